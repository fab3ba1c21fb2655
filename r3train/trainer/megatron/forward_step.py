"""One microbatch through one model chunk: log-probs, or the policy loss and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from r3train.algo.corrections import (
    gap_quantile,
    is_group_sum,
    log_prob_gap_histogram,
    mismatch_metrics,
    NUM_GAP_BINS,
)
from r3train.algo.loss_rows import LossRows, on_this_rank
from r3train.algo.policy_loss import microbatch_loss, PolicyLoss
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.trainer.megatron.actor_routes import ActorRoutes
from r3train.trainer.megatron.hf_weights import unwrap
from r3train.trainer.megatron.log_probs import Draw, log_probs_and_entropy
from r3train.trainer.megatron.replay import RoutingReplayManager
from r3train.trainer.megatron.sampling_mask import SamplingMask
from r3train.types import RankSlice, RankTopology


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
    ages: torch.Tensor  # int64[n]
    row_classes: torch.Tensor | None  # int64[n], None without R3
    packed: PackedSeqParams
    rows: torch.Tensor  # int64[k], ascending, k >= 1: the rows that go through the output layer
    # of these rows, where their labels were sampled within a sampling mask
    kept: SamplingMask | None
    teacher_log_probs: torch.Tensor | None  # set where samples carry them

    @classmethod
    def from_slice(
        cls, s: RankSlice, device: torch.device, *, loss_rows_only: bool = True
    ) -> DeviceSlice:
        """Copy the slice's streams to the device, with its ``loss_rows`` or all rows for the output layer."""

        def move(x: Any) -> torch.Tensor:
            return torch.from_numpy(x).to(device, non_blocking=True)

        cu_seqlens = move(s.cu_seqlens_padded)
        # every context-parallel rank holds the same share of each sequence
        padded = np.diff(s.cu_seqlens_padded)
        lengths = padded // (int(s.cu_seqlens_padded[-1]) // s.num_rows)
        rows = loss_rows(s) if loss_rows_only else np.arange(s.num_rows)
        return cls(
            microbatch_id=s.microbatch_id,
            tokens=move(s.tokens),
            labels=move(s.labels),
            positions=move(s.positions),
            loss_mask=move(s.loss_mask),
            rollout_log_probs=move(s.rollout_log_probs),
            advantages=move(s.advantages),
            samples=move(np.repeat(np.arange(len(lengths)), lengths)),
            loss_weights=move(s.loss_weights),
            ages=move((np.zeros(s.num_rows) if s.ages is None else s.ages).astype(np.int64)),
            row_classes=None if s.row_classes is None else move(s.row_classes.astype(np.int64)),
            # Padding rows count as the tail of their sequence.  Attention is causal: no real token
            # sees them, and all attention backends use the same lengths.
            packed=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=s.max_seqlen,
                max_seqlen_kv=s.max_seqlen,
            ),
            rows=move(rows),
            kept=SamplingMask.from_slice(s, rows, device),
            teacher_log_probs=None if s.teacher_log_probs is None else move(s.teacher_log_probs),
        )

    def over_all_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Scatter values of ``rows``, float32[k], to all rows, float32[n]; the others hold 0."""
        return values.new_zeros(self.labels.shape[0]).index_copy(0, self.rows, values)


def loss_rows(s: RankSlice) -> np.ndarray:
    """Rows with loss or a sampling mask, int64[k], ascending; row 0 where there are none.

    The evidence of sampling masks counts every label that was drawn, in the loss or not.
    """
    needed = s.loss_mask if s.mask_counts is None else s.loss_mask | (s.mask_counts > 0)
    rows = np.flatnonzero(needed)
    # a rank without any takes part in the collectives of the others
    return rows if len(rows) else np.zeros(1, np.int64)


def logits_of_rows(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    context: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Compute the logits of some rows, [1, k, vocab / tp]: the ``output_processor`` of Megatron's GPTModel.

    hidden_states: [n, 1, hidden], with sequence parallelism this rank's share of them.
    context: the rows, int64[k].
    """
    shares_rows = output_layer.sequence_parallel
    if shares_rows:
        # the output layer then adds up the gradients of k rows over the ranks itself
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False
        )
    output_layer.sequence_parallel = False
    try:
        logits, _ = output_layer(hidden_states.index_select(0, context), weight=output_weight)
    finally:
        output_layer.sequence_parallel = shares_rows
    return logits.transpose(0, 1)


