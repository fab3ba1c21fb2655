"""The virtual clock of tests whose producer sleeps."""

import asyncio

import pytest
from tests.virtual_clock import VirtualClock

from r3train.generation import producer, recheck, shared


@pytest.fixture
def virtual_clock(monkeypatch, request) -> VirtualClock:
    """Time of producers that the test makes, and ``time`` of its module."""
    clock = VirtualClock()
    monkeypatch.setattr(asyncio, "new_event_loop", clock.new_event_loop)
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", clock.run_coroutine_threadsafe)
    for module in (producer, recheck, shared, request.module):
        monkeypatch.setattr(module, "time", clock, raising=False)
    return clock
