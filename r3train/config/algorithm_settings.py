"""The learning rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from r3train.config.requirements import at_most, check, excludes, only_with, Requirement, requires
from r3train.config.section import each_once, Section

if TYPE_CHECKING:
    from r3train.config.run import RunConfig


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

# settings that --loss-type sft reads; every other one of the learning rule has no effect with it
_SFT_SETTINGS = (
    "loss_type",
    "mask_truncated",
    "loss_aggregation",
    "kl_loss_coef",
    "kl_loss_type",
    "entropy_coef",
)

_OF_KL = only_with("kl_loss_coef > 0")
_OF_STEPS = only_with("steps_per_rollout > 1: it compares the actor with itself before the rollout")
_OF_WEIGHTS = only_with("rollout_is = token|sequence|geometric or use_tis or policy_loss = *:*")
_NOT_DPPO = excludes("policy_loss = dppo_tv|dppo_kl: it clips nothing: its bound is --dppo-delta")
_NOT_GDPO = excludes("advantage_estimator = gdpo: it reads the numbers at --reward-keys only")
_TWICE = "rollout_is = token|sequence|geometric or use_tis: the ratio would be corrected twice"
_SGLANG_1 = "SGLang's log-probs of a text are those at 1; or take --opd-type megatron"
_SGLANG_ALL = "SGLang's log-probs of a text are those of the whole vocabulary; or take megatron"


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
    every_field: ClassVar[tuple[Requirement, ...]] = (
        excludes("loss_type = sft: it has no reward and no ratio", but=_SFT_SETTINGS),
    )

    loss_type: Annotated[
        Literal["policy", "sft"],
        requires(
            "n_samples_per_prompt = 1 or replay_rollouts: a conversation is trained once",
            when="sft",
        ),
    ] = "policy"
    """policy: reinforcement.  sft: supervised fine-tuning without a server, on the assistant's tokens of
    prompt_data's conversations (input_key: chat messages), or on those of --replay-rollouts."""
    advantage_estimator: Annotated[
        str, requires("reward_keys: it compares each by itself", when="gdpo")
    ] = "grpo"
    """Rule that makes advantages of rewards: a name of docs/guide/algorithms.md, or module:function."""
    reward_keys: Annotated[tuple[str, ...], AfterValidator(each_once)] = Field(
        default=(), strict=False
    )
    """Keys of a reward that returns a table: the reward is the weighted sum of their numbers, and gdpo
    compares each by itself."""
    reward_weights: Annotated[tuple[float, ...], only_with("reward_keys")] = Field(
        default=(), strict=False
    )
    """Weight of each of reward_keys; unset: 1 each."""
    policy_loss: Annotated[
        str,
        excludes(_TWICE, when="dppo_tv|dppo_kl"),
    ] = "ppo"
    """Rule that makes a loss of advantages: a name of docs/guide/algorithms.md, or module:function."""
    grpo_std_normalization: Annotated[bool, only_with("advantage_estimator = grpo|*:*")] = True
    """grpo: divide a group's centred rewards by their standard deviation."""
    gamma: Annotated[float, only_with("advantage_estimator = reinforce_plus_plus|*:*")] = Field(
        default=1.0, gt=0, le=1
    )
    """reinforce_plus_plus: discount of the reward for each token before the last."""
    normalize_advantages: Annotated[
        bool,
        excludes(
            "advantage_estimator = reinforce_plus_plus|reinforce_plus_plus_baseline|gdpo: it"
            " whitens its advantages already"
        ),
    ] = False
    """Shift and scale the advantages of a rollout's loss tokens to mean 0 and variance 1."""
    overlong_buffer_len: Annotated[
        int | None,
        at_most("rollout_max_response_len"),
        _NOT_GDPO,
    ] = Field(default=None, ge=1)
    """Soft limit (DAPO): within this many tokens below rollout_max_response_len the reward falls
    linearly, by overlong_penalty_factor at the limit itself; unset: no penalty."""
    overlong_penalty_factor: Annotated[float, only_with("overlong_buffer_len")] = Field(
        default=1.0, gt=0
    )
    """Penalty of an answer that fills rollout_max_response_len, with overlong_buffer_len."""
    length_penalty_coef: Annotated[
        float,
        _NOT_GDPO,
    ] = Field(default=0.0, ge=0)
    """Reward that an answer of rollout_max_response_len tokens loses; a shorter one loses in proportion."""
    mask_truncated: bool = False
    """Do not train on answers that were cut at their longest length; their rewards still count for
    their group. Of an agent's sample the answers that were cut lose their loss, the others keep it."""
    loss_aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"
    ] = "token-mean"
    """Mean over the step: of all tokens' losses; of episodes' token means; of episodes' token sums; or of
    these sums divided by rollout_max_response_len."""
    eps_clip: Annotated[
        float,
        _NOT_DPPO,
    ] = Field(default=0.2, ge=0)
    """Lower clip: ratios are clipped from below at 1 - eps_clip; values >= 1 disable the lower clip."""
    eps_clip_high: float | None = Field(default=None, ge=0)
    """Upper clip: a ratio above 1 + eps_clip_high counts as that; unset means eps_clip."""
    eps_clip_c: Annotated[
        float | None, excludes("policy_loss = cispo|dppo_tv|dppo_kl: it has no dual clip")
    ] = Field(default=None, ge=1)
    """ppo, gspo: a row with a negative advantage A loses at most -eps_clip_c A (dual clip)."""
    dppo_delta: Annotated[float, only_with("policy_loss = dppo_tv|dppo_kl|*:*")] = Field(
        default=0.2, gt=0
    )
    """dppo_tv, dppo_kl: divergence from the engine beyond which a row that moves away is dropped."""
    ratio_anchor: Annotated[
        Literal["old", "rollout"],
        excludes("policy_loss = dppo_tv|dppo_kl: it is against the engine as it is"),
        excludes(_TWICE),
    ] = "old"
    """Denominator of the loss's ratio: the actor before the rollout's first optimizer step, or the
    engine."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference in the loss; without it and kl_coef no reference
    is loaded."""
    kl_coef: Annotated[
        float,
        excludes("kl_loss_coef > 0: the KL would count twice, in the reward and in the loss"),
        _NOT_GDPO,
    ] = Field(default=0.0, ge=0)
    """Put the KL divergence from the reference into the reward instead: each token loses kl_coef times
    old - reference log-prob."""
    ref_routing: Annotated[
        Literal["replay", "native"],
        only_with("kl_loss_coef > 0 or kl_coef > 0: there is no reference"),
        only_with("use_rollout_routing_replay"),
    ] = "replay"
    """Routes of the reference's pass under R3: the rollout's, or those that its own routers choose."""
    kl_loss_type: Annotated[Literal["k1", "k2", "k3", "k3+"], _OF_KL] = "k3"
    """Estimator of that KL; k3+ has the value of k3 and the gradient of k2."""
    use_unbiased_kl: Annotated[
        bool,
        _OF_KL,
        _OF_STEPS,
    ] = False
    """Weight that KL by the ratio new / old, for tokens that an older policy sampled; meant for k2 and k3+."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    use_tis: Annotated[
        bool, excludes("rollout_is = sequence|geometric: it is --rollout-is token")
    ] = False
    """Truncated importance sampling (TIS): an alias of --rollout-is token."""
    rollout_is: Literal["none", "token", "sequence", "geometric"] = "none"
    """Weight each token by actor over engine probability: its own, that of its whole sample, or the
    sample's geometric mean."""
    rollout_is_mode: Annotated[
        Literal["truncate", "mask"],
        _OF_WEIGHTS,
    ] = "truncate"
    """Treatment of a weight outside tis_clip_low and tis_clip: hold it at the bound, or make it 0."""
    tis_clip: Annotated[float, _OF_WEIGHTS] = Field(default=2.0, gt=0)
    """Upper bound of the weight of rollout_is."""
    tis_clip_low: Annotated[
        float,
        _OF_WEIGHTS,
        at_most("tis_clip"),
    ] = Field(default=0.0, ge=0)
    """Lower bound of the weight of rollout_is."""
    rollout_rs: Annotated[tuple[Rejection, ...], AfterValidator(each_once)] = Field(
        default=(), strict=False
    )
    """Reject rows by the gap between actor and engine; a row stays if each of these keeps it.  A rejected
    row has no policy loss, and still counts in the loss's mean."""
    rollout_rs_threshold: Annotated[tuple[str, ...], only_with("rollout_rs")] = Field(
        default=(), strict=False
    )
    """Bound of each rollout_rs, or one for all: LOWER_UPPER of the ratio for k1 (a single number b
    means 1/b to b), the largest estimate for k2 and k3."""
    opsm_delta: Annotated[
        float | None,
        _OF_STEPS,
    ] = Field(default=None, gt=0)
    """Drop rows with a negative advantage if their sample's mean of old - new log-prob exceeds this."""
    use_opd: Annotated[bool, requires("opd_type: sglang or megatron")] = False
    """On-policy distillation: subtract from each token's advantage how much likelier the actor finds the
    token than a teacher does.  A reward is then optional."""
    opd_type: Annotated[
        Literal["sglang", "megatron"] | None,
        only_with("use_opd"),
        requires("opd_teacher_load", when="megatron"),
        requires("opd_teacher_url or replay_rollouts", when="sglang"),
        requires(f"rollout_temperature = 1: {_SGLANG_1}", when="sglang"),
        excludes(f"rollout_top_k > 1: {_SGLANG_ALL}", when="sglang"),
    ] = None
    """Teacher of --use-opd: served by SGLang (--opd-teacher-url) or held by the ranks
    (--opd-teacher-load)."""
    opd_kl_coef: Annotated[float, only_with("use_opd")] = Field(default=1.0, gt=0)
    """Factor of that difference of log-probs."""
    min_ess: float = Field(default=0.0, ge=0, le=1)
    """Skip an optimizer step whose effective share of samples (train/ess) is below this.  The run ends after
    max_bad_steps rollouts in a row without a step (max_weight_staleness + 1, if that is more)."""

    @check
    def _bounds_of_clipping(self, run: RunConfig) -> Iterator[str]:
        if self.policy_loss in ("dppo_tv", "dppo_kl") and self.clip_high != self.eps_clip:
            yield (
                f"--eps-clip-high {self.eps_clip_high:g} cannot go with --policy-loss"
                f" {self.policy_loss}: it clips nothing: its bound is --dppo-delta"
            )

    @check
    def _reward_and_bounds(self, run: RunConfig) -> Iterator[str]:
        keys, weights = self.reward_keys, self.reward_weights
        if keys and weights and len(weights) != len(keys):
            yield f"reward_weights has {len(weights)} entries for {len(keys)} reward_keys"
        # recorded rollouts have their rewards
        replaced = run.data.custom_rm_path or run.checkpoint.replay_rollouts
        name = None if replaced else run.data.rm_type
        if keys and name and ":" not in name and name.removeprefix("boxed_") != "remote_rm":
            yield f"--reward-keys needs a reward that returns a table: --rm-type {name} returns a number"
        if self.rollout_rs:
            try:
                self.rejection_bounds
            except ValueError as error:
                yield str(error)

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
