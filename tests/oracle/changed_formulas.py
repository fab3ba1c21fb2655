"""A planted bug in each formula of the learning rule: one line of production code, changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Change:
    """``old`` in a function's source becomes ``new``; it shows under a rule with these settings."""

    function: str  # module:function, below r3train
    old: str
    new: str
    under: dict[str, Any] = field(default_factory=dict)


_GRPO = "algo.advantages.grpo:grpo"
_AGGREGATION = "algo.trajectories:loss_weights"
_SURROGATE = "algo.losses.ppo:clipped_surrogate"
_KL = "algo.divergence:kl_estimate"
_WEIGHTS = "algo.corrections:rollout_weights"
_MASKS = "algo.corrections:kept_rows"
_LOSS = "algo.policy_loss:microbatch_loss"
_SHAPED = "algo.trajectories:shaped_rewards"
_K2, _K3, _K3_PLUS = ({"kl_loss_type": kind} for kind in ("k2", "k3", "k3+"))


def _masked(name: str) -> dict[str, Any]:
    return {"rollout_rs": name}


CHANGES = {
    # advantages
    "grpo_std_of_the_population": Change(
        _GRPO, "ddof=1", "ddof=0", {"advantage_estimator": "grpo"}
    ),
    "rloo_against_the_mean_of_all": Change(
        "algo.advantages.rloo:rloo", "n / (n - 1) * ", "", {"advantage_estimator": "rloo"}
    ),
    "returns_not_discounted": Change(
        "algo.advantages.reinforce_plus_plus:reinforce_plus_plus",
        "algorithm.gamma",
        "1.0",
        {"advantage_estimator": "reinforce_plus_plus"},
    ),
    "baseline_not_subtracted": Change(
        "algo.advantages.reinforce_plus_plus:reinforce_plus_plus_baseline",
        "centred(rewards)",
        "rewards",
        {"advantage_estimator": "reinforce_plus_plus_baseline"},
    ),
    "max_rl_not_over_the_mean": Change(
        "algo.advantages.max_rl:max_rl",
        " / np.where(positive, divisor, 1.0)",
        "",
        {"advantage_estimator": "max_rl"},
    ),
    "gdpo_rewards_not_over_their_spread": Change(
        "algo.advantages.gdpo:gdpo",
        " / (key_rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)",
        "",
        {"advantage_estimator": "gdpo"},
    ),
    "whitened_without_the_mean": Change(
        "algo.advantages.building_blocks:whitened",
        "(values - mean) * scale",
        "values * scale",
        {"advantage_estimator": "reinforce_plus_plus"},
    ),
    "overlong_pays_short_answers": Change(
        _SHAPED,
        "np.maximum(lengths - (max_response_len - buffer), 0.0)",
        "(lengths - (max_response_len - buffer))",
        {"overlong_buffer_len": 8},
    ),
    "length_penalty_not_a_share": Change(
        _SHAPED,
        "length_penalty_coef * lengths / max_response_len",
        "length_penalty_coef * lengths",
        {"length_penalty_coef": 0.4},
    ),
    "whole_answers_masked": Change(
        "algo.trajectories:_masked",
        'finish_reason == "length"',
        'finish_reason == "stop"',
        {"mask_truncated": True},
    ),
    # losses
    "ppo_takes_the_smaller_loss": Change(
        _SURROGATE,
        "torch.maximum(unclipped",
        "torch.minimum(unclipped",
        {"policy_loss": "ppo", "eps_clip_c": None},
    ),
    "dual_clip_for_good_rows": Change(
        _SURROGATE,
        "above = (rows.advantages < 0) & (",
        "above = (rows.advantages > 0) & (",
        {"policy_loss": "ppo", "eps_clip_c": 1.04},
    ),
    "gspo_ratio_of_the_sum": Change(
        "algo.losses.ppo:gspo",
        "rows.sample_mean(",
        "rows.sample_sum(",
        {"policy_loss": "gspo"},
    ),
    "cispo_weight_with_gradient": Change(
        "algo.losses.cispo:cispo", ".exp().detach()", ".exp()", {"policy_loss": "cispo"}
    ),
    "dppo_tv_bound_never_reached": Change(
        "algo.losses.dppo:dppo_tv",
        "(p - q).abs()",
        "0 * p",
        {"policy_loss": "dppo_tv"},
    ),
    "dppo_kl_with_the_other_sign": Change(
        "algo.losses.dppo:dppo_kl",
        "_dppo(divergence",
        "_dppo(-divergence",
        {"policy_loss": "dppo_kl"},
    ),
    "dppo_drops_rows_that_come_back": Change(
        "algo.losses.dppo:_dppo",
        "away & (divergence",
        "~away & (divergence",
        {"policy_loss": "dppo_tv"},
    ),
    "dppo_without_its_square": Change(
        "algo.losses.dppo:_dppo",
        " + _SQUARE_COEF * gap.square()",
        "",
        {"policy_loss": "dppo_tv"},
    ),
    "sft_of_the_probability": Change(
        "algo.losses.sft:sft",
        "-rows.log_probs",
        "-rows.log_probs.exp()",
        {"loss_type": "sft"},
    ),
    # means
    "token_mean_by_samples": Change(
        _AGGREGATION,
        '"token-mean": 1.0',
        '"token-mean": num_tokens / (num_episodes * num_loss_tokens.clip(1))',
        {"loss_aggregation": "token-mean"},
    ),
    "empty_samples_counted": Change(
        _AGGREGATION,
        "max(np.count_nonzero(num_loss_tokens), 1)",
        "len(num_loss_tokens)",
        {"loss_aggregation": "seq-mean-token-mean"},
    ),
    "sample_sums_over_tokens": Change(
        _AGGREGATION,
        '-sum": num_tokens / num_episodes',
        '-sum": 1.0',
        {"loss_aggregation": "seq-mean-token-sum"},
    ),
    "constant_is_the_longest_answer": Change(
        _AGGREGATION,
        "* max_response_len",
        "* num_loss_tokens.max()",
        {"loss_aggregation": "constant"},
    ),
    # KL
    "k1_of_the_reference": Change(
        _KL, "        return ratio\n", "        return -ratio\n", {"kl_loss_type": "k1"}
    ),
    "k2_not_halved": Change(_KL, "return ratio.square() / 2", "return ratio.square()", _K2),
    "k3_of_the_reference": Change(
        "algo.divergence:k3_kl",
        "log_ratio(ref_log_probs, log_probs)",
        "log_ratio(log_probs, ref_log_probs)",
        _K3,
    ),
    "k3_plus_with_the_gradient_of_k3": Change(
        _KL, "return k3.detach() + k2 - k2.detach()", "return k3", _K3_PLUS
    ),
    "ratio_of_the_kl_with_gradient": Change(
        _LOSS,
        "rows.old_log_probs).exp().detach()",
        "rows.old_log_probs).exp()",
        {"use_unbiased_kl": True},
    ),
    "reward_pays_the_reference": Change(
        "loop.kl_reward:held_ratios",
        "log_ratio(old, reference.float())",
        "log_ratio(reference.float(), old)",
        {"kl_coef": 0.05},
    ),
    # corrections
    "weight_of_the_engine": Change(
        _WEIGHTS,
        "rows.old_log_probs, rows.rollout_log_probs",
        "rows.rollout_log_probs, rows.old_log_probs",
        {"rollout_is": "token"},
    ),
    "sequence_weight_of_the_mean": Change(
        _WEIGHTS, "rows.sample_sum(d)", "rows.sample_mean(d)", {"rollout_is": "sequence"}
    ),
    "geometric_weight_of_the_sum": Change(
        _WEIGHTS, "rows.sample_mean(d)", "rows.sample_sum(d)", {"rollout_is": "geometric"}
    ),
    "small_weights_stay_small": Change(
        _WEIGHTS,
        "ratio.clamp(low, high)",
        "ratio.clamp(max=high)",
        {"rollout_is": "token", "rollout_is_mode": "truncate"},
    ),
    "small_weights_not_masked": Change(
        _WEIGHTS,
        "masked_fill(above | below",
        "masked_fill(above",
        {"rollout_is": "token", "rollout_is_mode": "mask"},
    ),
    "anchor_is_the_old_actor": Change(
        _LOSS,
        "old_log_probs=rows.rollout_log_probs",
        "old_log_probs=rows.old_log_probs",
        {"ratio_anchor": "rollout"},
    ),
    "mask_k1_of_the_actor": Change(_MASKS, '"k1": -d', '"k1": d', _masked("token_k1")),
    "mask_k2_not_halved": Change(_MASKS, "d.square() / 2", "d.square()", _masked("token_k2")),
    "mask_k3_of_the_actor": Change(_MASKS, "k3_kl(-d,", "k3_kl(d,", _masked("token_k3")),
    "mask_without_a_lower_bound": Change(
        _MASKS, "(value >= low) & (value <= high)", "value <= high", _masked("token_k1")
    ),
    "mask_sum_is_a_mean": Change(
        _MASKS, '"seq_sum": rows.sample_sum', '"seq_sum": rows.sample_mean', _masked("seq_sum_k1")
    ),
    "mask_mean_is_a_sum": Change(
        _MASKS,
        '"seq_mean": rows.sample_mean',
        '"seq_mean": rows.sample_sum',
        _masked("seq_mean_k2"),
    ),
    "mask_largest_is_a_sum": Change(
        _MASKS, '"seq_max": rows.sample_max', '"seq_max": rows.sample_sum', _masked("seq_max_k3")
    ),
    "opsm_of_samples_that_came_nearer": Change(
        _MASKS,
        "rows.old_log_probs - rows.log_probs",
        "rows.log_probs - rows.old_log_probs",
        {"opsm_delta": 0.002},
    ),
    "ess_of_weights_not_over_their_mean": Change(
        "algo.corrections:mismatch_metrics", "ratio**2 / square", "1.0 / square", {"min_ess": 0.85}
    ),
}


@contextmanager
def planted(change: Change) -> Iterator[None]:
    """Run a function with its changed line as long as the block runs, wherever it was imported."""
    place, _, called = change.function.partition(":")
    module = import_module(f"r3train.{place}")
    function = getattr(module, called)
    source = inspect.getsource(function)
    assert source.count(change.old) == 1, f"{change.old!r} in {change.function}"
    scope = dict(vars(module))
    exec(source.replace(change.old, change.new), scope)  # noqa: S102 - the source is ours
    was = function.__code__
    function.__code__ = scope[called].__code__
    try:
        yield
    finally:
        function.__code__ = was
