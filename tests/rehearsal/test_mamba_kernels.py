"""The kernels of Mamba-2 mixers on a GPU compute what their twins on a CPU do.

Triton's interpreter runs SGLang's own code, and that of mamba-ssm, which no environment has: these tests of it are not
run where a checkout of github.com/state-spaces/mamba is not on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
OF_TRAINER = pytest.mark.skipif(
    find_spec("mamba_ssm") is None, reason="not run: mamba-ssm is not found"
)


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, dict[str, float]]:
    """Errors of outputs, states and gradients, by case."""
    report = tmp_path_factory.mktemp("kernels") / "report.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.interpreted_mamba", str(report)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


@pytest.mark.parametrize("case", ["server extends", "server decodes"])
def test_every_output_and_state_of_a_server_is_that_of_the_twin(case, errors):
    assert errors[case].keys() == {"output", "window", "state"}
    assert max(errors[case].values()) < 1e-5, errors[case]


@OF_TRAINER
def test_every_output_and_gradient_of_the_actor_is_that_of_the_twin(errors):
    assert len(errors["trainer"]) == 7
    assert max(errors["trainer"].values()) < 1e-5, errors["trainer"]


@OF_TRAINER
def test_a_state_that_outlives_its_sequence_is_seen(errors):
    assert errors["planted"]["output"] > 0.1
