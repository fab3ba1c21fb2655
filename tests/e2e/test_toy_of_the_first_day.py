"""The job of make gpu-smoke, whole, on a CPU: its toy, its recipe and its flags."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from benchmarks.gpu_smoke import STEPS
from r3train.verify.tiny import build
from r3train.families.tiny_options import SIZES, TinyOptions
from tests.e2e.jobs import run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_first_job_of_the_first_day_is_proved_on_a_cpu(tmp_path):
    build(tmp_path / "toy", replace(TinyOptions(), **SIZES["gpu"]))
    (step,) = [step for step in STEPS if step.name == "job"]
    words = shlex.split(step.command)
    flags = words[words.index("train_async.py") + 1 :]
    recipe, flags = flags[1], flags[2 : flags.index("--run-dir")]
    flags += ["--hf-checkpoint", str(tmp_path / "toy/model"), "--rollout-batch-size", "4"]
    # 1,000 tokens of 8 answers take a CPU half an hour
    flags += ["--prompt-data", str(tmp_path / "toy/prompts.jsonl"), "--rollout-max-response-len"]
    flags += ["64"]
    job = run(tmp_path / "run", *flags, recipe=recipe, ranks=1, timeout=800)
    assert job.code == 0 and "R3: passed" in job.output, job.output
    steps = job.metrics()
    assert len([line for line in steps if "train/grad_norm" in line]) == 3
