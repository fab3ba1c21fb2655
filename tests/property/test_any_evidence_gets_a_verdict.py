"""check-evidence answers with a verdict for any value in any field of any record.

One field of one line is replaced or left out, or a line is torn: never a traceback, never an exit code
of something else, and never a pass where the value cannot be right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from r3train.cli import main
from r3train.audit import check_evidence
from tests.unit.evidence_dirs import write_run

CODES = {"passed": 0, "failed": 1, "no evidence": 3}
GONE = object()
ODD = (None, True, "", "0x1", -1, 1 << 41, 10**25, 0.5, -1e300, float("nan"))
ODD += ([], [None, -1], {}, {"1": -1}, GONE)
# as good as there: true, 1 and null
OPTIONAL = (
    ("counts_tokens",),
    ("version",),
    ("rows_by_class",),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("evidence") / "run", range(2))


def paths(value: Any, so_far: tuple = ()) -> list[tuple]:
    """Every place in a record, as keys from its outside in."""
    found = [so_far] if so_far else []
    pairs = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, inner in pairs:
        found += paths(inner, (*so_far, key))
    return found


def put(value: Any, path: tuple, new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    if new is GONE:
        del value[path[-1]]
    else:
        value[path[-1]] = new


def audit_of(run: Path) -> dict:
    """The audit as JSON; the same one is printed for a terminal and written for a pull request too."""
    audits = []

    def printed(audit) -> str:
        audits.append(audit)
        return markdown_of(audit)

    markdown_of = check_evidence.markdown_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_evidence, "markdown_of", printed)
        result = CliRunner().invoke(main, ["check-evidence", str(run), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    out = json.loads(result.output)
    assert result.exit_code == CODES[out["verdict"]]
    assert out["verdict"] in check_evidence.text_of(audits[0])
    return out["audits"][0]


def damaged(good: Path, name: str, change) -> tuple[Path, Any]:
    """A copy of the run with ``change`` done to one file's lines; the others are as in ``good``."""
    run = good.parent / "damaged"
    if not run.exists():
        shutil.copytree(good, run)
    for file in FILES:
        shutil.copy(good / "evidence" / file, run / "evidence" / file)
    path = run / "evidence" / name
    lines = path.read_text().splitlines(keepends=True)
    told = change(lines)
    path.write_text("".join(lines))
    return run, told


FILES = ("steps.jsonl", "rank_00001.jsonl")


def places(good: Path) -> Iterator[tuple[str, int, tuple]]:
    """Every place of every kind of record once: file, line from 0, keys from its outside in."""
    for name in FILES:
        seen = set()
        for at, line in enumerate((good / "evidence" / name).read_text().splitlines()):
            for path in paths(json.loads(line)):
                if path not in seen:
                    seen.add(path)
                    yield name, at, path


@pytest.mark.parametrize("new", ODD, ids=lambda new: "gone" if new is GONE else repr(new))
def test_an_odd_value_in_any_field_of_any_record_gets_a_verdict(good, new):
    for name, at, path in places(good):

        def change(lines: list[str]) -> bool:
            line = json.loads(lines[at])
            before = json.dumps(line)
            put(line, path, new)
            lines[at] = json.dumps(line) + "\n"
            return json.dumps(line) == before

        run, same = damaged(good, name, change)
        audit = audit_of(run)
        if same or (new in (GONE, {}) and (path in OPTIONAL or path[2:3] == ("calls",))):
            continue  # a verdict is all that can be asked for
        if path[2:] == ("rows_without_choice",) and new is None:
            continue  # a rollout that no server generated
        if path[0] == "mismatch_threshold" and new in (0.5, True):
            continue  # as a run may have had it
        if path[0] == "suspect_limit" and isinstance(new, (bool, int, float)) and new >= 0:
            continue  # likewise: no sum has reached it
        assert audit["verdict"] == "failed", (name, at + 1, path)
        if type(new) in (bool, int, str):
            continue  # it may be of the right kind, and fail for what it says
        open_tables = ("counts", "agreement", "rows_by_class", "statistics")
        if path[-1] == "attempt" or path[2:3] == ("calls",) or path[0] in open_tables:
            continue
        where = f"{name}:{at + 1}: "
        assert any(f["what"].startswith(where) for f in audit["findings"]), (
            path,
            audit["findings"],
        )


@settings(max_examples=100)
@given(data=st.data(), garbage=st.binary(min_size=1, max_size=40))
def test_torn_and_foreign_lines_get_a_verdict(good, data, garbage):
    name = data.draw(st.sampled_from(FILES))
    run, _ = damaged(good, name, lambda lines: None)
    path = run / "evidence" / name
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:at] + garbage + content[at + data.draw(st.integers(0, 900)) :])
    audit_of(run)
