"""Servers of the run: restarts with backoff, an end of them, and the moments when the supervisor asks for health."""

from __future__ import annotations

import time

import pytest

from r3train.engine import supervisor as module
from r3train.engine.backend import EngineDied
from r3train.engine.supervisor import EngineSupervisor


class Server:
    """A server that comes back from a restart, and counts questions for its health."""

    addr = "fake:1"

    def __init__(self):
        self.asked, self.dead, self.hung = 0, False, False
        self.calls = []

    def check_alive(self):
        if self.dead:
            raise EngineDied("it ended")

    def healthy(self, timeout_s):
        self.asked += 1
        return not self.hung

    def stop(self):
        self.calls.append("stop")

    def restart(self):
        self.calls.append("restart")
        self.dead = self.hung = False

    def wait_ready(self):
        self.calls.append("ready")


class Clock:
    """The supervisor's time, which passes by the test alone: no load makes a server silent."""

    def __init__(self):
        self.now, self.asked, self.slept = 100.0, 0, []

    def monotonic(self):
        self.asked += 1
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)


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
    options = {"max_restarts": 2, "backoff_s": 40.0, "health_timeout_s": 0.04}
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


def test_restarts_back_off_and_end_with_the_cause(server, clock, watch):
    for _ in range(2):
        server.dead = True
        with pytest.raises(EngineDied, match="it ended"):
            watch.check()
        watch.restart("it ended")
        watch.check()
    assert clock.slept == [40.0, 60.0], "twice as long, at most a minute"
    assert server.calls == ["stop", "restart", "ready"] * 2
    with pytest.raises(EngineDied, match="broken .after 2 restarts, max_engine_restarts 2"):
        watch.restart("broken")
    assert watch.restarts == 2 and len(server.calls) == 6


def test_a_server_that_has_released_its_memory_is_not_asked_for_its_health(server, clock, watch):
    for resting in (False, True, False):
        watch.rest(resting)
        server.asked = clock.asked = 0
        until(lambda: clock.asked >= 20, do=watch.check)
        assert bool(server.asked) is not resting
    watch.rest(True)
    server.dead = True
    with pytest.raises(EngineDied, match="it ended"):
        watch.check()


def test_servers_that_rested_are_asked_for_their_health_again_after_a_restart(server, watch):
    """A restarted server holds its memory; a hang of it would be found by nobody."""
    watch.rest(True)
    watch.restart("it ended")
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
    with pytest.raises(
        EngineDied, match="hangs: no sign of life for 1 s .limit 0.04 s: engine_health_timeout_s"
    ):
        until(lambda: False, do=watch.check)
    watch.restart("it hangs")
    watch.check()


def test_a_server_that_answers_does_not_hang_however_long_somebody_waits(server, clock, watch):
    def slow(timeout_s):
        server.asked += 1
        clock.now += 1.0
        return True

    server.healthy = slow
    until(lambda: server.asked >= 5, do=watch.check)
    watch.check()
