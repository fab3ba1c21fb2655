"""The weight of the routers' auxiliary losses: what was configured, whatever share of the rows is trained.

Megatron multiplies an auxiliary loss by rows, prompts included, and divides all gradients by the loss
tokens of the step.  The loss then weighs rows / loss tokens times what was configured.  Here a
load-balancing loss counts as a mean over the step's microbatches (``seq_aux_loss``: over its sequences), weighted
by their rows, and the z-loss as a mean over its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
)
from megatron.core.transformer.moe.router import TopKRouter

from r3train.patches import patch
from r3train.trainer.megatron.replay import in_recomputation
from r3train.types import RankSlice, RankTopology

_WEIGHT = "auxiliary losses would weigh rows / loss tokens times what was configured"
_SEQUENCES = "seq_aux_loss would take a pack of sequences for one"


def _token_counts(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any, Any]:
    """Megatron's counts of a router's call; a pack of padding only counts as 1 token.

    Megatron divides by them.  A data-parallel rank without a sample would make NaN of all gradients.
    """
    per_expert, local, total = get_tokens_per_expert_and_token_count(*args, **kwargs)
    return per_expert, local, total.clamp(min=1) if torch.is_tensor(total) else total


class AuxiliaryLosses:
    """Takes the place of Megatron's weighing in every router of a rank's chunks.

    without_padding: the routers leave out padding rows, as they do under replay.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        topology: RankTopology,
        device: torch.device,
        *,
        without_padding: bool,
    ):
        self._topology = topology
        self._device = device
        self._without_padding = without_padding
        self._loss_tokens_per_row: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None  # of this rank in the router's call
        # chunk -> cu_seqlens int32[B + 1] of the pack that runs forward, and of the one that autograd walks back
        self._forward: dict[torch.nn.Module, torch.Tensor] = {}
        self._backward: dict[torch.nn.Module, torch.Tensor] = {}
        self._routers = {
            m: chunk
            for chunk in chunks
            for m in chunk.modules()
            if isinstance(m, TopKRouter)
            and (m.is_aux_loss_enabled() or m.config.moe_z_loss_coeff is not None)
        }
        for chunk in set(self._routers.values()):
            chunk.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
            chunk.register_forward_hook(self._expect_backward)
        patch(
            router_module,
            "get_tokens_per_expert_and_token_count",
            _token_counts,
            expects="(routing_map, reduce_group, topk=None, with_padding_mask=False)",
            why="a count of 0 tokens makes NaN of all gradients",
        )
        for router in self._routers:
            patch(
                router,
                "attach_and_log_load_balancing_loss",
                self._attach,
                expects="(activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group,"
                " needs_dp_avg=True, valid_token_count=None)",
                why=_WEIGHT,
            )
            patch(
                router,
                "_apply_seq_aux_loss",
                partial(self._apply_sequence_loss, router),
                expects="(probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask=False)",
                why=_SEQUENCES,
            )
            z_loss, expects = partial(self._begin_call, router), "(logits, padding_mask=None)"
            patch(router, "apply_z_loss", z_loss, expects=expects, why=_WEIGHT)

    def begin_step(self, slices: Sequence[RankSlice]) -> None:
        """Count the step's rows and loss tokens; a collective of the pipeline stage."""
        if not self._routers:
            return
        real = self._without_padding
        rows = sum(int((s.route_uids >= 0).sum()) if real else len(s.route_uids) for s in slices)
        # tensor ranks have rows of their own in the routers, and all the loss tokens
        tokens = sum(int(s.loss_mask.sum()) for s in slices) / self._topology.tp_size
        counts = torch.tensor([tokens, rows], dtype=torch.float64, device=self._device)
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(counts, group=group)
        self._loss_tokens_per_row = (counts[0] / counts[1].clamp_min(1)).float()

    def _attach(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: dist.ProcessGroup,
        needs_dp_avg: bool = True,
        valid_token_count: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attach this rank's share of a load-balancing loss to its router's probabilities."""
        # valid_token_count is of no use: this rank's rows, or its group's where there is a mask
        rows = self._rows.clone()
        dist.all_reduce(rows, group=reduce_group)  # of the microbatch, on all ranks that share it
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * rows * self._loss_tokens_per_row)

    def _begin_forward(self, chunk: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._forward[chunk] = kwargs["packed_seq_params"].cu_seqlens_q

    def _expect_backward(self, chunk: torch.nn.Module, args: tuple, out: torch.Tensor) -> None:
        if out.requires_grad:
            pack = {chunk: self._forward[chunk]}
            # fires before any recomputation below the chunk's output
            out.register_hook(lambda _: self._backward.update(pack))

    def _apply_sequence_loss(
        self,
        router: TopKRouter,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Attach this rank's share of the load-balancing loss of each sequence, weighted by its rows.

        scores_for_aux_loss: float32[m, E].  routing_map: bool[m, E].  Both are 0 in rows that a mask leaves out.
        """
        coeff = router.get_aux_loss_coeff("seq_aux_loss")
        if coeff == 0:
            return probs
        packs = self._backward if in_recomputation() else self._forward
        # context-parallel ranks hold the same share of each sequence
        ends = packs[self._routers[router]][1:] // self._topology.cp_size
        first = self._topology.tp_rank * seq_length if self._topology.sequence_parallel else 0
        rows = torch.arange(first, first + seq_length, dtype=ends.dtype, device=ends.device)
        sequences = torch.searchsorted(ends, rows, right=True)
        load = scores_for_aux_loss.new_zeros(len(ends), scores_for_aux_loss.shape[1])
        load.index_add_(0, sequences, routing_map.to(load.dtype))
        dist.all_reduce(load, group=router.tp_cp_group)
        share = load / load.sum(1, keepdim=True).clamp_min(1)  # [B, E]
        balance = router.config.num_moe_experts * (share[sequences] * scores_for_aux_loss).sum()
        loss = coeff * balance  # a sequence's loss times its rows, summed
        return MoEAuxLossAutoScaler.apply(probs, loss * self._loss_tokens_per_row)

    def _begin_call(
        self, router: TopKRouter, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Count the rows of a router's call, which begins here, and attach the z-loss of this rank's.

        logits: float32[m, E].  The z-loss is that of arXiv 2202.08906 eq. 5.
        """
        if not router.training or not torch.is_grad_enabled():
            return logits
        real = torch.ones_like(logits[:, 0])
        if padding_mask is not None:
            real = real.masked_fill(padding_mask, 0)
        self._rows = real.sum()
        coeff = router.config.moe_z_loss_coeff
        if coeff is None:
            return logits
        z_loss = (torch.logsumexp(logits, dim=-1).square() * real).sum()
        return MoEAuxLossAutoScaler.apply(logits, z_loss * coeff * self._loss_tokens_per_row)
