"""The recorded runs that the browser tests show: what is written today still reads them."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from r3train.cli import main

RECORDED = Path(__file__).parents[2] / "browser/recorded"


def test_the_evidence_of_the_recorded_run_passes_when_it_is_judged_again():
    result = CliRunner().invoke(main, ["check-evidence", str(RECORDED / "with_r3")])
    assert result.exit_code == 0, result.output
