"""One microbatch through one model chunk: log-probs, or the policy loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from r3train.algo.corrections import log_prob_gap_histogram
from r3train.algo.losses.registry import configured_loss
from r3train.algo.policy_loss import microbatch_loss
from r3train.algo.rows import LossRows
from r3train.config.algorithm import AlgorithmSection
from r3train.trainer.megatron.hf_bridge import unwrap
from r3train.trainer.megatron.replay import RoutingReplayManager
from r3train.types import RankSlice


@dataclass
class DeviceSlice:
    """A rank's slice on the device; each stream is int64, bool or float32 [n]."""

    microbatch_id: int
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    advantages: torch.Tensor
    samples: torch.Tensor  # int64[n], the row's sequence in the pack, the tail among them
    loss_weights: torch.Tensor  # float32[sequences]
    packed: PackedSeqParams

    @classmethod
    def of(cls, s: RankSlice, device: torch.device) -> DeviceSlice:
        """Copy the slice's streams to the device."""

        def move(x: Any) -> torch.Tensor:
            return torch.from_numpy(x).to(device, non_blocking=True)

        cu_seqlens = move(s.cu_seqlens_padded)
        # every context-parallel rank holds the same share of each sequence
        padded = np.diff(s.cu_seqlens_padded)
        own = padded // (int(s.cu_seqlens_padded[-1]) // s.num_rows)
        return cls(
            microbatch_id=s.microbatch_id,
            tokens=move(s.tokens),
            labels=move(s.labels),
            positions=move(s.positions),
            loss_mask=move(s.loss_mask),
            rollout_log_probs=move(s.rollout_log_probs),
            advantages=move(s.advantages),
            samples=move(np.repeat(np.arange(len(own)), own)),
            loss_weights=move(s.loss_weights),
            # Padding rows count as the tail of their sequence.  Attention is causal: no real token
            # sees them, and all attention backends use the same lengths.
            packed=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=s.max_seqlen,
                max_seqlen_kv=s.max_seqlen,
            ),
        )


def run_chunk(
    batch: DeviceSlice, model: torch.nn.Module, replay: RoutingReplayManager | None
) -> torch.Tensor:
    """Run one chunk forward, and name the microbatch to the replay for forward and backward.

    Returns hidden states, or logits [1, n, vocab / tp] on the last stage.
    """
    vp_stage = unwrap(model).vp_stage or 0
    if replay is not None:
        replay.begin_forward(vp_stage, batch.microbatch_id)
    out = model(
        input_ids=batch.tokens[None],
        position_ids=batch.positions[None],
        attention_mask=None,
        packed_seq_params=batch.packed,
    )
    if replay is not None and out.requires_grad:
        # Fires when autograd reaches this chunk's output, before any recomputation below it.
        out.register_hook(lambda _: replay.begin_backward(vp_stage, batch.microbatch_id))
    return out


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-prob of each row's label at the rollout's temperature, float32[n].

    logits: [1, n, vocab / tp], overwritten.  SGLang samples from logits divided by the temperature,
    and reports the log-probs of those.
    """
    scaled = logits[0].float()
    if temperature != 1.0:
        scaled = scaled / temperature
    # the vocabulary-parallel loss works in place on its [s, b, v] input
    return -vocab_parallel_cross_entropy(scaled[:, None].contiguous(), labels[:, None])[:, 0]


class _VocabParallelEntropy(torch.autograd.Function):
    """Entropy of vocabulary-parallel logits; the gradient is -p (log p + H)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        highest = logits.amax(-1, keepdim=True)
        torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
        weights = (logits - highest).exp()
        total = weights.sum(-1, keepdim=True)
        torch.distributed.all_reduce(total, group=group)
        log_p = logits - highest - total.log()
        p = weights / total
        entropy = -(p * log_p).sum(-1)
        torch.distributed.all_reduce(entropy, group=group)
        ctx.save_for_backward(p, log_p, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        p, log_p, entropy = ctx.saved_tensors
        return -grad[..., None] * p * (log_p + entropy[..., None])


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropy of each row's next token, float32[n]; logits: [1, n, vocab / tp]."""
    return _VocabParallelEntropy.apply(logits[0].float() / temperature)


def _over_context_ranks(values: torch.Tensor, operation: str) -> torch.Tensor:
    """The ``OverRanks`` of rows that context parallelism has cut."""
    if parallel_state.get_context_parallel_world_size() > 1:
        reduce = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}
        group = parallel_state.get_context_parallel_group()
        torch.distributed.all_reduce(values, op=reduce[operation], group=group)
    return values


def make_log_prob_step(
    batches: dict[int, DeviceSlice], replay: RoutingReplayManager | None, temperature: float
) -> Callable:
    """Make a Megatron forward step that returns {microbatch_id: float32[n]} on the last stage."""

    def collect(batch: DeviceSlice, logits: torch.Tensor, non_loss_data: bool = True) -> dict:
        return {batch.microbatch_id: token_log_probs(logits, batch.labels, temperature)}

    def step(iterator: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = batches[next(iterator)]
        return run_chunk(batch, model, replay), partial(collect, batch)

    return step


def make_train_step(
    batches: dict[int, DeviceSlice],
    replay: RoutingReplayManager | None,
    algorithm: AlgorithmSection,
    temperature: float,
    old_log_probs: dict[int, torch.Tensor] | None,
    ref_log_probs: dict[int, torch.Tensor] | None,
) -> Callable:
    """Make a Megatron forward step that returns (loss sum, token count, metric sums).

    Without ``old_log_probs`` those of this very forward stand for them, without gradient.
    With ``calculate_per_token_loss`` Megatron divides the gradients by the global token count.
    """
    policy_loss = configured_loss(algorithm)

    def loss_func(batch: DeviceSlice, logits: torch.Tensor) -> tuple:
        # the entropy first: token_log_probs overwrites the logits
        with torch.set_grad_enabled(algorithm.entropy_coef > 0):
            entropy = token_entropy(logits, temperature)
        log_probs = token_log_probs(logits, batch.labels, temperature)
        old = log_probs.detach() if old_log_probs is None else old_log_probs[batch.microbatch_id]
        rows = LossRows(
            log_probs=log_probs,
            old_log_probs=old,
            # without an engine there is no gap to one
            rollout_log_probs=old if algorithm.loss_type == "sft" else batch.rollout_log_probs,
            advantages=batch.advantages,
            mask=batch.loss_mask,
            entropy=entropy,
            samples=batch.samples,
            loss_weights=batch.loss_weights,
            ref_log_probs=ref_log_probs[batch.microbatch_id] if ref_log_probs else None,
            over_ranks=_over_context_ranks,
        )
        result = microbatch_loss(policy_loss, rows, algorithm)
        report = {
            "sums": result.sums,
            "maxima": result.maxima,
            "gaps": log_prob_gap_histogram(rows.old_log_probs, rows.rollout_log_probs, rows.mask),
        }
        return result.loss, rows.mask.sum().int(), report

    def step(iterator: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = batches[next(iterator)]
        return run_chunk(batch, model, replay), partial(loss_func, batch)

    return step
