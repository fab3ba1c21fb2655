"""The manager between passes: nothing stays staged, whatever ended the pass."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from r3train.cpu.device import prepare_device
from r3train.types import RankSlice, missing_marker

prepare_device()

from megatron.core.transformer.moe import token_dispatcher  # noqa: E402

from r3train.trainer.megatron.actor import MegatronActor  # noqa: E402
from r3train.trainer.megatron.replay import (  # noqa: E402
    RouterReplay,
    RoutingReplayManager,
    StagedRoutes,
)

NUM_ROWS, TOPK, NUM_EXPERTS = 6, 2, 8


def make_manager(*, check: bool = True) -> RoutingReplayManager:
    return RoutingReplayManager(
        num_experts=NUM_EXPERTS,
        topk=TOPK,
        device=torch.device("cpu"),
        rank=0,
        counts_tokens=True,
        checks=check,
    )


def make_slice(microbatch_id: int = 0) -> RankSlice:
    """Four real rows, the last without a route, and two of padding; one MoE layer, number 3."""
    routes = np.full((NUM_ROWS, 1, TOPK), missing_marker(np.uint8), dtype=np.uint8)
    routes[:3, 0] = [[0, 1], [2, 3], [4, 5]]
    zeros = np.zeros(NUM_ROWS, dtype=np.int64)
    return RankSlice(
        microbatch_id=microbatch_id,
        cu_seqlens_padded=np.array([0, 4, 6], dtype=np.int32),
        max_seqlen=4,
        loss_weights=np.array([1, 0], dtype=np.float32),
        tokens=zeros,
        labels=zeros,
        positions=zeros,
        loss_mask=zeros.astype(bool),
        rollout_log_probs=zeros.astype(np.float32),
        advantages=zeros.astype(np.float32),
        token_uids=np.array([0, 1, 2, 3, -1, -1]),
        layer_numbers=np.array([3], dtype=np.int32),
        routes=routes,
        route_uids=np.array([0, 1, 2, 3, -1, -1]),
        route_versions=np.array([4, 5, 5, -1, -1, -1], dtype=np.int32),
    )


def choose(manager: RoutingReplayManager) -> torch.Tensor:
    """Return the experts that the router of layer 3 is served."""
    scores = torch.arange(NUM_ROWS * NUM_EXPERTS, dtype=torch.float32).view(NUM_ROWS, -1)

    def gates(s, experts):
        return s.gather(1, experts)

    def own(s, topk, num_groups=None, group_topk=None):
        return torch.topk(s, topk, dim=1)

    return RouterReplay(manager, 0, 3, gates).get_replay_topk(scores, TOPK, None, None, own)[1]


def test_recorded_rows_are_replayed_and_holes_take_the_rows_own_best():
    manager = make_manager()
    manager.begin_pass("train", [make_slice()])
    manager.begin_forward(0, 0)
    experts = choose(manager)
    assert experts[:3].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert experts[3].tolist() == [7, 6]
    assert experts[4:].tolist() == [[0, 1], [2, 3]]  # padding is dealt round the experts


@pytest.mark.parametrize("num_rows", [1, 128, 300])
@pytest.mark.parametrize(("dtype", "topk"), [(np.uint8, 8), (np.uint8, 3), (np.uint16, 4)])
def test_staged_routes_are_the_slices_own_and_lie_layer_by_layer(num_rows, dtype, topk):
    routes = np.random.default_rng(0).integers(0, 90, (num_rows, 5, topk)).astype(dtype)
    routes[-1, 2, 0] = missing_marker(dtype)
    uids = np.arange(num_rows)
    fields = dict(routes=routes, route_uids=uids, route_versions=uids.astype(np.int32))
    one = replace(make_slice(), layer_numbers=np.arange(1, 6, dtype=np.int32), **fields)
    staged = StagedRoutes.from_slice(one, 90, torch.device("cpu"))
    assert np.array_equal(staged.routes.numpy(), routes)
    assert all(staged.routes[:, i].is_contiguous() for i in range(5))
    laid = replace(one, routes=np.ascontiguousarray(routes.swapaxes(0, 1)).swapaxes(0, 1))
    again = StagedRoutes.from_slice(laid, 90, torch.device("cpu"))
    assert torch.equal(again.routes, staged.routes)
    # a slice that lies so already is not copied, but that torch has no arithmetic for uint16
    assert (again.routes.data_ptr() == laid.routes.ctypes.data) == (dtype == np.uint8)
    assert staged.rows_with_missing.tolist() == [num_rows - 1]
    assert staged.missing_rows_per_layer == [0, 0, 1, 0, 0]


def test_chunks_of_rows_that_are_in_order_are_not_copied_and_others_are_sorted():
    rows, probs = torch.rand(6, 3), torch.rand(6)
    sizes = torch.tensor([1, 2, 3])
    sort = token_dispatcher.sort_chunks_by_idxs
    same = sort(rows, sizes, torch.arange(3), probs=probs)
    assert same[0] is rows and same[1] is probs
    turned = sort(rows, sizes, torch.tensor([2, 0, 1]), probs=probs)
    for got, given in zip(turned, (rows, probs)):
        assert torch.equal(got, torch.cat([given[3:], given[:1], given[1:3]]))


def test_outside_a_pass_the_router_chooses_for_itself():
    assert choose(make_manager())[0].tolist() == [7, 6]


def test_an_exception_leaves_no_stale_routes_and_no_half_counted_evidence():
    manager = make_manager()
    actor = SimpleNamespace(replay=manager)
    with pytest.raises(RuntimeError, match="in mid-pass"):
        with MegatronActor._pass(actor, "train", [make_slice()]):
            manager.begin_forward(0, 0)
            choose(manager)
            raise RuntimeError("in mid-pass")
    assert manager.staged(0) is None
    assert manager.collect(0) == []
    assert choose(manager)[0].tolist() == [7, 6]
    with MegatronActor._pass(actor, "train", [make_slice()]):  # and the next pass is whole
        manager.begin_forward(0, 0)
        assert choose(manager)[0].tolist() == [0, 1]


@pytest.mark.parametrize("check", [False, True])
def test_calls_are_recorded_with_the_check_alone(check):
    manager = make_manager(check=check)
    assert (manager.recorder is not None) is check
