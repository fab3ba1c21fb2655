"""The budget of the gap in jobs on the real server: what adds up, and what older weights add."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from tests.e2e import jobs

from r3train.algo.gap_budget import PARTS
from r3train.cli import main

pytestmark = pytest.mark.e2e
IN_GAP = [part for part in PARTS if part != "routing"]  # which R3 takes out


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_parts_add_up_to_the_gap_and_older_weights_are_what_dominates(
    staleness, tmp_path, tiny_flags, engine
):
    job = jobs.run(
        tmp_path / "run",
        *tiny_flags,
        *jobs.R3_FLAGS,
        *("--num-rollout", "5", "--rollout-external-engine-addrs", engine),
        *("--max-weight-staleness", str(staleness), "--r3-recheck-share", "1", "--lr", "2e-3"),
    )
    assert job.code == 0, job.output
    for metrics in job.metrics():
        total = metrics["train/log_prob_gap_k3"]
        parts = {part: metrics.get(f"gap/{part}_k3") for part in IN_GAP}
        assert None not in parts.values()  # --r3-recheck-share 1 and canaries: all were read
        assert sum(parts.values()) == pytest.approx(total, rel=1e-6)
        assert abs(parts["rest"]) < 0.1 * total
        old = metrics.get("train/loss_tokens_age_1", 0) == metrics["train/num_loss_tokens"]
        if staleness and old and total > 1e-9:  # the first updates of a warm-up move nothing
            assert parts["staleness"] > 0.9 * total
        if not staleness:
            assert parts["staleness"] == 0 and total < 1e-12
        # what the actor's own routers would add on equal weights in float32: rounding
        assert abs(metrics.get("gap/routing_k3", 0.0)) < 1e-9
    read_by_own_routers = [m["step"] for m in job.metrics() if "gap/routing_k3" in m]
    assert read_by_own_routers == [0]  # at the start, and every eighth version
    result = CliRunner().invoke(main, ["explain", str(job.run_dir)])
    assert result.exit_code == 0, result.output
    if staleness:
        assert "staleness dominates" in result.output


@pytest.mark.slow
def test_what_a_cache_that_is_not_flushed_adds_lands_on_the_cache(tmp_path, tiny_flags, engine):
    """At staleness 0 nothing else in float32 is above rounding; canaries have cache keys of one version each."""
    job = jobs.run(
        tmp_path / "run",
        *tiny_flags,
        *jobs.R3_FLAGS,
        *("--num-rollout", "5", "--rollout-external-engine-addrs", engine),
        *("--max-weight-staleness", "0", "--no-flush-cache-on-update"),
    )
    assert job.code == 0, job.output
    *_, last = job.metrics()
    assert last["train/log_prob_gap_k3"] > 1e-8 and last["rows/cached"] > 0
    assert last["gap/cache_k3"] > 0.9 * last["train/log_prob_gap_k3"]
    assert abs(last["gap/rest_k3"]) < 0.1 * last["train/log_prob_gap_k3"]
    result = CliRunner().invoke(main, ["explain", str(job.run_dir)])
    assert "cache dominates" in result.output, result.output
