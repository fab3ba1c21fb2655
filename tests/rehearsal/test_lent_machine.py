"""Parts that ``make lent`` prepares, as far as a CPU runs them: the actor's report twice, and when two of them say stop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import lent_h100, lent_wheels

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "tests/rehearsal/stand_ins"


def part(*words: object) -> tuple[int, dict]:
    """The exit code and the line of a part, in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STAND_INS), env.get("PYTHONPATH", "")]))
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.lent_h100", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ranks
@pytest.mark.slow
def test_the_actors_report_is_repeated_and_one_of_other_routes_or_numbers_says_stop(tmp_path):
    files = [tmp_path / f"{name}.pt" for name in ("host", "again", "changed")]
    for file in files[:2]:
        code, line = part("actor", file, "float32")
        assert code == 0, line
        assert line["device"] == "cpu" and line["records"] > 0
    code, line = part("compare", *files[:2])
    assert code == 0 and line["go_on"] and line["log_prob_gap"] == 0, line
    assert line["worst_weight"][1] == 0
    for change in (routes, numbers):
        report = torch.load(files[0], weights_only=False)
        change(report)
        torch.save(report, files[2])
        code, line = part("compare", files[0], files[2])
        assert code == 1 and not line["go_on"], (change, line)


def routes(report: dict) -> None:
    report["evidence"][-1]["fingerprint"] += 1


def numbers(report: dict) -> None:
    next(iter(report["log_probs"].values()))[5] += 0.01


def test_a_part_without_a_device_says_its_error_and_stop():
    code, line = part("permute", "/nowhere")
    assert code == 1 and line["error"] and line["part"] == "permute /nowhere"


def test_every_call_names_a_part_and_the_half_hour_holds_them():
    named = re.findall(r"lent_h100 (\w+)", " ".join(call.command for call in lent_wheels.CALLS))
    assert set(named) == lent_h100.PARTS.keys()
    assert sum(call.minutes for call in lent_wheels.CALLS) <= 20


def test_every_wheel_has_the_version_of_a_lock_file():
    assert lent_wheels.pins(["fla-core", "pydantic"])[0].startswith("fla-core==")
    with pytest.raises(ValueError, match="no pin of fla"):
        lent_wheels.pins(["fla"])
