"""A report as the record of a run: how it was started, and in what its settings differ."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from html import unescape
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch

from r3train.config import RunConfig
from r3train.observe.starts import read_starts, record_start, StartParts, STARTS_FILE
from tests.unit.report_runs import page_of, report, with_metrics

ROOT = Path(__file__).parents[3]


def with_settings(run_dir: Path, **changes) -> Path:
    config = RunConfig.from_toml(ROOT / "configs/tiny_cpu.toml", {"run_dir": run_dir, **changes})
    with_metrics(run_dir)
    (run_dir / "config.toml").write_text(config.to_toml())
    return run_dir


def started(run_dir: Path, time: str, first_step: int = 0) -> None:
    record_start(run_dir, time, first_step, os.getpid(), 2, torch.device("cpu"))


def rows(page, title: str) -> dict[str, list[str]]:
    """The cells of the table after a title, by the first of each row."""
    table = page.text[page.text.index(title) :]
    table = table[: table.index("</table>")]
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in table.split("<tr>")[1:]]
    return {row[0]: [unescape(cell) for cell in row[1:]] for row in cells}


def test_the_page_says_how_a_run_was_started_and_resumed(tmp_path):
    run = with_metrics(tmp_path / "run")
    started(run, "2026-11-24T10:00:00.500000Z")
    started(run, "2026-11-24T12:00:00.500000Z", first_step=3)
    found = rows(page_of(run), "How it was run")
    assert found["started"] == ["2026-11-24 10:00:00 UTC"]
    assert found["resumed"] == ["2026-11-24 12:00:00 UTC, from step 3"]
    assert "pytest" in found["command"][0] and found["in"] == [str(Path.cwd())]
    assert found["on"][0].endswith(", 2 ranks") and "GPU" not in found
    python, torch_version = sys.version.split()[0], version("torch")
    assert f"python {python}" in found["versions"][0]
    assert f"torch {torch_version}" in found["versions"][0] and "sglang 0" in found["versions"][0]


def test_a_start_names_the_commits_and_says_where_files_were_changed(tmp_path, monkeypatch):
    """The working directory's, where user code lies, and r3train's own if that is a checkout."""
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.chdir(code)
    started(tmp_path, "t")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    started(tmp_path, "t")
    (code / "reward.py").write_text("")
    subprocess.run(["git", "add", "."], check=True)
    started(tmp_path, "t")
    monkeypatch.setenv("PATH", "")
    started(tmp_path, "t")
    found = [start.commits.get("working directory") for start in read_starts(tmp_path)]
    assert found == [None, head.strip(), f"{head.strip()}-dirty", None]
    own = read_starts(tmp_path)[0].commits.get("r3train", "")
    assert len(own.removesuffix("-dirty")) == (40 if (ROOT / ".git").exists() else 0)


@pytest.mark.parametrize(
    "line, complaint",
    [("{", "not JSON"), ("[]", "expected an object"), ('{"time": 3}', "`str`, got `int`")],
)
def test_a_damaged_start_is_named_with_its_file_and_line(line, complaint, tmp_path):
    run = with_metrics(tmp_path / "run")
    started(run, "t")
    path = run / STARTS_FILE
    path.write_text(path.read_text() + line + "\n")
    result = report(run)
    assert result.exit_code == 2
    assert f"{STARTS_FILE}:2" in result.output and complaint in result.output


def test_the_settings_of_one_run_are_those_that_are_not_at_their_default(tmp_path):
    page = page_of(with_settings(tmp_path / "run", rollout_top_p=0.5))
    found = rows(page, "from the default")
    assert found["rollout.rollout_top_p"] == ["1", "0.5"]
    assert found["rollout.sglang.max_total_tokens"] == ["unset", "8192"]
    assert found["replay.enable_r3_correctness_check"] == ["false", "true"]
    assert "rollout.rollout_top_k" not in found and "Settings that differ" not in page.text
    words = f"{len(found) - 1} settings differ from the default"
    assert words in page.words


def test_of_several_runs_the_settings_that_differ_come_first(tmp_path):
    one = with_settings(tmp_path / "one", lr=0.5)
    two = with_settings(tmp_path / "two", rollout_seed=7)
    unknown = with_metrics(tmp_path / "unknown")
    page = page_of(one, two, unknown)
    found = rows(page, "Settings that differ between the runs")
    del found["setting"]
    assert found == {
        "rollout.rollout_seed": ["42", "42", "7", "-"],
        "trainer.lr": ["1e-06", "0.5", "0.002", "-"],
    }
    assert "rollout.num_rollout" in rows(page, "from the default")
    assert "None." in page_of(one, one).words


def test_a_run_of_another_version_is_shown_with_the_settings_that_it_has(tmp_path):
    run = with_metrics(tmp_path / "run")
    (run / "config.toml").write_text("top = 1\n[gone]\nsetting = 'x'\n[trainer]\nlr = 'fast'\n")
    found = rows(page_of(run), "from the default")
    assert found["gone.setting"] == ["unset", "x"] and found["trainer.lr"] == ["1e-06", "fast"]
    assert found["top"] == ["unset", "1"]


def test_the_parts_of_a_start_add_up_to_its_first_step_and_stand_in_its_own_line(tmp_path):
    started(tmp_path, "2026-01-01T00:00:00Z")
    began = psutil.Process(os.getpid()).create_time()
    parts = StartParts(tmp_path, os.getpid())
    parts.end("joining", time.time())
    assert read_starts(tmp_path)[0].parts == {}
    started(tmp_path, "2026-01-02T00:00:00Z", first_step=5)
    said = parts.end_first_step({"perf/step_s": 0.02, "perf/rollout_wait_s": 0.01})
    first, second = read_starts(tmp_path)
    assert first.parts == {} and list(second.parts)[-2:] == [
        "waiting for the first rollout",
        "first step",
    ]
    assert sum(second.parts.values()) == pytest.approx(time.time() - began, abs=0.5)
    assert second.parts["first step"] == pytest.approx(0.01, abs=0.002)
    assert all(part in said for part in second.parts)
