"""Late reports of lost servers, and the moments when the supervisor asks for health."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from r3train.engine import supervisor as module
from r3train.engine.backend import EngineDied, EngineUnreachable, Request, SamplingParams
from r3train.engine.supervisor import EngineSupervisor, ResubmittingBackend

BROKE = EngineUnreachable("connection broke")


class Server:
    """A server that comes back from a restart, and counts questions for its health."""

    addr = "fake:1"

    def __init__(self):
        self.asked, self.hung = 0, False

    def check_alive(self):
        pass

    def healthy(self, timeout_s):
        self.asked += 1
        return not self.hung

    def stop(self):
        pass

    restart = wait_ready = stop


class Clock:
    """The supervisor's time, which passes by the test alone: no load makes a server silent."""

    def __init__(self):
        self.now, self.asked = 100.0, 0

    def monotonic(self):
        self.asked += 1
        return self.now

    def sleep(self, seconds):
        pass


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def watch(server, clock):
    options = {"max_restarts": 5, "backoff_s": 1.0, "health_timeout_s": 0.04}
    watch = EngineSupervisor([server], **options)
    yield watch
    watch.close()


def until(condition, *, do=lambda: None):
    """Wait until the watching thread has come so far; it needs milliseconds."""
    end = time.perf_counter() + 60
    while not condition():
        assert time.perf_counter() < end, "the watching thread does not come so far"
        do()
        time.sleep(0.005)


def test_an_error_of_servers_that_were_replaced_since_is_no_fault_of_the_new_ones(watch):
    watch.report(BROKE, epoch=0, tokens_again=3)
    watch.restart()
    watch.restored(version=1)
    watch.report(BROKE, epoch=0, tokens_again=3)  # its connection broke late
    watch.check()
    assert (watch.resubmitted, watch.resumed_tokens) == (1, 3)


def test_errors_during_a_restart_are_expected_and_after_it_they_are_faults_again(watch):
    for epoch in range(2):
        watch.report(BROKE, epoch)
        with pytest.raises(EngineDied, match="connection broke"):
            watch.check()
        watch.restart()
        watch.report(BROKE, epoch)  # between the restart and the published weights
        watch.check()
        watch.restored(version=epoch)
        assert watch.resubmitted == 2 * (epoch + 1)


@pytest.mark.parametrize(
    "versions_stay, restored, asked_again", [(False, 4, 5), (False, 6, 6), (True, 6, 5)]
)
def test_a_request_sent_again_asks_for_its_version_or_the_newer_one_of_the_servers(
    watch, versions_stay, restored, asked_again
):
    asked = []

    class Inner:
        async def generate(self, request):
            asked.append(request.weight_version)
            if len(asked) == 1:
                watch.restart()
                watch.restored(version=restored)
                raise BROKE
            return "answer"

    ids = np.array([5], np.int32)
    request = Request(0, 0, "p", ids, 8, SamplingParams(8), weight_version=5)
    backend = ResubmittingBackend(Inner(), watch, versions_stay=versions_stay)
    assert asyncio.run(backend.generate(request)) == "answer"
    assert asked == [5, asked_again]


def test_servers_that_rested_are_asked_for_their_health_again_after_a_restart(server, watch):
    """A restarted server holds its memory; a hang of it would be found by nobody."""
    watch.rest(True)
    watch.restart()
    server.asked = 0
    until(lambda: server.asked, do=watch.check)


def test_silence_counts_from_the_moment_when_somebody_waits(server, clock, watch):
    """A server that nobody has waited for in a long training step has not been silent all that time."""
    clock.now = 200.0
    clock.asked = 0
    until(lambda: clock.asked >= 5)  # a whole round of the watch, which nobody waits for
    server.hung = True
    watch.check()
    until(lambda: server.asked >= 2)  # the first question had no answer
    watch.check()
    clock.now += 1.0
    with pytest.raises(EngineDied, match="no sign of life for 1 s"):
        until(lambda: False, do=watch.check)


def test_a_server_that_answers_does_not_hang_however_long_somebody_waits(server, clock, watch):
    def slow(timeout_s):
        server.asked += 1
        clock.now += 1.0
        return True

    server.healthy = slow
    until(lambda: server.asked >= 5, do=watch.check)
    watch.check()
