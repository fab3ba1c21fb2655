"""The doctor's probe, with a real server and a real actor: every family is right, and one wrong answer is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.verify.tiny import build
from r3train.families import TINY_NAMES
from r3train.families.tiny_options import TinyOptions

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def probe(tiny: Path, run_dir: Path, module: str = "r3train.cli") -> tuple[int, list[dict], str]:
    """The doctor's exit status, its findings, and all that it wrote."""
    command = [sys.executable, "-m", module, "doctor", "--probe"]
    command += ["--config", "configs/tiny_cpu.toml", "--use-rollout-routing-replay"]
    command += ["--world-size", "2", "--json", "--run-dir", str(run_dir)]
    command += ["--hf-checkpoint", str(tiny / "model")]
    command += ["--prompt-data", str(tiny / "prompts.jsonl")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=540)
    said = done.stdout + done.stderr
    assert "[\n" in done.stdout, said
    return done.returncode, json.loads(done.stdout[done.stdout.index("[\n") :]), said


def situations(findings: list[dict]) -> set[str]:
    return {f["text"].split(":")[0] for f in findings if f["subject"] == "SGLang probe"}


@pytest.mark.parametrize("family", TINY_NAMES)
def test_server_and_actor_of_every_family_are_judged_and_found_right(family, tmp_path):
    # every fourth layer of a hybrid model has another attention
    build(tmp_path / "tiny", TinyOptions(family=family, num_layers=4))
    code, findings, said = probe(tmp_path / "tiny", tmp_path / "run")
    assert code == 0 and not [f for f in findings if f["level"] == "problem"], said
    assert len(situations(findings)) == 15, said
    actor = {f["text"].split(":")[0] for f in findings if f["subject"] == "Megatron probe"}
    assert actor == {"a short text, against HF", "a long text, against HF"}
    routes = [f for f in findings if "rows are the reference's" in f["text"]]
    assert len(routes) == len({f["text"].split(":")[0] for f in routes}) == 5


def test_answer_rows_shifted_behind_a_prefix_cache_hit_are_found_and_nothing_else(tiny, tmp_path):
    code, findings, said = probe(tiny, tmp_path, "tests.e2e.probe_of_shifted_rows")
    assert code == 1, said
    (wrong,) = [f for f in findings if f["level"] == "problem"]
    assert wrong["text"].startswith("after a prefix-cache hit: ") and wrong["remedy"]
    assert {"a fresh prompt", "an aborted answer, against the actor"} < situations(findings)
    assert len(situations(findings)) == 15
