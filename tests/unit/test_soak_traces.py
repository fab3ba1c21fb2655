"""The soak's judgement of memory and descriptors finds a leak, and none where there is none."""

from __future__ import annotations

import random

from benchmarks.soak_traces import (
    Trace,
    growth_across_lives,
    growth_within_life,
    handles_gathered,
)

MB = 1 << 20


def life(pid: int, first: int, last: int, memory, handles=lambda age: 40) -> Trace:
    """Four samples a second, a step every half: ``memory(step)`` and a little noise."""
    trace, noise = Trace("rank 0", pid), random.Random(pid)
    for i in range((last - first) * 2):
        step, age = first + i // 2, i * 0.25 + 5.0
        trace.add(age, step, int(memory(step) * noise.uniform(0.995, 1.005)), handles(age))
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


def test_gathered_descriptors_are_found():
    assert handles_gathered(life(1, 50, 150, lambda step: MB)) == ""
    text = handles_gathered(life(1, 50, 150, lambda step: MB, lambda age: 40 + int(age)))
    assert text.startswith("rank 0 (1): 5")
