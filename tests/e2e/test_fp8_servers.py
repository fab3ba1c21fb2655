"""Servers in fp8 under a bfloat16 actor, in whole jobs: --rollout-weights fp8."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tests.e2e import jobs
from tests.e2e.publishing_rig import publishing

from r3train.cli import main
from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.engine.control import EngineControl
from r3train.engine.server import SGLangServer
from r3train.engine.sglang_http import HTTPSettings
from r3train.families import FAMILIES, FP8_SCALE, quantised_tensors
from r3train.families.tiny_options import TinyOptions
from r3train.fp8_blocks import quantised
from r3train.hf_checkpoint import copy_all_but_weights, write_fp8_checkpoint
from r3train.loop.canaries import NotServed
from r3train.loop.weight_update import WeightUpdate
from r3train.types import Prompt
from r3train.verify.tiny import build

pytestmark = pytest.mark.e2e

TINY = TinyOptions(
    num_layers=2,
    hidden_size=128,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    moe_intermediate_size=128,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """Layers of whole blocks."""
    directory = tmp_path_factory.mktemp("fp8") / "tiny"
    build(directory, TINY)
    return directory


def flags(tiny: Path) -> list[str]:
    return [
        "--hf-checkpoint",
        str(tiny / "model"),
        "--prompt-data",
        str(tiny / "prompts.jsonl"),
        *"--bf16 --rollout-weights fp8 --num-rollout 3 --max-weight-staleness 0 --lr 1e-4".split(),
        *"--lr-warmup-iters 0 --rollout-batch-size 4 --n-samples-per-prompt 4".split(),
        *jobs.R3_FLAGS,
    ]


@pytest.mark.parametrize(
    "transport",
    ["distributed", *(pytest.param(t, marks=pytest.mark.slow) for t in ("disk", "shared_memory"))],
)
def test_a_job_trains_against_servers_of_fp8_and_every_step_is_proved(tiny, transport, tmp_path):
    job = jobs.run(
        tmp_path / "run",
        *flags(tiny),
        "--update-weight-transfer-mode",
        transport,
    )
    assert job.code == 0, job.output
    names = quantised_tensors(read_hf_facts(tiny / "model"))
    served = load_file(job.run_dir / "served" / "model-00001-of-00001.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in served.values())
    # a byte for a number, and four for a block
    assert num_bytes < 0.6 * (tiny / "model" / "model.safetensors").stat().st_size
    metrics = job.metrics()
    assert {m["perf/published_tensors"] for m in metrics[:-1]} == {len(served)}
    assert {m["perf/published_bytes"] for m in metrics[:-1]} == {num_bytes}
    for m in metrics:
        assert m["r3/passed"] is True and m["served/passed"] is True
        # rounding of weights and activations, and no more
        assert 1e-3 < m["train/log_prob_gap_mean"] < 0.3
    assert {name + FP8_SCALE for name in names} < served.keys()
    lines = (job.run_dir / "evidence" / "weights.jsonl").read_text().splitlines()
    compared = [json.loads(line)["compared"] for line in lines]
    # what the servers were started with; then one layer, and the other with what is in no layer
    assert compared[0] == 0 and sum(compared[1:3]) == len(served) and min(compared[1:]) > 0
    assert not any((job.run_dir / "weight_check").iterdir())
    checked = CliRunner().invoke(main, ["check-evidence", str(job.run_dir)])
    assert checked.exit_code == 0, checked.output


MODES = {
    "adapters merged": "--lora-rank 4 --check-weight-update-equal",
    "colocated": "--colocate",
    "two stages, two servers": "--expert-model-parallel-size 1 --pipeline-model-parallel-size 2"
    " --rollout-num-engines 2",
    "updates in flight": "--max-weight-staleness 1 --pause-generation-mode in_place",
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_servers_of_fp8_are_proved_in_every_mode(tiny, mode, tmp_path):
    job = jobs.run(tmp_path / "run", *flags(tiny), *MODES[mode].split())
    assert job.code == 0, job.output
    assert [m["r3/passed"] and m["served/passed"] for m in job.metrics()] == [True] * 3
    lines = (job.run_dir / "evidence" / "weights.jsonl").read_text().splitlines()
    assert all(json.loads(line)["compared"] for line in lines if json.loads(line)["sent"])


@pytest.fixture(scope="module")
def update(tiny, tmp_path_factory) -> Iterator[WeightUpdate]:
    """Updates of a server of fp8, without canaries."""
    run_dir = tmp_path_factory.mktemp("updates")
    config = RunConfig.from_sources(
        flags={
            "hf_checkpoint": tiny / "model",
            "bf16": True,
            "prompt_data": "none",
            "rm_type": "accepted_words",
            "num_rollout": 99,
            "rollout_batch_size": 2,
            "rollout_max_response_len": 4,
            "rollout_weights": "fp8",
            "use_rollout_routing_replay": True,
            "enable_r3_correctness_check": True,
        }
    )
    tokenizer = SimpleNamespace(get_added_vocab=dict, eos_token_id=None)
    prompt = Prompt("p", 0, "", np.arange(4, dtype=np.int32), None)
    with publishing({"fp8": config}, run_dir, [prompt], tokenizer) as (_, runs):
        run = runs["fp8"]
        run.checksums.begin(0)
        run.update.canaries = None
        yield run.update


EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
# a tensor that is sent -> what is sent in its place, and what the server names
FAULTS = {
    "an expert doubled": (EXPERT + FP8_SCALE, lambda t: 2 * t, "experts.w2_weight"),
    "an expert's rows rolled by one": (
        EXPERT,
        lambda t: t.view(torch.uint8).roll(1, 0).view(t.dtype),
        "experts.w2_weight",
    ),
    "attention's output 5% larger": (O_PROJ + FP8_SCALE, lambda t: 1.05 * t, "o_proj.weight"),
}


def moved(update: WeightUpdate) -> None:
    """Move the actor's parameters as a step would."""
    with torch.no_grad():
        for chunk in update.actor.model.unwrapped:
            for parameter in chunk.parameters():
                parameter.add_(0.01 * parameter.abs().mean() * torch.randn_like(parameter))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_is_not_what_was_exported_ends_the_run_by_name_within_a_round(update, fault):
    """Canaries find none of these.  Of two layers one is compared at an update, the other at the next."""
    spoiled, spoil, named = FAULTS[fault]
    publisher = update.rank_zero.weights.publisher
    publish: Callable = publisher.publish

    def publish_spoiled(tensors, **how):
        spoilt = ((n, spoil(t) if n == spoiled else t) for n, t in tensors)
        return publish(spoilt, **how)

    first = 10 * (1 + list(FAULTS).index(fault))
    for version in (first, first + 1):
        moved(update)
        assert update.publish(version)["rollout/weight_version"] == version
    with mock.patch.object(publisher, "publish", publish_spoiled):
        moved(update)
        update.publish(first + 2)  # of layer 0
        moved(update)
        with pytest.raises(NotServed, match="^not served: SENT: ") as error:
            update.publish(first + 3)
    assert f"weight version {first + 3}: rank 0 model.layers.1." in str(error.value)
    assert f"{named} are not those of a second export" in str(error.value)
    moved(update)
    update.publish(first + 4)  # the fault was the only one


