"""Counts of every router call and of every application of kept tokens, made on the device and read once a step.

Nothing here forces a device synchronisation: each call leaves one int64 vector behind, and
``collect`` stacks them all and copies them to the host at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.core import parallel_state

from r3train.routing.agreement import overlap_counts, shared_experts
from r3train.routing.fingerprint import route_hashes, to_unsigned
from r3train.routing.padding import let_go_slots
from r3train.trainer.megatron.kept_tokens import KeptTokens, shard_of, was_left
from r3train.types import ReplayEvidence

if TYPE_CHECKING:
    from r3train.trainer.megatron.replay import StagedRoutes

# A recomputed router input may differ from the first by the noise of the kernels, not by more.
_RECOMPUTE_TOLERANCE = 1e-3
# Scores are kept until they are recomputed, as a projection on this many columns.  All columns of
# every layer and microbatch of a step would be gigabytes.
_SIGNATURE_COLUMNS = 4


# (scores float[m, E], experts int64[m, k]) -> gate values at the experts, float[m, k]
Gates = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Choice:
    """The experts that the replay object served in the call in progress, and the router's own."""

    layer_number: int
    scores: torch.Tensor  # float[m, E]
    experts: torch.Tensor  # int64[m, K], served
    own: torch.Tensor  # int64[m, K], the trainer's own top-k
    let_go: torch.Tensor | None  # bool[m, K], recorded slots served otherwise; None if none can be
    gates: Gates


@dataclass
class _Call:
    host: dict
    counters: torch.Tensor  # int64[len(_COUNTERS)] on the device


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
    "slots_let_go",
    "rows_let_go",
    "let_go_off",
)


