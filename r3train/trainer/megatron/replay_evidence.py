"""Counts of every router call and of every application of sampling masks, made on the device and read once per step.

Nothing here forces a device synchronisation: the calls of a microbatch are counted some layers at a
time, each leaves one int64 vector, and ``collect`` stacks them all and copies them to the host at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import is_checkpointing

from r3train.routing.agreement import overlap_counts, shared_experts
from r3train.routing.fingerprint import kept_hashes, route_hashes, to_unsigned
from r3train.trainer.megatron.sampling_mask import SamplingMask, shard_of, was_left
from r3train.types import (
    INDEXER,
    ReplayEvidence,
    ROUTES,
    SAMPLING_MASK,
    SAMPLING_MASK_LAYER,
    StreamName,
)

if TYPE_CHECKING:
    from r3train.trainer.megatron.indexer_replay import Recording, StagedIndexer
    from r3train.trainer.megatron.replay import StagedRoutes

# A recomputed router input may differ from the first by the noise of the kernels, not by more.
_RECOMPUTE_TOLERANCE = 1e-3
# Scores are kept until they are recomputed, as a projection on this many columns.  All columns of
# every layer and microbatch of a step would be gigabytes.
_SIGNATURE_COLUMNS = 4
# Calls of one microbatch that are counted at once, by the same kernels as one.  Until then their maps are held.
TOGETHER = 16


@dataclass
class Choice:
    """The experts that the replay object gave in the call in progress, and the router's own."""

    layer_number: int
    scores: torch.Tensor  # float[m, E]
    experts: torch.Tensor  # int64[m, K], replayed
    actor_experts: torch.Tensor  # int64[m, K], the trainer's own top-k


@dataclass
class _Call:
    host: dict
    counters: torch.Tensor | None = None  # int64[len(_COUNTERS)] on the device, once counted


@dataclass
class _Seen:
    """A router call to be counted: tensors that it left, without a copy."""

    call: _Call
    column: int
    routing_map: torch.Tensor  # bool[m, E]
    experts: torch.Tensor | None = None  # int64[m, K]; None where the router chose for itself
    actor_experts: torch.Tensor | None = None
    # float32[m, 4] each: the forward's and the recomputation's
    signatures: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def lacks(self) -> tuple[bool, ...]:
        return tuple(x is None for x in (self.experts, self.signatures))


_COUNTERS = (
    "replay_idx_sum",
    "map_sum",
    "fingerprint",
    "duplicate_rows",
    "rows_equal",
    "rows_overlap",
    "rows_mismatch",
    "rows_current_equal",
    "rows_current_mismatch",
    "rows_recompute_differ",
    "control_token_minus",
    "control_token_plus",
    "control_layer_minus",
    "control_layer_plus",
)


