import math
import sys
from dataclasses import replace

import pytest
import torch
from tests.unit.algo.rollouts import loss_rows

from r3train.algo.divergence import k3_kl
from r3train.algo.losses.dppo import dppo_kl
from r3train.algo.losses.guarded import GuardedLoss
from r3train.algo.losses.ppo import ppo
from r3train.algo.losses.policy_losses import check_policy_loss, configured_loss, get_policy_loss
from r3train.algo.policy_loss import metric_names, microbatch_loss, rows_without_values
from r3train.algo.loss_rows import RowLoss
from r3train.config.algorithm_settings import AlgorithmSection

CLIP = AlgorithmSection(eps_clip=0.2, eps_clip_high=0.3)
EVERYTHING = AlgorithmSection(
    eps_clip_high=0.3,
    kl_loss_coef=0.1,
    entropy_coef=0.01,
    use_tis=True,
    tis_clip=2.0,
    tis_clip_low=0.5,
    use_opd=True,
    opd_type="megatron",
)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def leaf(*values):
    return vector(*values).requires_grad_()


def test_dppo_kl_is_finite_where_a_token_is_certain():
    new = torch.zeros(2, requires_grad=True)
    rollout = torch.tensor([0.0, -1.0])
    rows = loss_rows(new, rollout, torch.ones(2), rollout_log_probs=rollout)
    out = dppo_kl(rows, AlgorithmSection())
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all() and torch.isfinite(new.grad).all()


def test_the_weighed_kl_of_k2_and_k3_plus_has_the_expected_gradient_of_the_divergence():
    # three tokens, each weighed by how often the older policy draws it
    old, ref = vector(0.5, 0.3, 0.2).log(), vector(0.2, 0.2, 0.6).log()
    logits = leaf(0.1, 0.9, -0.4)
    new = logits.log_softmax(0)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0].tolist()

    forward = gradient((new.exp() * (new - ref)).sum())
    expected = {
        "k1": [0.0, 0.0, 0.0],
        "k2": forward,
        "k3": gradient((ref.exp() * (ref - new)).sum()),
        "k3+": forward,
    }
    for kind, wanted in expected.items():
        algorithm = AlgorithmSection(kl_loss_coef=1.0, kl_loss_type=kind, use_unbiased_kl=True)
        rows = loss_rows(new, old, vector(0, 0, 0), ref_log_probs=ref)
        rows = replace(rows, samples=torch.arange(3), loss_weights=old.exp())
        got = gradient(microbatch_loss(ppo, rows, algorithm).loss)
        assert got == pytest.approx(wanted, abs=1e-12), kind


def test_a_ratio_beyond_float32_stays_finite():
    new = torch.tensor([0.0], requires_grad=True)
    loss = ppo(loss_rows(new, torch.tensor([-200.0]), torch.tensor([-1.0])), CLIP).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(new.grad).all()


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    policy, reference = vector(0.7, 0.2, 0.1), vector(0.3, 0.3, 0.4)
    exact = (policy * (policy.log() - reference.log())).sum()
    expected_k3 = (policy * k3_kl(policy.log(), reference.log())).sum()
    torch.testing.assert_close(expected_k3, exact)


