"""The learning rule."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from r3train.config.section import Section


class AlgorithmSection(Section):
    """From rewards to a loss."""

    title: ClassVar[str] = "Algorithm"

    advantage_estimator: str = "grpo"
    """Rule that makes advantages of rewards: a name of docs/extending.md, or module:function."""
    policy_loss: str = "ppo"
    """Rule that makes a loss of advantages: a name of docs/extending.md, or module:function."""
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
    """Reward that an answer of rollout_max_response_len tokens loses; a shorter one loses its share."""
    mask_truncated: bool = False
    """Do not train on answers that were cut at their longest length; their rewards still count for
    their group."""
    eps_clip: float = Field(default=0.2, ge=0, lt=1)
    """Lower clip: a ratio below 1 - eps_clip counts as 1 - eps_clip."""
    eps_clip_high: float | None = Field(default=None, ge=0)
    """Upper clip: a ratio above 1 + eps_clip_high counts as that; unset means eps_clip."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL divergence from the reference; 0 loads no reference."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    use_tis: bool = False
    """Truncated importance sampling (TIS): weight each token by actor over rollout probability."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Upper bound of the TIS weight."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Lower bound of the TIS weight."""

    @property
    def clip_high(self) -> float:
        """eps_clip_high with its default resolved."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def needs_reference(self) -> bool:
        """True when the KL reference is loaded."""
        return self.kl_loss_coef != 0
