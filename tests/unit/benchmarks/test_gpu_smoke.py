"""make gpu-smoke: what it says without a GPU, where it ends, and the table that it writes."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import train_async
from benchmarks import gpu_smoke
from r3train.cli import SUBCOMMANDS
from r3train.config.options import parse_train_flags
from r3train.launch.gpus import server_gpus


def test_without_a_gpu_every_step_says_not_run(monkeypatch, capsys):
    monkeypatch.setattr(gpu_smoke, "gpu_names", list)
    assert gpu_smoke.main([]) == gpu_smoke.NOT_RUN
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gpu_smoke.STEPS)
    assert all(line.endswith("not run: no CUDA device") for line in lines)


def test_nothing_runs_behind_a_step_that_failed(tmp_path, monkeypatch, capsys):
    ok, two, fails, last = (
        replace(gpu_smoke.STEPS[0], name=name, command=command, num_gpus=num_gpus)
        for name, command, num_gpus in (
            ("ok", "python --version", 1),
            ("two", "python --version", 2),
            ("fails", "python -c 'import sys; sys.exit(7)'", 1),
            ("last", "python --version", 1),
        )
    )
    found = gpu_smoke.outcomes([ok, two, fails, last], 1, tmp_path)
    assert [outcome.word for outcome in found] == ["passed", "not run", "failed", "not run"]
    assert found[1].reason == "needs 2 GPUs, 1 here" and found[3].reason == "fails failed"
    assert "Python 3" in (tmp_path / "ok.log").read_text()
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_smoke.BEGIN}\nold\n{gpu_smoke.END}\nafter\n")
    gpu_smoke.write_page(page, found, ["H100"])
    text = page.read_text()
    assert "1 x H100" in text and "| fails | `python -c" in text and "| failed |" in text
    assert "| not run |" in text and "old" not in text and text.endswith("after\n")
    monkeypatch.setattr(gpu_smoke, "gpu_names", lambda: ["H100"])
    monkeypatch.setattr(gpu_smoke, "STEPS", (fails,))
    assert gpu_smoke.main([]) == 1
    monkeypatch.setattr(gpu_smoke, "STEPS", (ok, two))
    assert gpu_smoke.main([]) == gpu_smoke.NOT_RUN
    monkeypatch.setattr(gpu_smoke, "STEPS", (ok,))
    assert gpu_smoke.main([]) == 0


def test_a_job_finds_no_earlier_run_in_its_directory(tmp_path):
    left = tmp_path / "job"
    left.mkdir()
    command = f"bash -c 'test ! -e {left}' --run-dir {left}"
    job = replace(gpu_smoke.STEPS[0], name="another job", command=command)
    assert [outcome.word for outcome in gpu_smoke.outcomes([job], 1, tmp_path)] == ["passed"]


def test_one_gpu_runs_a_job_its_evidence_figures_variants_and_topologies(tmp_path):
    steps = [replace(step, command="python --version") for step in gpu_smoke.STEPS]
    ran = [o.step.name for o in gpu_smoke.outcomes(steps, 1, tmp_path) if o.word == "passed"]
    assert ran[3:6] == ["colocated", "colocated_evidence", "replay_overhead"], ran
    assert ran[6:] == ["rollout_rate", "adapters", "optimizer", "topologies"], ran


@pytest.mark.parametrize("step", gpu_smoke.STEPS, ids=lambda step: step.name)
def test_a_step_is_a_command_that_is_there(step):
    program, *words = shlex.split(step.command)
    root = Path(gpu_smoke.ROOT)
    if program == "r3train":
        assert words[0] in SUBCOMMANDS
    elif "train_async.py" in words:
        config = parse_train_flags(
            words[words.index("train_async.py") + 1 :], prog_name="train_async.py"
        )
        assert config.trainer.check_weight_update_equal and config.r3_check_enabled
    elif words[1] == "pytest":
        assert (root / words[2]).is_file()
    else:
        assert (root / f"{words[1].replace('.', '/')}.py").is_file()
    if "--config" in words and program == "r3train":
        parse_train_flags([word for word in words[1:] if word != "--probe"], prog_name="doctor")


JOBS = [step for step in gpu_smoke.STEPS if "train_async.py" in step.command]


@pytest.mark.parametrize("step", JOBS, ids=lambda step: step.name)
def test_a_job_is_taken_by_the_dry_run_and_needs_its_gpus_and_no_fewer(step, tiny, tmp_path):
    words = shlex.split(step.command)
    ranks = int(words[words.index("--nproc-per-node") + 1])
    flags = words[words.index("train_async.py") + 1 :]
    config = parse_train_flags(flags, prog_name="train_async.py")
    servers = server_gpus(config, num_ranks=ranks, num_visible=step.num_gpus)
    assert step.num_gpus == max(ranks, *(gpus.stop for gpus in servers))
    model = ("--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl"))
    elsewhere = ("--run-dir", str(tmp_path / "run"))  # runs/gpu may hold a run already
    dry = [*flags, *model, *elsewhere, "--dry-run", "--world-size", str(ranks)]
    result = CliRunner().invoke(train_async.main, dry, env={"RANK": None, "WORLD_SIZE": None})
    assert result.exit_code == 0, result.output


def test_a_step_that_is_too_slow_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_smoke, "_TIMEOUT_S", 3)
    slow = replace(gpu_smoke.STEPS[0], name="slow", command="bash -c 'sleep 61 & echo $!; wait'")
    (found,) = gpu_smoke.outcomes([slow], 1, tmp_path)
    assert found.word == "failed" and found.reason.startswith("not done after 3 s")
    child = int((tmp_path / "slow.log").read_text())
    # a killed process may still run for a moment where the machine is busy
    with suppress(psutil.NoSuchProcess):
        ended = psutil.Process(child)
        until = time.monotonic() + 30
        while ended.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, ended.status()
            time.sleep(0.05)
