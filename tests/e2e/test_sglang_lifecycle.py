"""The real server dies with its owner, and its own death is noticed at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests import whole_samples
from tests.e2e.sglang_support import make_model
from tests.e2e.test_sglang_server import ROUTES, prompt_of

from r3train.engine.backend import EngineDied, SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.server import SGLangServer

pytestmark = pytest.mark.e2e

OWNER = """
import json, sys, time, psutil
from r3train.engine.server import SGLangServer
from r3train.engine.sglang_http import HTTPSettings
server = SGLangServer(sys.argv[1], sys.argv[2], return_routed_experts=True).start()
server.wait_ready()
tree = psutil.Process(server.pid).children(recursive=True)
print(json.dumps([server.pid] + [process.pid for process in tree]), flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "a", 0)


# a job's own end with its server is in test_faults: the two that start one more are slow
@pytest.mark.slow
def test_sigkill_of_the_owner_leaves_no_process_after_15_seconds(model, tmp_path):
    command = [sys.executable, "-c", OWNER, str(model), str(tmp_path / "sglang.log")]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        tree = [psutil.Process(pid) for pid in json.loads(owner.stdout.readline())]
        assert len(tree) >= 4
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        _, left = psutil.wait_procs(tree, timeout=15)
        assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


@pytest.mark.slow
def test_a_crash_is_noticed_at_once_by_the_request_and_by_the_owner(model, tmp_path):
    server = SGLangServer(model, tmp_path / "sglang.log", return_routed_experts=True)

    async def generate_and_kill():
        client = SGLangClient(
            [server.addr], HTTPSettings(check_alive=server.check_alive), routes=ROUTES
        )
        try:
            sampling = SamplingParams(900, ignore_eos=True)
            call = whole_samples.generate(client, prompt_of(0), sampling, sample_id=77)
            task = asyncio.create_task(call)
            await asyncio.sleep(0.5)
            assert not task.done()
            for process in psutil.Process(server.pid).children(recursive=True):
                if "sglang::scheduler" in " ".join(process.cmdline()):
                    process.kill()
            began = time.monotonic()
            with pytest.raises(EngineDied, match="ended with exit code") as raised:
                await task
            return time.monotonic() - began, str(raised.value)
        finally:
            await client.aclose()

    with server:
        server.check_alive()
        seconds, message = asyncio.run(generate_and_kill())
        assert seconds < 10
        assert str(server.log_path) in message and "Prefill batch" in message
        with pytest.raises(EngineDied):
            server.check_alive()
        assert not psutil.pid_exists(server.pid) or server._guard.poll() is not None


def test_a_server_that_cannot_start_says_why_from_its_log(tmp_path):
    server = SGLangServer(tmp_path / "no_such_model", tmp_path / "sglang.log")
    with pytest.raises(EngineDied, match=r"exit code [1-9](.|\n)*no_such_model"):
        with server:
            pass
    server.stop()
