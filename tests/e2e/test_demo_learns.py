"""The README's promise: the demo learns, and R3 is exact at every step of it."""

from __future__ import annotations

import pytest

from r3train.evidence.metrics import summarise
from r3train.tiny import TinyOptions, build
from tests.e2e import jobs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_the_demo_learns_with_r3_exact_at_every_step(seed, tmp_path, engine):
    build(tmp_path / "tiny", TinyOptions(seed=seed))
    job = jobs.run(
        tmp_path / "run",
        *jobs.R3_FLAGS,
        *("--hf-checkpoint", str(tmp_path / "tiny/model")),
        *("--prompt-data", str(tmp_path / "tiny/prompts.jsonl")),
        *("--rollout-external-engine-addrs", engine),
        *("--seed", str(seed), "--rollout-seed", str(seed)),
        timeout=500,
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    summary = summarise(metrics)
    assert summary["steps"] == 60 and summary["r3"] == "passed"
    assert summary["reward_first"] <= 0.4
    assert summary["reward_last"] >= 0.8
    assert all(m["r3/num_calls"] == m["r3/num_calls_expected"] for m in metrics)
    assert (job.run_dir / "plot.png").stat().st_size > 10_000
