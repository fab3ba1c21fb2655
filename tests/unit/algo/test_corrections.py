import math
from dataclasses import replace

import pytest
import torch
from tests.unit.algo.rollouts import loss_rows

from r3train.algo.corrections import (
    age_sums,
    class_sums,
    gap_quantile,
    group_metrics,
    is_group_sum,
    kept_rows,
    log_prob_gap_histogram,
    log_prob_gap_sums,
    mismatch_metrics,
    mismatch_sums,
    rollout_weights,
)
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.types import RowClass, UNKNOWN_CLASS


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def values(tensors):
    return {key: tensor.item() for key, tensor in tensors.items()}


def rows_of(old, rollout, mask=None, samples=None, advantages=None, new=None):
    samples = None if samples is None else torch.tensor(samples)
    advantages = torch.ones_like(old) if advantages is None else advantages
    rows = loss_rows(
        old if new is None else new, old, advantages, mask, samples, rollout_log_probs=rollout
    )
    return rows.masked()


def weights_of(rows, **settings):
    weights, _, sums = rollout_weights(rows, AlgorithmSection(**settings))
    return weights, sums


def test_without_a_low_clip_small_weights_stay_small():
    weights, sums = weights_of(rows_of(logs(0.01), logs(1.0)), use_tis=True)
    assert weights.item() == pytest.approx(0.01) and sums["tis_clipped_low"].item() == 0


def test_weights_carry_no_gradient():
    weights, sums = weights_of(rows_of(logs(0.5).requires_grad_(), logs(0.4)), use_tis=True)
    assert not weights.requires_grad
    assert not any(tensor.requires_grad for tensor in sums.values())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_masked_garbage_weighs_nothing(garbage, level):
    dirty = torch.tensor([garbage, 0.0])
    rows = rows_of(dirty, dirty, torch.tensor([False, True]))
    weights, sums = weights_of(rows, rollout_is=level)
    assert weights.tolist() == [0.0, 1.0]
    assert sums["tis_weight"] == 1.0 and sums["tis_clipped_high"] == 0


def test_one_bound_of_a_k1_is_for_both_ways():
    # actor over engine 2, 3, 1/2, 1/4
    rows = rows_of(logs(0.4, 0.9, 0.1, 0.1), logs(0.2, 0.3, 0.2, 0.4))
    algorithm = AlgorithmSection(rollout_rs=["token_k1"], rollout_rs_threshold=["2.01"])
    assert kept_rows(rows, algorithm)[0].tolist() == [True, False, True, False]
    assert kept_rows(rows, AlgorithmSection()) == (None, {})


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rollout_rs": ["token_k1"]}, "has 0 entries for 1"),
        (
            {"rollout_rs": ["token_k2"], "rollout_rs_threshold": ["0.5_2"]},
            "expected a number above",
        ),
        (
            {"rollout_rs": ["token_k1"], "rollout_rs_threshold": ["2_0.5"]},
            "lower bound is the larg",
        ),
        ({"rollout_rs": ["token_k1"], "rollout_rs_threshold": ["x"]}, "'x' of token_k1"),
        ({"rollout_rs": ["token_k3"], "rollout_rs_threshold": ["-1"]}, "'-1' of token_k3"),
    ],
)
def test_a_bound_that_says_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmSection(**settings).rejection_bounds


def test_mismatch_metrics_of_no_row_are_zero():
    nothing = torch.zeros(2)
    rows = rows_of(nothing, nothing, torch.tensor([False, False]))
    means = {k: float(v) for k, v in (weights_of(rows)[1] | mismatch_sums(rows)).items()}
    assert set(mismatch_metrics(means).values()) == {0.0}


def test_a_ratio_of_two_is_not_beyond_ln_2_and_rows_outside_the_mask_do_not_count():
    sums = log_prob_gap_sums(
        logs(0.3, 0.4, 0.9), logs(0.3, 0.8, 0.1), torch.tensor([True, True, False])
    )
    assert values(sums) == pytest.approx(
        {
            "log_prob_gap_abs": math.log(2.0),
            "log_prob_gap_k3": 0.5 + math.log(2.0) - 1,
            "log_prob_gap_far": 0,
            "log_prob_gap_max": math.log(2.0),
        }
    )


def test_gap_sums_without_a_masked_row_are_zero():
    nothing = torch.full((4,), math.nan)
    sums = log_prob_gap_sums(nothing, nothing, torch.zeros(4, dtype=torch.bool))
    assert set(values(sums).values()) == {0.0}
    empty = torch.empty(0)
    sums = log_prob_gap_sums(empty, empty, torch.empty(0, dtype=torch.bool))
    assert set(values(sums).values()) == {0.0}


