import math

import pytest
import torch

from r3train.algo.corrections import (
    gap_quantile,
    log_prob_gap_histogram,
    log_prob_gap_stats,
    log_prob_gap_sums,
    truncated_importance_weights,
)


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def values(tensors):
    return {key: tensor.item() for key, tensor in tensors.items()}


def test_truncated_weights_equal_the_hand_worked_ratios():
    # ratios 1, 3 (cut to 2), 0.1 (raised to 0.5), and a masked row
    weights, sums = truncated_importance_weights(
        logs(0.5, 0.6, 0.05, 0.9),
        logs(0.5, 0.2, 0.5, 0.1),
        torch.tensor([True, True, True, False]),
        clip=2.0,
        clip_low=0.5,
    )
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=torch.float64))
    assert values(sums) == pytest.approx(
        {"tis_weight": 3.5, "tis_ratio": 4.1, "tis_clipped_high": 1, "tis_clipped_low": 1}
    )


def test_without_a_low_clip_small_weights_stay_small():
    weights, sums = truncated_importance_weights(
        logs(0.01), logs(1.0), torch.tensor([True]), clip=2.0
    )
    assert weights.item() == pytest.approx(0.01) and sums["tis_clipped_low"].item() == 0


def test_weights_carry_no_gradient():
    old = logs(0.5).requires_grad_()
    weights, sums = truncated_importance_weights(old, logs(0.4), torch.tensor([True]), clip=2.0)
    assert not weights.requires_grad
    assert not any(tensor.requires_grad for tensor in sums.values())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_garbage_weighs_nothing(garbage):
    weights, sums = truncated_importance_weights(
        torch.tensor([garbage, 0.0]),
        torch.tensor([garbage, 0.0]),
        torch.tensor([False, True]),
        clip=2.0,
    )
    assert weights.tolist() == [0.0, 1.0]
    assert values(sums) == {
        "tis_weight": 1.0,
        "tis_ratio": 1.0,
        "tis_clipped_high": 0,
        "tis_clipped_low": 0,
    }


@pytest.mark.parametrize("low, high", [(2.0, 2.0), (3.0, 2.0), (-0.1, 2.0), (0.0, 0.0)])
def test_clips_that_leave_no_room_are_refused(low, high):
    with pytest.raises(ValueError, match="tis_clip"):
        truncated_importance_weights(logs(0.5), logs(0.5), torch.tensor([True]), high, low)


def test_gap_sums_equal_the_hand_worked():
    # actor/engine: equal, twice and a bit (far), a quarter (far), masked
    sums = log_prob_gap_sums(
        logs(0.3, 0.9, 0.1, 0.9),
        logs(0.3, 0.4, 0.4, 0.1),
        torch.tensor([True, True, True, False]),
    )
    assert values(sums) == pytest.approx(
        {
            "log_prob_gap_abs": math.log(2.25) + math.log(4.0),
            # samples come from the engine: r = actor / engine, k3 = r - ln r - 1
            "log_prob_gap_k3": (2.25 - math.log(2.25) - 1) + (0.25 + math.log(4.0) - 1),
            "log_prob_gap_far": 2,
            "log_prob_gap_max": math.log(4.0),
        }
    )


def test_gap_stats_are_the_sums_over_the_masked_rows():
    stats = log_prob_gap_stats(
        logs(0.3, 0.4, 0.9), logs(0.3, 0.8, 0.1), torch.tensor([True, True, False])
    )
    assert values(stats) == pytest.approx(
        {
            "mean": math.log(2.0) / 2,
            "k3": (0.5 + math.log(2.0) - 1) / 2,
            "far_share": 0.0,  # ln 2 itself is not beyond ln 2
            "max": math.log(2.0),
        }
    )


def test_gap_stats_without_a_masked_row_are_zero():
    nothing = torch.full((4,), math.nan)
    stats = log_prob_gap_stats(nothing, nothing, torch.zeros(4, dtype=torch.bool))
    assert set(values(stats).values()) == {0.0}
    empty = torch.empty(0)
    stats = log_prob_gap_stats(empty, empty, torch.empty(0, dtype=torch.bool))
    assert set(values(stats).values()) == {0.0}


def test_a_live_gap_that_is_not_finite_is_not_hidden():
    stats = log_prob_gap_stats(
        torch.tensor([-math.inf, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([True, True])
    )
    assert math.isinf(stats["max"].item())


def test_nothing_is_read_back_to_the_host():
    a, b = torch.empty(5, device="meta"), torch.empty(5, device="meta")
    mask = torch.empty(5, device="meta", dtype=torch.bool)
    truncated_importance_weights(a, b, mask, clip=2.0)
    log_prob_gap_stats(a, b, mask)


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
