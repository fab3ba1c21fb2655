"""Planted bugs on the way of the routes: decoding, packing, slicing, filling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from r3train import types
from r3train.layout import microbatch
from r3train.loop import batch as batches, scatter
from r3train.trainer.megatron import replay
from r3train.types import TrainSample
from r3train.verify.mutations import Scene, mutation, patched
from r3train.verify.compare import FORWARD, ROUTES


@contextmanager
def _routes_become(change: Callable[[TrainSample, np.ndarray], np.ndarray]) -> Iterator[None]:
    """Change a sample's routes [T-1, L, K] where packing reads them."""

    def make(original: Callable) -> Callable:
        def checked(sample: TrainSample, *args: object) -> np.ndarray:
            return change(sample, original(sample, *args).copy())

        return checked

    with patched(microbatch, "checked_routes", make):
        yield


@mutation("every token gets the route of the token before it", topology="tp2", phase=ROUTES)
def token_shift_plus(scene: Scene) -> Iterator[None]:
    with _routes_become(lambda s, r: np.roll(r, 1, axis=0)):
        yield


@mutation("every token gets the route of the token after it", topology="ep2", phase=ROUTES)
def token_shift_minus(scene: Scene) -> Iterator[None]:
    with _routes_become(lambda s, r: np.roll(r, -1, axis=0)):
        yield


@mutation("every layer gets the routes of the layer before it", topology="tp2", phase=ROUTES)
def layer_shift(scene: Scene) -> Iterator[None]:
    with _routes_become(lambda s, r: np.roll(r, 1, axis=1)):
        yield


@mutation("two adjacent layers get each other's routes", topology="ep2", phase=ROUTES)
def layers_swapped(scene: Scene) -> Iterator[None]:
    def swap(sample: TrainSample, routes: np.ndarray) -> np.ndarray:
        routes[:, [1, 2]] = routes[:, [2, 1]]
        return routes

    with _routes_become(swap):
        yield


@mutation("the last recorded row of every sample is lost", topology="cp2", phase=ROUTES)
def last_row_dropped(scene: Scene) -> Iterator[None]:
    def drop(sample: TrainSample, routes: np.ndarray) -> np.ndarray:
        routes[-1] = types.missing_marker(routes.dtype)
        return routes

    with _routes_become(drop):
        yield


@mutation("two samples of a group get each other's routes", topology="dp2", phase=ROUTES)
def group_samples_swapped(scene: Scene) -> Iterator[None]:
    lengths = scene.batch.lengths
    twin = {}
    for i in range(0, len(lengths) - 1, 2):
        if lengths[i] == lengths[i + 1]:
            twin |= {i: i + 1, i + 1: i}

    def swap(sample: TrainSample, routes: np.ndarray) -> np.ndarray:
        other = twin.get(sample.sample.sample_id)
        if other is None:
            return routes
        start, length = int(scene.batch.starts[other]), int(lengths[other])
        return scene.batch.routes[start : start + length - 1].astype(routes.dtype)

    with _routes_become(swap):
        yield


@mutation("one expert of one row of one layer is another", topology="ep2", phase=ROUTES)
def one_expert_changed(scene: Scene) -> Iterator[None]:
    def change(sample: TrainSample, routes: np.ndarray) -> np.ndarray:
        if sample.sample.sample_id == 7:
            used = routes[2, 1]
            unused = np.setdiff1d(np.arange(scene.variant.num_experts), used)
            routes[2, 1, 0] = unused[0]
        return routes

    with _routes_become(change):
        yield


@mutation("one row names an expert twice", topology="dp2", phase=ROUTES)
def duplicate_in_row(scene: Scene) -> Iterator[None]:
    def change(sample: TrainSample, routes: np.ndarray) -> np.ndarray:
        if sample.sample.sample_id == 7:
            routes[2, 1] = routes[2, 1, 0]
        return routes

    with _routes_become(change):
        yield


@mutation(
    "layers are counted without the dense ones before them",
    topology="recompute_uniform",
    phase=ROUTES,
)
def dense_offset_dropped(scene: Scene) -> Iterator[None]:
    moe = [n - 1 for n in scene.variant.moe_layer_numbers]

    def change(sample: TrainSample, routes: np.ndarray) -> np.ndarray:
        out = routes.copy()
        out[:, moe] = routes[:, : len(moe)]
        return out

    with _routes_become(change):
        yield


