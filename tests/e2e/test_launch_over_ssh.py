"""``r3train launch`` over a real ssh: two hosts of one machine, a run from start to end, and each way to fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.engine.server import free_port
from tests.e2e import jobs, ssh_hosts
from tests.e2e.live_jobs import end, output, pointer, steps_done, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(900)]
A, B = ssh_hosts.HOSTS
HERE = "r3train.launch.start_hosts.facts"
REWARD = """import os
def carried(prompt, response_text, response_ids):
    return len(response_ids) / 100 + (os.environ["OF_THIS_RUN"] == "it's here")
"""


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for PATH whose ssh reaches both hosts."""
    found = ssh_hosts.programs()
    if found is None:
        pytest.skip("not run: no sshd, and it cannot be installed here (Debian, as root)")
    with ssh_hosts.hosts(tmp_path_factory.mktemp("ssh"), *found) as directory:
        yield directory


@contextmanager
def launched(ssh: Path, run_dir: Path, *flags: str, hosts: str = f"{A},{B}", **variables: str):
    """A launched run that goes on; whatever is left of it is ended."""
    command = [sys.executable, "-m", "r3train.cli", "launch", "--hosts", hosts]
    command += ["--rdzv-endpoint", f"{A}:{free_port(A)}"]
    command += ["--config", "tiny_cpu", "--run-dir", str(run_dir), "--no-plot", *flags]
    environment = {"PATH": f"{ssh}{os.pathsep}{os.environ['PATH']}", **variables}
    with (run_dir.parent / f"{run_dir.name}.txt").open("wb") as screen:
        job = psutil.Popen(
            command,
            cwd=jobs.ROOT,
            env=jobs.environment() | environment,
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=subprocess.STDOUT,
        )
    try:
        yield job
    finally:
        end([*started(run_dir), job])
        job.wait()


def started(run_dir: Path) -> list[psutil.Process]:
    """All that a launch has started on the hosts: processes that are told of the run's directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and "launch" not in words:
            found.append(process)
            found += process.children(recursive=True)
    return found


def rank(run_dir: Path, number: int) -> psutil.Process:
    """The process of a rank."""
    for process in started(run_dir):
        if "r3train.launch.train" in process.cmdline() and process.environ()["RANK"] == str(number):
            return process
    raise AssertionError(f"no rank {number}: {output(run_dir)}")


def gone(run_dir: Path, processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1] and not started(run_dir)


def test_a_run_of_two_hosts_trains_with_what_it_was_given_and_prints_by_host(
    ssh, tmp_path, tiny_flags, engine
):
    code = tmp_path / "code 'of' $HOME"
    code.mkdir()
    (code / "reward_here.py").write_text(REWARD)
    run_dir = tmp_path / "it's a run of $HOME"
    flags = ["--env", "PYTHONPATH", "--env", "OF_THIS_RUN", "--", *tiny_flags, "--num-rollout", "2"]
    flags += ["--custom-rm-path", "reward_here:carried", "--rollout-external-engine-addrs", engine]
    variables = {"PYTHONPATH": str(code), "OF_THIS_RUN": "it's here", "NOT_NAMED": "secret"}
    with launched(ssh, run_dir, *flags, **variables) as job:
        wait_for(lambda: steps_done(run_dir) >= 1, job, run_dir)
        environment = rank(run_dir, 1).environ()
        assert environment["WORLD_SIZE"] == "2" and environment["LOCAL_WORLD_SIZE"] == "1"
        assert "NOT_NAMED" not in environment
        assert job.wait(timeout=240) == 0, output(run_dir)
    shown = output(run_dir)
    assert "run finished" in shown
    assert all("run finished" not in line for line in shown.splitlines() if line.startswith(B))
    metrics = jobs.Job(0, shown, run_dir).metrics()
    assert len(metrics) == 2 and metrics[0]["rollout/reward_mean"] > 1
    assert gone(run_dir, [])


def test_ctrl_c_saves_on_all_hosts_and_ends_with_0(ssh, tmp_path, tiny_flags, engine):
    run_dir, saved = tmp_path / "run", tmp_path / "saved"
    flags = [*tiny_flags, "--num-rollout", "100000", "--save", str(saved)]
    with launched(ssh, run_dir, *flags, "--rollout-external-engine-addrs", engine) as job:
        wait_for(lambda: steps_done(run_dir) >= 2, job, run_dir)
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=120) == 0, output(run_dir)
    assert f"SIGINT: stopping after this rollout, then saving to {saved}" in output(run_dir)
    assert pointer(saved) >= 2 and gone(run_dir, [])


def connection(job: psutil.Popen, host: str) -> psutil.Process:
    """The launcher's ssh of a host."""
    (found,) = [process for process in job.children() if host in process.cmdline()]
    return found


