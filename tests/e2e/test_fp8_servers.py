"""Servers in fp8 under a bfloat16 actor, in whole jobs: --rollout-weights fp8."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from r3train.cli import main
from r3train.config.hf_facts import read_hf_facts
from r3train.families import FP8_SCALE, quantised_tensors
from r3train.families.tiny_options import TinyOptions
from r3train.verify.tiny import build
from tests.e2e import jobs

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
    for m in metrics:
        assert (
            m["r3/passed"] is True and m["served/passed"] is True and m["r3_audit/passed"] is True
        )
        assert m["perf/published_tensors"] == len(served)
        assert m["perf/published_bytes"] == num_bytes
        # rounding of weights and activations, and no more
        assert 1e-3 < m["train/log_prob_gap_mean"] < 0.3
    assert {name + FP8_SCALE for name in names} < served.keys()
    checked = CliRunner().invoke(main, ["check-evidence", str(job.run_dir)])
    assert checked.exit_code == 0, checked.output
