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
from r3train.trainer.megatron.kept_tokens import KeptTokens
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
    kept: KeptTokens | None  # set where the labels were drawn among kept tokens

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
            kept=KeptTokens.of(s, device),
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


def sampled_logits(
    logits: torch.Tensor,
    batch: DeviceSlice,
    temperature: float,
    model: torch.nn.Module,
    replay: RoutingReplayManager | None,
) -> torch.Tensor:
    """The logits from which the engine drew, float32[n, vocab / tp].

    logits: [1, n, vocab / tp].  SGLang divides them by the temperature, and with top-k and top-p draws
    among the tokens that it keeps then.  With the R3 check on the evidence counts what was left.
    """
    scaled = logits[0].float()
    if temperature != 1.0:
        scaled = scaled / temperature
    if batch.kept is None:
        return scaled
    left = batch.kept.left_of(scaled)
    if replay is not None and replay.recorder is not None:
        replay.recorder.record_kept_tokens(
            batch.kept,
            scaled=scaled.detach(),
            left=left.detach(),
            labels=batch.labels,
            vp_stage=unwrap(model).vp_stage or 0,
            layer_number=unwrap(model).config.num_layers + 1,
        )
    return left


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-prob of each row's label, float32[n]; logits: float32[n, vocab / tp], overwritten."""
    # the vocabulary-parallel loss works in place on its [s, b, v] input
    return -vocab_parallel_cross_entropy(logits[:, None].contiguous(), labels[:, None])[:, 0]


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


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row's next token, float32[n]; logits: float32[n, vocab / tp]."""
    return _VocabParallelEntropy.apply(logits)


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

    def collect(
        batch: DeviceSlice, model: torch.nn.Module, logits: torch.Tensor, non_loss_data: bool = True
    ) -> dict:
        drawn_from = sampled_logits(logits, batch, temperature, model, replay)
        return {batch.microbatch_id: token_log_probs(drawn_from, batch.labels)}

    def step(iterator: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = batches[next(iterator)]
        return run_chunk(batch, model, replay), partial(collect, batch, model)

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

    def loss_func(batch: DeviceSlice, model: torch.nn.Module, logits: torch.Tensor) -> tuple:
        drawn_from = sampled_logits(logits, batch, temperature, model, replay)
        # the entropy first: token_log_probs overwrites the logits
        with torch.set_grad_enabled(algorithm.entropy_coef > 0):
            entropy = token_entropy(drawn_from)
        log_probs = token_log_probs(drawn_from, batch.labels)
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
        return run_chunk(batch, model, replay), partial(loss_func, batch, model)

    return step