@pytest.mark.parametrize(
    "algorithm",
    [
        CLIP,
        AlgorithmSection(policy_loss="gspo", rollout_is="sequence"),
        AlgorithmSection(
            policy_loss="dppo_kl", rollout_rs=["seq_mean_k3"], rollout_rs_threshold=["0.5"]
        ),
    ],
    ids=["ppo", "gspo", "dppo_kl"],
)
def test_the_loss_is_a_sum_so_splitting_samples_over_microbatches_changes_nothing(algorithm):
    torch.manual_seed(0)
    new, old, rollout, advantages = (-torch.rand(10, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(10) > 0.4
    policy_loss = get_policy_loss(algorithm.policy_loss)

    def loss_of_settings(rows, samples, weights):
        streams = {"rollout_log_probs": rollout[rows], "loss_weights": vector(*weights)}
        return microbatch_loss(
            policy_loss,
            loss_rows(
                new[rows],
                old[rows],
                advantages[rows],
                mask[rows],
                torch.tensor(samples),
                **streams,
            ),
            algorithm,
        )

    loss_together = loss_of_settings(slice(0, 10), [0] * 3 + [1] * 7, [0.5, 2.0])
    parts = loss_of_settings(slice(0, 3), [0] * 3, [0.5]), loss_of_settings(
        slice(3, 10), [0] * 7, [2.0]
    )
    for key, value in loss_together.sums.items():
        torch.testing.assert_close(value, parts[0].sums[key] + parts[1].sums[key])


def careless(rows, algorithm):
    """A loss that does not look at the mask."""
    return RowLoss((rows.log_probs - 1).exp() / (rows.advantages - rows.rollout_log_probs))


@pytest.mark.parametrize("policy_loss", [ppo, careless])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_masked_rows_with_garbage_give_zero_loss_and_zero_gradient(garbage, policy_loss):
    def build(first):
        new, entropy = leaf(first, -1.0), leaf(first, 0.5)
        rows = loss_rows(
            new,
            vector(first, -1.1),
            vector(first, 2.0),
            torch.tensor([False, True]),
            rollout_log_probs=vector(first, -1.2),
            ref_log_probs=vector(first, -0.9),
            teacher_log_probs=vector(first, -1.3),
            entropy=entropy,
        )
        out = microbatch_loss(policy_loss, rows, EVERYTHING)
        out.loss.backward()
        return out, new.grad, entropy.grad

    clean, clean_grad, clean_entropy_grad = build(0.0)
    dirty, grad, entropy_grad = build(garbage)
    assert dirty.loss.item() == clean.loss.item() and math.isfinite(dirty.loss.item())
    assert not any(v.requires_grad for v in (*dirty.sums.values(), *dirty.maxima.values()))
    assert {k: v.item() for k, v in dirty.sums.items()} == {
        k: v.item() for k, v in clean.sums.items()
    }
    assert dirty.maxima["log_prob_gap_max"] == clean.maxima["log_prob_gap_max"]
    assert grad[0] == 0 and entropy_grad[0] == 0
    torch.testing.assert_close(grad, clean_grad)
    torch.testing.assert_close(entropy_grad, clean_entropy_grad)


def test_garbage_in_a_live_row_is_not_hidden():
    rows = loss_rows(vector(math.nan, -1.0), vector(-1.0, -1.0), vector(1.0, 1.0))
    assert math.isnan(microbatch_loss(ppo, rows, CLIP).loss.item())


@pytest.mark.parametrize("rows", [0, 3])
def test_a_rank_that_holds_padding_alone_can_still_run_backward(rows):
    new = torch.full((rows,), -1.0, requires_grad=True)
    zeros = torch.zeros(rows)
    out = microbatch_loss(ppo, loss_rows(new, zeros, zeros, zeros.bool()), CLIP)
    out.loss.backward()
    assert out.loss.item() == 0.0 and torch.equal(new.grad, torch.zeros(rows))
    assert out.maxima["log_prob_gap_max"].item() == 0.0


def test_a_part_without_a_coefficient_is_reported_and_carries_no_gradient():
    new, entropy = leaf(-1.0), leaf(0.5)
    rows = loss_rows(new, vector(-1.0), vector(0.0), ref_log_probs=vector(-3.0), entropy=entropy)
    out = microbatch_loss(ppo, rows, CLIP)
    out.loss.backward()
    assert out.sums["kl"] > 0 and out.sums["entropy"].item() == 0.5
    assert new.grad.item() == 0.0 and entropy.grad is None


def test_streams_of_unequal_length_are_our_own_bug():
    with pytest.raises(AssertionError):
        loss_rows(vector(1, 2), vector(1), vector(1, 2))


def test_nothing_is_read_back_to_the_host():
    # rows of a meta device have no values: any .item(), bool() or data-dependent shape raises
    out = microbatch_loss(ppo, rows_without_values(EVERYTHING), EVERYTHING)
    assert out.loss.shape == ()
    with pytest.raises(RuntimeError):  # and this is what reading one back would look like
        out.loss.item()


def test_every_rank_knows_the_names_of_the_metrics_without_a_loss():
    sums, maxima = metric_names(ppo, CLIP)
    assert {"num_tokens", "loss", "clipped"} <= set(sums) and maxima == ("log_prob_gap_max",)
    assert not {"kl", "tis_weight"} & set(sums)
    assert {"kl", "tis_weight"} <= set(metric_names(ppo, EVERYTHING)[0])


# -- losses of a user's own ----------------------------------------------------------------------

HERE = "tests.unit.algo.test_losses"


def reinforce(rows, algorithm):
    """-A log p, with the largest loss of a row as a metric."""
    loss = -rows.advantages * rows.log_probs
    return RowLoss(loss, {"rows": rows.mask.sum()}, {"loss_max": loss.detach().amax()})


def returns_a_tensor(rows, algorithm):
    return rows.log_probs


def returns_a_sum(rows, algorithm):
    return RowLoss(rows.log_probs.sum())


def without_gradient(rows, algorithm):
    return RowLoss(rows.advantages)


def reads_a_value(rows, algorithm):
    return RowLoss(rows.log_probs if rows.mask.any() else -rows.log_probs)


def exits_on_values(rows, algorithm):
    if rows.log_probs.device.type != "meta":
        sys.exit(0)
    return RowLoss(rows.log_probs)


def takes_a_name(rows, algorithm):
    return RowLoss(rows.log_probs, {"entropy": rows.mask.sum()})


def metric_of_rows(rows, algorithm):
    return RowLoss(rows.log_probs, {"mine": rows.advantages})


def takes_rows_only(rows):
    return RowLoss(rows.log_probs)


def test_a_loss_found_by_path_is_corrected_and_adds_its_metrics():
    algorithm = AlgorithmSection(policy_loss=f"{HERE}:reinforce", use_tis=True)
    check_policy_loss(algorithm)
    found = get_policy_loss(algorithm.policy_loss)
    rows = loss_rows(
        vector(-1.0, -2.0),
        vector(-1.0, -2.0),
        vector(1.0, 2.0),
        rollout_log_probs=vector(-1.0, -2.0 + math.log(4)),
    )
    out = microbatch_loss(found, rows, algorithm)
    assert out.loss.item() == pytest.approx(1.0 + 4.0 / 4)
    assert out.sums["rows"].item() == 2 and out.maxima["loss_max"].item() == 4.0
    assert "clipped" not in out.sums
    sums, maxima = metric_names(found, algorithm)
    assert set(sums) == set(out.sums) and set(maxima) == set(out.maxima)


def test_a_loss_that_exits_on_values_is_named_and_ends_no_process_with_0():
    algorithm = AlgorithmSection(policy_loss=f"{HERE}:exits_on_values")
    check_policy_loss(algorithm)
    rows = loss_rows(vector(-1.0), vector(-1.0), vector(1.0))
    with pytest.raises(
        ValueError, match=rf"^--policy-loss {HERE}:exits_on_values: raised SystemEx"
    ):
        microbatch_loss(configured_loss(algorithm), rows, algorithm)


def held(name):
    algorithm = AlgorithmSection(policy_loss=f"{HERE}:{name}", entropy_coef=0.01)
    loss = configured_loss(algorithm)
    return GuardedLoss(loss, algorithm, metric_names(loss, algorithm)), algorithm


def with_entropy(rows, algorithm):
    found = ppo(rows, algorithm)
    return replace(found, loss=found.loss + rows.log_probs.exp() * rows.entropy)


def test_a_users_loss_that_is_held_has_the_gradients_that_it_has_alone():
    for loss in (held("with_entropy")[0], with_entropy):
        new, entropy = leaf(-1.0, -2.0, -3.0), leaf(0.5, 0.25, 0.125)
        rows = loss_rows(new, vector(-1.1, -1.9, -3.0), vector(1.0, -2.0, 0.5))
        out = microbatch_loss(loss, replace(rows, entropy=entropy), held("with_entropy")[1])
        out.loss.backward()
        found = [new.grad, entropy.grad, out.loss.detach()]
        if loss is with_entropy:
            assert all(map(torch.equal, found, before))
        before = found


_calls = []


def fails_on_values(rows, algorithm):
    if rows.log_probs.device.type != "meta":
        _calls.append(1)
        raise KeyError("gold")
    return ppo(rows, algorithm)


def test_a_users_loss_that_has_failed_is_named_once_and_not_called_again():
    loss, algorithm = held("fails_on_values")
    _calls.clear()
    for _ in range(2):
        rows = loss_rows(leaf(-1.0), vector(-1.0), vector(1.0))
        out = microbatch_loss(loss, rows, algorithm)
        assert out.loss.isnan() and out.sums["clipped"].isnan()
    (error,) = loss.errors
    assert error.startswith(
        f"--policy-loss {HERE}:fails_on_values: raised KeyError: 'gold' (test_losses.py:"
    )
    assert len(_calls) == 1


def on_values(change):
    def loss(rows, algorithm):
        found = ppo(rows, algorithm)
        return found if rows.log_probs.device.type == "meta" else change(found)

    return loss


lacks_a_metric = on_values(lambda found: replace(found, sums={}))
gives_a_number = on_values(lambda found: replace(found, sums={**found.sums, "clipped": 1.0}))
loses_the_gradient = on_values(lambda found: replace(found, loss=found.loss.detach()))


@pytest.mark.parametrize(
    "name, message",
    [
        ("lacks_a_metric", "returned sums and maxima"),
        ("gives_a_number", "returned 1.0 as clipped"),
        ("loses_the_gradient", "returned a loss without gradient"),
    ],
)
def test_a_users_loss_that_returns_other_things_on_values_than_on_trial_is_named(name, message):
    loss, algorithm = held(name)
    out = microbatch_loss(loss, loss_rows(leaf(-1.0), vector(-1.0), vector(1.0)), algorithm)
    assert out.loss.isnan()
    assert loss.errors[0].startswith(f"--policy-loss {HERE}:{name}: {message}")


@pytest.mark.parametrize(
    "name, message",
    [
        ("ppa", r"^--policy-loss ppa: unknown, expected one of cispo.*mean ppo\?$"),
        (f"{HERE}:absent", f"{HERE} has no absent"),
        (f"{HERE}:CLIP", "expected a function"),
        (
            f"{HERE}:takes_rows_only",
            r"found a function \(rows\), expected a function \(rows, algorithm\)",
        ),
        (f"{HERE}:returns_a_tensor", "returned Tensor, expected a RowLoss"),
        (f"{HERE}:returns_a_sum", r"a loss of shape \[\] for \[3\] rows"),
        (f"{HERE}:without_gradient", "requires_grad False: expected"),
        (f"{HERE}:reads_a_value", "on rows of a meta device: raised "),
        (f"{HERE}:takes_a_name", "metrics entropy exist already"),
        (f"{HERE}:metric_of_rows", r"metric mine has shape \[3\]"),
    ],
)
def test_a_name_without_a_fitting_loss_is_refused_at_start_up(name, message):
    with pytest.raises(ValueError, match=message) as refused:
        check_policy_loss(AlgorithmSection(policy_loss=name))
    assert len(str(refused.value).splitlines()) == 1
