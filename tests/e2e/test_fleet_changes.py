"""Jobs whose servers join, die, hang and go (--rollout-engines-file): every prompt once, and the evidence holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e import jobs
from tests.e2e.accounts import all_trained_once
from tests.e2e.live_jobs import output, running, steps_done, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
KEY = "of-a-fleet-that-changes"


class Server:
    """``r3train serve``; its address stands in ``directory`` while it is well."""

    def __init__(self, directory: Path, name: str, *flags: str) -> None:
        self.address, self.log = directory / name, directory.parent / f"{name}.log"
        self.address.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "r3train.cli", "serve", "--config", "configs/tiny_cpu.toml"),
            *("--log", str(self.log), "--address-file", str(self.address), *flags),
        ]
        self.out = directory.parent / f"{name}.out"
        self.process = jobs.start(command, self.out)

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.out.read_text()
        return self.address.exists()

    def send(self, number: int) -> None:
        """Send a signal to all of its processes, as to a machine."""
        if self.process.poll() is not None:
            return
        for each in [*self.process.children(recursive=True), self.process]:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    @property
    def url(self) -> str:
        return f"http://{self.address.read_text().strip()}"


@pytest.fixture
def start(tmp_path, tiny_flags, monkeypatch) -> Iterator:
    """Starts servers whose addresses stand in one directory, and ends them."""
    monkeypatch.setenv("R3TRAIN_ENGINE_API_KEY", KEY)
    started, directory = [], tmp_path / "servers"
    directory.mkdir()

    def of(name: str, *flags: str) -> Server:
        started.append(Server(directory, name, *tiny_flags[:4], *flags))
        return started[-1]

    yield of
    for server in started:
        server.send(signal.SIGCONT)
        with suppress(psutil.NoSuchProcess):
            server.process.terminate()
    _, left = psutil.wait_procs([server.process for server in started], timeout=30)
    for process in left:
        process.kill()


def changes(run_dir: Path) -> list[tuple[int, str]]:
    path = run_dir / "servers.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line["server"], line["what"]) for line in map(json.loads, lines)]


@contextmanager
def job(tmp_path, tiny_flags, steps: int, *flags: str) -> Iterator:
    """A job with answers that are always being made, and a function that waits for what holds of its run directory."""
    run_dir = tmp_path / "run"
    command = [
        *(*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", str(steps)),
        *("--rollout-engines-file", str(tmp_path / "servers"), "--engine-health-timeout-s", "5"),
        *(*"--rollout-max-response-len 96 --rollout-ignore-eos --rollout-segment-len 16".split(),),
        *flags,
    ]
    with running(run_dir, *command) as process:
        yield process, run_dir, lambda holds: wait_for(holds, process, run_dir)


def settle(process, run_dir: Path, steps: int) -> list[dict]:
    """Wait for the end of a job: everything was trained once, and its evidence holds; returns its metrics."""
    assert process.wait(timeout=400) == 0, output(run_dir)
    all_trained_once([run_dir], steps)
    check = [sys.executable, "-m", "r3train.cli", "check-evidence", str(run_dir)]
    done = subprocess.run(check, cwd=jobs.ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = jobs.Job(0, "", run_dir).metrics()
    assert all(m["r3/passed"] and m["rollout/staleness_max"] <= 1 for m in metrics)
    return metrics


def test_by_disk_servers_join_die_hang_and_go_and_none_is_there_for_a_while(
    start, tmp_path, tiny_flags
):
    a, b = start("a"), start("b")
    other = start("other", "--sglang-dtype", "bfloat16")
    disk = ("--update-weight-transfer-mode", "disk")
    with job(tmp_path, tiny_flags, 20, *disk) as (
        process,
        run,
        until,
    ):
        until(lambda: a.is_up() and b.is_up() and steps_done(run) >= 3)
        until(other.is_up)
        until(lambda: any(what == "refused" for _, what in changes(run)))
        assert "runs with dtype = 'bfloat16'" in output(run)
        other.process.terminate()
        until(lambda: [what for _, what in changes(run)].count("joined") == 2)
        at = steps_done(run)
        until(lambda: steps_done(run) > at)
        a.send(signal.SIGKILL)  # its address stays
        until(lambda: "lost" in [what for _, what in changes(run)])
        at = steps_done(run)
        until(lambda: steps_done(run) > at)
        b.send(signal.SIGSTOP)
        until(lambda: [what for _, what in changes(run)].count("lost") == 2)
        c = start("c")
        until(lambda: c.is_up() and [what for _, what in changes(run)].count("joined") == 3)
        b.send(signal.SIGCONT)  # of an older version by now
        until(lambda: [what for _, what in changes(run)].count("joined") == 4)
        c.process.terminate()  # says so before it ends
        until(lambda: "left" in [what for _, what in changes(run)])
        metrics = settle(process, run, 20)
    assert "leaving" in [what for _, what in changes(run)]
    assert metrics[-1]["faults/resubmitted_requests"] > 0
    assert metrics[-1]["faults/resumed_tokens"] % 16 == 0
    assert metrics[-1]["fleet/joined"] == 4 and metrics[-1]["fleet/left"] == 3
    assert not any(m["faults/bad_answers"] > 5 for m in metrics)


def test_a_server_that_dies_in_a_broadcast_leaves_and_the_update_is_made_again(
    start, tmp_path, tiny_flags
):
    a, b = (start(name, "--sglang-log-level-http", "info") for name in "ab")
    flags = ("--update-weight-buffer-size", "20000", "--check-weight-update-equal")
    with job(tmp_path, tiny_flags, 12, *flags) as (process, run, until):
        until(lambda: a.is_up() and b.is_up() and steps_done(run) >= 2)
        until(lambda: [what for _, what in changes(run)].count("joined") == 2)
        at = steps_done(run) + 2
        until(lambda: steps_done(run) >= at)
        updates = b.log.read_text().count("POST /begin_weight_update")
        while b.log.read_text().count("POST /begin_weight_update") == updates:
            assert process.poll() is None, output(run)
        b.send(signal.SIGKILL)
        until(lambda: "lost" in [what for _, what in changes(run)])
        os.unlink(b.address)
        metrics = settle(process, run, 12)
    assert metrics[-1]["fleet/servers"] == 1 and metrics[-1]["fleet/left"] == 1


def test_one_that_rounds_otherwise_joins_and_one_whose_scores_are_of_something_else_is_refused(
    start, tmp_path, tiny_flags, monkeypatch
):
    """The tensors of both are right; servers round by their batches, each otherwise (``rounding_server``)."""
    monkeypatch.setenv("PYTHONPATH", f"{jobs.ROOT / 'tests/e2e/rounding_server'}:{jobs.ROOT}")
    monkeypatch.setenv("ROUNDING_SEED", "pid")

    def rounding(name: str, eps: str) -> Server:
        monkeypatch.setenv("ROUNDING_EPS", eps)
        return start(name, "--rollout-server-env", "ROUNDING_EPS", "ROUNDING_SEED")

    first = rounding("first", "1e-1")
    disk = ("--update-weight-transfer-mode", "disk")
    with job(tmp_path, tiny_flags, 200, *disk) as (_, run, until):
        until(lambda: first.is_up() and steps_done(run) >= 2)
        sound, wrong = rounding("sound", "1e-1"), rounding("wrong", "3")
        until(lambda: sound.is_up() and wrong.is_up())
        urls = sound.url, wrong.url
        until(lambda: len(changes(run)) == 3)
        at = steps_done(run)
        until(lambda: steps_done(run) >= at + 2)
    lines = [json.loads(line) for line in (run / "servers.jsonl").read_text().splitlines()]
    told = {line["url"]: line for line in lines[1:]}
    print(*(line["why"] for line in told.values()), sep="\n")
    assert [told[url]["what"] for url in urls] == ["joined", "refused"]
