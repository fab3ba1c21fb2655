"""--check-weight-update-equal with planted bugs: a real server, a real actor, the loop's own publish.

The model has dense layers, shared experts and expert biases.  Between two versions its parameters are
moved by hand, as a step would move them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.e2e.publishing_rig import publishing, PublishingRun

from r3train.config import RunConfig
from r3train.config.data_settings import DataSection
from r3train.config.model_settings import ModelSection
from r3train.config.replay_settings import ReplaySection
from r3train.config.rollout_settings import RolloutSection
from r3train.config.trainer_settings import TrainerSection
from r3train.engine.backend import EngineError
from r3train.engine.server import SGLangServer
from r3train.loop.canaries import Canaries, NotServed
from r3train.trainer.megatron.actor import MegatronActor
from r3train.types import Prompt
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from r3train.verify.mutations import planted_by

pytestmark = pytest.mark.e2e
VARIANT = VARIANTS["glm"]
PROMPT = Prompt("p", 0, "", np.arange(4, dtype=np.int32), None)
TENSORS, PARAMETERS = 51, 93  # on the server, in the actor


@dataclass
class Run:
    """A run of one rank that only publishes, by each transport."""

    bf16: bool
    actor: MegatronActor
    runs: dict[str, PublishingRun]  # by transport
    version: int = 0

    def __post_init__(self) -> None:
        states = [chunk.state_dict().values() for chunk in self.actor.model.unwrapped]
        tensors = [t for state in states for t in state if torch.is_tensor(t)]
        self.first = [(t, t.clone()) for t in tensors if t.is_floating_point()]

    def canaries(self, kind: str) -> Canaries:
        """The canaries of a transport's run, begun with the checkpoint's weights, as a job begins."""
        canaries = self.runs[kind].canaries
        if not canaries.ready:
            self.publish(kind, moved=0.0)
            canaries.ask_first(self.version)
            canaries.begin(self.version)
        return canaries

    def publish(self, kind: str, canaries: Canaries | None = None, moved: float = 0.05) -> dict:
        """Move all parameters as a step would, and bring the server to them; canaries: that judge the update."""
        with torch.no_grad():
            for tensor, first in self.first:
                tensor.copy_(first * (1 + moved * torch.randn_like(first)))
        self.version += 1
        self.runs[kind].update.canaries = canaries
        return self.runs[kind].publish(self.version)

    @contextmanager
    def unchecked(self, kind: str) -> Iterator[None]:
        """A block whose updates are not compared with what was sent."""
        update = self.runs[kind].update
        config = update.config
        trainer = config.trainer.model_copy(update={"check_weight_update_equal": False})
        update.config = config.model_copy(update={"trainer": trainer})
        try:
            yield
        finally:
            update.config = config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Log-probs are almost alike, so that no near tie of bfloat16 routers moves one by much."""
    directory = write_checkpoint(VARIANT, tmp_path_factory.mktemp("model"))
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] *= 0.02
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


