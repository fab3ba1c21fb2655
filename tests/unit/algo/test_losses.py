import math

import pytest
import torch

from r3train.algo.losses import k3_kl, log_ratio_clip_loss, policy_loss

CLIP = dict(eps_clip=0.2, eps_clip_high=0.3)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def leaf(*values):
    return vector(*values).requires_grad_()


# ratio, advantage, loss, gradient to log_probs (= -r A unless clipped), clipped?
CLIP_CASES = {
    "good_token_made_likelier_is_clipped_at_1_plus_eps_high": (1.5, 2.0, -2.6, 0.0, True),
    "good_token_made_unlikelier_is_not_clipped": (0.5, 2.0, -1.0, -1.0, False),
    "bad_token_made_likelier_is_not_clipped": (1.5, -2.0, 3.0, 3.0, False),
    "bad_token_made_unlikelier_is_clipped_at_1_minus_eps": (0.5, -2.0, 1.6, 0.0, True),
    "between_the_symmetric_and_the_high_bound_nothing_is_clipped": (1.25, 2.0, -2.5, -2.5, False),
    "on_policy_the_gradient_is_minus_the_advantage": (1.0, 2.0, -2.0, -2.0, False),
    "no_advantage_no_loss": (1.5, 0.0, 0.0, 0.0, False),
}


@pytest.mark.parametrize("case", CLIP_CASES)
def test_asymmetric_clip_equals_the_hand_worked(case):
    ratio, advantage, expected_loss, expected_grad, expected_clipped = CLIP_CASES[case]
    old = vector(-3.0)
    new = (old + math.log(ratio)).requires_grad_()
    loss, clipped = log_ratio_clip_loss(new, old, vector(advantage), **CLIP)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected_loss, abs=1e-12)
    assert new.grad.item() == pytest.approx(expected_grad, abs=1e-12)
    assert clipped.item() is expected_clipped


def test_swapping_the_two_bounds_would_be_seen():
    new, old, advantages = vector(math.log(1.5)), vector(0.0), vector(2.0)
    right, _ = log_ratio_clip_loss(new, old, advantages, 0.2, 0.3)
    swapped, _ = log_ratio_clip_loss(new, old, advantages, 0.3, 0.2)
    assert right.item() != pytest.approx(swapped.item())


def test_a_ratio_beyond_float32_stays_finite():
    new = torch.tensor([0.0], requires_grad=True)
    loss, _ = log_ratio_clip_loss(new, torch.tensor([-200.0]), torch.tensor([-1.0]), **CLIP)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(new.grad).all()


def test_k3_equals_the_hand_worked_value_and_gradient():
    # reference half as likely: d = ln .5, k3 = .5 + ln 2 - 1; gradient 1 - .5
    new = leaf(-1.0, -1.0, -1.0)
    ref = vector(-1.0 + math.log(0.5), -1.0, -1.0 + math.log(2.0))
    kl = k3_kl(new, ref)
    kl.sum().backward()
    torch.testing.assert_close(kl, vector(math.log(2.0) - 0.5, 0.0, 1.0 - math.log(2.0)))
    torch.testing.assert_close(new.grad, vector(0.5, 0.0, -1.0))


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    policy, reference = vector(0.7, 0.2, 0.1), vector(0.3, 0.3, 0.4)
    exact = (policy * (policy.log() - reference.log())).sum()
    expected_k3 = (policy * k3_kl(policy.log(), reference.log())).sum()
    torch.testing.assert_close(expected_k3, exact)


def test_policy_loss_adds_its_three_parts_and_reports_their_sums():
    new, old = leaf(math.log(0.5), math.log(0.25)), vector(math.log(0.5), math.log(0.5))
    entropy = leaf(0.7, 0.9)
    out = policy_loss(
        new,
        old,
        vector(1.0, 2.0),
        torch.tensor([True, True]),
        **CLIP,
        ref_log_probs=vector(math.log(0.25), math.log(0.25)),
        kl_loss_coef=0.1,
        entropy=entropy,
        entropy_coef=0.01,
        rollout_log_probs=vector(math.log(0.5), math.log(0.125)),
        tis_weights=vector(1.0, 0.5),
    )
    out.loss.backward()
    # pg: -1 * 1 * 1 and -.5 * 2 * .5; k3 of the first row: .5 - ln .5 - 1; entropy 1.6
    pg, kl = -1.0 - 0.5, math.log(2.0) - 0.5
    expected = {
        "num_tokens": 2,
        "pg_loss": pg,
        "kl": kl,
        "entropy": 1.6,
        "loss": pg + 0.1 * kl - 0.01 * 1.6,
        "clipped": 0,
        "ratio": 1.5,
        "ppo_kl": math.log(2.0),
        "log_prob_gap_abs": math.log(4.0),
        "log_prob_gap_k3": 4.0 - math.log(4.0) - 1.0,
        "log_prob_gap_far": 1,
    }
    assert {k: v.item() for k, v in out.sums.items()} == pytest.approx(expected)
    assert out.maxima["log_prob_gap_max"].item() == pytest.approx(math.log(4.0))
    assert out.loss.item() == pytest.approx(expected["loss"])
    # -r A w + coef (1 - ref/p)
    torch.testing.assert_close(new.grad, vector(-1.0 + 0.1 * 0.5, -0.5))
    torch.testing.assert_close(entropy.grad, vector(-0.01, -0.01))
    assert not any(v.requires_grad for v in (*out.sums.values(), *out.maxima.values()))


