"""The kernels of linear attention on a GPU compute what their twins on a CPU do, forward and backward.

Triton's interpreter runs flash-linear-attention's own code.  It is in no environment of the CPU; these tests are not run
where it is not found:

    pip install --no-deps --target DIRECTORY fla-core==0.5.2
    PYTHONPATH=DIRECTORY pytest tests/rehearsal/test_linear_attention_kernels.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("fla") is None, reason="not run: fla-core (flash-linear-attention) is not found"
)
ROOT = Path(__file__).resolve().parents[2]
BOUNDS = {"float32": 1e-5, "float16": 5e-3}


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, dict[str, float]]:
    """Errors of outputs and gradients, by case."""
    report = tmp_path_factory.mktemp("kernels") / "report.json"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.rehearsal.interpreted_kernels",
            str(report),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def test_every_output_and_gradient_is_that_of_the_twin(errors):
    compared = {case: found for case, found in errors.items() if case != "planted"}
    assert len(compared) == 8
    for case, found in compared.items():
        print(case, {name: f"{error:.1e}" for name, error in found.items()})
        assert max(found.values()) < BOUNDS[case.split()[-1]], (case, found)
    assert errors["rule as published float32"].keys() == {"output", "q", "k", "v", "g", "beta"}


def test_a_state_that_outlives_its_sequence_is_seen(errors):
    assert errors["planted"]["output"] > 0.1
