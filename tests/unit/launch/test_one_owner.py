"""One job a directory, and no job without its launcher."""

from __future__ import annotations

import os
import re
import resource
import stat
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest

from r3train.config.options import train_options
from r3train.launch.job.finding import PROBLEM, WARNING
from r3train.doctor.diagnosis import diagnose
from r3train.launch.job.run_dir import (
    claim_directories,
    open_run_dir,
    OWNER_FILE,
    raise_file_limit,
)
from tests.unit.launch.test_preflight import ROOT, start

HOLDER = """
import sys, time
from contextlib import ExitStack
from r3train.config.options import train_options
from r3train.launch.job.run_dir import claim_directories

config = train_options(lambda config: config).main(sys.argv[1:], standalone_mode=False)
with ExitStack() as claims:
    claim_directories(config, claims)
    print("held", flush=True)
    time.sleep(600)
"""
# tests run with torch's threads held to one
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_directories_that_a_job_makes_are_its_owners_alone_and_others_keep_their_mode(
    tiny, tmp_path
):
    there, made, save = tmp_path / "there", tmp_path / "a/made", tmp_path / "a/save"
    there.mkdir(mode=0o750)
    for run_dir in (made, there):
        with ExitStack() as claims:
            claim_directories(_config(tiny, "--run-dir", str(run_dir), "--save", str(save)), claims)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (made, save, there)]
    assert modes == [0o700, 0o700, 0o750]
    exports = tmp_path / "exports"
    flags = ("--run-dir", str(made), "--save-hf", str(exports / "{rollout_id}"))
    with ExitStack() as claims:
        claim_directories(_config(tiny, *flags), claims)
    assert exports.stat().st_mode & 0o777 == 0o777 & ~_umask()


@pytest.mark.parametrize("setting", ["run_dir", "save", "save_hf"])
def test_a_directory_of_a_running_job_is_refused_until_that_job_has_ended(setting, tiny, tmp_path):
    taken, flag = tmp_path / "taken", "--" + setting.replace("_", "-")
    own = () if setting == "run_dir" else ("--run-dir", str(tmp_path / "own"))
    command = [sys.executable, "-c", HOLDER, *_flags(tiny), *own, flag, str(taken)]
    holder = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        here = () if setting == "run_dir" else ("--run-dir", str(tmp_path / "other"))
        refused = start(tiny, *here, flag, str(taken))
        assert refused.exit_code == 2
        said = f"{taken}: in use \\({setting}\\) by process {holder.pid} on .*: one job a directory"
        assert re.search(said, refused.output), refused.output
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with ExitStack() as claims:  # a job that was killed leaves its file, and no lock
        claim_directories(_config(tiny, *own, flag, str(taken)), claims)
        lock = tmp_path / f".taken{OWNER_FILE}" if setting == "save_hf" else taken / OWNER_FILE
        assert f"process {os.getpid()} on" in lock.read_text()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _config(tiny: Path, *flags: str):
    command = train_options(lambda config: config)
    return command.main([*_flags(tiny), *flags], standalone_mode=False)


def _flags(tiny: Path) -> tuple[str, ...]:
    model = ("--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl"))
    return ("--config", str(ROOT / "configs/tiny_cpu.toml"), *model)


def test_jobs_that_start_in_one_second_have_directories_of_their_own(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = _config(tiny)
    with ExitStack() as claims:
        made = [claim_directories(config, claims) for _ in range(5)]
    assert len(set(made)) == 5 and all(path.is_dir() for path in made)


def test_a_run_that_resumes_nothing_does_not_append_to_another_one(tiny, tmp_path):
    taken = ("--run-dir", str(tmp_path / "run"), "--dry-run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0}\n')
    refused = start(tiny, *taken)
    assert refused.exit_code == 2
    assert f"{tmp_path}/run: holds a run already (metrics.jsonl)" in refused.output
    resumed = start(tiny, *taken, "--auto-resume", "--save", str(tmp_path / "saved"))
    assert resumed.exit_code == 0, resumed.output
    again = start(tiny, *taken, environment={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.exit_code == 0, again.output


def test_the_settings_of_an_earlier_start_are_kept(tiny, tmp_path):
    for lr in ("0.1", "0.2", "0.2", "0.3"):
        config = _config(tiny, "--run-dir", str(tmp_path), "--lr", lr)
        with ExitStack() as claims:  # a start that fails before it writes its settings
            claim_directories(config, claims)
        with ExitStack() as claims:
            open_run_dir(config, claim_directories(config, claims), lambda value: value)
    rates = {p.name: tomllib.loads(p.read_text())["trainer"]["lr"] for p in tmp_path.glob("*.toml")}
    assert rates == {"config.1.toml": 0.1, "config.2.toml": 0.2, "config.toml": 0.3}


def test_the_soft_limit_of_open_files_is_raised_and_the_hard_one_left():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1] and soft == min(hard, 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_doctor_warns_of_a_run_in_its_directory(tiny, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    found = list(diagnose(_config(tiny, "--run-dir", str(tmp_path)), 2))
    assert not [finding for finding in found if finding.level == PROBLEM], found
    warned = [finding for finding in found if "holds a run already" in finding.text]
    assert [finding.level for finding in warned] == [WARNING]
