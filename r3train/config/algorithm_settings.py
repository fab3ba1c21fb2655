"""The learning rule."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from r3train.config.section import Section


Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]


def _bounds(name: str, text: str) -> tuple[float, float]:
    """Read a bound of ``rollout_rs_threshold``."""
    is_ratio = name.endswith("k1")
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    usable = len(numbers) in ((1, 2) if is_ratio else (1,))
    if not usable or not all(0 < n < math.inf for n in numbers):
        expected = "LOWER_UPPER or a number" if is_ratio else "a number"
        raise ValueError(f"rollout_rs_threshold {text!r} of {name}: expected {expected} above 0")
    if not is_ratio:
        return -math.inf, numbers[0]
    low, high = numbers if len(numbers) == 2 else sorted((1 / numbers[0], numbers[0]))
    if low > high:
        raise ValueError(f"rollout_rs_threshold {text!r} of {name}: the lower bound is the larger")
    return math.log(low), math.log(high)


class AlgorithmSection(Section):
    """From rewards to a loss."""

    title: ClassVar[str] = "Algorithm"

    loss_type: Literal["policy", "sft"] = "policy"
    """policy: reinforcement.  sft: supervised fine-tuning without a server, on the assistant's tokens of
    prompt_data's conversations (input_key: chat messages), or on those of --replay-rollouts."""
    advantage_estimator: str = "grpo"
    """Rule that makes advantages of rewards: a name of docs/algorithms.md, or module:function."""
    reward_keys: tuple[str, ...] = Field(default=(), strict=False)
    """Keys of a reward that returns a table: the reward is the weighted sum of their numbers, and gdpo
    compares each by itself."""
    reward_weights: tuple[float, ...] = Field(default=(), strict=False)
    """Weight of each of reward_keys; unset: 1 each."""
    policy_loss: str = "ppo"
    """Rule that makes a loss of advantages: a name of docs/algorithms.md, or module:function."""
    grpo_std_normalization: bool = True
    """grpo: divide a group's centred rewards by their standard deviation."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """reinforce_plus_plus: discount of the reward for each token before the last."""
    normalize_advantages: bool = False
    """Shift and scale the advantages of a rollout's loss tokens to mean 0 and variance 1."""
    overlong_buffer_len: int | None = Field(default=None, ge=1)
    """Soft limit (DAPO): within this many tokens below rollout_max_response_len the reward falls
    linearly, by overlong_penalty_factor at the limit itself; unset: no penalty."""
    overlong_penalty_factor: float = Field(default=1.0, gt=0)
    """Penalty of an answer that fills rollout_max_response_len, with overlong_buffer_len."""
    length_penalty_coef: float = Field(default=0.0, ge=0)
    """Reward that an answer of rollout_max_response_len tokens loses; a shorter one loses in proportion."""
    mask_truncated: bool = False
    """Do not train on answers that were cut at their longest length; their rewards still count for
    their group."""
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"
    ] = "token-mean"
    """Mean that makes the step's loss of its rows: over all tokens; over episodes of their token
    means; over episodes of their token sums; or of these sums divided by rollout_max_response_len."""
    eps_clip: float = Field(default=0.2, ge=0)
    """Lower clip: ratios are clipped from below at 1 - eps_clip; values >= 1 disable the lower clip."""
    eps_clip_high: float | None = Field(default=None, ge=0)
    """Upper clip: a ratio above 1 + eps_clip_high counts as that; unset means eps_clip."""
    eps_clip_c: float | None = Field(default=None, ge=1)
    """ppo, gspo: a row with a negative advantage A loses at most -eps_clip_c A (dual clip)."""
    dppo_delta: float = Field(default=0.2, gt=0)
    """dppo_tv, dppo_kl: divergence from the engine beyond which a row that moves away is dropped."""
    ratio_anchor: Literal["old", "rollout"] = "old"
    """Denominator of the loss's ratio: the actor before the rollout's first optimizer step, or the
    engine."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference in the loss; without it and kl_coef no reference
    is loaded."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Put the KL divergence from the reference into the reward instead: each token loses kl_coef times
    old - reference log-prob."""
    ref_routing: Literal["replay", "native"] = "replay"
    """Routes of the reference's pass under R3: the rollout's, or those that its own routers choose."""
    kl_loss_type: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Estimator of that KL; k3+ has the value of k3 and the gradient of k2."""
    use_unbiased_kl: bool = False
    """Weight that KL by the ratio new / old, for tokens that an older policy sampled; meant for k2 and k3+."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    use_tis: bool = False
    """Truncated importance sampling (TIS): an alias of --rollout-is token."""
    rollout_is: Literal["none", "token", "sequence", "geometric"] = "none"
    """Weight each token by actor over engine probability: its own, that of its whole sample, or the
    sample's geometric mean."""
    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight outside tis_clip_low and tis_clip: hold it at the bound, or make it 0."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Upper bound of that weight."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Lower bound of that weight."""
    rollout_rs: tuple[Rejection, ...] = Field(default=(), strict=False)
    """Reject rows by the gap between actor and engine; a row stays if each of these keeps it.  A rejected
    row has no policy loss, and still counts in the loss's mean."""
    rollout_rs_threshold: tuple[str, ...] = Field(default=(), strict=False)
    """Bound of each rollout_rs, or one for all: LOWER_UPPER of the ratio for k1 (a single number b
    means 1/b to b), the largest estimate for k2 and k3."""
    opsm_delta: float | None = Field(default=None, gt=0)
    """Drop rows with a negative advantage if their sample's mean of old - new log-prob exceeds this."""
    use_opd: bool = False
    """On-policy distillation: subtract from each token's advantage how much likelier the actor finds the
    token than a teacher does.  A reward is then optional."""
    opd_type: Literal["sglang", "megatron"] | None = None
    """Teacher of --use-opd: served by SGLang (--opd-teacher-url) or held by the ranks
    (--opd-teacher-load)."""
    opd_kl_coef: float = Field(default=1.0, gt=0)
    """Factor of that difference of log-probs."""
    min_ess: float = Field(default=0.0, ge=0, le=1)
    """Skip an optimizer step whose effective share of samples (train/ess) is below this.  The run ends after
    max_bad_steps rollouts in a row without a step (max_weight_staleness + 1, if that is more)."""

    @property
    def weight_of_key(self) -> dict[str, float]:
        """reward_keys with their weights."""
        return dict(zip(self.reward_keys, self.reward_weights or (1.0,) * len(self.reward_keys)))

    @property
    def clip_high(self) -> float:
        """eps_clip_high with its default resolved."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def importance_level(self) -> str:
        """rollout_is with its alias use_tis resolved."""
        return "token" if self.use_tis else self.rollout_is

    @property
    def rejection_bounds(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest estimate that each of rollout_rs keeps; raises ValueError naming it."""
        texts = self.rollout_rs_threshold
        if len(texts) == 1:
            texts = texts * len(self.rollout_rs)
        if len(texts) != len(self.rollout_rs):
            raise ValueError(
                f"rollout_rs_threshold has {len(texts)} entries for {len(self.rollout_rs)} of"
                " rollout_rs, expected one each or one for all"
            )
        return {name: _bounds(name, text) for name, text in zip(self.rollout_rs, texts)}

    @property
    def corrects_rollouts(self) -> bool:
        """True when anything holds the gap between the engine's log-probs and the actor's."""
        return (
            self.importance_level != "none"
            or bool(self.rollout_rs)
            or self.ratio_anchor == "rollout"
            or self.is_dppo
        )

    @property
    def is_dppo(self) -> bool:
        """True for a loss against the engine itself, with a bound of its own."""
        return self.policy_loss in ("dppo_tv", "dppo_kl")

    @property
    def needs_reference(self) -> bool:
        """True when the KL reference is loaded."""
        return self.kl_loss_coef != 0 or self.kl_coef != 0

    @property
    def holds_teacher(self) -> bool:
        """True when the ranks hold a teacher's weights (--opd-type megatron)."""
        return self.use_opd and self.opd_type == "megatron"

    @property
    def asks_teacher(self) -> bool:
        """True when samples carry the log-probs of a teacher that a server holds (--opd-type sglang)."""
        return self.use_opd and self.opd_type == "sglang"