@pytest.mark.parametrize(
    "killed, lines",
    [
        (
            lambda job, run_dir: rank(run_dir, 1),
            [
                rf"^{B}: rank 1 \(process \d+\) was ended by SIGKILL",
                f"^{B}: r3train train has ended with 1: ending the others",
            ],
        ),
        (
            lambda job, run_dir: connection(job, B),
            [f"^{B}: the connection is lost: ending the others"],
        ),
    ],
    ids=["a rank", "a connection"],
)
def test_what_dies_ends_the_others_and_its_host_is_named(
    ssh, tmp_path, tiny_flags, engine, killed, lines
):
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, "--num-rollout", "100000", "--rollout-external-engine-addrs", engine]
    with launched(ssh, run_dir, *flags) as job:
        wait_for(lambda: steps_done(run_dir) >= 1, job, run_dir)
        all_of_it = started(run_dir)
        killed(job, run_dir).kill()
        assert job.wait(timeout=120) == 1, output(run_dir)
    shown = output(run_dir)
    assert all(re.search(line, shown, re.M) for line in lines), shown
    assert gone(run_dir, all_of_it)


def test_a_launcher_that_is_killed_leaves_a_run_that_saves_and_ends(
    ssh, tmp_path, tiny_flags, engine
):
    run_dir, saved = tmp_path / "run", tmp_path / "saved"
    flags = [*tiny_flags, "--num-rollout", "100000", "--save", str(saved)]
    with launched(ssh, run_dir, *flags, "--rollout-external-engine-addrs", engine) as job:
        wait_for(lambda: steps_done(run_dir) >= 2, job, run_dir)
        all_of_it = started(run_dir)
        job.kill()
        left = psutil.wait_procs(all_of_it, timeout=120)[1]
        assert not left, left
    assert pointer(saved) >= 2


def test_hosts_that_serve_are_up_before_the_ranks_and_end_after_them(ssh, tmp_path, tiny_flags):
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, "--num-rollout", "2", "--serve-hosts", f"{B}"]
    flags += ["--rollout-server-start-timeout-s", "400"]
    with launched(ssh, run_dir, *flags, hosts=f"{A}:2") as job:
        wait_for(lambda: steps_done(run_dir) >= 1, job, run_dir)
        all_of_it = started(run_dir)
        (serve,) = [p for p in all_of_it if "serve" in p.cmdline()]
        key = serve.environ()["R3TRAIN_ENGINE_API_KEY"]
        assert rank(run_dir, 1).environ()["R3TRAIN_ENGINE_API_KEY"] == key and len(key) == 32
        assert not [p for p in psutil.process_iter(["cmdline"]) if key in str(p.info["cmdline"])]
        assert job.wait(timeout=240) == 0, output(run_dir)
    shown = output(run_dir)
    assert f"{B}: serving " in shown and key not in shown and gone(run_dir, all_of_it)


def test_a_server_that_ends_early_ends_the_run_before_a_rank_is_started(ssh, tmp_path, tiny_flags):
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, "--serve-hosts", B, "--hf-checkpoint", "models/not-here"]
    with launched(ssh, run_dir, *flags, hosts=f"{A}:2") as job:
        assert job.wait(timeout=120) == 2, output(run_dir)
    shown = output(run_dir)
    assert f"{B}: r3train serve has ended with 2: ending the others" in shown
    assert "models/not-here: no such checkpoint directory" in shown and "checking the" not in shown


@pytest.mark.parametrize(
    "hosts, changed, lines",
    [
        ("127.0.0.3", {}, ["127.0.0.3: ssh: connect to host 127.0.0.3 port"]),
        (f"{A},localhost", {}, ["localhost: No ED25519 host key is known for [localhost]"]),
        (
            f"{A},{B}",
            {"os.getcwd": lambda: "/nowhere"},
            [f"{h}: /nowhere: No such" for h in (A, B)],
        ),
        (
            A,
            {"sys.executable": "/nowhere/python"},
            [f"{A}: bash: line 1: /nowhere/python: No such"],
        ),
        (
            f"{A},{B}",
            {HERE: lambda **_: {"r3train": "0.1 of code 123"}},
            [rf"{h}: r3train is {version('r3train')} of code " for h in (A, B)],
        ),
        (
            A,
            {HERE: lambda **_: {"tiny_cpu": "123"}},
            [f"{A}: tiny_cpu is "],
        ),
    ],
)
def test_hosts_that_cannot_take_part_are_a_line_each(ssh, monkeypatch, hosts, changed, lines):
    monkeypatch.setenv("PATH", f"{ssh}{os.pathsep}{os.environ['PATH']}")
    if changed:  # the hosts are as they are, and this end is another
        monkeypatch.setattr(HERE, lambda **_: {})
        for name, value in changed.items():
            monkeypatch.setattr(name, value)
    done = CliRunner().invoke(main, ["launch", "--hosts", hosts, "--", "--config", "tiny_cpu"])
    assert done.exit_code == 2, done.output
    _, _, found = done.output.partition("Error: ")
    assert len(found.splitlines()) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found.splitlines(), lines)), found
