"""A report of a damaged run, or into a place that cannot be written: never a traceback."""

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
    """Put a line before the file's last; returns its number."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    text = record if isinstance(record, str) else json.dumps(record)
    lines.insert(max(0, len(lines) - 1), text + "\n")
    path.write_text("".join(lines))
    return f"{path.name} line {max(1, len(lines) - 1)}: "


# -- samples.jsonl: what is damaged is left out, and said ----------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"reward": ...}, "reward is None: Field required"),
        ({"reward": None}, "reward is None: Input should be a valid number"),
        ({"reward": "high"}, "reward is 'high': Input should be a valid number"),
        ({"reward": True}, "reward is True: Input should be a valid number"),
        ({"reward": 10**400}, "reward is 1000000000"),
        ({"reward": float("nan")}, "reward is nan: Input should be a finite number"),
        ({"kind": ["best"]}, "kind is ['best']: Input should be"),
        ({"kind": "odd"}, "kind is 'odd': Input should be 'worst', 'slowest' or 'best'"),
        ({"step": "9"}, "step is '9': Input should be a valid integer"),
        ({"response_len": 3.5}, "response_len is 3.5: Input should be a valid integer"),
        ({"generation_s": "long"}, "generation_s is 'long': Input should be a valid number"),
        ({"text": None}, "text is None: Input should be a valid string"),
        ({"prompt": 7}, "prompt is 7: Input should be a valid string"),
        ({"finish_reason": {}}, "finish_reason is {}: Input should be a valid string"),
    ],
)
def test_a_damaged_sample_is_named_and_the_others_are_shown(run, change, message):
    sample = {k: v for k, v in {**GOOD, "text": "gone", **change}.items() if v is not ...}
    where = with_line(run / "samples.jsonl", sample)
    with_line(run / "samples.jsonl", GOOD)
    page = page_of(run).words
    assert where + message in page
    assert "a fine answer" in page and "gone" not in page
    assert where in report(run).stderr


@pytest.mark.parametrize("line", ["{", "[1]", "null", "[" * 100_000, '{"kind": ' + "9" * 5000, ""])
def test_a_line_of_samples_that_is_no_object_is_named(run, line):
    assert with_line(run / "samples.jsonl", line) in page_of(run).words


def test_a_lone_surrogate_in_a_text_is_shown_as_a_replacement_character(run):
    with_line(run / "samples.jsonl", {**GOOD, "text": "half \ud83d of it", "prompt": "\udc80"})
    page = page_of(run).words
    assert "half � of it" in page and "Left out" not in page


def test_samples_that_cannot_be_read_are_named(run):
    (run / "samples.jsonl").unlink()
    (run / "samples.jsonl").mkdir()
    assert "samples.jsonl: cannot be read: Is a directory" in page_of(run).words


def test_many_damaged_lines_are_counted_after_the_first(run):
    (run / "samples.jsonl").write_text("{\n" * 1000)
    page = page_of(run).words
    assert "samples.jsonl line 1: " in page and "samples.jsonl: 980 more" in page
    assert "line 500" not in page


def test_a_last_line_that_was_cut_is_said_to_be(run):
    for name in ("samples.jsonl", "metrics.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 4, "ki')
        assert f"{name} ends within a line: its writer was stopped" in page_of(run).words


# -- config.toml ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, message",
    [
        ("replay = 3", "config.toml: replay is 3, expected a table"),
        (
            "[replay]\nuse_rollout_routing_replay = 'yes'",
            "config.toml: replay.use_rollout_routing_replay is 'yes', expected true or false",
        ),
        ("replay =", "config.toml: not valid TOML: Invalid value"),
        ("a = " + "[" * 20_000, "config.toml: "),
        ("\udcff", "config.toml: not valid TOML: 'utf-8' codec"),
    ],
)
def test_a_damaged_configuration_is_named_and_r3_is_unknown(run, text, message):
    (run / "config.toml").write_text(text, errors="surrogateescape")
    page = page_of(run).words
    assert message in page and " unknown no evidence" in page


def test_a_configuration_that_cannot_be_read_is_named(run):
    (run / "config.toml").mkdir()
    assert "config.toml: cannot be read: Is a directory" in page_of(run).words


# -- metrics.jsonl -------------------------------------------------------------------------------


def test_metrics_that_cannot_be_read_are_a_usage_error(run):
    (run / "metrics.jsonl").unlink()
    assert f"{run}: no metrics.jsonl: is it a run directory?" in refused(run)
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl: cannot be read: Is a directory" in refused(run)


def test_metrics_without_one_whole_line_are_a_usage_error(run):
    (run / "metrics.jsonl").write_text("{\n" + "[" * 100_000 + "\n")
    assert "metrics.jsonl line 1: not JSON: " in refused(run)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not JSON: "),
        ("[1]", "got a list, expected an object"),
        ("[" * 100_000 + "]" * 100_000, "not JSON: "),
        ('{"a": 1}', "step is None, expected an integer"),
        ('{"step": 1.5}', "step is 1.5, expected an integer"),
        ('{"step": true}', "step is True, expected an integer"),
        ('{"step": -1}', "step is -1, expected an integer"),
        (f'{{"step": {10**400}}}', "step is 1000000000"),
        ('{"step": 2, "train/loss": [1]}', "train/loss is [1], expected a number"),
        ('{"step": 2, "train/loss": "low"}', "train/loss is 'low', expected a number"),
        (f'{{"step": 2, "train/loss": {10**400}}}', "train/loss is 1000000000"),
        (f'{{"step": 2, "train/loss": {"9" * 5000}}}', "not JSON: Exceeds the limit"),
        ('{"step": 2, "perf/step_s": {}}', "perf/step_s is {}, expected a number"),
        ('{"step": 2, "r3/passed": [0]}', "r3/passed is [0], expected a number"),
    ],
)
def test_a_damaged_line_of_metrics_is_named_and_the_others_are_drawn(run, line, message):
    where = with_line(run / "metrics.jsonl", line)
    page = page_of(run)
    assert where + message in page.words and page.lines("Reward")


def test_a_note_among_the_metrics_is_no_damage(run):
    with_line(run / "metrics.jsonl", {"step": 2, "note": "warm", "train/kl": None, "train/x": "a"})
    assert "Left out" not in page_of(run).words


@pytest.mark.parametrize(
    "line, message",
    [
        ({"step": 1}, "expected a step and a name, got {'step': 1}"),
        ({"step": 1, "name": "a", "eval/a/mean": "high"}, "eval/a/mean is 'high', expected a numb"),
    ],
)
def test_a_damaged_line_of_evaluations_is_named_with_its_folder(run, line, message):
    (run / "eval").mkdir()
    good = {"step": 2, "name": "a", "eval/a/mean": 0.5}
    (run / "eval/metrics.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(good)}\n")
    page = page_of(run)
    assert f"eval/metrics.jsonl line 1: {message}" in page.words
    assert page.lines("Evaluation: a") == {"run": [(2, 0.5)]}


def test_a_run_without_a_step_says_so(run):
    (run / "metrics.jsonl").write_text("")
    assert "no steps" in page_of(run).words


@pytest.mark.parametrize(
    "value, shown",
    [(float("nan"), "nan"), (1e308, "1e+308"), (-1e308, "-1e+308"), (5e-324, "4.94e-324")],
)
def test_a_number_that_cannot_be_drawn_is_named_beside_the_others(run, value, shown):
    path = run / "metrics.jsonl"
    keys = ("rollout/reward_mean", "train/log_prob_gap_mean", "perf/step_s", "perf/train_s")
    lines = [{"step": 2, **dict.fromkeys(keys, value)}, {"step": 3, **dict.fromkeys(keys, 0.25)}]
    lines += [{"step": 4, **dict.fromkeys(keys, value)}, {"step": 6, **dict.fromkeys(keys, 0.5)}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run, args=("--png", run / "png"))
    assert f"not drawn: {shown} at steps 2, 4" in page.words
    assert page.lines("Reward") == {"run": [(3, 0.25), (6, 0.5)]}


@pytest.mark.parametrize(
    "values",
    [
        (1e300, -1e300),
        (1e-300, 1e300),
        (1.0, 1.0 + 2**-52),
        (1e299, 1e299 * (1 + 2**-52)),
        (1e-300, 1.0000001e-300),
        (-1e-300, 0.0),
    ],
)
def test_extreme_numbers_are_drawn_within_their_chart(run, values):
    keys = ("rollout/reward_mean", "train/log_prob_gap_mean", "perf/step_s", "perf/publish_s")
    lines = [{"step": i, **dict.fromkeys(keys, v)} for i, v in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run, args=("--png", run / "png"))
    low, high = page.figures["Reward"]["layout"]["yaxis"]["range"]
    assert math.isfinite(high - low)
    assert [low < y < high for _, y in page.lines("Reward")["run"]] == [True, True]
    assert "nan" not in page.words and "inf x" not in page.words


def test_long_numbers_keep_the_page_narrow(run):
    line = {"step": 0, "rollout/reward_mean": 1e299, "perf/step_s": 1e299, "perf/train_s": 1e299}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with_line(run / "samples.jsonl", {**GOOD, "reward": -1e300})
    assert "0" * 30 not in page_of(run).words


# -- the output ----------------------------------------------------------------------------------


def test_a_page_that_cannot_be_written_is_a_usage_error_with_path_and_cause(run, tmp_path):
    (tmp_path / "file").write_text("")
    for output, cause in (
        (tmp_path / "file" / "r.html", "it is no directory"),
        (tmp_path / "file" / "more" / "r.html", "Not a directory"),
        (Path("/proc/nowhere/r.html"), "No such file or directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        said = refused(run, "--output", output)
        assert cause in said and str(output.parent)[-20:] in said
    (run / "report.html").mkdir()
    assert f"{run}/report.html: cannot be written: Is a directory" in refused(run)


def test_pictures_that_cannot_be_written_are_a_usage_error_with_path_and_cause(run, tmp_path):
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file: cannot be written: it is no directory" in refused(
        run, "--png", tmp_path / "file"
    )
    said = refused(run, "--png", tmp_path / "file" / "png")
    assert "file/png: cannot be written: Not a directory" in said
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
