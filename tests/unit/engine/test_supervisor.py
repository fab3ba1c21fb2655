"""Lost servers: held requests, restarts with backoff, and an end of them."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from r3train.engine.backend import (
    EngineDied,
    EngineError,
    EngineUnreachable,
    Request,
    SamplingParams,
)
from r3train.engine.supervisor import EngineSupervisor, ResubmittingBackend


class FakeServer:
    addr = "fake:1"

    def __init__(self):
        self.dead = self.hung = False
        self.calls = []

    def check_alive(self):
        if self.dead:
            raise EngineDied("it ended")

    def healthy(self, timeout_s):
        return not self.hung

    def stop(self):
        self.calls.append("stop")

    def restart(self):
        self.calls.append("restart")
        self.dead = self.hung = False

    def wait_ready(self):
        self.calls.append("ready")


def request_of(sample_id: int, **options) -> Request:
    ids = np.array([5], np.int32)
    return Request(sample_id, 0, "p", ids, 8, SamplingParams(8), **options)


def supervisor(server, **options):
    options = {"max_restarts": 2, "backoff_s": 0.01, "health_timeout_s": 30.0} | options
    return EngineSupervisor([server], **options)


def test_requests_of_a_dead_server_wait_and_are_sent_again_with_the_new_version():
    server = FakeServer()
    watch = supervisor(server)
    asked = []

    class Inner:
        async def generate(self, request):
            asked.append((request.sample_id, request.weight_version))
            if watch.epoch == 0:
                raise EngineUnreachable("connection broke")
            return f"answer {request.sample_id}"

        async def abort(self):
            asked.append("abort")

    async def run():
        backend = ResubmittingBackend(Inner(), watch)
        await backend.abort()
        assert asked.pop() == "abort"
        both = [
            asyncio.create_task(
                backend.generate(request_of(i, weight_version=3, num_generated=2 * i))
            )
            for i in range(2)
        ]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in both)
        with pytest.raises(EngineDied, match="connection broke"):
            watch.check()
        watch.restart()
        watch.check()
        watch.restored(version=4)
        return await asyncio.gather(*both)

    assert asyncio.run(run()) == ["answer 0", "answer 1"]
    assert sorted(asked) == [(0, 3), (0, 4), (1, 3), (1, 4)]
    assert server.calls == ["stop", "restart", "ready"]
    assert watch.resubmitted == 2 and watch.resumed_tokens == 2
    watch.close()


def test_another_error_of_the_engine_is_not_held():
    watch = supervisor(FakeServer())

    class Refusing:
        async def generate(self, _request):
            raise EngineError("answered 400")

    with pytest.raises(EngineError, match="400"):
        asyncio.run(ResubmittingBackend(Refusing(), watch).generate(request_of(0)))
    watch.check()
    watch.close()


def test_restarts_back_off_and_end_with_the_cause():
    server = FakeServer()
    watch = supervisor(server, max_restarts=2, backoff_s=0.05)
    for expected_s in (0.05, 0.1):
        server.dead = True
        with pytest.raises(EngineDied, match="it ended"):
            watch.check()
        began = time.monotonic()
        watch.restart()
        assert time.monotonic() - began >= expected_s
        watch.restored(version=1)
    server.dead = True
    with pytest.raises(EngineDied):
        watch.check()
    with pytest.raises(EngineDied, match="it ended .after 2 restarts, max_engine_restarts 2"):
        watch.restart()
    watch.close()


def test_a_server_that_has_released_its_memory_is_not_asked_for_its_health():
    server, asked = FakeServer(), []
    server.healthy = lambda timeout_s: asked.append(timeout_s) or True
    watch = supervisor(server, health_timeout_s=0.2)
    for resting in (False, True, False):
        watch.rest(resting)
        asked.clear()
        for _ in range(5):
            watch.check()
            time.sleep(0.1)
        assert bool(asked) is not resting
    watch.rest(True)
    server.dead = True
    with pytest.raises(EngineDied, match="it ended"):
        watch.check()
    watch.close()


def test_a_hung_server_is_found_while_somebody_waits_for_it_and_only_then():
    server = FakeServer()
    watch = supervisor(server, health_timeout_s=0.5)
    server.hung = True
    time.sleep(1.5)  # nobody asks
    watch.check()
    with pytest.raises(
        EngineDied, match="hangs: no sign of life.*limit 0.5 s: engine_health_timeout_s"
    ):
        for _ in range(100):
            watch.check()
            time.sleep(0.1)
    watch.close()
