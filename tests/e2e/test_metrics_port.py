"""A job with --metrics-port, scraped while it runs."""

from __future__ import annotations

import math
import re
import urllib.error

import pytest

from r3train.observe.prometheus import exported_name
from tests.e2e import jobs
from tests.e2e.live_jobs import output, running, wait_for
from tests.unit.observe.test_prometheus import scraped

pytestmark = pytest.mark.e2e


def test_a_job_serves_the_numbers_of_its_metrics_while_it_runs(tmp_path, tiny_flags):
    run_dir = tmp_path / "run"
    flags = (*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "8", "--metrics-port", "0")
    evaluated = ("--eval-prompt-data", "toy", tiny_flags[3], "--eval-interval", "8")
    found: dict[int, dict[str, float]] = {}
    with running(run_dir, *flags, *evaluated) as job:
        wait_for(lambda: "metrics: http://127.0.0.1:" in output(run_dir), job, run_dir)
        url = re.search(r"metrics: (\S+/metrics)", output(run_dir))[1]

        def is_over() -> bool:
            try:
                numbers = scraped(url)
            except (urllib.error.URLError, ConnectionError):
                return job.poll() is not None or bool(found)
            if (step := int(numbers.get("r3train:step", -1))) >= 0:
                found[step] = numbers
            return step == 7

        wait_for(is_over, job, run_dir)
        assert job.wait(timeout=300) == 0, output(run_dir)
    records = {record["step"]: record for record in jobs.Job(0, "", run_dir).metrics()}
    assert len(found) >= 2, "steps that were seen"
    for step, numbers in found.items():
        for key, value in records[step].items():
            if key == "time" or not isinstance(value, (int, float)):
                continue
            name = exported_name(key) + "_total" * key.startswith("faults/")
            scale = 1e9 if key.endswith("_gb") else 1
            assert math.isclose(numbers[name], value * scale, rel_tol=1e-9), (step, key)
        until = [records[i] for i in range(step + 1)]
        assert numbers["r3train:steps_total"] == step + 1
        tokens = sum(record["rollout/tokens"] for record in until)
        assert numbers["r3train:generation_tokens_total"] == tokens
        assert "r3train:eval_mean toy" in numbers
