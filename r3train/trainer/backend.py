"""What the loop asks of a trainer; ``megatron.actor`` is the one implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from r3train.types import RankSlice, RankTopology, ReplayEvidence


class TrainerBackend(Protocol):
    """An actor spread over ranks: every method is a collective, called by all of them."""

    topology: RankTopology

    def compute_log_probs(
        self,
        slices: Sequence[RankSlice],
        replay_pass: str | None,
        temperature: float | None = None,
    ) -> dict[int, torch.Tensor]:
        """Log-probs of each microbatch's labels, {microbatch_id: float32[n]}.

        replay_pass: old_log_prob, ref_log_prob, or None to let the routers choose for themselves;
        temperature: the rollout's unless given.

        Held by the last pipeline stage and laid out as its slices are; empty on other stages.
        """
        ...

    def train_step(
        self,
        slices: Sequence[RankSlice],
        old_log_probs: dict[int, torch.Tensor],
        ref_log_probs: dict[int, torch.Tensor] | None,
    ) -> dict[str, float]:
        """One optimizer step over all microbatches of the global batch; its metrics, on all ranks."""
        ...

    def collect_evidence(self, step: int) -> list[ReplayEvidence]:
        """What this rank's routers did since the last call; empty with the check off."""
        ...

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors under Hugging Face names; every rank drains it."""
        ...
