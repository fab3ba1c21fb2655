"""A pause for new weights that fails, and one whose requests do not end at once."""

from __future__ import annotations

import time

import pytest
from tests.fakes.server import SimulatedEngine, prompt_for, rollout_section

from r3train.engine.backend import EngineDied, SamplingParams
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings

pytestmark = pytest.mark.usefixtures("virtual_clock")


def producer_of(engine: SimulatedEngine, mode: str, **settings) -> Producer:
    settings = {
        "num_rollout": 8,
        "max_weight_staleness": 1,
        "pause_generation_mode": mode,
    } | settings
    request = RequestSettings(SamplingParams(64))
    return Producer(rollout_section(**settings), lambda: engine, prompt_for, request)


def until(condition) -> None:
    """Wait for a condition; a test's own time limit ends a wait without end."""
    while not condition():
        time.sleep(0.002)


class OfServersThatEnd(SimulatedEngine):
    """One whose servers have ended: they neither go on nor update."""

    dead = False

    async def continue_generation(self):
        await super().continue_generation()
        if self.dead:
            raise EngineDied("the server has ended")


@pytest.mark.parametrize("mode", ["drain", "in_place", "retract", "abort"])
def test_nothing_is_sent_after_a_failed_update_until_new_servers_are_there(mode):
    engine = OfServersThatEnd()
    with producer_of(engine, mode) as producer:
        producer.next_batch(0)
        engine.dead = True
        with pytest.raises(EngineDied, match="while it updates"):
            with producer.quiesced():
                raise EngineDied("the server ended while it updates")
        until(lambda: not engine.running)
        asked, engine.dead = len(engine.asked), False
        with producer.quiesced():  # another one, whose servers answer
            engine.version = 1
            producer.set_version(1)
        time.sleep(0.1)
        assert len(engine.asked) == asked
        producer.resume()
        assert [len(producer.next_batch(step)) for step in (1, 2)] == [2, 2]
        assert len(engine.asked) > asked


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_new_servers_are_not_told_to_go_on_with_what_the_old_ones_froze(mode):
    engine = OfServersThatEnd()
    with producer_of(engine, mode) as producer:
        producer.next_batch(0)
        engine.dead = True
        with pytest.raises(EngineDied):
            with producer.quiesced():
                raise EngineDied("the server ended while it updates")
        engine.dead = False
        producer.set_version(1)
        producer.resume()
        engine.calls.clear()
        producer.next_batch(1)
    assert "continue" not in engine.calls


class ThatMissesAnAbort(SimulatedEngine):
    """One whose first abort comes before the requests do."""

    async def abort(self):
        if self.calls.count("abort"):
            await super().abort()
        else:
            self.calls.append("abort")


def test_an_abort_is_repeated_until_the_last_request_has_ended():
    engine = ThatMissesAnAbort(length=lambda _: 60, tick_s=1.0)
    with producer_of(engine, "abort") as producer:
        until(lambda: len(engine.running) > 1)
        with producer.quiesced():
            assert not engine.running
        assert engine.calls.count("abort") > 1