def test_the_loss_is_a_sum_so_splitting_rows_over_microbatches_changes_nothing():
    torch.manual_seed(0)
    new, old, advantages = (torch.randn(10, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(10) > 0.4
    whole = policy_loss(new, old, advantages, mask, **CLIP)
    parts = [
        policy_loss(new[s], old[s], advantages[s], mask[s], **CLIP)
        for s in (slice(0, 3), slice(3, 10))
    ]
    for key, value in whole.sums.items():
        torch.testing.assert_close(value, parts[0].sums[key] + parts[1].sums[key])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_masked_rows_with_garbage_give_zero_loss_and_zero_gradient(garbage):
    def build(first):
        new, entropy = leaf(first, -1.0), leaf(first, 0.5)
        out = policy_loss(
            new,
            vector(first, -1.1),
            vector(first, 2.0),
            torch.tensor([False, True]),
            **CLIP,
            rollout_log_probs=vector(first, -1.2),
            ref_log_probs=vector(first, -0.9),
            kl_loss_coef=0.1,
            entropy=entropy,
            entropy_coef=0.01,
            tis_weights=vector(first, 0.9),
        )
        out.loss.backward()
        return out, new.grad, entropy.grad

    clean, clean_grad, clean_entropy_grad = build(0.0)
    dirty, grad, entropy_grad = build(garbage)
    assert dirty.loss.item() == clean.loss.item() and math.isfinite(dirty.loss.item())
    assert {k: v.item() for k, v in dirty.sums.items()} == {
        k: v.item() for k, v in clean.sums.items()
    }
    assert dirty.maxima["log_prob_gap_max"] == clean.maxima["log_prob_gap_max"]
    assert grad[0] == 0 and entropy_grad[0] == 0
    torch.testing.assert_close(grad, clean_grad)
    torch.testing.assert_close(entropy_grad, clean_entropy_grad)


def test_garbage_in_a_live_row_is_not_hidden():
    out = policy_loss(
        vector(math.nan, -1.0),
        vector(-1.0, -1.0),
        vector(1.0, 1.0),
        torch.tensor([True, True]),
        **CLIP,
    )
    assert math.isnan(out.loss.item())


@pytest.mark.parametrize("rows", [0, 3])
def test_a_rank_that_holds_padding_alone_can_still_run_backward(rows):
    new = torch.full((rows,), -1.0, requires_grad=True)
    zeros = torch.zeros(rows)
    out = policy_loss(
        new, zeros, zeros, torch.zeros(rows, dtype=torch.bool), **CLIP, rollout_log_probs=zeros
    )
    out.loss.backward()
    assert out.loss.item() == 0.0 and torch.equal(new.grad, torch.zeros(rows))
    assert out.maxima["log_prob_gap_max"].item() == 0.0


def test_a_part_without_a_coefficient_is_reported_and_carries_no_gradient():
    new, entropy = leaf(-1.0), leaf(0.5)
    out = policy_loss(
        new,
        vector(-1.0),
        vector(0.0),
        torch.tensor([True]),
        **CLIP,
        ref_log_probs=vector(-3.0),
        entropy=entropy,
    )
    out.loss.backward()
    assert out.sums["kl"] > 0 and out.sums["entropy"].item() == 0.5
    assert new.grad.item() == 0.0 and entropy.grad is None


def test_a_coefficient_without_its_tensor_is_refused():
    row = vector(-1.0)
    mask = torch.tensor([True])
    with pytest.raises(ValueError, match="expected ref_log_probs"):
        policy_loss(row, row, row, mask, **CLIP, kl_loss_coef=0.1)
    with pytest.raises(ValueError, match="expected entropy"):
        policy_loss(row, row, row, mask, **CLIP, entropy_coef=0.1)


def test_streams_of_unequal_length_are_our_own_bug():
    with pytest.raises(AssertionError):
        policy_loss(vector(1, 2), vector(1), vector(1, 2), torch.tensor([True, True]), **CLIP)


def test_nothing_is_read_back_to_the_host():
    # a meta tensor has no values: any .item(), bool() or data-dependent shape raises
    rows = [torch.empty(5, device="meta") for _ in range(7)]
    mask = torch.empty(5, device="meta", dtype=torch.bool)
    out = policy_loss(
        rows[0].requires_grad_(),
        rows[1],
        rows[2],
        mask,
        **CLIP,
        rollout_log_probs=rows[3],
        ref_log_probs=rows[4],
        kl_loss_coef=0.1,
        entropy=rows[5],
        entropy_coef=0.1,
        tis_weights=rows[6],
    )
    assert out.loss.shape == ()
    with pytest.raises(RuntimeError):  # and this is what reading one back would look like
        out.loss.item()
