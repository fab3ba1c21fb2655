"""A server that the trainer reaches over a network, in a network namespace, with a key."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.e2e import jobs, live_jobs

from r3train.engine.backend import EngineError
from r3train.engine.control import EngineControl
from r3train.engine.key import ENGINE_KEY_VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
KEY = "of-this-test-alone-7c1b9e"


@dataclass(frozen=True)
class OtherHost:
    """A network namespace: its name, its address, and this side's."""

    name: str
    address: str
    ours: str


@pytest.fixture(scope="module")
def other_host() -> Iterator[OtherHost]:
    name, net = f"r3t{os.getpid()}", f"10.{100 + os.getpid() % 100}.77"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("not run: a network namespace needs root and ip")
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if added.returncode != 0:
        pytest.skip(f"not run: no network namespace can be made here: {added.stderr}")
    try:
        for command in (
            f"ip link add {name}o type veth peer name {name}i netns {name}",
            f"ip addr add {net}.1/30 dev {name}o",
            f"ip link set {name}o up",
            f"ip -n {name} addr add {net}.2/30 dev {name}i",
            f"ip -n {name} link set {name}i up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(command.split(), check=True)
        yield OtherHost(name, f"{net}.2", f"{net}.1")
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)  # the pair goes with it


@dataclass(frozen=True)
class Server:
    address: str
    log: Path


@pytest.fixture(scope="module")
def server(other_host, tiny_flags, tmp_path_factory) -> Iterator[Server]:
    """``r3train serve`` over there, as slurm/server.sh and docs/guide/several_machines.md start it."""
    directory = tmp_path_factory.mktemp("other_host")
    log, address_file = directory / "sglang.log", directory / "address"
    serve = [
        "ip",
        "netns",
        "exec",
        other_host.name,
        Path(sys.executable).parent / "r3train",
        "serve",
        "--host",
        other_host.address,
        "--log",
        log,
        "--address-file",
        address_file,
        *"--config configs/tiny_cpu.toml".split(),
        *tiny_flags,
        jobs.R3_FLAGS[0],
    ]
    environment = {**jobs.environment(), ENGINE_KEY_VARIABLE: KEY}
    process = subprocess.Popen(serve, cwd=jobs.ROOT, env=environment, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 400
        while not address_file.exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.3)
        yield Server(address_file.read_text().strip(), log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def status_of(server: Server, path: str, key: str | None, body: bytes | None = None) -> int:
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"http://{server.address}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_without_its_key_a_server_does_nothing_for_anybody(server):
    for path, body in (
        ("/model_info", None),
        ("/generate", b'{"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}'),
        ("/update_weights_from_disk", b'{"model_path": "/"}'),
        ("/flush_cache", b"{}"),
    ):
        assert status_of(server, path, None, body) == 401, path
        assert status_of(server, path, "another-key-than-its", body) == 401, path
    assert status_of(server, "/model_info", KEY) == 200
    with (
        EngineControl([server.address]) as control,
        pytest.raises(EngineError, match=f"401.*asks for a key, and no one.*{ENGINE_KEY_VARIABLE}"),
    ):
        control.model_info()


def test_a_job_trains_with_it_by_the_default_transport_and_the_key_is_shown_nowhere(
    server, other_host, tiny_flags, tmp_path, monkeypatch
):
    monkeypatch.setenv(ENGINE_KEY_VARIABLE, KEY)
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "2", "--check-weight-update-equal"]
    run_dir, seen = tmp_path / "run", []
    with live_jobs.running(
        run_dir, *flags, "--rollout-external-engine-addrs", server.address
    ) as process:
        live_jobs.wait_for(lambda: live_jobs.steps_done(run_dir) > 0, process, run_dir, 300)
        for other in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                seen.append(other.cmdline())
        code = process.wait(timeout=200)
    job = jobs.Job(code, live_jobs.output(run_dir), run_dir)
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert len(metrics) == 2 and all(m["r3/passed"] is True for m in metrics)
    assert all(m["served/gap_max"] <= 1e-4 for m in metrics)
    text = server.log.read_text()
    assert f"master_address={other_host.ours}," in text, "not over the other host's network"
    assert "'api_key': '***'" in text, "SGLang writes its arguments to its log"
    assert any("train_async.py" in " ".join(words) for words in seen)
    assert any("r3train.engine.launch_server" in words for words in seen)
    assert not [words for words in seen if KEY in " ".join(words)]
    files = [path for path in job.run_dir.rglob("*") if path.is_file()] + [server.log]
    assert len(files) > 5
    assert KEY not in job.output
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
