"""Suspicion: noise of every size ends nothing, a fault that lasts does, and nothing becomes usual slowly.

The noise of an update is drawn as it was found on servers that round: a factor of the update's batch, which the next
one partly shares, a drift of up to three times in both directions over a thousand updates, rows that differ in clumps.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from r3train.proof.suspicion import bounded_mean, ROWS_OF_NOTHING, Suspicions, verdict_of

# mean |difference| of log-probs in nats, and the share of rows with other experts
LEVELS = [(1e-6, 1e-5), (1e-3, 0.005), (1e-2, 0.01), (2e-2, 0.035), (3e-2, 0.1)]
ROWS = 48_000


def factors(random: np.random.Generator, updates: int) -> np.ndarray:
    """Factors of the updates' noise: float64[updates], the first near 1."""
    shared, found = random.normal(0, 0.2), np.empty(updates)
    for i in range(updates):
        shared = 0.5 * shared + random.normal(0, 0.17)
        found[i] = shared
    walk = np.cumsum(random.normal(0, 0.35 / math.sqrt(1000), updates))
    return np.exp(found + np.abs((walk + 1.1) % 4.4 - 2.2) - 1.1)


def rows_that_differ(random: np.random.Generator, shares: np.ndarray) -> np.ndarray:
    """In clumps: the variance of their number is 30 times that of rows on their own."""
    mean = np.minimum(shares, 0.9) * ROWS
    return np.minimum(random.poisson(random.gamma(mean / 29, 29)), ROWS) / ROWS


def gaps(suspicions: Suspicions, value: float, start: float) -> float:
    return suspicions.see("BOUND", 0, value, start=start, least=1e-7).sum


def shares(suspicions: Suspicions, value: float, start: float) -> float:
    return suspicions.see("ROUTER", 0, value, start=start, least=ROWS_OF_NOTHING / ROWS).sum


@pytest.mark.parametrize("runs", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gap, share", LEVELS)
def test_sound_noise_ends_none_of_so_many_runs_of_2000_updates(runs, gap, share):
    random, largest = np.random.default_rng(0), [0.0, 0.0]
    for _ in range(runs):
        noise, suspicions = factors(random, 2000), Suspicions()
        # a start's median of some values is within a few tenths of what follows
        start_gap, start_share = (x * math.exp(random.normal(0, 0.1)) for x in (gap, share))
        for factor, rows in zip(noise, rows_that_differ(random, share * noise)):
            value = gap * factor * (1 + (random.random() < 0.01) * random.exponential(0.5))
            largest[0] = max(largest[0], gaps(suspicions, value, start_gap))
            largest[1] = max(largest[1], shares(suspicions, rows, start_share))
    print(
        f"{gap:g} nats, {share:g} of the rows: largest sums {largest[0]:.2f} and {largest[1]:.2f}"
    )
    assert max(largest) < 5


@pytest.mark.parametrize("gap, most", [(1e-6, 6), (1e-3, 6), (1e-2, 12), (3e-2, 20)])
def test_a_server_that_is_frozen_is_found_although_each_update_is_near_the_last(gap, most):
    """A rule that holds an update against the one before never finds 0.010, 0.014, 0.022, ..."""
    for seed in range(20):
        random, suspicions = np.random.default_rng(seed), Suspicions()
        noise = gap * factors(random, 150)
        for value in noise[:20]:
            gaps(suspicions, value, gap)
        sums = [
            gaps(suspicions, math.hypot(value, 0.01 * n), gap)
            for n, value in enumerate(noise[20:], 1)
        ]
        assert next(n for n, s in enumerate(sums, 1) if s >= 5) <= most


def test_rows_that_differ_three_times_as_often_are_found_within_twenty_updates():
    for seed in range(20):
        random, suspicions = np.random.default_rng(seed), Suspicions()
        share = 0.02 * np.exp(random.normal(0, 0.1, 60)) * np.where(np.arange(60) < 20, 1, 3)
        sums = [shares(suspicions, x, 0.02) for x in rows_that_differ(random, share)]
        assert max(sums[:20]) < 5 <= max(sums[20:40])


def test_one_update_never_fails_and_two_good_ones_clear_it():
    suspicions, verdicts = Suspicions(), []
    for value in (1e9, 0.01, 0.01, math.nan, math.inf):
        verdicts.append(verdict_of([suspicions.see("BOUND", 0, value, start=0.01)], 5.0))
    assert verdicts == ["suspect", "passed", "passed", "suspect", "suspect"]


def test_noise_that_grows_with_the_model_becomes_usual_up_to_four_times_the_start():
    random, suspicions = np.random.default_rng(2), Suspicions()
    slow = 1e-2 * np.geomspace(1, 4, 1000) * np.exp(random.normal(0, 0.2, 1000))
    assert max(gaps(suspicions, value, 1e-2) for value in slow) < 1
    for _ in range(2000):
        last = suspicions.see("BOUND", 0, 0.2, start=1e-2)
    assert last.usual <= 0.04 and last.sum > 5


def test_a_value_above_twice_the_usual_does_not_become_usual_though_each_second_is_small():
    suspicions = Suspicions()
    seen = [suspicions.see("BOUND", 0, value, start=0.01) for value in [0.01, 0.024] * 100]
    assert {s.usual for s in seen} == {0.01}


def test_a_few_rows_are_no_more_than_none_and_forty_are():
    suspicions = Suspicions()
    few = [
        suspicions.see("ROUTER", 0, n / 1000, start=0.0, least=3 / 1000) for n in (0, 2, 0, 3, 1)
    ]
    assert max(s.sum for s in few) == 0
    many = [suspicions.see("ROUTER", 0, 40 / 1000, start=0.0, least=3 / 1000) for _ in range(5)]
    assert suspicions.verdict(many[-1:]) == "failed"


def test_the_first_values_calibrate_but_not_beyond_the_highest_that_is_told():
    for highest, verdict in ((math.inf, "passed"), (0.02, "failed")):
        suspicions = Suspicions()
        how = dict(start=0.01, highest=highest)
        seen = [suspicions.see("decoded rows", 0, 0.3, **how) for _ in range(13)]
        assert [s.usual for s in seen[:8]] == [None] * 8 and suspicions.verdict(
            seen[:8]
        ) == "passed"
        assert suspicions.verdict(seen[-1:]) == verdict


def test_what_may_not_fall_below_its_start_is_never_suspect_below_twice_that():
    suspicions = Suspicions(calibrating=0)
    for value in [0.0] * 200 + [0.0099] * 200:
        found = suspicions.see("routes", 0, value, start=0.005, may_fall=False)
    assert found.sum == 0
    assert suspicions.see("routes", 0, 0.0, start=0.005, may_fall=False).usual >= 0.005


def test_one_token_that_is_far_off_counts_as_thirty():
    off = np.full(1000, 1e-3)
    off[7] = 6.3
    assert bounded_mean(off, 1e-3) == pytest.approx(1.029e-3)
    assert bounded_mean(np.zeros(0), 1e-3) == 0
