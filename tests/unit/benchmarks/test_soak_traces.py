"""The soak's judgement of memory and handles finds a leak, and none where there is none."""

from __future__ import annotations

import random
from collections import Counter

from benchmarks.soak_processes import ANON_INODES, CONNECTIONS, HALF_CLOSED, OTHER_SOCKETS, PIPES
from benchmarks.soak_traces import (
    Trace,
    growth_across_lives,
    growth_within_life,
    handles_gathered,
)

MB = 1 << 20


def life(pid: int, first: int, last: int, memory, handles=lambda i: Counter()) -> Trace:
    """Four samples per second, a step every half: ``memory(step)`` and a little noise."""
    trace, noise = Trace("rank 0", pid), random.Random(pid)
    for i in range((last - first) * 2):
        step, age = first + i // 2, i * 0.25 + 5.0
        trace.add(age, step, int(memory(step) * noise.uniform(0.995, 1.005)), handles(i))
    return trace


def test_flat_memory_grows_by_nothing_though_it_settles_first():
    def settling(step):
        return (300 if step < 60 else 400) * MB

    found = growth_within_life(life(1, 50, 150, settling))
    assert found is not None and abs(found.growth) < 0.02
    assert growth_within_life(life(1, 0, 40, settling)) is None, "before step 50 nothing is said"


def test_a_leak_within_a_life_is_found():
    found = growth_within_life(life(1, 50, 150, lambda step: (400 + step) * MB))
    assert found.growth > 0.1 and "process 1" in str(found)


def test_a_leak_from_life_to_life_is_found_and_the_age_of_lives_is_respected():
    def traces(leak):
        spans = [(40, 60), (60, 100), (100, 120), (120, 160), (160, 180)]
        return [
            life(k, a, b, lambda step, k=k, a=a: (300 + leak * k + (step - a)) * MB)
            for k, (a, b) in enumerate(spans)
        ]

    even = growth_across_lives(traces(0))
    assert len(even) == 3 and all(abs(g.growth) < 0.02 for g in even)
    assert all(g.growth > 0.05 for g in growth_across_lives(traces(20)))


def gathered(handles, max_connections: int = 30) -> list[str]:
    """Complaints about a life whose i-th sample holds ``handles(i)``."""
    trace = life(1, 50, 150, lambda step: MB, lambda i: Counter(handles(i)))
    return handles_gathered(trace, max_connections=max_connections)


def test_handles_that_come_and_go_are_no_leak():
    def of_a_job(i):
        return {
            PIPES: 40 + 2 * (i % 10 < 3),  # a save
            OTHER_SOCKETS: 43 if i % 30 else 41,
            CONNECTIONS: (i * 7) % 31,
            HALF_CLOSED: i % 5 == 0,
        }

    assert gathered(of_a_job) == []


def test_a_connection_more_than_may_be_in_flight_is_found():
    assert gathered(lambda i: {CONNECTIONS: 10 if i < 100 else 30}) == []
    (text,) = gathered(lambda i: {CONNECTIONS: 10 if i < 100 else 31})
    assert text == "rank 0 (1): 10 connections to servers became 31, at most 30 expected"


def test_gathered_handles_of_each_kind_are_found():
    for kind in (PIPES, ANON_INODES, OTHER_SOCKETS):
        (text,) = gathered(lambda i, kind=kind: {kind: 40 + i // 40})
        assert text.startswith(f"rank 0 (1): 40 {kind} became 4")
    (text,) = gathered(lambda i: {HALF_CLOSED: 1})
    assert "1 half-closed sockets became 1, at most 0 expected" in text
    assert handles_gathered(life(1, 50, 60, lambda step: MB), max_connections=1) == []
