"""Microbatches: which samples share one, their flat streams, and one rank's slice of them.

Entry t of a stream belongs to the forward whose input is token t, so label, mask, log-prob and advantage of token t + 1
stand at t.  Two samples, of tokens 5 6 | 7 8 and 3 | 4 (prompt | answer), are one pack.  A sample's last row predicts
nothing and has no route: 255 marks it.

>>> from r3train.types import Prompt
>>> def train_sample(number, tokens, prompt_len, routes):
...     sampled = np.arange(len(tokens)) >= prompt_len
...     prompt = Prompt(f"data:{number}", number, "", np.array(tokens[:prompt_len], np.int32), label=None)
...     sample = RolloutSample(
...         sample_id=number, group_id=number, prompt=prompt, token_ids=np.array(tokens, np.int32),
...         prompt_len=prompt_len, loss_mask=sampled, rollout_log_probs=np.where(sampled, -0.5, 0).astype(np.float32),
...         routed_experts=np.array(routes, np.uint8).reshape(-1, 1, 1), weight_versions=np.where(sampled, 0, -1),
...         finish_reason="stop", row_classes=np.zeros(len(tokens), np.uint8))
...     return TrainSample(sample, 1.0, sampled.astype(np.float32))
>>> samples = [train_sample(0, [5, 6, 7, 8], 2, [15, 16, 17]), train_sample(1, [3, 4], 1, [13])]
>>> pack = build_microbatch(0, samples, Streams(RouteShape(1, 1, 32)), cp_size=1, tp_size=1)
>>> pack.tokens.tolist(), pack.labels.tolist(), pack.positions.tolist()
([5, 6, 7, 8, 3, 4], [6, 7, 8, 0, 4, 0], [0, 1, 2, 3, 0, 1])
>>> pack.loss_mask.astype(int).tolist(), np.concatenate(pack.routes).ravel().tolist()
([0, 1, 1, 0, 1, 0], [15, 16, 17, 255, 13, 255])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from r3train.layout.rows import (
    PADDING,
    cp_rows,
    pack_layout,
    runs_of,
    sp_rows,
    take_ragged,
    take_routes,
    take_rows,
)
from r3train.ids import PADDING_UID, token_uids
from r3train.layout.provenance import classes_of_tokens
from r3train.routing import indexer_topk
from r3train.types import (
    MicroBatch,
    RankSlice,
    RankTopology,
    RolloutSample,
    RouteShape,
    RowClass,
    TokenLayout,
    TrainSample,
    missing_marker,
)


@dataclass(frozen=True)
class Streams:
    """Streams that the samples of a run carry besides their tokens.

    route_shape: None without R3; for fresh_prefixes see ``current_versions``; sampling_mask: log-probs are those among the
    tokens that sampling kept; teacher: samples carry a teacher's log-probs; index_topk: the choices of an indexer are
    replayed.
    """

    route_shape: RouteShape | None = None
    fresh_prefixes: bool = True
    sampling_mask: bool = False
    teacher: bool = False
    index_topk: int | None = None


def pack_bins(
    lengths: Sequence[int], budget: int, *, num_bins_multiple: int = 1
) -> list[list[int]]:
    """Group samples so that no group holds more than ``budget`` tokens.

    First-fit decreasing, then the fullest groups are split until the number of groups is a
    multiple of ``num_bins_multiple`` (data-parallel size, times pipeline size under an interleaved
    schedule): every rank then runs the same number of microbatches.  Groups may be empty when
    there are fewer samples than groups.  Returns lists of indices into ``lengths``, each ascending.

    Raises ValueError when a single sample is longer than the budget.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > budget:
            raise ValueError(
                f"sample {i} of the batch has {lengths[i]} tokens, more than a microbatch may hold "
                f"({budget} = max_tokens_per_gpu x context_parallel_size)"
            )
        for b, free in enumerate(room):
            if lengths[i] <= free:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    target = max(1, -(-len(bins) // num_bins_multiple)) * num_bins_multiple
    while len(bins) < target:
        fullest = max(range(len(bins)), key=lambda b: (len(bins[b]) > 1, -room[b]), default=None)
        if fullest is None or len(bins[fullest]) < 2:
            bins.append([])
            room.append(budget)
            continue
        kept, moved = _halve(bins[fullest], lengths)
        bins[fullest], room[fullest] = kept, budget - sum(lengths[i] for i in kept)
        bins.append(moved)
        room.append(budget - sum(lengths[i] for i in moved))
    return [sorted(b) for b in bins]


def _halve(samples: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split one group into two of near-equal token counts."""
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for i in sorted(samples, key=lambda i: -lengths[i]):
        lighter = int(totals[1] < totals[0])
        halves[lighter].append(i)
        totals[lighter] += lengths[i]
    return halves


def assign_microbatches(
    bins: list[list[int]], lengths: Sequence[int], dp_size: int
) -> list[list[list[int]]]:
    """Deal groups to data-parallel ranks so that the j-th groups of all ranks weigh alike.

    Returns [dp_size][microbatches][samples].  Ranks wait for one another in every microbatch (the
    experts' all-to-all), so equal neighbours matter more than equal sums.
    """
    assert len(bins) % dp_size == 0, (len(bins), dp_size)
    ordered = sorted(bins, key=lambda b: -sum(lengths[i] for i in b))
    dealt: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for start in range(0, len(ordered), dp_size):
        turn = ordered[start : start + dp_size]
        # every other turn runs backwards, so that no rank always gets the heaviest
        for rank, group in enumerate(turn if (start // dp_size) % 2 == 0 else turn[::-1]):
            dealt[rank].append(group)
    return dealt


def build_microbatch(
    microbatch_id: int,
    samples: Sequence[TrainSample],
    streams: Streams,
    *,
    cp_size: int,
    tp_size: int,
    rollout_id: int = 0,
) -> MicroBatch:
    """Concatenate samples into row-aligned streams and lay them out.

    ``tp_size`` is 1 without sequence parallelism; ages are those in rollout ``rollout_id``.
    Raises ValueError naming the sample whose routes, sampling masks, indexer's choices or teacher's log-probs are absent
    or misshapen, and one whose classes of rows are misshapen.
    """
    route_shape, index_topk = streams.route_shape, streams.index_topk
    lengths = np.array([s.sample.num_tokens for s in samples], dtype=np.int32)
    routes = classes = None
    if route_shape is not None:
        routes = route_parts([s.sample for s in samples], route_shape)
        classes = flat([classes_of_tokens(s.sample) for s in samples], np.uint8)
    mask_counts = mask_ids = None
    versions = flat([np.append(s.sample.weight_versions[1:], -1) for s in samples], np.int32)
    for s in samples:
        _check_sampling_mask(s.sample, streams.sampling_mask)
    if streams.sampling_mask:
        # a sample begins with a prompt, which has none: the shift leaves the order of the ids
        mask_counts = shifted([s.sample.mask_counts for s in samples], np.int32)
        mask_ids = flat([s.sample.mask_ids for s in samples], np.int32)
    chosen = chosen_rows = None
    if index_topk is not None:
        assert route_shape is not None, "an indexer is replayed with routes"
        parts = [_indexer_bits(s.sample, index_topk, route_shape.num_layers) for s in samples]
        chosen, chosen_rows = _flat_indexer_rows(parts, lengths, index_topk)
    teacher_log_probs = None
    if streams.teacher:
        teacher_log_probs = shifted([_teacher_log_probs(s.sample) for s in samples], np.float32)
    return MicroBatch(
        microbatch_id=microbatch_id,
        layout=pack_layout(lengths, cp_size=cp_size, tp_size=tp_size),
        sample_ids=np.array([s.sample.sample_id for s in samples], dtype=np.int64),
        loss_weights=np.array([s.loss_weight for s in samples], dtype=np.float32),
        tokens=flat([s.sample.token_ids for s in samples], np.int64),
        labels=shifted([s.sample.token_ids for s in samples], np.int64),
        positions=flat([np.arange(n) for n in lengths], np.int64),
        loss_mask=shifted([s.sample.loss_mask for s in samples], np.bool_),
        rollout_log_probs=shifted([s.sample.rollout_log_probs for s in samples], np.float32),
        advantages=shifted([s.advantages for s in samples], np.float32),
        row_uids=flat(
            [token_uids(s.sample.sample_id, s.sample.num_tokens) for s in samples], np.int64
        ),
        row_versions=flat(
            [current_versions(s.sample, fresh_prefixes=streams.fresh_prefixes) for s in samples],
            np.int32,
        ),
        ages=np.where(versions < 0, 0, rollout_id - versions).clip(min=0).astype(np.int32),
        routes=routes,
        mask_counts=mask_counts,
        mask_ids=mask_ids,
        teacher_log_probs=teacher_log_probs,
        row_classes=classes,
        indexer_topk=chosen,
        indexer_rows=chosen_rows,
    )


def _indexer_bits(sample: RolloutSample, topk: int, num_layers: int) -> np.ndarray:
    """Return the tokens that a sample's indexer chose, as bits; raises ValueError if they are absent or misshapen."""
    name = f"sample {sample.sample_id} (prompt {sample.prompt.prompt_id})"
    found = sample.indexer_topk
    expected = indexer_topk.num_rows(sample.num_tokens, topk), num_layers
    if (found is None and not expected[0]) or (found is not None and not len(found)):
        return np.zeros((*expected, 0), dtype=np.uint64)  # not one row was computed
    if found is None:
        raise ValueError(
            f"{name} came without the choices of its indexer; R3 needs {expected} of them"
        )
    if found.shape[:2] != expected:
        raise ValueError(
            f"{name} has choices of its indexer {found.shape[:2]}, expected {expected}"
        )
    return found


def _flat_indexer_rows(
    parts: Sequence[np.ndarray], lengths: np.ndarray, topk: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lay bits [r, L, W] of samples end to end, and find the row there of each token, -1 for none.

    A sample's rows begin at position ``topk``; its last token has none.
    """
    if not parts:
        return np.zeros((0, 0, 0), dtype=np.uint64), np.zeros(0, dtype=np.int64)
    width = max(part.shape[2] for part in parts)
    rows = np.full(int(lengths.sum()), -1, dtype=np.int64)
    first_token = first_row = 0
    for part, length in zip(parts, lengths.tolist()):
        rows[first_token + topk : first_token + topk + len(part)] = np.arange(
            first_row, first_row + len(part)
        )
        first_token, first_row = first_token + length, first_row + len(part)
    return np.concatenate([indexer_topk.widened(part, width) for part in parts]), rows


def _teacher_log_probs(sample: RolloutSample) -> np.ndarray:
    """The teacher's log-probs of a sample; raises ValueError naming it if they are absent or misshapen."""
    found = sample.teacher_log_probs
    if found is None or found.shape != sample.token_ids.shape:
        got = "none" if found is None else f"{len(found)}"
        raise ValueError(
            f"sample {sample.sample_id} (prompt {sample.prompt.prompt_id}) has {got} of the teacher's"
            f" log-probs, expected {sample.num_tokens}: --opd-type sglang needs samples that were"
            " generated with it"
        )
    return found


def flat(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Lay the samples' streams end to end; an empty one without samples."""
    return np.concatenate(parts).astype(dtype) if len(parts) else np.zeros(0, dtype)


def shifted(streams: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Lay streams over tokens end to end as streams over rows.

    Row t predicts token t+1: values of token t+1 move back by one.
    """
    return flat([np.append(s[1:], np.zeros(1, s.dtype)) for s in streams], dtype)


def token_rows(layout: TokenLayout, stream: np.ndarray, topology: RankTopology) -> np.ndarray:
    """Cut one rank's rows of a stream [F], as ``slice_microbatch`` does: [n], 0 in padding rows."""
    return take_rows(stream, _rank_rows(layout, topology)[0], 0)


def _check_sampling_mask(sample: RolloutSample, needed: bool) -> None:
    """Raise ValueError where a token in the loss has no sampling mask, or where nobody asks for them."""
    name = f"sample {sample.sample_id} (prompt {sample.prompt.prompt_id})"
    counts, ids = sample.mask_counts, sample.mask_ids
    if not needed:
        if counts is not None:
            raise ValueError(
                f"{name} was sampled within a sampling mask, whose log-probs it has: train it with"
                " --rollout-top-k as it was sampled"
            )
        return
    if counts is None or ids is None:
        raise ValueError(f"{name} came without a sampling mask: --rollout-top-k needs them")
    if len(counts) != sample.num_tokens or counts[0] or int(counts.sum()) != len(ids):
        raise ValueError(
            f"{name} has {len(counts)} counts of sampling masks, {int(counts.sum())} in all, and"
            f" {len(ids)} sampling masks: expected {sample.num_tokens} counts and as many tokens"
        )
    if (bare := sample.loss_mask & (counts == 0)).any():
        raise ValueError(f"{name}: token {int(np.argmax(bare))} has no sampling mask")


def row_versions(sample: RolloutSample, *, fresh_prefixes: bool = True) -> np.ndarray:
    """Find the weight version that computed the routes of each row, int32[T], -1 where not known.

    Row t predicts token t+1 and is of that token's version.  The rows before a token that no weights
    generated (of a prompt, of an environment) were computed by the request that generated the next
    token.  fresh_prefixes: no prefix is cached over a weight update.  If False, those rows may be
    older than the request, and are not known.  The last token has no row.
    """
    versions = np.append(sample.weight_versions[1:], np.int32(-1)).astype(np.int32)
    if not fresh_prefixes:
        return versions
    last = len(versions) - 1
    version_rows = np.where(versions >= 0, np.arange(len(versions)), last)
    return versions[np.minimum.accumulate(version_rows[::-1])[::-1]]


def current_versions(sample: RolloutSample, *, fresh_prefixes: bool = True) -> np.ndarray:
    """Find the weight version that computed each row and all rows before it, int32[T], -1 where there is none.

    A row behind one of other weights was computed from keys and values that the actor, which holds one version, does
    not compute.  fresh_prefixes: as ``row_versions`` takes it.
    """
    versions = row_versions(sample, fresh_prefixes=fresh_prefixes)
    return np.where(np.maximum.accumulate(versions != versions[0]), np.int32(-1), versions)


def rows_never_computed(sample: RolloutSample) -> int:
    """Count the rows of tokens that were no request's input: from the last generated token on.

    Of a whole answer the last token only; of an environment's tokens all that no answer followed.
    """
    generated = np.flatnonzero(sample.weight_versions >= 0)
    return sample.num_tokens - (int(generated[-1]) if len(generated) else 0)


def route_parts(
    samples: Sequence[RolloutSample], route_shape: RouteShape
) -> tuple[np.ndarray, ...]:
    """Lay the samples' routes, [T-1, L, K] each, end to end: parts of [F, L, K], without a copy.

    A sample's last token was never an input: its row is marked missing.
    Raises ValueError naming the sample whose routes are absent or misshapen.
    """
    last = np.full((1, *route_shape.row), route_shape.missing, dtype=route_shape.dtype)
    parts: list[np.ndarray] = []
    for sample in samples:
        name = f"sample {sample.sample_id} (prompt {sample.prompt.prompt_id})"
        routes, expected = sample.routed_experts, (sample.num_tokens - 1, *route_shape.row)
        if routes is None:
            raise ValueError(f"{name} came without routed experts; R3 needs {expected} of them")
        if routes.shape != expected or routes.dtype != route_shape.dtype:
            raise ValueError(
                f"{name} has routed experts {routes.shape} {routes.dtype}, expected {expected} "
                f"{route_shape.dtype}"
            )
        parts += [routes, last]
    return tuple(parts) or (last[:0],)


def slice_microbatch(microbatch: MicroBatch, topology: RankTopology) -> RankSlice:
    """Cut out one rank's share: its CP rows of the streams, its SP rows and layers of the routes.

    Streams are cut by CP only (Megatron scatters the embeddings over TP itself); routes by CP, SP
    and by the layers that the rank's chunks hold, so that nothing else is sent to it.
    """
    layout = microbatch.layout
    rows, route_rows = _rank_rows(layout, topology)
    runs, route_runs = runs_of(rows), runs_of(route_rows)

    def take_tokens(stream: np.ndarray, fill: int | bool = 0) -> np.ndarray:
        return take_rows(stream, rows, fill, runs)

    def take_route_stream(stream: np.ndarray, fill: int) -> np.ndarray:
        return take_rows(stream, route_rows, fill, route_runs)

    sequences = len(layout.cu_seqlens_padded) - 1
    routes = None
    if microbatch.routes is not None:
        marker = missing_marker(microbatch.routes[0].dtype)
        routes = take_routes(
            microbatch.routes, _layer_numbers(topology), route_rows, marker, route_runs
        )
    mask_counts = mask_ids = mask_versions = None
    if microbatch.mask_counts is not None and topology.is_last_stage:
        mask_counts, mask_ids = take_ragged(microbatch.mask_counts, microbatch.mask_ids, rows)
        mask_versions = take_tokens(microbatch.row_versions, -1)
    teacher_log_probs = row_classes = None
    if microbatch.teacher_log_probs is not None:
        teacher_log_probs = take_tokens(microbatch.teacher_log_probs)
    if microbatch.row_classes is not None:
        row_classes = take_tokens(microbatch.row_classes, RowClass.FILLED)
    chosen = indexer_layers = token_versions = None
    if microbatch.indexer_topk is not None and microbatch.indexer_rows is not None:
        indexer_layers = _sorted_numbers(topology.indexer_layer_numbers)
        places = take_rows(microbatch.indexer_rows, rows, -1, runs)
        chosen = _take_indexer_bits(microbatch.indexer_topk, places, indexer_layers)
        token_versions = take_tokens(microbatch.row_versions, -1)
    return RankSlice(
        microbatch_id=microbatch.microbatch_id,
        cu_seqlens_padded=layout.cu_seqlens_padded,
        max_seqlen=int(np.diff(layout.cu_seqlens_padded).max()),
        loss_weights=np.pad(microbatch.loss_weights, (0, sequences - len(microbatch.loss_weights))),
        tokens=take_tokens(microbatch.tokens),
        labels=take_tokens(microbatch.labels),
        positions=take_tokens(microbatch.positions),
        loss_mask=take_tokens(microbatch.loss_mask, False),
        rollout_log_probs=take_tokens(microbatch.rollout_log_probs),
        advantages=take_tokens(microbatch.advantages),
        token_uids=take_tokens(microbatch.row_uids, PADDING_UID),
        layer_numbers=_layer_numbers(topology),
        routes=routes,
        route_uids=take_route_stream(microbatch.row_uids, PADDING_UID),
        route_versions=take_route_stream(microbatch.row_versions, -1),
        mask_counts=mask_counts,
        mask_ids=mask_ids,
        mask_versions=mask_versions,
        teacher_log_probs=teacher_log_probs,
        ages=take_tokens(microbatch.ages),
        row_classes=row_classes,
        indexer_topk=chosen,
        indexer_layers=indexer_layers,
        token_versions=token_versions,
    )


def _take_indexer_bits(bits: np.ndarray, rows: np.ndarray, layer_numbers: np.ndarray) -> np.ndarray:
    """Gather the bits of some layers (numbers from 1) into rows, no bit where ``rows`` is -1.

    bits: uint64[r, L, W]; rows: int64[n].  Returns [n, i, W], which lies in memory layer by layer.
    """
    out = np.zeros((len(layer_numbers), len(rows), bits.shape[2]), dtype=bits.dtype)
    has = rows >= 0
    for i, number in enumerate(layer_numbers.tolist() if has.any() else ()):
        out[i, has] = bits[rows[has], number - 1]
    return out.swapaxes(0, 1)


def _rank_rows(layout: TokenLayout, topology: RankTopology) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one rank's token streams, int64[n], and of its routers, int64[m]."""
    rows = cp_rows(layout.rows, layout.cu_seqlens_padded, topology.cp_size, topology.cp_rank)
    if topology.sequence_parallel:
        return rows, sp_rows(rows, topology.tp_size, topology.tp_rank)
    return rows, rows


def _layer_numbers(topology: RankTopology) -> np.ndarray:
    return _sorted_numbers(topology.moe_layer_numbers)


def _sorted_numbers(numbers_by_chunk: tuple[tuple[int, ...], ...]) -> np.ndarray:
    return np.array(sorted(sum(numbers_by_chunk, ())), dtype=np.int32)


assert PADDING == PADDING_UID
