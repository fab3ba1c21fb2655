"""A report of a damaged run, or into a place that cannot be written: one line that names it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.report_runs import page_of, Page, report, with_metrics

GOOD = {"step": 9, "kind": "best", "reward": 0.5, "response_len": 3, "text": "a fine answer"}


@pytest.fixture
def run(tmp_path) -> Path:
    return with_metrics(tmp_path / "run")


def refused(*args: object) -> str:
    result = report(*args)
    assert result.exit_code == 2 and result.stderr.startswith("Usage:"), result.output
    return " ".join(result.stderr.split())


def with_line(path: Path, record: object) -> str:
    """Put a line before the file's last; returns its place as messages have it."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    text = record if isinstance(record, str) else json.dumps(record)
    lines.insert(max(0, len(lines) - 1), text + "\n")
    path.write_text("".join(lines))
    return f"{max(1, len(lines) - 1)}: "


METRICS, SAMPLES, EVALUATIONS = "metrics.jsonl", "samples.jsonl", "eval/metrics.jsonl"
SET = {"step": 1, "name": "a", "eval/a/mean": 0.5}


@pytest.mark.parametrize(
    "file, line, message",
    [
        *((file, "{", "not JSON: ") for file in (METRICS, SAMPLES, EVALUATIONS)),
        *((file, "[1]", "got list, expected an object") for file in (METRICS, SAMPLES)),
        (METRICS, "[" * 100_000, "not JSON: "),
        (METRICS, {"a": 1}, "step is None, expected an integer from 0 to"),
        (METRICS, {"step": 1.5}, "step is 1.5, expected an integer"),
        (METRICS, {"step": -1}, "step is -1, expected an integer"),
        (METRICS, {"step": 2, "train/loss": 10**400}, "train/loss is 1000000000"),
        (EVALUATIONS, {"step": 1}, "expected a name"),
        (SAMPLES, {k: v for k, v in GOOD.items() if k != "reward"}, "missing required field"),
        (SAMPLES, {**GOOD, "reward": "high"}, "Expected `float`, got `str` - at `$.reward`"),
        (SAMPLES, {**GOOD, "kind": "odd"}, "Invalid enum value 'odd' - at `$.kind`"),
        ("config.toml", "replay =", "not valid TOML: Invalid value"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_nothing_is_drawn(run, file, line, message):
    (run / "eval").mkdir()
    (run / EVALUATIONS).write_text(2 * (json.dumps(SET) + "\n"))
    number = with_line(run / file, line)
    said = refused(run)
    place = f"{run}/{file}:" + ("" if file == "config.toml" else number)
    assert place in said and message in said, said
    assert not (run / "report.html").exists()


def test_a_run_without_metrics_is_refused_and_one_without_a_step_says_so(run):
    (run / METRICS).write_text("")
    assert "no steps" in page_of(run).words
    (run / METRICS).unlink()
    assert f"{run}: no metrics.jsonl: is it a run directory?" in refused(run)


def test_a_last_line_that_was_cut_is_left_out(run):
    before = page_of(run).lines("Reward")
    for name in (SAMPLES, METRICS):
        with (run / name).open("a") as file:
            file.write('{"step": 4, "ki')
    assert page_of(run).lines("Reward") == before


def test_half_a_character_and_a_note_are_shown(run):
    with_line(run / SAMPLES, {**GOOD, "text": "half \ud83d of it", "prompt": "\udc80"})
    with_line(run / METRICS, {"step": 2, "note": "warm", "train/kl": None, "train/x": "a"})
    assert "half \ufffd of it" in page_of(run).words


@pytest.mark.parametrize(
    "value, shown",
    [(float("nan"), "nan"), (float("inf"), "inf"), (1e308, "1e+308"), (5e-324, "4.94e-324")],
)
def test_a_number_that_cannot_be_drawn_is_named_next_to_the_others(run, value, shown):
    keys = ("rollout/reward_mean", "train/log_prob_gap_mean", "perf/step_s", "perf/train_s")
    lines = [{"step": 2, **dict.fromkeys(keys, value)}, {"step": 3, **dict.fromkeys(keys, 0.25)}]
    lines += [{"step": 4, **dict.fromkeys(keys, value)}, {"step": 6, **dict.fromkeys(keys, 0.5)}]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run, args=("--png", run / "png"))
    assert f"not drawn: {shown} at steps 2, 4" in page.words
    assert page.lines("Reward") == {"run": [(3, 0.25), (6, 0.5)]}


@pytest.mark.parametrize("values", [(1e100, -1e100), (1e-100, 1e100), (1.0, 1.0 + 2**-52)])
def test_extreme_numbers_are_drawn_within_their_chart(run, values):
    keys = ("rollout/reward_mean", "train/log_prob_gap_mean", "perf/step_s", "perf/publish_s")
    lines = [{"step": i, **dict.fromkeys(keys, v)} for i, v in enumerate(values)]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run, args=("--png", run / "png"))
    low, high = page.figures["Reward"]["layout"]["yaxis"]["range"]
    assert math.isfinite(high - low)
    assert [low < y < high for _, y in page.lines("Reward")["run"]] == [True, True]
    assert "0" * 30 not in page.words


# -- the output ----------------------------------------------------------------------------------


def test_a_page_that_cannot_be_written_is_a_usage_error_with_path_and_cause(run, tmp_path):
    (tmp_path / "file").write_text("")
    for output, cause in (
        (tmp_path / "file" / "r.html", "it is no directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        said = refused(run, "--output", output)
        assert cause in said and str(output.parent)[-20:] in said
    (run / "report.html").mkdir()
    assert f"{run}/report.html: cannot be written: Is a directory" in refused(run)


def test_a_picture_that_cannot_be_written_is_a_usage_error_with_path_and_cause(run, tmp_path):
    (tmp_path / "png" / "reward.png").mkdir(parents=True)
    said = refused(run, "--png", tmp_path / "png")
    assert "png/reward.png: cannot be written: Is a directory" in said


def test_a_run_that_is_read_only_needs_an_output(tmp_path):
    report(with_metrics(tmp_path / "warm"))  # imports what another user may not read
    directory = Path(tempfile.mkdtemp())  # tmp_path is below a directory that is closed to others
    try:
        run = with_metrics(directory / "run")
        (run / "metrics.jsonl").chmod(0o644)
        run.chmod(0o555)
        directory.chmod(0o777)
        with nobody():
            said = refused(run)
            assert f"{run}/report.html: cannot be written: Permission denied" in said
            assert "--output" in said.split("Error:")[1]
            assert report(run, "--output", directory / "r.html").exit_code == 0
    finally:
        run.chmod(0o755)
        shutil.rmtree(directory)


@contextlib.contextmanager
def nobody():
    """A user whom permissions hold: root is another one meanwhile."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


# -- whatever else -------------------------------------------------------------------------------


def test_odd_names_of_runs_are_shown_and_drawn(tmp_path):
    run = with_metrics(tmp_path / os.fsdecode(b"_$a$b$ {\\frac <b> \xff"))
    page = page_of(run, args=("--png", run / "png"))
    assert "_$a$b$ {\\frac <b> �" in page.words


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, 1e308, -1e308, 5e-324, 2**63])
    | st.floats()
    | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
small = st.integers(0, 5)
record = st.fixed_dictionaries(
    {},
    optional={
        "step": small | anything,
        "rollout/reward_mean": st.floats() | anything,
        "train/log_prob_gap_mean": st.floats() | anything,
        "perf/step_s": st.floats(0) | anything,
        "perf/train_s": st.floats(0) | anything,
        "perf/rollout_idle_share": st.floats() | anything,
        "r3/passed": st.booleans() | anything,
        "r3/agreement": st.floats() | anything,
    },
)
sample = st.fixed_dictionaries(
    {},
    optional={
        "step": small | anything,
        "kind": st.sampled_from(["worst", "best", "slowest"]) | anything,
        "reward": st.floats() | anything,
        "response_len": small | anything,
        "generation_s": st.floats() | anything,
        "text": st.text(st.characters()) | anything,
    },
)


def lines_of(records) -> st.SearchStrategy[bytes]:
    whole = st.lists(records, max_size=5).map(lambda rs: "".join(json.dumps(r) + "\n" for r in rs))
    return whole.map(lambda text: text.encode()) | st.binary(max_size=200)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines_of(record), lines_of(sample), st.binary(max_size=50) | st.just(b"replay = 3"))
def test_whatever_is_in_the_files_there_is_a_page_or_a_usage_error(
    tmp_path, metrics, samples, config
):
    contents = {"metrics.jsonl": metrics, "samples.jsonl": samples, "config.toml": config}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    if report(tmp_path).exit_code == 0:
        Page(tmp_path / "report.html")