def run_chunk(
    batch: DeviceSlice, model: torch.nn.Module, replay: RoutingReplayManager | ActorRoutes | None
) -> torch.Tensor:
    """Run one chunk forward, and name the microbatch to the replay for forward and backward.

    Returns hidden states, or logits [1, k, vocab / tp] of ``batch.rows`` on the last stage.
    """
    vp_stage = unwrap(model).vp_stage or 0
    if replay is not None:
        replay.begin_forward(vp_stage, batch.microbatch_id)
    out = model(
        input_ids=batch.tokens[None],
        position_ids=batch.positions[None],
        attention_mask=None,
        packed_seq_params=batch.packed,
        output_processor=logits_of_rows,
        output_processor_context=batch.rows,
    )
    if replay is not None and out.requires_grad:
        # Fires when autograd reaches this chunk's output, before any recomputation below it.
        out.register_hook(lambda _: replay.begin_backward(vp_stage, batch.microbatch_id))
    return out


def _draw(
    batch: DeviceSlice,
    model: torch.nn.Module,
    replay: RoutingReplayManager | ActorRoutes | None,
    temperature: float,
    chunk_size: int,
) -> tuple[Draw, Callable[[], None]]:
    """Say how the engine drew the labels of ``batch.rows``; returns that, and a call that ends their evidence.

    With the R3 check on, that evidence counts what was left of each chunk's logits.
    """
    labels = batch.labels.index_select(0, batch.rows)
    draw = Draw(labels, temperature, batch.kept, chunk_size=chunk_size)
    recorder = replay.recorder if replay is not None else None
    kept = batch.kept
    if recorder is None or kept is None:
        return draw, lambda: None
    counts: list[torch.Tensor] = []

    def see(part: SamplingMask, scaled: torch.Tensor, left: torch.Tensor) -> None:
        counts.append(recorder.count_sampling_mask(part, scaled, left))

    def record() -> None:
        vp_stage = unwrap(model).vp_stage or 0
        recorder.record_sampling_mask(kept, torch.stack(counts).sum(0), vp_stage=vp_stage)

    return replace(draw, see_kept=see), record


def _over_context_ranks(values: torch.Tensor, operation: str) -> torch.Tensor:
    """The ``OverRanks`` of rows that context parallelism has cut."""
    reduce = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}
    group = parallel_state.get_context_parallel_group()
    torch.distributed.all_reduce(values, op=reduce[operation], group=group)
    return values


