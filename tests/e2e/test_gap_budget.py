"""The budget of the gap where a cache is not flushed; test_one_run.py has that of a sound run."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from tests.e2e import jobs

from r3train.cli import main

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_what_a_cache_that_is_not_flushed_adds_lands_on_the_cache(tmp_path, served_flags):
    """At staleness 0 nothing else in float32 is above rounding; canaries have cache keys of one version each."""
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *jobs.R3_FLAGS,
        *"--num-rollout 5 --max-weight-staleness 0 --no-flush-cache-on-update".split(),
    )
    assert job.code == 0, job.output
    *_, last = job.metrics()
    assert last["train/log_prob_gap_k3"] > 1e-8 and last["rows/cached"] > 0
    assert last["gap/cache_k3"] > 0.9 * last["train/log_prob_gap_k3"]
    assert abs(last["gap/rest_k3"]) < 0.1 * last["train/log_prob_gap_k3"]
    result = CliRunner().invoke(main, ["explain", str(job.run_dir)])
    assert "cache dominates" in result.output, result.output