def rounded_to_fp8(checkpoint: Path, directory: Path) -> Path:
    """A checkpoint near another one whose matrices fp8 expresses exactly: each block's largest number is 448 times 2**n."""
    directory.mkdir()
    copy_all_but_weights(checkpoint, directory)
    tensors = load_file(checkpoint / "model.safetensors")
    for name in quantised_tensors(read_hf_facts(checkpoint)):
        _, scales = quantised(tensors[name])
        scales = torch.exp2(scales.log2().ceil())
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        whole = whole[: tensors[name].shape[0], : tensors[name].shape[1]]
        rounded = (tensors[name] / whole).to(torch.float8_e4m3fn).float() * whole
        rounded[::128, ::128] = 448 * scales
        tensors[name] = rounded.bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize(
    "name, family",
    [
        pytest.param(name, family, id=name, marks=() if name == "qwen3_moe" else pytest.mark.slow)
        for family in FAMILIES.values()
        if family.fp8_served
        for name in family.tiny
    ],
)
def test_a_server_of_fp8_holds_tensor_by_tensor_what_one_of_bfloat16_holds(name, family, tmp_path):
    """Of numbers that both express: then scales, parts of joined linears and experts are in their places."""
    ranks = {"head_dim": 256} if family.layers == "latent_attention" else {}
    build(tmp_path / "tiny", replace(TINY, family=name, moe_intermediate_size=256, **ranks))
    exact = rounded_to_fp8(tmp_path / "tiny" / "model", tmp_path / "exact")
    write_fp8_checkpoint(read_hf_facts(exact), tmp_path / "fp8")
    held = []
    for checkpoint in (exact, tmp_path / "fp8"):
        server = SGLangServer(checkpoint, tmp_path / f"{checkpoint.name}.log", dtype="bfloat16")
        with (
            server,
            EngineControl([server.addr], HTTPSettings(check_alive=server.check_alive)) as control,
        ):
            server.wait_ready()
            held += control.weight_checksums().values()
    assert held[0] == held[1]