class CallRecorder:
    """Recorder of router calls, one record each; exists only if the R3 check is on."""

    def __init__(
        self,
        *,
        rank: int,
        topk: int,
        num_experts: int,
        counts_tokens: bool,
        keep_score_ratio: float = 0.0,
    ):
        self._rank = rank
        self._topk = topk
        self._num_experts = num_experts
        self._counts_tokens = counts_tokens
        self._keep_score_ratio = keep_score_ratio
        self._calls: list[_Call] = []
        self._choice: Choice | None = None
        self._pass, self._native = "", False
        self._weight_version: int | None = None
        # (microbatch, layer) -> projected router scores of a train forward, which a recomputation
        # must repeat
        self._signatures: dict[tuple[int, int], torch.Tensor] = {}
        self._projection: torch.Tensor | None = None

    def begin_pass(
        self, replay_pass: str, weight_version: int | None = None, *, native: bool
    ) -> None:
        """Name the pass of the calls that follow; native: its forwards count the controls.

        weight_version: as for ``StagedRoutes.from_slice``.
        """
        self._pass, self._native = replay_pass, native
        self._weight_version = weight_version

    def end_pass(self) -> None:
        """Drop the scores of the pass: they must not be compared with a later one's."""
        self._signatures.clear()
        self._choice = None

    def clear(self) -> None:
        """Drop the calls that were not collected."""
        self._calls.clear()

    def note_choice(self, choice: Choice) -> None:
        """Keep the served experts; ``record`` compares the returned map with them."""
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
        """Count one call from the routing map that the router returned.

        routing_map: bool[m, E].  In a call without a served choice the router chose for itself.
        """
        choice, self._choice = self._choice, None
        replayed = choice is not None and choice.layer_number == layer_number
        column = staged.column[layer_number]
        missing_rows = staged.missing_rows_per_layer[column]
        # the K largest of a 0/1 row are its ones; if it has fewer, the others are masked out
        ids = routing_map.to(torch.uint8).topk(self._topk, dim=1).indices
        chosen = routing_map.gather(1, ids)
        counted = chosen & staged.real[:, None]
        zero = routing_map.new_zeros((), dtype=torch.int64)
        hashes = route_hashes(staged.uids, ids, layer_number)
        fingerprint = torch.where(counted, hashes, zero).sum()
        values = dict.fromkeys(_COUNTERS, zero)
        values["map_sum"] = routing_map.sum()
        values["duplicate_rows"] = (~chosen).any(1).sum()
        if replayed:
            recorded = staged.routes[:, column] != staged.marker
            whole = recorded.all(1) & staged.real
            fingerprint = fingerprint - _filled_hashes(
                staged, choice.experts, column, layer_number, zero
            )
            values["replay_idx_sum"] = choice.experts.sum()
            replayed_routes = choice.experts
            if choice.let_go is not None:
                replayed_routes = torch.where(
                    recorded, staged.routes[:, column].long(), choice.experts
                )
                let_go, off = self._let_go(staged, choice, recorded, routing_map, column, stage)
                # the map has another expert there; the rollout has the recorded one
                served = route_hashes(staged.uids, choice.experts, layer_number)
                asked = route_hashes(staged.uids, replayed_routes, layer_number)
                fingerprint = fingerprint + torch.where(let_go, asked - served, zero).sum()
                values["slots_let_go"] = let_go.sum()
                values["rows_let_go"] = (let_go.any(1) & whole).sum()
                values["let_go_off"] = off
            shared = shared_experts(choice.own, replayed_routes)
            equal, overlap, none = overlap_counts(shared, self._topk, whole)
            values.update(rows_equal=equal, rows_overlap=overlap, rows_mismatch=none)
            if staged.num_current:
                equal, _, none = overlap_counts(shared, self._topk, whole & staged.current)
                values.update(rows_current_equal=equal, rows_current_mismatch=none)
            if self._native and stage == "replay_forward":
                values.update(_controls(staged, choice.own, replayed_routes, column, whole))
            if self._pass == "train":
                values["rows_recompute_differ"] = self._recompute_differ(
                    choice, microbatch_id, stage, zero
                )
        values["fingerprint"] = fingerprint
        self._calls.append(
            _Call(
                host=dict(
                    replay_pass=self._pass,
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
                ),
                counters=_vector(values),
            )
        )

    def _let_go(
        self,
        staged: StagedRoutes,
        choice: Choice,
        recorded: torch.Tensor,
        routing_map: torch.Tensor,
        column: int,
        stage: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the slots that the rule lets go, and count those that the map treats otherwise.

        The rule is applied here anew, to the scores that the router had.  A recomputation must repeat
        its forward's decision, which was checked there.  recorded: bool[m, K], slots with a route.
        """
        routes = staged.routes[:, column].long().masked_fill(~recorded, 0)
        recorded = recorded & staged.real[:, None]
        rule = choice.let_go
        if stage == "replay_forward":
            gates = choice.gates(choice.scores, routes), choice.gates(choice.scores, choice.own)
            rule = let_go_slots(*gates, self._keep_score_ratio) & recorded
        gone = recorded & ~routing_map.gather(1, routes)
        return rule, (rule != gone).sum()

    def _recompute_differ(
        self, choice: _Choice, microbatch_id: int, stage: str, zero: torch.Tensor
    ) -> torch.Tensor:
        """Count rows whose recomputed scores differ from those of the microbatch's own forward.

        This check alone ties a recomputation to its microbatch.  Routes and uids come from the same
        staged record: they would agree with each other even if both were another microbatch's.
        """
        key, signature = (microbatch_id, choice.layer_number), self._signature(choice.scores)
        if stage == "replay_forward":
            self._signatures[key] = signature
            return zero
        first = self._signatures.pop(key, None)
        if first is None or first.shape != signature.shape:
            return zero + signature.shape[0]
        scale = first.abs().amax(1).clamp_min(1.0)
        return ((first - signature).abs().amax(1) > _RECOMPUTE_TOLERANCE * scale).sum()

    def _signature(self, scores: torch.Tensor) -> torch.Tensor:
        """Project scores [m, E] on four fixed directions, float32[m, 4]."""
        if self._projection is None:  # made on the device, so that nothing waits for a copy
            numbers = torch.arange(scores.shape[1] * _SIGNATURE_COLUMNS, device=scores.device)
            self._projection = numbers.cos().view(scores.shape[1], _SIGNATURE_COLUMNS)
        return scores.float() @ self._projection

    @torch.no_grad()
    def count_kept_tokens(
        self, kept: KeptTokens, scaled: torch.Tensor, left: torch.Tensor, layer_number: int
    ) -> torch.Tensor:
        """Count a chunk of an application of kept tokens, from the logits that it left.

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
        hashes = route_hashes(kept.uids, ids + first, layer_number)
        label = labels - first
        own_label = (label >= 0) & (label < size)
        has_label = is_left.gather(1, label.clamp(0, size - 1)[:, None])[:, 0]
        sums = torch.stack(
            [
                torch.where(counted, hashes, zero).sum(),
                (is_left & limited[:, None]).sum(),
                (limited & own_label & ~has_label).sum(),
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
            of_version = kept.versions == self._weight_version
            values["rows_current_equal"] = (equal & of_version).sum()
            values["rows_current_mismatch"] = (mismatch & of_version).sum()
        return _vector(values)

    def record_kept_tokens(
        self, kept: KeptTokens, counters: torch.Tensor, *, vp_stage: int, layer_number: int
    ) -> None:
        """Record one application of kept tokens, of which ``counters`` are the chunks' sum.

        Tensor-parallel rank 0 alone counts them.
        """
        s, version, current = kept.source, self._weight_version, 0
        if version is not None:
            current = int(((s.kept_versions == version) & (s.kept_counts > 0)).sum())
        replayed, real = int((s.kept_counts > 0).sum()), int((s.token_uids >= 0).sum())
        native = int((s.loss_mask & (s.kept_counts == 0)).sum())
        self._calls.append(
            _Call(
                host=dict(
                    replay_pass=self._pass,
                    stage="sampling_mask",
                    vp_stage=vp_stage,
                    microbatch_id=s.microbatch_id,
                    layer_number=layer_number,
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
        table = torch.stack([c.counters for c in self._calls]).cpu().tolist()
        records = []
        for call, row in zip(self._calls, table):
            counters = dict(zip(_COUNTERS, row))
            counters["fingerprint"] = to_unsigned(counters["fingerprint"])
            call.host["rows_replayed"] -= counters["rows_let_go"]
            records.append(
                ReplayEvidence(
                    step=step,
                    rank=self._rank,
                    topk=self._topk,
                    **{"counts_tokens": self._counts_tokens, **call.host},
                    **counters,
                )
            )
        self._calls.clear()
        return records


def _vector(values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The counters of a call in one int64 vector."""
    return torch.stack([values[name].to(torch.int64) for name in _COUNTERS])


def _filled_hashes(
    staged: StagedRoutes,
    experts: torch.Tensor,
    column: int,
    layer_number: int,
    zero: torch.Tensor,
) -> torch.Tensor:
    """Sum the hashes of slots that the trainer filled: the map holds them, the rollout does not."""
    if staged.rows_with_missing is None:
        return zero
    rows = staged.rows_with_missing
    holes = staged.routes[rows, column] == staged.marker
    hashes = route_hashes(staged.uids[rows], experts[rows], layer_number)
    return torch.where(holes, hashes, zero).sum()


def _controls(
    staged: StagedRoutes,
    own: torch.Tensor,
    replayed: torch.Tensor,
    column: int,
    whole: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Count rows that agree if the routes are moved by one token or one layer on purpose.

    If the true agreement is no better than these, the routes are not aligned at all.
    """
    num_layers, topk = staged.routes.shape[1:]
    variants = {
        "control_token_minus": replayed.roll(1, 0),
        "control_token_plus": replayed.roll(-1, 0),
        "control_layer_minus": staged.routes[:, (column - 1) % num_layers].long(),
        "control_layer_plus": staged.routes[:, (column + 1) % num_layers].long(),
    }
    return {
        name: overlap_counts(shared_experts(own, v), topk, whole)[0] for name, v in variants.items()
    }
