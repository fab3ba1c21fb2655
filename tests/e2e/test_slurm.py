"""The batch scripts on a real one-node Slurm: the verdict is the exit code, a requeue resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e import jobs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("sbatch") or shutil.which("apt-get")),
        reason="not run: a loopback Slurm needs root, and Slurm or apt-get",
    ),
]
CLUSTER = jobs.ROOT / "slurm" / "local_cluster.sh"
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
DAEMONS = ("munged", "slurmctld", "slurmd")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of a client of a cluster that lives as long as these tests."""
    directory = tmp_path_factory.mktemp("slurm")
    done = subprocess.run(["bash", CLUSTER, "install", directory], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"not run: Slurm cannot be installed here: {done.stderr[-300:]}")
    subprocess.run(["bash", CLUSTER, "start", directory], check=True, timeout=120)
    pids = {name: int((directory / f"{name}.pid").read_text()) for name in DAEMONS}
    try:
        bin_dir = Path(jobs.sys.executable).parent
        yield {**jobs.environment(), "SLURM_CONF": f"{directory}/slurm.conf", "BIN": str(bin_dir)}
    finally:
        subprocess.run(["bash", CLUSTER, "stop", directory], check=True, timeout=120)
        assert not {name for name, pid in pids.items() if _runs(pid, name)}


def submit(slurm: dict[str, str], script: str, run_dir: Path, *flags: str, wait: bool = False):
    """Submit a script; returns (sbatch's exit code, job id), with ``wait`` once the job has ended."""
    environment = {**slurm, "RUN_DIR": str(run_dir), "R3TRAIN_ROOT": str(jobs.ROOT)}
    command = ["sbatch", "--parsable", f"--output={run_dir}.out", *(["--wait"] if wait else [])]
    done = subprocess.run(
        [*command, f"slurm/{script}", *flags],
        cwd=jobs.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout.strip()


def output_of(run_dir: Path) -> str:
    return Path(f"{run_dir}.out").read_text()


def test_the_regression_job_passes_and_its_exit_code_says_so(slurm, tmp_path, tiny_flags, engine):
    flags = [*tiny_flags, "--rollout-external-engine-addrs", engine]
    # as people do; sbatch looks every so many seconds, so the others are waited for here
    code, _ = submit(slurm, "r3_regression.sbatch", tmp_path / "run", *flags, wait=True)
    output = output_of(tmp_path / "run")
    assert code == 0, output
    assert "passed: 3 steps" in output
    assert (tmp_path / "run/r3_summary.md").read_text().startswith("### R3 evidence: passed")


@pytest.mark.parametrize(
    "bug, layers",
    [("token_shift", (1, 2, 3, 4)), ("layer_swap", (1, 2))],
    ids=lambda value: str(value),
)
def test_a_planted_route_shift_fails_the_job_and_names_step_and_layers(
    bug, layers, slurm, tmp_path, tiny_flags, engine
):
    flags = [*tiny_flags, "--rollout-external-engine-addrs", engine, "--plant-bug", bug]
    _, job_id = submit(slurm, "r3_regression.sbatch", tmp_path / "run", *flags)
    _wait(lambda: _fact(slurm, job_id, "JobState") in ENDED, "the job to end")
    output = output_of(tmp_path / "run")
    assert _fact(slurm, job_id, "ExitCode") == "1:0", output
    found = re.findall(
        r"failed step (\d+), .*old_log_prob/replay_forward, layer (\d+): route fingerprint is",
        output,
    )
    assert {(int(step), int(layer)) for step, layer in found} == {(0, n) for n in layers}, output
    summary = (tmp_path / "run/r3_summary.md").read_text()
    assert summary.startswith("### R3 evidence: failed")


def test_a_job_that_is_told_to_stop_saves_goes_back_and_resumes(
    slurm, tmp_path, tiny_flags, engine
):
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--rollout-external-engine-addrs", engine]
    flags += ["--num-rollout", "12"]
    _, job_id = submit(slurm, "train_single_node.sbatch", run_dir, *flags)
    _wait(lambda: len(_steps(run_dir)) >= 2, "two steps")
    # what Slurm itself sends 120 s before the end of the job (--signal=B:USR1@120)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job_id], env=slurm, check=True)
    _wait(lambda: _fact(slurm, job_id, "JobState") in ENDED, "the second start to end")
    output = output_of(run_dir)
    assert _fact(slurm, job_id, "JobState") == "COMPLETED", output
    assert "back into the queue" in output and "resuming from" in output
    # every step trained, none twice
    assert sorted(_steps(run_dir)) == list(range(12)), output
    checked = [Path(jobs.sys.executable).parent / "r3train", "check-evidence", run_dir]
    verdict = subprocess.run(checked, capture_output=True, text=True)
    assert verdict.returncode == 0 and "passed: 12 steps" in verdict.stdout, verdict.stdout


def _runs(pid: int, name: str) -> bool:
    try:
        return psutil.Process(pid).name() == name
    except psutil.NoSuchProcess:
        return False


def _steps(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def _fact(slurm: dict[str, str], job_id: str, name: str) -> str:
    shown = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", job_id], env=slurm, capture_output=True, text=True
    ).stdout
    return shown.partition(f" {name}=")[2].partition(" ")[0]


def _wait(done, what: str, timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"waited for {what}, not there after {timeout_s:g} s"
        time.sleep(0.3)
