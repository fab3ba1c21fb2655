"""The doctor's probe with a real server and a real actor finds the one answer that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_answer_rows_shifted_behind_a_prefix_cache_hit_are_found_and_nothing_else(tiny, tmp_path):
    command = [sys.executable, "-m", "tests.e2e.probe_of_shifted_rows", "doctor", "--probe"]
    command += ["--config", "configs/tiny_cpu.toml", "--use-rollout-routing-replay"]
    command += ["--world-size", "2", "--json", "--run-dir", str(tmp_path)]
    command += ["--hf-checkpoint", str(tiny / "model")]
    command += ["--prompt-data", str(tiny / "prompts.jsonl")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=540)
    assert done.returncode == 1, done.stdout + done.stderr
    findings = json.loads(done.stdout[done.stdout.index("[\n") :])
    (wrong,) = [f for f in findings if f["level"] == "problem"]
    assert wrong["text"].startswith("after a prefix-cache hit: ") and wrong["remedy"]
    situations = {f["text"].split(":")[0] for f in findings if f["subject"] == "SGLang probe"}
    assert {"a fresh prompt", "an aborted answer, against the actor"} < situations
    assert len(situations) == 15
