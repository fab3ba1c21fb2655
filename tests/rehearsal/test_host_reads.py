"""In a layer the host reads from the device once: how many rows each of its experts got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.verify.model_zoo import VARIANTS, write_checkpoint

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]
EXPERTS, ROTARY = "experts.py", "rope_utils.py"


def test_the_host_reads_once_a_layer_and_rotary_positions_that_are_not_fused_read_four_times(
    tmp_path,
):
    model, report = write_checkpoint(VARIANTS["moe4"], tmp_path / "model"), tmp_path / "report.json"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LOCAL_RANK": "0",
        "PYTHONPATH": str(Path(__file__).parent / "stand_ins"),
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.host_reads"]
    done = subprocess.run(
        [*command, str(report), str(model)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    layers = found["layers"]
    for kind, rotary in (("unfused", 4), ("fused", 0)):
        for name, forwards in (("forward", 1), ("train", 2)):  # of a train pass: recomputation
            by_file = found[f"{kind} {name}"]
            assert by_file.pop(EXPERTS) == forwards * layers
            assert by_file.pop(ROTARY, 0) == forwards * layers * rotary
            # once a step, not once a layer
            assert sum(by_file.values()) < (1 if name == "forward" else 2 * layers), by_file