@mutation("expert ids above 255 wrap round", topology="one_wide300", phase=ROUTES)
def uint8_wrap(scene: Scene) -> Iterator[None]:
    with patched(
        types.RouteShape, "dtype", lambda original: property(lambda self: np.dtype(np.uint8))
    ):
        yield


@mutation(
    "missing slots are filled with experts 0, 1, ... in turn, whatever the row holds",
    topology="dp2",
    phase=ROUTES,
)
def cyclic_fill(scene: Scene) -> Iterator[None]:
    def cyclic(scores: torch.Tensor, experts: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
        turn = torch.arange(experts.numel(), device=experts.device).view_as(experts)
        return torch.where(missing, turn % scores.shape[1], experts)

    with patched(replay, "fill_missing", lambda original: cyclic):
        yield


@mutation("context-parallel ranks take contiguous shares", topology="cp2", phase=FORWARD)
def contiguous_cp(scene: Scene) -> Iterator[None]:
    def contiguous(rows, cu_seqlens_padded, cp_size, cp_rank):
        share = np.diff(cu_seqlens_padded) // cp_size
        starts = cu_seqlens_padded[:-1] + share * cp_rank
        return np.concatenate([rows[s : s + n] for s, n in zip(starts, share)])

    with patched(microbatch, "cp_rows", lambda original: contiguous):
        yield


@mutation("the two zigzag chunks of a rank change places", topology="cp2", phase=FORWARD)
def cp_halves_swapped(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def swapped(rows, cu_seqlens_padded, cp_size, cp_rank):
            own = original(rows, cu_seqlens_padded, cp_size, cp_rank)
            half = np.diff(cu_seqlens_padded) // (2 * cp_size)
            parts, start = [], 0
            for n in half:
                parts += [own[start + n : start + 2 * n], own[start : start + n]]
                start += 2 * n
            return np.concatenate(parts)

        return swapped

    with patched(microbatch, "cp_rows", make):
        yield


@mutation(
    "routes are cut by a contiguous share where the tokens are cut in a zigzag",
    topology="cp2",
    phase=ROUTES,
)
def contiguous_cp_routes(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def sliced(batch, topology):
            out = original(batch, topology)
            n = len(batch.layout.rows) // topology.cp_size
            rows = batch.layout.rows[n * topology.cp_rank : n * (topology.cp_rank + 1)]
            own = batch.routes[:, out.layer_numbers - 1]
            routes = microbatch.take_rows(own, rows, types.missing_marker(own.dtype))
            return replace(out, routes=routes)

        return sliced

    with patched(scatter, "slice_microbatch", make):
        yield


@mutation(
    "routes are not cut for sequence parallelism",
    topology="tp2",
    phase=ROUTES,
    expect_error="the router sees",
)
def sp_slice_skipped(scene: Scene) -> Iterator[None]:
    with patched(microbatch, "sp_rows", lambda original: lambda rows, tp_size, tp_rank: rows):
        yield


@mutation("every tensor rank replays the first rank's rows", topology="tp2", phase=ROUTES)
def sp_first_share(scene: Scene) -> Iterator[None]:
    with patched(microbatch, "sp_rows", lambda o: lambda rows, size, rank: o(rows, size, 0)):
        yield


@mutation("tensor ranks are counted backwards", topology="tp2", phase=ROUTES)
def tp_ranks_reversed(scene: Scene) -> Iterator[None]:
    with patched(
        microbatch, "sp_rows", lambda o: lambda rows, size, rank: o(rows, size, size - 1 - rank)
    ):
        yield


@mutation(
    "the last sample of the first microbatch is dealt to nobody", topology="dp2", phase=ROUTES
)
def sample_not_dealt(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def deal(*args):
            dealt = original(*args)
            dealt[0][0].pop()
            return dealt

        return deal

    with patched(batches, "deal_bins", make):
        yield


@mutation("every data rank is sent the first one's microbatches", topology="dp2", phase=ROUTES)
def first_data_rank_everywhere(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def send(microbatches, topologies):
            return original(microbatches, [replace(t, dp_rank=0) for t in topologies])

        return send

    with patched(scatter, "send_slices", make):
        yield


@mutation("every tensor rank is sent its neighbour's routes", topology="tp2", phase=ROUTES)
def neighbours_routes(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def sliced(batch, t):
            other = original(batch, replace(t, tp_rank=t.tp_size - 1 - t.tp_rank))
            return replace(original(batch, t), routes=other.routes)

        return sliced

    with patched(scatter, "slice_microbatch", make):
        yield
