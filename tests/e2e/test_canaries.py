"""The claim served with planted faults: real servers, a real actor, the loop's own update.

Between two versions the parameters move by hand, as a step of Adam would move them.  A fault is what one server holds
when canaries are read: after the sound update it loads other tensors under the same label.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import closing, contextmanager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tests.e2e import jobs
from tests.e2e.live_jobs import output, pointer, running, scheduler, steps_done, wait_for
from tests.e2e.publishing_rig import publishing, PublishingRun

from r3train.audit.audit_run import audit_run
from r3train.audit.findings import SERVED
from r3train.config import RunConfig
from r3train.config.data_settings import DataSection
from r3train.config.model_settings import ModelSection
from r3train.config.replay_settings import ReplaySection
from r3train.config.rollout_settings import RolloutSection
from r3train.config.trainer_settings import TrainerSection
from r3train.data.tokenizer import load_tokenizer
from r3train.engine.control import EngineControl
from r3train.engine.publish_memory import SharedMemoryPublisher
from r3train.engine.server import SGLangServer
from r3train.loop.canaries import NotServed
from r3train.trainer.megatron.actor import MegatronActor
from r3train.types import Prompt
from r3train.verify.tiny import TinyOptions, build

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
VOCAB = 256
Weights = dict[str, torch.Tensor]


@dataclass
class Rig:
    """Runs of one rank that only publish: to two servers, and to the first of them alone."""

    actor: MegatronActor
    runs: dict[int, PublishingRun]  # by the number of servers
    alone: list[SharedMemoryPublisher]  # to each server alone
    run_dir: Path
    version: int = 0
    before: Weights = field(default_factory=dict)  # as the last version was sent
    begun: dict[int, Weights] = field(default_factory=dict)  # at the start of each run

    def __post_init__(self) -> None:
        states = [chunk.state_dict() for chunk in self.actor.model.unwrapped]
        named = [(n, t) for state in states for n, t in state.items() if torch.is_tensor(t)]
        self.parameters = {n: t for n, t in named if t.is_floating_point()}
        self.masters = {n: t.float().clone() for n, t in self.parameters.items()}
        self.before = self.weights()

    def weights(self) -> Weights:
        return {name: tensor.detach().clone() for name, tensor in self.actor.hf_weights()}

    def step(self, lr: float) -> None:
        """Move every parameter by lr, up or down; in bfloat16 norms, which lie near 1, by ten times as much."""
        self.before = self.weights()
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for name, master in self.masters.items():
                parameter = self.parameters[name]
                is_coarse = parameter.dtype == torch.bfloat16 and "norm" in name
                size = 10 * lr if is_coarse else lr
                master += size * torch.sign(torch.randn(master.shape, generator=generator))
                parameter.copy_(master.to(parameter.dtype))
        self.version += 1

    def update(
        self,
        lr: float,
        servers: int = 2,
        fault: Callable[[Weights], Weights] | None = None,
        planted: str = "null",
        checksums: bool = False,
    ) -> dict:
        """Make a step and bring the servers to it.

        fault: what the last server really holds then; checksums: servers are asked for them, which tells before canaries do.
        """
        run = self.runs[servers]
        run.update.checksums = run.checksums if checksums else None
        if not run.canaries.ready:
            run.checksums.begin(self.version)
            run.publish(self.version)
            run.canaries.ask_first(self.version)
            run.canaries.begin(self.version)
            self.begun[servers] = self.weights()
        self.step(lr)
        publisher = run.update.rank_zero.weights.publisher
        publish = publisher.publish

        def faulty(tensors, *, version):
            published = publish(tensors, version=version)
            if fault is not None:
                held = fault(self.weights())
                self.alone[servers - 1].publish(iter(held.items()), version=version)
            return published

        with mock.patch.object(publisher, "publish", faulty), run.planted(planted):
            return run.publish(self.version)

    def caught_by(self, lr: float, servers: int = 2, within: int = 1, **fault) -> str:
        """The test that catches a fault within so many updates that have it; sound ones follow, which pass."""
        self.update(lr, servers)
        for updates in range(1, within + 1):
            try:
                metrics = self.update(lr, servers, **fault)
            except NotServed as error:
                text = str(error)
                assert f"weight version {self.version}" in text and "\n" not in text, text
                assert not error.metrics["served/passed"]
                break
            assert metrics["served/passed"]
        else:
            raise AssertionError(f"not found within {within} updates: {metrics}")
        print(f"after {updates} updates: {text}")
        fault.pop("fault", None), fault.pop("planted", None)
        # a sum that reached the limit falls from there, by less than 1 an update
        for _ in range(20):
            try:
                if not self.update(lr, servers, **fault)["served/suspect"]:
                    break
            except NotServed as error:
                assert 0 < error.metrics["served/suspect"] < 6, error
        else:
            raise AssertionError("sound updates do not end the suspicion")
        return text.removeprefix("not served: ").split(":")[0]

    def kept(self, *endings: str) -> Callable[[Weights], Weights]:
        """The tensors of these names as the version before had them."""

        def fault(weights: Weights) -> Weights:
            old = [name for name in weights if name.endswith(endings)]
            assert old, endings
            assert any(not torch.equal(weights[n], self.before[n]) for n in old), old
            return {**weights, **{name: self.before[name] for name in old}}

        return fault

    def kept_from_the_start(self, *endings: str) -> Callable[[Weights], Weights]:
        """The tensors of these names as they are now, whatever is sent later."""
        first = self.weights()
        names = [name for name in first if any(part in name for part in endings)]
        assert names, endings
        return lambda weights: {**weights, **{name: first[name] for name in names}}

    def one_version_behind(self, weights: Weights) -> Weights:
        return self.before


@contextmanager
def opened(family: str, dtype: str, run_dir: Path):
    """A rig on two servers of a tiny model."""
    options = TinyOptions(family=family, vocab_size=VOCAB, initializer_range=0.15, dtype=dtype)
    build(run_dir / "tiny", options, force=True)
    checkpoint = run_dir / "tiny" / "model"
    prompts = [
        Prompt(
            f"p{i}", i, "", np.random.default_rng(i).integers(3, VOCAB, 8).astype(np.int32), None
        )
        for i in range(8)
    ]
    servers = [
        SGLangServer(
            checkpoint, run_dir / f"sglang_{i}.log", dtype=dtype, return_routed_experts=True
        )
        for i in range(2)
    ]
    with ExitStack() as held:
        for server in servers:
            held.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_ready()
        addrs = [server.addr for server in servers]
        configs = {
            number: RunConfig(
                model=ModelSection(hf_checkpoint=checkpoint, bf16=dtype == "bfloat16"),
                data=DataSection(prompt_data="none"),
                rollout=RolloutSection(
                    num_rollout=99,
                    rollout_batch_size=2,
                    rollout_max_response_len=200,
                    rollout_ignore_eos=True,
                    rollout_external_engine_addrs=addrs[:number],
                ),
                trainer=TrainerSection(update_weight_transfer_mode="shared_memory"),
                replay=ReplaySection(
                    use_rollout_routing_replay=True,
                    enable_r3_correctness_check=True,
                    r3_canary_share=1.0,
                ),
            )
            for number in (2, 1)
        }
        runs = publishing(configs, run_dir, prompts, load_tokenizer(checkpoint))
        actor, runs = held.enter_context(runs)
        alone = []
        for i, addr in enumerate(addrs):
            control = held.enter_context(closing(EngineControl([addr])))
            own = dict(directory=run_dir / f"alone_{i}", hf_checkpoint=checkpoint)
            publisher = SharedMemoryPublisher(control, bucket_bytes=1 << 26, **own)
            alone.append(held.enter_context(closing(publisher)))
        yield Rig(actor, runs, alone, run_dir)


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def glm(request, tmp_path_factory):
    """With expert biases and shared experts."""
    run_dir = tmp_path_factory.mktemp(request.param)
    with opened("glm4_moe", request.param, run_dir) as rig:
        yield rig


def test_sound_updates_pass_and_are_recorded(glm):
    for lr in (1e-3, 1e-4, 1e-7):
        assert glm.update(lr)["served/passed"]
    lines = (glm.run_dir / "run_2" / "evidence" / "served.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["server"] for record in records] == [0, 1] * 4
    first, last = records[0], records[-1]
    assert (first["num_texts"], last["num_texts"], last["num_tokens"]) == (2, 2, 2 * 495)
    assert last["num_decoded"] == 2 * 8
    assert last["earlier"] and not first["earlier"]
    for record in records:
        assert record["noise"]["repeat"]["log_prob_off"] < (
            2.0 if glm.runs[2].config.model.bf16 else 1e-5
        )
        assert record["coverage"]["experts_used"] > 0.9 * record["coverage"]["experts"]


def test_EARLY_names_a_cache_that_was_not_flushed(glm):
    assert glm.caught_by(1e-3, planted="cache_not_flushed") == "EARLY"


def test_MOVED_names_one_server_of_two_that_is_one_version_behind(glm):
    assert glm.caught_by(1e-3, fault=glm.one_version_behind) == "MOVED"


def test_MOVED_names_a_single_server_that_is_one_version_behind(glm):
    assert glm.caught_by(1e-3, servers=1, fault=glm.one_version_behind) == "MOVED"


def test_MOVED_names_a_server_that_has_its_first_weights_again(glm):
    glm.update(1e-3, servers=1)
    assert glm.caught_by(1e-3, servers=1, fault=lambda weights: glm.begun[1]) == "MOVED"


def test_ROUTER_names_router_biases_that_were_kept(glm):
    if glm.runs[2].config.model.bf16:
        pytest.skip(
            "in bfloat16 a bias that is off by less than 1e-2 drowns in the router's rounding"
        )
    fault = glm.kept("e_score_correction_bias")
    assert glm.caught_by(2e-3, servers=1, within=6, fault=fault) == "ROUTER"


def test_BOUND_names_experts_of_one_layer_that_were_never_updated_again(glm):
    """The distance grows by less than three times an update: a rule that looks at the update before never finds it.

    At 1e-3 bfloat16 hides them for 60 updates: 0.033 nats, where rounding is 0.015.  WEIGHTS names them at the first.
    """
    fault = glm.kept_from_the_start("layers.2.mlp.experts")
    lr = 4e-3 if glm.runs[2].config.model.bf16 else 1e-3
    assert glm.caught_by(lr, servers=1, within=16, fault=fault) == "BOUND"


def told(glm, lr: float, **how) -> str:
    """Line of WEIGHTS on a fault, at its update."""
    servers = how.setdefault("servers", 2)
    glm.update(lr, servers, checksums=True)
    with pytest.raises(NotServed) as error:
        glm.update(lr, checksums=True, **how)
    assert glm.update(lr, servers, checksums=True)["served/passed"]
    print(error.value)
    return str(error.value).removeprefix("not served: ")


def test_WEIGHTS_names_the_tensors_that_one_of_two_servers_kept(glm):
    """One norm, and one expert, which a server holds among others in one tensor: below rounding for canaries in bfloat16."""
    for lr in (1e-3, 1e-4):
        norm = told(glm, lr, fault=glm.kept("layers.2.input_layernorm.weight"))
        assert re.match(
            "UNLIKE: server 1, .*: rank 0 model.layers.2.input_layernorm.weight are", norm
        )
        expert = told(glm, lr, fault=glm.kept("layers.2.mlp.experts.5.down_proj.weight"))
        assert re.match(
            "UNLIKE: server 1, .*: rank 0 model.layers.2.mlp.experts.w2_weight are", expert
        )


def test_WEIGHTS_names_a_server_that_is_one_version_behind(glm):
    version = glm.version + 1
    said = told(glm, 1e-4, fault=glm.one_version_behind)
    assert re.match(
        rf"SAME: server 1, .*: it holds all \d+ tensors of weight version {version},", said
    )
    version = glm.version + 1
    said = told(glm, 1e-4, servers=1, fault=glm.one_version_behind)
    assert re.match(
        rf"SAME: server 0, .*: it holds all \d+ tensors of weight version {version},", said
    )


def test_WEIGHTS_take_no_update_that_rounding_hides_for_a_server_that_stood_still(glm):
    for lr in (1e-12, 1e-12, 1e-5):
        metrics = glm.update(lr, checksums=True)
        assert metrics["served/passed"] and metrics["perf/checksums_s"] > 0


@pytest.mark.slow
def test_a_restarted_server_with_the_checkpoints_weights_answers_no_rollout(tmp_path, tiny_flags):
    run_dir, saved = tmp_path / "run", tmp_path / "saved"
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "100000", "--max-engine-restarts", "1"]
    bug = ("-m", "tests.e2e.train_with_bug", "restarted_server_keeps_its_weights")
    with running(run_dir, *flags, "--save", str(saved), program=bug) as job:
        wait_for(lambda: steps_done(run_dir) >= 4, job, run_dir)
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=480) != 0
    said = output(run_dir)
    found = re.search(r"not served: RESTART: server 0, weight version (\d+): it holds all", said)
    assert found, said
    # what was trained is right, and saved; of that version nothing was trained
    audit = audit_run(run_dir)
    assert audit.claims[SERVED] == "failed" and len(audit.findings) == len(
        [f for f in audit.findings if f.claim == SERVED]
    )
    assert pointer(saved) == int(found[1]) == steps_done(run_dir)