class CallRecorder:
    """Recorder of router calls, one record each; exists only if the R3 check is on."""

    def __init__(
        self,
        *,
        rank: int,
        topk: int,
        counts_tokens: bool,
    ):
        self._rank = rank
        self._topk = topk
        self._counts_tokens = counts_tokens
        self._calls: list[_Call] = []
        self._seen: list[_Seen] = []
        # what the calls in _seen share: their microbatch; pass, counts_controls, stage, and which tensors they lack
        self._staged: StagedRoutes | None = None
        self._kind: tuple = ()
        self._choice: Choice | None = None
        self._pass, self._counts_controls = "", False
        self._weight_version: int | None = None
        # (stream, microbatch, layer) -> projection of what a train forward chose from, which a
        # recomputation must repeat
        self._signatures: dict[tuple[StreamName, int, int], torch.Tensor] = {}
        self._projections: dict[int, torch.Tensor] = (
            {}
        )  # by the number of columns of what is projected

    def begin_pass(
        self, replay_pass: str, weight_version: int | None = None, *, counts_controls: bool
    ) -> None:
        """Name the pass of the calls that follow; counts_controls: its forwards count the controls.

        weight_version: as for ``StagedRoutes.from_slice``.
        """
        self._pass, self._counts_controls = replay_pass, counts_controls
        self._weight_version = weight_version

    def end_pass(self) -> None:
        """Count what is left of the pass, and drop its scores: they must not be compared with a later one's."""
        self._count()
        self._signatures.clear()
        self._choice = None

    def clear(self) -> None:
        """Drop the calls that were not collected."""
        self._calls.clear()
        self._seen, self._staged = [], None

    def note_choice(self, choice: Choice) -> None:
        """Keep the replayed experts; ``record`` compares the returned map with them."""
        self._choice = choice

    @torch.no_grad()
    def record(
        self,
        staged: StagedRoutes,
        *,
        routing_map: torch.Tensor,
        vp_stage: int,
        microbatch_id: int,
        layer_number: int,
        stage: str,
    ) -> None:
        """Note one call and the routing map that the router returned; it is counted with its neighbours.

        routing_map: bool[m, E].  In a call without a replayed choice the router chose for itself.
        """
        choice, self._choice = self._choice, None
        if choice is not None and choice.layer_number != layer_number:
            choice = None
        replayed = choice is not None
        column = staged.column[layer_number]
        missing_rows = staged.missing_rows_per_layer[column]
        call = _Call(
            host=dict(
                replay_pass=self._pass,
                stream=ROUTES,
                stage=stage,
                vp_stage=vp_stage,
                microbatch_id=microbatch_id,
                layer_number=layer_number,
                num_rows=staged.num_rows,
                rows_replayed=staged.num_real - missing_rows if replayed else 0,
                rows_filled=missing_rows if replayed else 0,
                rows_padding=staged.num_rows - staged.num_real,
                rows_native=0 if replayed else staged.num_real,
                rows_current=staged.num_current if replayed else 0,
            )
        )
        seen = _Seen(call, column, routing_map)
        if choice is not None:
            seen.experts, seen.actor_experts = choice.experts, choice.actor_experts
            if self._pass == "train":
                seen.signatures = self._signatures_of(
                    ROUTES, choice.scores, layer_number, microbatch_id, stage
                )
        self._calls.append(call)
        kind = self._pass, self._counts_controls, stage, seen.lacks
        if self._staged is not staged or self._kind != kind:
            self._count()
        self._staged, self._kind = staged, kind
        self._seen.append(seen)
        if len(self._seen) == TOGETHER:
            self._count()

    @torch.no_grad()
    def _count(self) -> None:
        """Count the calls that were noted: of one microbatch, alike in all but their layers."""
        seen, staged = self._seen, self._staged
        self._seen, self._staged = [], None
        if not seen:
            return
        columns = [s.column for s in seen]
        layers = torch.stack([staged.layer_numbers[column] for column in columns])
        maps = torch.stack([s.routing_map for s in seen])  # [l, m, E]
        # the K largest of a 0/1 row are its ones; if it has fewer, the others are masked out
        ids = maps.to(torch.uint8).topk(self._topk).indices
        chosen = maps.gather(2, ids)
        hashes = route_hashes(staged.uids, ids, layers) * (chosen & staged.real[:, None])
        values = {
            "map_sum": maps.sum((1, 2)),
            "duplicate_rows": (~chosen).any(2).sum(1),
            "fingerprint": hashes.sum((1, 2)),
        }
        if seen[0].experts is not None:
            self._count_replayed(seen, staged, columns, layers, values)
        counters = _vector(values)
        for i, one in enumerate(seen):
            one.call.counters = counters[i]

    def _count_replayed(
        self,
        seen: list[_Seen],
        staged: StagedRoutes,
        columns: list[int],
        layers: torch.Tensor,
        values: dict[str, torch.Tensor],
    ) -> None:
        """Add the counters of calls that were replayed, and remove filled slots and padding rows from the fingerprint."""
        experts = torch.stack([s.experts for s in seen])  # [l, m, K]
        actor_experts = torch.stack([s.actor_experts for s in seen])
        recorded = _layer_routes(staged, columns) != staged.marker
        whole = recorded.all(2) & staged.real
        if (rows := staged.rows_with_missing) is not None:
            # slots that the trainer filled: the map holds them, the rollout does not
            filled = route_hashes(staged.uids[rows], experts[:, rows], layers)
            values["fingerprint"] -= (filled * ~recorded[:, rows]).sum((1, 2))
        values["replay_idx_sum"] = experts.sum((1, 2))
        shared = shared_experts(actor_experts, experts)
        equal, overlap, none = overlap_counts(shared, self._topk, whole)
        values.update(rows_equal=equal, rows_overlap=overlap, rows_mismatch=none)
        if staged.num_current:
            equal, _, none = overlap_counts(shared, self._topk, whole & staged.current)
            values.update(rows_current_equal=equal, rows_current_mismatch=none)
        if self._kind[1:3] == (True, "replay_forward"):
            values.update(_controls(staged, actor_experts, experts, columns, whole))
        if seen[0].signatures is not None:
            first, again = map(torch.stack, zip(*(s.signatures for s in seen)))
            values["rows_recompute_differ"] = _differ(first, again).sum(1)

    def _signatures_of(
        self,
        stream: StreamName,
        scores: torch.Tensor,
        layer_number: int,
        microbatch_id: int,
        stage: str,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keep a forward's scores that will be recomputed; of a recomputation return them and its own.

        They alone tie a recomputation to its microbatch.  Routes and uids come from the same staged
        record: they would agree with each other even if both were another microbatch's.
        """
        key = stream, microbatch_id, layer_number
        if stage == "replay_forward":
            if is_checkpointing():
                self._signatures[key] = self._signature(scores)
            return None
        again = self._signature(scores)
        first = self._signatures.pop(key, None)
        if first is None or first.shape != again.shape:  # no row is the forward's
            return torch.zeros_like(again), torch.full_like(again, torch.inf)
        return first, again

    def _signature(self, scores: torch.Tensor) -> torch.Tensor:
        """Project scores [m, E] on four fixed directions, float32[m, 4]."""
        columns = scores.shape[1]
        if columns not in self._projections:  # made on the device, so that nothing waits for a copy
            numbers = torch.arange(columns * _SIGNATURE_COLUMNS, device=scores.device)
            self._projections[columns] = numbers.cos().view(columns, _SIGNATURE_COLUMNS)
        return scores.float() @ self._projections[columns]

    @property
    def counts_controls(self) -> bool:
        """True in a pass whose forwards count the controls."""
        return self._counts_controls

    @torch.no_grad()
    def begin_indexer_call(
        self, staged: StagedIndexer, column: int, x: torch.Tensor, *, topk: int, **place: Any
    ) -> Recording:
        """Return what makes the record of a call of sparse attention that begins.

        x: the layer's input, [n, 1, hidden] or its sequence-parallel share.  It alone ties a recomputation to its
        microbatch, see ``_signatures_of``.  place: fields of ``ReplayEvidence``.  Tensor-parallel rank 0
        alone counts the rows.
        """
        signatures = None
        if self._pass == "train":
            layer, microbatch = place["layer_number"], place["microbatch_id"]
            signatures = self._signatures_of(
                INDEXER, x.detach().flatten(0, 1), layer, microbatch, place["stage"]
            )
        chosen = staged.num_chosen[column]
        call = _Call(
            host=dict(
                replay_pass=self._pass,
                stream=INDEXER,
                num_rows=staged.num_rows,
                rows_replayed=chosen,
                rows_filled=staged.num_real - chosen,
                rows_padding=staged.num_rows - staged.num_real,
                rows_native=0,
                rows_current=staged.num_current,
                topk=topk,
                counts_tokens=parallel_state.get_tensor_model_parallel_rank() == 0,
                **place,
            )
        )

        def record(values: dict[str, torch.Tensor] | None) -> None:
            if values is None:
                values = {"map_sum": staged.uids.new_zeros(())}
            if signatures is not None:
                values["rows_recompute_differ"] = _differ(*signatures).sum()
            call.counters = _vector(values)
            self._calls.append(call)

        return record

    @torch.no_grad()
    def count_sampling_mask(
        self, kept: SamplingMask, scaled: torch.Tensor, left: torch.Tensor
    ) -> torch.Tensor:
        """Count a chunk of an application of sampling masks, from the logits that it left.

        scaled, left: float32[n, vocab / tp], before and after it.  Returns int64 counters over all
        shards of the vocabulary, the same on every tensor-parallel rank.
        """
        limited, labels, zero = kept.limited, kept.labels, kept.labels.new_zeros(())
        first, size = shard_of(left)
        group = parallel_state.get_tensor_model_parallel_group()
        values = dict.fromkeys(_COUNTERS, zero)

        is_left = was_left(left)
        kept_logits, ids = left.topk(min(kept.widest, size), dim=1)
        counted = was_left(kept_logits) & limited[:, None]
        hashes = kept_hashes(kept.uids, ids + first, SAMPLING_MASK_LAYER)
        label = labels - first
        holds_label = (label >= 0) & (label < size)
        has_label = is_left.gather(1, label.clamp(0, size - 1)[:, None])[:, 0]
        sums = torch.stack(
            [
                torch.where(counted, hashes, zero).sum(),
                (is_left & limited[:, None]).sum(),
                (limited & holds_label & ~has_label).sum(),
            ]
        )
        torch.distributed.all_reduce(sums, group=group)
        values.update(zip(("fingerprint", "map_sum", "duplicate_rows"), sums))
        values["replay_idx_sum"] = zero + kept.ids.numel()

        inf = torch.inf
        edges = torch.stack(
            [
                -scaled.masked_fill(~is_left, inf).amin(1),
                scaled.masked_fill(~is_left, -inf).amax(1),
                scaled.masked_fill(is_left, -inf).amax(1),
            ]
        )
        torch.distributed.all_reduce(edges, op=torch.distributed.ReduceOp.MAX, group=group)
        equal = limited & (-edges[0] >= edges[2])
        mismatch = limited & (edges[1] < edges[2])
        values.update(
            rows_equal=equal.sum(),
            rows_overlap=(limited & ~equal & ~mismatch).sum(),
            rows_mismatch=mismatch.sum(),
        )
        if self._weight_version is not None:
            is_current = kept.versions == self._weight_version
            values["rows_current_equal"] = (equal & is_current).sum()
            values["rows_current_mismatch"] = (mismatch & is_current).sum()
        return _vector(values)

    def record_sampling_mask(
        self, kept: SamplingMask, counters: torch.Tensor, *, vp_stage: int
    ) -> None:
        """Record one application of sampling masks, of which ``counters`` are the chunks' sum.

        Tensor-parallel rank 0 alone counts them.
        """
        s, version, current = kept.source, self._weight_version, 0
        if version is not None:
            current = int(((s.mask_versions == version) & (s.mask_counts > 0)).sum())
        replayed, real = int((s.mask_counts > 0).sum()), int((s.token_uids >= 0).sum())
        native = int((s.loss_mask & (s.mask_counts == 0)).sum())
        self._calls.append(
            _Call(
                host=dict(
                    replay_pass=self._pass,
                    stream=SAMPLING_MASK,
                    stage="replay_forward",
                    vp_stage=vp_stage,
                    microbatch_id=s.microbatch_id,
                    layer_number=SAMPLING_MASK_LAYER,
                    num_rows=s.num_rows,
                    rows_replayed=replayed,
                    rows_filled=real - replayed - native,
                    rows_padding=s.num_rows - real,
                    rows_native=native,
                    rows_current=current,
                    counts_tokens=parallel_state.get_tensor_model_parallel_rank() == 0,
                ),
                counters=counters,
            )
        )

    def collect(self, step: int) -> list[ReplayEvidence]:
        """Return the calls since the last ``collect``.  This is the one device read of a step."""
        if not self._calls:
            return []
        self._count()
        table = torch.stack([c.counters for c in self._calls]).cpu().tolist()
        records = []
        for call, row in zip(self._calls, table):
            counters = dict(zip(_COUNTERS, row))
            counters["fingerprint"] = to_unsigned(counters["fingerprint"])
            records.append(
                ReplayEvidence(
                    step=step,
                    rank=self._rank,
                    **{"topk": self._topk, "counts_tokens": self._counts_tokens, **call.host},
                    **counters,
                )
            )
        self._calls.clear()
        return records


def _differ(first: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
    """bool[..., m]: rows of which a recomputation's signature, [..., m, 4], is not the forward's."""
    scale = first.abs().amax(-1).clamp_min(1.0)
    return (first - again).abs().amax(-1) > _RECOMPUTE_TOLERANCE * scale


def _vector(values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The counters of one call as int64[len(_COUNTERS)], or of l calls as int64[l, len(_COUNTERS)].

    values: int64 numbers, or int64[l]; what is not counted is 0.
    """
    zero = torch.zeros_like(values["map_sum"])
    return torch.stack([values.get(name, zero) for name in _COUNTERS], dim=-1)


def _layer_routes(staged: StagedRoutes, columns: Sequence[int]) -> torch.Tensor:
    """Stack the routes of some layers, [l, m, K]."""
    return torch.stack([staged.routes[:, column] for column in columns])


def _controls(
    staged: StagedRoutes,
    actor_experts: torch.Tensor,
    replayed: torch.Tensor,
    columns: Sequence[int],
    whole: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Count rows that agree if the routes are moved by one token or one layer on purpose.

    If the true agreement is no better than these, the routes are not aligned at all.
    """
    num_layers, topk = staged.routes.shape[1:]
    variants = {
        "control_token_minus": replayed.roll(1, 1),
        "control_token_plus": replayed.roll(-1, 1),
        "control_layer_minus": _layer_routes(staged, [(c - 1) % num_layers for c in columns]),
        "control_layer_plus": _layer_routes(staged, [(c + 1) % num_layers for c in columns]),
    }
    return {
        name: overlap_counts(shared_experts(actor_experts, v), topk, whole)[0]
        for name, v in variants.items()
    }