def test_a_live_gap_that_is_not_finite_is_not_hidden():
    sums = log_prob_gap_sums(
        torch.tensor([-math.inf, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([True, True])
    )
    assert math.isinf(sums["log_prob_gap_max"].item())


def test_nothing_is_read_back_to_the_host():
    a, b = torch.empty(5, device="meta"), torch.empty(5, device="meta")
    mask = torch.empty(5, device="meta", dtype=torch.bool)
    log_prob_gap_sums(a, b, mask)


def test_a_quantile_of_the_gap_is_known_to_its_bin_whatever_is_added_up():
    generator = torch.Generator().manual_seed(3)
    gaps = 10 ** (torch.rand(20_000, generator=generator) * 6 - 6)
    mask = torch.rand(20_000, generator=generator) > 0.3
    parts = [
        log_prob_gap_histogram(g, torch.zeros_like(g), m)
        for g, m in zip(gaps.split(7000), mask.split(7000))
    ]
    counts = sum(parts).tolist()
    assert sum(counts) == int(mask.sum())
    for share in (0.5, 0.99, 0.999):
        exact = float(gaps[mask].quantile(share))
        found = gap_quantile(counts, share, float(gaps[mask].max()))
        assert exact * 0.999 <= found <= exact * 1.08


def test_quantiles_of_gaps_at_the_ends_are_no_invention():
    zero = torch.zeros(10)
    every = torch.ones(10, dtype=torch.bool)
    equal = log_prob_gap_histogram(zero, zero, every).tolist()
    assert gap_quantile(equal, 0.999, 0.0) == 0.0
    nothing = log_prob_gap_histogram(zero, zero, ~every).tolist()
    assert gap_quantile(nothing, 0.999, 0.0) == 0.0
    odd = torch.tensor([float("nan"), float("inf"), 1e6])
    far = log_prob_gap_histogram(odd, zero[:3], every[:3]).tolist()
    assert far[-1] == 3 and gap_quantile(far, 0.5, 1e6) == 1e6


def test_where_every_token_is_of_one_age_nothing_is_told_by_age():
    rows = rows_of(logs(0.5, 0.6), logs(0.5, 0.2))
    rows = replace(rows, ages=torch.tensor([0, 0]), num_ages=1)
    assert age_sums(rows, torch.ones(2), {}, None) == {}
    assert not any(map(is_group_sum, ("own_age_mean", "loss_age_0", "ess_age_old")))


def test_metrics_by_class_are_those_of_the_rows_that_predicted_a_token():
    old, rollout = logs(0.5, 0.6, 0.05, 0.9, 0.2, 0.4), logs(0.5, 0.2, 0.5, 0.1, 0.4, 0.1)
    mask = torch.tensor([True, True, True, False, True, True])
    rows = rows_of(old, rollout, mask, samples=[0, 0, 1, 1, 1, 2])
    # the prompt row of sample 1 came from the cache, that of sample 2 is of a file without classes
    classes = [RowClass.PREFILLED, RowClass.DECODED, RowClass.DECODED, RowClass.CACHED]
    classes += [RowClass.PREFILLED_AGAIN, UNKNOWN_CLASS]
    rows = replace(rows, row_classes=torch.tensor(classes))
    sums = class_sums(rows)
    assert all(is_group_sum(name) for name in sums)
    got = group_metrics(values(sums))
    tokens = {k.partition("_rows_")[2]: v for k, v in got.items() if k.startswith("loss_tokens")}
    assert tokens == {"prefilled": 1, "decoded": 2, "prefilled_again": 1, "cached": 2}
    assert got["log_prob_gap_mean_rows_prefilled"] == 0
    assert got["log_prob_gap_mean_rows_decoded"] == pytest.approx((math.log(3) + math.log(10)) / 2)
    assert got["log_prob_gap_k1_rows_decoded"] == pytest.approx((math.log(10) - math.log(3)) / 2)
    assert got["log_prob_gap_k1_rows_prefilled_again"] == pytest.approx(math.log(2))
    # of sample 1, in which a row came from the cache, both tokens
    assert got["log_prob_gap_k1_rows_cached"] == pytest.approx((math.log(10) + math.log(2)) / 2)
    assert got["log_prob_gap_k3_rows_cached"] == pytest.approx((0.1 + 0.5 - 2 + math.log(20)) / 2)
    assert class_sums(replace(rows, row_classes=None)) == {}
    assert not any(map(is_group_sum, ("loss_rows_decoded", "loss_tokens_rows_other")))


def test_a_prompt_from_the_cache_counts_on_the_rank_that_does_not_hold_it():
    """Context parallelism: one rank holds the prompt's rows, another the tokens that they precede."""
    held = []

    def over_ranks(found, operation):
        assert operation == "max"
        held.append(found)
        return torch.maximum(found, torch.tensor([1.0, 0.0], dtype=found.dtype))

    old, rollout = logs(0.5, 0.6), logs(0.25, 0.6)
    rows = rows_of(old, rollout, torch.tensor([True, True]), samples=[0, 1])
    decoded = torch.full((2,), int(RowClass.DECODED))
    rows = replace(rows, row_classes=decoded, over_ranks=over_ranks)
    got = group_metrics(values(class_sums(rows)))
    assert held[0].tolist() == [0, 0]
    assert got["loss_tokens_rows_cached"] == 1
    assert got["log_prob_gap_mean_rows_cached"] == pytest.approx(math.log(2))