KINDS = ("distributed", "disk", "shared_memory")
# those that are no checkpoint on disk
OTHERS = ("distributed", "shared_memory")


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def run(request, checkpoint, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")

    def config(kind: str) -> RunConfig:
        return RunConfig(
            model=ModelSection(
                hf_checkpoint=checkpoint,
                bf16=request.param == "bfloat16",
                transformer_overrides=VARIANT.overrides,
            ),
            data=DataSection(prompt_data="none"),
            rollout=RolloutSection(
                num_rollout=99,
                rollout_batch_size=2,
                rollout_max_response_len=4,
                rollout_external_engine_addrs=[server.addr],
            ),
            trainer=TrainerSection(
                check_weight_update_equal=True,
                update_weight_transfer_mode=kind,
                update_weight_buffer_size=50_000,
            ),
            replay=ReplaySection(r3_canary_share=1.0),
        )

    with SGLangServer(checkpoint, run_dir / "sglang.log", dtype=request.param) as server:
        server.wait_ready()
        tokenizer = SimpleNamespace(get_added_vocab=dict, eos_token_id=None)
        configs = {kind: config(kind) for kind in KINDS}
        with publishing(configs, run_dir, [PROMPT], tokenizer) as (actor, runs):
            yield Run(request.param == "bfloat16", actor, runs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_update_passes_and_the_check_leaves_nothing_behind(run, kind):
    canaries = run.canaries(kind)
    for _ in range(2):
        with run.runs[kind].planted("null"):
            metrics = run.publish(kind, canaries)
        assert metrics["served/passed"]
        assert metrics["served/gap_max"] <= (0.5 if run.bf16 else 1e-4)
    assert not list((run.runs[kind].run_dir / "weight_check").iterdir())


# what says so: the checksums of the servers for transports that are no checkpoint on disk; for the one
# that is, whose files the check reads too, the actor that loads them back
SERVERS, ACTOR = (
    r"(\d+) of 51 tensors of engine 0 are not",
    r"(\d+) parameters of rank 0 are not what",
)
EXPERT = r"model\.layers\.3\.mlp\.experts\.7\."
CAUGHT = {
    "expert_never_sent": [(KINDS, rf"{EXPERT}down_proj.weight, .* was not sent", None)],
    "tensor_of_last_version": [
        (OTHERS, SERVERS + r".* rank 0 model.layers.3.mlp.experts.w2_weight", 1),
        (("disk",), ACTOR + r".*experts.*linear_fc2", 1),
    ],
    "weights_frozen": [(OTHERS, SERVERS, TENSORS), (("disk",), ACTOR, PARAMETERS)],
    "export_frozen": [(KINDS, ACTOR, PARAMETERS)],
    "canaries_of_itself": [(OTHERS, SERVERS, TENSORS), (("disk",), ACTOR, PARAMETERS)],
    "expert_bias_not_exported": [(KINDS, r"e_score_correction_bias was not sent", None)],
    "version_with_first_bucket": [(("distributed",), "last bucket carried no version", None)],
}
# what canaries say, which these runs without R3 read too
SERVED = {"cache_not_flushed": KINDS, "weights_frozen": ("disk",), "export_frozen": KINDS}
TESTS = {"cache_not_flushed": "EARLY"}  # of the others MOVED
CASES = [
    pytest.param(bug, kind, text, count, id=f"{bug}-{kind}")
    for bug, catches in CAUGHT.items()
    for kinds, text, count in catches
    for kind in kinds
]


@pytest.mark.parametrize("bug, kind, text, count", CASES)
def test_a_planted_bug_is_caught_by_name(run, bug, kind, text, count):
    canaries = run.canaries(kind) if bug == "canaries_of_itself" else None
    run.publish(kind, canaries)
    with (
        run.runs[kind].planted(bug),
        pytest.raises((AssertionError, ValueError, EngineError)) as error,
    ):
        run.publish(kind, canaries)
    found = re.search(text, str(error.value))
    assert found and "\n" not in str(error.value), str(error.value)
    if count is not None:
        assert int(found[1]) == count
    run.publish(kind)  # the run could go on: the bug was the only fault


@pytest.mark.parametrize(
    "bug, kind", [(bug, kind) for bug, kinds in SERVED.items() for kind in kinds]
)
def test_canaries_without_r3_name_weights_and_caches_that_are_not_the_updates(run, bug, kind):
    canaries = run.canaries(kind)
    run.publish(kind, canaries)
    test = TESTS.get(bug, "MOVED")
    where = f"^not served: {test}: server 0, weight version {run.version + 1}: "
    with run.unchecked(kind), run.runs[kind].planted(bug):
        with pytest.raises(NotServed, match=where) as error:
            run.publish(kind, canaries)
    assert error.value.metrics["served/passed"] is False
    assert run.publish(kind, canaries)["served/passed"]


@pytest.mark.parametrize("bug", ["expert_never_sent", "expert_bias_not_exported"])
def test_a_tensor_that_never_went_out_is_named_without_the_flag_too(run, bug):
    with run.unchecked("distributed"):
        run.publish("distributed")
        with run.runs["distributed"].planted(bug), pytest.raises(ValueError) as error:
            run.publish("distributed")
    assert re.search(CAUGHT[bug][0][1], str(error.value)), str(error.value)
    run.publish("distributed")


def test_every_bug_of_publishing_is_planted_here():
    assert {
        bug.name for bug in planted_by("tests/e2e/test_weights_are_proved.py")
    } == CAUGHT.keys() | SERVED.keys()
