"""The learning rule."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from r3train.config.section import Section


class AlgorithmSection(Section):
    """How rewards become a loss."""

    title: ClassVar[str] = "Algorithm"

    advantage_estimator: str = "grpo"
    """How rewards become advantages: a name of docs/extending.md, or module:function."""
    policy_loss: str = "ppo"
    """How advantages become a loss: a name of docs/extending.md, or module:function."""
    grpo_std_normalization: bool = True
    """Divide a group's centred rewards by their standard deviation."""
    eps_clip: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped below 1 - eps_clip."""
    eps_clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped above 1 + eps_clip_high; unset means eps_clip."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the reference; 0 loads no reference."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    use_tis: bool = False
    """Truncated importance sampling of the actor against the rollout log-probs."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Upper bound of the importance weight."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Lower bound of the importance weight."""

    @property
    def clip_high(self) -> float:
        """The upper clip with its default resolved."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def needs_reference(self) -> bool:
        """Whether a KL reference model is held."""
        return self.kl_loss_coef != 0
