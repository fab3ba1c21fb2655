"""The budget of the gap: a cause that is planted lands on its own part, and nothing is counted twice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from r3train.algo.gap_budget import ADDED, CanaryLogProbs, gap_budget, gap_stats, PARTS

TOKENS, CANARIES, RECHECKED = 40_000, 20_000, 20_000


@dataclass(frozen=True)
class World:
    """Standard deviations, in nats, of the noise that each cause adds to a log-prob; and a step's tokens by age.

    prefill: of what a server computes in one pass, which rechecks and canaries both read.
    """

    prefill: float = 0.01
    server: float = 0.01
    kernels: float = 0.02
    routing: float = 0.05
    cache: float = 0.0
    staleness: float = 0.03  # of each version
    ages: tuple[int, ...] = (1,)
    replayed: bool = True

    def budget(self, seed: int = 0, canaries: bool = True) -> dict[str, float]:
        rng = np.random.default_rng(seed)

        def noise(scale: float | np.ndarray, count: int) -> np.ndarray:
            # as of a policy that sampled the tokens: the mean of exp(d) is 1
            return scale * rng.standard_normal(count) - scale**2 / 2

        read = [self.server, self.kernels, self.cache]
        read += [] if self.replayed else [self.routing]
        d = sum(noise(scale, TOKENS) for scale in read)
        age = rng.choice(self.ages, TOKENS)
        d = d + noise(self.staleness * np.sqrt(age), TOKENS)
        metrics: dict[str, float] = {"train/num_loss_tokens": TOKENS}
        metrics["train/loss_tokens_rows_cached"] = TOKENS
        metrics |= {f"train/log_prob_gap_{k}": v for k, v in gap_stats(0 * d, d).items()}
        for age_value in set(self.ages):
            age_gap = gap_stats(0 * d[age == age_value], d[age == age_value])
            metrics |= {f"train/log_prob_gap_{k}_age_{age_value}": age_gap[k] for k in ADDED}
            metrics[f"train/loss_tokens_age_{age_value}"] = int((age == age_value).sum())
        truth = -rng.exponential(2.0, CANARIES)
        prefill = truth + noise(self.prefill, CANARIES)
        actor = truth + noise(self.kernels, CANARIES)
        read_by = CanaryLogProbs(
            server=prefill,
            actor=actor,
            live=actor + noise(self.routing, CANARIES),
            early=truth + noise(self.prefill, CANARIES),
            warm=truth + noise(self.prefill, CANARIES) - noise(self.cache, CANARIES),
        )
        truth = -rng.exponential(2.0, RECHECKED)
        delivered = truth - noise(self.server, RECHECKED)
        again = truth + noise(self.prefill, RECHECKED)
        return gap_budget(
            metrics,
            rechecked=(delivered, again),
            canaries=read_by if canaries else None,
            replayed=self.replayed,
            flushed=True,
        )


@pytest.mark.parametrize("replayed", [True, False])
@pytest.mark.parametrize("ages", [(0,), (0, 1), (1, 2, 4)])
@pytest.mark.parametrize("cause", [part for part in PARTS if part != "rest"])
def test_what_a_planted_cause_adds_lands_on_its_part(cause, ages, replayed):
    if cause == "staleness" and ages == (0,):
        return
    world = World(ages=ages, replayed=replayed)
    before, after = (w.budget() for w in (world, replace(world, **{cause: 0.2})))
    added = {part: after[f"gap/{part}_k3"] - before[f"gap/{part}_k3"] for part in PARTS}
    if cause == "routing" and replayed:  # R3 removes it: the budget names it next to the gap
        assert added.pop("routing") > 0.015
        assert max(map(abs, added.values())) < 5e-4
        return
    total = sum(gap for part, gap in added.items() if part != "routing" or not replayed)
    assert total > 0.009
    assert added[cause] / total > 0.9
    assert all(abs(gap) / total < 0.1 for part, gap in added.items() if part != cause)


@pytest.mark.parametrize("ages", [(0,), (0, 1), (1,), (0, 1, 2, 3, 4)])
def test_the_parts_that_were_measured_add_up_to_the_gap_within_a_tenth(ages):
    budget = World(ages=ages).budget()
    total = sum(budget[f"gap/{part}_k3"] for part in PARTS if part != "routing")
    assert abs(budget["gap/rest_k3"]) < 0.1 * total
    expected = sum(age * 0.03**2 for age in ages) / len(ages) / 2
    assert budget["gap/staleness_k3"] == pytest.approx(expected, abs=0.1 * total)
    # each part as it was read holds the prefill's rounding, which the gap has not
    assert budget["gap/server_mean"] == pytest.approx(0.8 * np.hypot(0.01, 0.01), rel=0.05)
    if ages[0] == 0 and len(ages) == 1:
        assert budget["gap/server_k3"] == pytest.approx(0.01**2 / 2, rel=0.2)
        assert budget["gap/kernels_k3"] == pytest.approx(0.02**2 / 2, rel=0.1)
        assert abs(budget["gap/cache_k3"]) < 0.05 * total


@pytest.mark.parametrize("has_cache", [True, False])
def test_what_older_tokens_have_changes_no_part_that_was_measured_at_equal_weights(has_cache):
    """Rounding is all there is, and server and kernels add up to more than the gap."""
    rng = np.random.default_rng(0)
    server, actor, early, warm, again = (0.01 * rng.standard_normal(1000) for _ in range(5))
    canaries = CanaryLogProbs(server, actor)
    if has_cache:
        canaries = CanaryLogProbs(server, actor, early=early, warm=warm)
    newest = gap_stats(np.zeros(1000), 0.005 * rng.standard_normal(1000))

    def parts(older: float) -> dict[str, float]:
        metrics = {"train/num_loss_tokens": 2000, "train/loss_tokens_rows_cached": 2000}
        for stat in ADDED:
            whole = (newest[stat] + older) / 2
            each = {"": whole, "_age_0": newest[stat], "_age_3": older}
            metrics |= {f"train/log_prob_gap_{stat}{of}": gap for of, gap in each.items()}
        metrics |= {f"train/loss_tokens_age_{age}": 1000 for age in (0, 3)}
        rechecked = again, np.zeros(1000)
        found = gap_budget(
            metrics, rechecked=rechecked, canaries=canaries, replayed=True, flushed=True
        )
        return {k: v for k, v in found.items() if not k.startswith(("gap/staleness", "gap/rest"))}

    assert len(parts(0.0)) >= 8
    assert parts(newest["k3"]) == parts(0.01) == parts(1.0)


def test_without_canaries_tokens_of_the_actors_own_weights_tell_what_staleness_adds():
    """The kernels are then a part of the rest."""
    budget = World(ages=(0, 1)).budget(canaries=False)
    assert not any(f"gap/{part}_k3" in budget for part in ("kernels", "routing", "cache"))
    assert budget["gap/staleness_k3"] == pytest.approx(0.03**2 / 4, rel=0.1)
    # the server's part holds the rounding of a prefill, which is no part of the gap
    assert budget["gap/rest_k3"] == pytest.approx((0.02**2 - 0.01**2) / 2, rel=0.1)
    assert budget["gap/server_p999"] == pytest.approx(np.hypot(0.01, 0.01) * 3.29, rel=0.1)


def test_a_step_of_one_age_has_no_staleness_if_its_tokens_are_of_the_actors_weights():
    metrics = {"train/num_loss_tokens": 10, "train/log_prob_gap_k1": 0.1}
    metrics |= {"train/log_prob_gap_k3": 0.2}
    budget = gap_budget(metrics, replayed=True, flushed=True)
    assert budget["gap/staleness_k3"] == 0 and budget["gap/rest_k3"] == 0.2
    # and a step without an engine has no gap at all
    assert gap_budget({"train/loss": 1.0}, replayed=True, flushed=True) == {}
    nothing = (np.zeros(0), np.zeros(0))
    assert "gap/server_k3" not in gap_budget(
        metrics, rechecked=nothing, replayed=True, flushed=True
    )


def test_a_cache_counts_by_the_tokens_that_stand_behind_it():
    metrics = {"train/num_loss_tokens": 10, "train/loss_tokens_rows_cached": 5}
    metrics |= {f"train/log_prob_gap_{stat}": 0.0 for stat in ADDED}
    same = np.array([-1.0, -2.0])
    read = CanaryLogProbs(server=same, actor=same, early=same, warm=same - 0.1)
    budget = gap_budget(metrics, canaries=read, replayed=True, flushed=True)
    assert budget["gap/cache_mean"] == pytest.approx(0.1)
    assert budget["gap/cache_k1"] == pytest.approx(-0.05)
    assert budget["gap/cache_p999"] == pytest.approx(0.1)
    assert budget["gap/kernels_k3"] == 0 and budget["gap/rest_k1"] == pytest.approx(0.05)


def test_without_a_flush_the_cache_is_what_tokens_behind_a_cached_prefix_have_more():
    """As a job had it at staleness 0: canaries, whose cache keys are of one version, saw nothing."""
    metrics = {"train/num_loss_tokens": 100, "train/loss_tokens_rows_cached": 75}
    metrics |= {"train/log_prob_gap_k1": 0.03, "train/log_prob_gap_k3": 0.006}
    behind = {"train/log_prob_gap_k1_rows_cached": 0.04, "train/log_prob_gap_k3_rows_cached": 0.008}
    same = np.array([-1.0, -2.0])
    read = CanaryLogProbs(server=same, actor=same, early=same, warm=same)
    budget = gap_budget(metrics | behind, canaries=read, replayed=True, flushed=False)
    assert budget["gap/cache_k3"] == pytest.approx(0.006)
    assert budget["gap/cache_k1"] == pytest.approx(0.03)
    assert budget["gap/rest_k3"] == pytest.approx(0, abs=1e-12)
    # only as far as there is a rest: the other tokens have a gap of another cause
    less = gap_budget(
        metrics | behind | {"train/log_prob_gap_k3": 0.003}, replayed=True, flushed=False
    )
    assert less["gap/cache_k3"] == pytest.approx(0.003) and less["gap/rest_k3"] == 0
    # with a flush nothing of it is the cache's
    flushed = gap_budget(metrics | behind, canaries=read, replayed=True, flushed=True)
    assert flushed["gap/cache_k3"] == 0 and flushed["gap/rest_k3"] == 0.006
