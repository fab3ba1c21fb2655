"""One wrong index map for tokens, their ids and routes alike: what a run's evidence makes of it.

The fingerprint is right then, as every row carries its own id and routes; the rows are those of other
tokens, or stand where they should not.  Only agreement can tell, and only where the routes are a
router's choice: SGLang's.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from r3train.cli import main
from tests.e2e import jobs

pytestmark = pytest.mark.e2e

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
CP2 = ("--context-parallel-size", "2")


def run_with(bug: str, parallel, run_dir, served_flags) -> tuple[jobs.Job, dict]:
    """One step of a job with the bug, and what check-evidence says of it."""
    job = jobs.run(
        run_dir,
        *served_flags,
        *jobs.R3_FLAGS,
        *"--num-rollout 1".split(),
        *parallel,
        "--save",
        str(run_dir / "checkpoints"),
        "--r3-canaries",
        "0",  # they find the bug before the first step
        "--ci-test",  # how many rows have no expert in common by chance is another number in each run
        program=("-m", "tests.e2e.train_with_bug", bug),
    )
    checked = CliRunner().invoke(main, ["check-evidence", str(run_dir), "--json"])
    (audit,) = json.loads(checked.stdout)["audits"]
    return job, audit | {"exit": checked.exit_code}


@pytest.mark.parametrize(
    "parallel", [pytest.param(TP2, marks=pytest.mark.slow), CP2], ids=["tp2", "cp2"]
)
def test_a_run_without_a_bug_passes(parallel, tmp_path, served_flags):
    job, said = run_with("null", parallel, tmp_path / "run", served_flags)
    assert job.code == 0, job.output
    assert said["exit"] == 0 and set(said["claims"].values()) == {"passed"}
    assert said["agreement"]["equal"] > 0.99


@pytest.mark.parametrize(
    "bug, parallel",
    [
        pytest.param("tp_ranks_reversed", TP2, marks=pytest.mark.slow),
        ("contiguous_cp", CP2),
        pytest.param("cp_halves_swapped", CP2, marks=pytest.mark.slow),
    ],
)
def test_agreement_alone_fails(bug, parallel, tmp_path, served_flags):
    job, said = run_with(bug, parallel, tmp_path / "run", served_flags)
    assert job.code != 0 and "R3 mismatch tokens" in job.output
    assert "staleness does not explain them" in job.output
    # every route was replayed: the weights of the step are kept, before the run ends
    saved = job.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert saved.read_text().strip() == "1"
    assert said["exit"] == 1
    # the server's answers are right: what came of them behind is not
    assert [claim for claim, of in said["claims"].items() if of != "passed"] == ["agreement"]
    assert all(f["step"] == 0 and f["layer_number"] for f in said["findings"])