def make_log_prob_step(
    batches: dict[int, DeviceSlice],
    replay: RoutingReplayManager | ActorRoutes | None,
    temperature: float,
    chunk_size: int,
) -> Callable:
    """Make a Megatron forward step that returns {microbatch_id: float32[n]} on the last stage.

    chunk_size: rows whose logits are in float32 at once; -1: all.
    """

    def collect(
        batch: DeviceSlice, model: torch.nn.Module, logits: torch.Tensor, non_loss_data: bool = True
    ) -> dict:
        draw, record = _draw(batch, model, replay, temperature, chunk_size)
        log_probs, _ = log_probs_and_entropy(logits, draw, with_entropy=False)
        record()
        return {batch.microbatch_id: batch.over_all_rows(log_probs)}

    def step(iterator: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        batch = batches[next(iterator)]
        return run_chunk(batch, model, replay), partial(collect, batch, model)

    return step


@dataclass(frozen=True)
class TrainingRule:
    """Rule by which rows become a loss.

    temperature: of the log-probs; chunk_size: as for ``make_log_prob_step``; num_ages: of weights that drew tokens.
    """

    policy_loss: PolicyLoss
    algorithm: AlgorithmSection
    temperature: float
    chunk_size: int
    num_ages: int = 1


def make_train_step(
    batches: dict[int, DeviceSlice],
    replay: RoutingReplayManager | ActorRoutes | None,
    rule: TrainingRule,
    old_log_probs: dict[int, torch.Tensor] | None,
    ref_log_probs: dict[int, torch.Tensor] | None,
    teacher_log_probs: dict[int, torch.Tensor] | None,
) -> Callable:
    """Make a Megatron forward step that returns (loss sum, token count, metric sums).

    Without ``old_log_probs`` those of this very forward stand for them, without gradient.
    ``teacher_log_probs`` are of a teacher that the ranks hold; those of a served one are in the batches.
    With ``calculate_per_token_loss`` Megatron divides the gradients by the global token count.
    """
    algorithm, num_ages = rule.algorithm, rule.num_ages
    is_cut = parallel_state.get_context_parallel_world_size() > 1

    def loss_func(batch: DeviceSlice, model: torch.nn.Module, logits: torch.Tensor) -> tuple:
        draw, record = _draw(batch, model, replay, rule.temperature, rule.chunk_size)
        log_probs, entropy = log_probs_and_entropy(logits, draw, with_entropy=True)
        assert entropy is not None
        record()
        log_probs, entropy = batch.over_all_rows(log_probs), batch.over_all_rows(entropy)
        old = log_probs.detach() if old_log_probs is None else old_log_probs[batch.microbatch_id]
        rows = LossRows(
            log_probs=log_probs,
            old_log_probs=old,
            # without an engine there is no gap to one
            rollout_log_probs=old if algorithm.loss_type == "sft" else batch.rollout_log_probs,
            advantages=batch.advantages,
            mask=batch.loss_mask,
            entropy=entropy if algorithm.entropy_coef > 0 else entropy.detach(),
            samples=batch.samples,
            loss_weights=batch.loss_weights,
            ref_log_probs=ref_log_probs[batch.microbatch_id] if ref_log_probs else None,
            teacher_log_probs=(
                teacher_log_probs[batch.microbatch_id]
                if teacher_log_probs
                else batch.teacher_log_probs
            ),
            over_ranks=_over_context_ranks if is_cut else on_this_rank,
            ages=batch.ages.clamp(max=num_ages - 1),
            num_ages=num_ages,
            row_classes=batch.row_classes,
        )
        result = microbatch_loss(rule.policy_loss, rows, algorithm)
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


def reduce_metrics(
    reports: list[dict],
    topology: RankTopology,
    names: tuple[Sequence[str], Sequence[str]],
    device: torch.device,
) -> dict[str, float]:
    """Return means over the global loss tokens, maxima, and sums of rows by age and class; equal on all ranks.

    reports: {"sums": ..., "maxima": ..., "gaps": ...} for each microbatch on the last stage, none on
    other stages.  names: the names of the sums and of the maxima.
    Tensor-parallel rank 0 alone contributes: its peers hold the same tokens.
    """
    sum_names, maximum_names = names
    num_sums = len(sum_names)
    sums = torch.zeros(num_sums + NUM_GAP_BINS, dtype=torch.float64, device=device)
    maxima = torch.full((len(maximum_names),), -math.inf, dtype=torch.float64, device=device)
    if topology.tp_rank == 0:
        for report in reports:
            values = torch.stack([report["sums"][n].double() for n in sum_names])
            sums += torch.cat([values, report["gaps"].double()])
            found = torch.stack([report["maxima"][n].double() for n in maximum_names])
            maxima = torch.maximum(maxima, found)
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    gaps = sums[num_sums:].tolist()
    totals = dict(zip(sum_names, sums.tolist()))  # without the bins of the gaps
    num_tokens = totals.pop("num_tokens")
    metrics = {
        name: total if is_group_sum(name) else total / max(num_tokens, 1.0)
        for name, total in totals.items()
    }
    metrics.update(zip(maximum_names, maxima.tolist()))
    metrics.update(mismatch_metrics(metrics))
    metrics["log_prob_gap_p999"] = gap_quantile(gaps, 0.999, metrics["log_prob_gap_max"])
    metrics["num_loss_tokens"] = num_tokens
    return metrics
