"""Kernels that replay and its check launch in a router call of a recipe's model; they read nothing back.

Kernels are counted as operations that are no views; the routers' modules are stand-ins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from r3train.cpu.device import prepare_device
from r3train.types import RankSlice, missing_marker

prepare_device()

from r3train.trainer.megatron import replay, replay_evidence  # noqa: E402

ROWS, LAYERS, TOPK, NUM_EXPERTS = 32, 48, 8, 128  # layers and experts of Qwen3-30B-A3B
ALIKE = (
    "aten.detach",
    "aten.slice",
    "aten.select",
    "aten.view",
    "aten._unsafe_view",
    "aten.expand",
)
ALIKE += (
    "aten.transpose",
    "aten.t.",
    "aten.unsqueeze",
    "aten.squeeze",
    "aten.alias",
    "aten.unbind",
)
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.equal")


class Launched(TorchDispatchMode):
    """Operations by name, without those that make a view."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith(ALIKE):
            self.kernels[str(func)] += 1
        return func(*args, **(kwargs or {}))


def microbatch(missing: bool) -> RankSlice:
    """A pack with padding; with ``missing`` one row has no route."""
    order = np.random.default_rng(0).random((ROWS, LAYERS, NUM_EXPERTS)).argsort(-1)
    routes = order[..., :TOPK].astype(np.uint8)
    if missing:
        routes[5] = missing_marker(routes.dtype)
    uids = np.where(np.arange(ROWS) < ROWS - 4, np.arange(ROWS), -1)
    return RankSlice(
        microbatch_id=0,
        cu_seqlens_padded=np.array([0, ROWS], dtype=np.int32),
        max_seqlen=ROWS,
        loss_weights=np.ones(1, dtype=np.float32),
        tokens=uids,
        labels=uids,
        positions=uids,
        loss_mask=uids >= 0,
        rollout_log_probs=np.zeros(ROWS, np.float32),
        advantages=np.zeros(ROWS, np.float32),
        token_uids=uids,
        layer_numbers=np.arange(1, LAYERS + 1, dtype=np.int32),
        routes=routes,
        route_uids=uids,
        route_versions=np.zeros(ROWS, np.int32),
    )


def own(scores: torch.Tensor, topk: int, *_: Any) -> Any:
    return torch.topk(scores, topk, dim=1)


def ranks_manager(check: bool) -> replay.RoutingReplayManager:
    return replay.RoutingReplayManager(
        num_experts=NUM_EXPERTS,
        topk=TOPK,
        device=torch.device("cpu"),
        rank=0,
        counts_tokens=True,
        checks=check,
    )


def router_of(layer_number: int, dispatcher: str = "alltoall") -> SimpleNamespace:
    config = SimpleNamespace(moe_token_dispatcher_type=dispatcher)
    return SimpleNamespace(layer_number=layer_number, topk=TOPK, config=config)


def kernels(check: bool, missing: bool, replay_pass: str, records: bool = True) -> Iterator[float]:
    """Kernels a call next to the router's own: of the forwards, then of a train pass's recomputations."""
    manager = ranks_manager(check)
    manager.records = records
    routers = [router_of(n) for n in range(1, LAYERS + 1)]
    manager.routers = [(0, router) for router in routers]
    served = [replay.RouterReplay(manager, 0, r.layer_number, torch.gather) for r in routers]
    scores = torch.randn(LAYERS, ROWS, NUM_EXPERTS)
    trains = replay_pass == "train"
    manager.begin_pass(replay_pass, [microbatch(missing)], 0, counts_controls=not trains)
    manager.begin_forward(0, 0)
    manager.begin_backward(0, 0)
    orders = {"forward": range(LAYERS)}
    if trains:
        orders["recomputation"] = range(LAYERS - 1, -1, -1)
    for stage, order in orders.items():
        with pytest.MonkeyPatch.context() as patch, Launched() as launched:
            patch.setattr(replay, "in_recomputation", lambda: stage == "recomputation")
            patch.setattr(replay_evidence, "is_checkpointing", lambda: trains)
            for i in order:
                _, experts = served[i].get_replay_topk(scores[i], TOPK, None, None, own)
                routing_map = torch.zeros_like(scores[i]).bool().scatter(1, experts, True)
                if check:
                    manager.record_call(routers[i], (), (None, routing_map))
            if check and records and stage == [*orders][-1]:
                manager.recorder.end_pass()
        assert not [name for name in launched.kernels if name.startswith(READS)]
        yield sum(launched.kernels.values()) / LAYERS - 3  # of these the map is made


@pytest.mark.parametrize("missing", [False, True])
def test_the_check_adds_few_kernels_to_a_router_call_and_reads_nothing_back(missing):
    """Counted one by one the calls of a first pass take 105, those of a train pass 58, of its recomputation 67."""
    for replay_pass in ("old_log_prob", "train"):
        plain = kernels(False, missing, replay_pass)
        for least, most in zip(plain, kernels(True, missing, replay_pass), strict=True):
            assert least < 20 and 1 < most - least < 10, (replay_pass, least, most)


def test_a_rollout_that_is_not_checked_adds_no_kernel():
    for replay_pass in ("old_log_prob", "train"):
        plain = [*kernels(False, True, replay_pass)]
        assert [*kernels(True, True, replay_pass, records=False)] == plain


def evidence(together: int, monkeypatch) -> list:
    """Records of two microbatches with two routers, in turns, in one of which a router serves itself."""
    monkeypatch.setattr(replay_evidence, "TOGETHER", together)
    manager = ranks_manager(check=True)
    routers = [router_of(n) for n in (1, 2, 3)]
    manager.routers = [(0, router) for router in routers]
    torch.manual_seed(0)
    scores = torch.randn(2, 3, ROWS, NUM_EXPERTS)
    for replay_pass in ("old_log_prob", "train"):
        two = [replace(microbatch(missing=i == 1), microbatch_id=i) for i in (0, 1)]
        manager.begin_pass(replay_pass, two, 0, counts_controls=replay_pass != "train")
        for stage in ("forward", "recomputation"):
            again = stage == "recomputation"
            monkeypatch.setattr(replay, "in_recomputation", lambda: again)
            monkeypatch.setattr(replay_evidence, "is_checkpointing", lambda: True)
            for i, layer in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2)):
                (manager.begin_backward if again else manager.begin_forward)(0, i)
                seen = scores[i, layer] + (again and (i, layer) == (1, 1))  # not its forward's
                served = replay.RouterReplay(manager, 0, layer + 1, torch.gather)
                experts = own(seen, TOPK).indices
                if (i, layer) != (1, 0):
                    _, experts = served.get_replay_topk(seen, TOPK, None, None, own)
                if layer == 2:  # one row is routed otherwise, and one twice to an expert
                    experts = experts.clone()
                    experts[0, 0], experts[1, 0] = (experts[0, 0] + 1) % NUM_EXPERTS, experts[1, 1]
                routing_map = torch.zeros_like(seen).bool().scatter(1, experts, True)
                manager.record_call(routers[layer], (), (None, routing_map))
        manager.end_pass()
    return manager.collect(0)


def test_calls_that_are_counted_together_are_counted_as_alone(monkeypatch):
    alone = evidence(1, monkeypatch)
    assert evidence(16, monkeypatch) == alone and len(alone) == 24
    assert {call.rows_native > 0 for call in alone} == {True, False}
    assert {call.duplicate_rows for call in alone} == {0, 1}
    assert {call.rows_recompute_differ for call in alone} == {0, ROWS}
    assert max(call.control_token_plus for call in alone) < max(call.rows_overlap for call in alone)


def test_scores_are_kept_only_where_they_will_be_recomputed(monkeypatch):
    for recomputes in (True, False):
        monkeypatch.setattr(replay_evidence, "is_checkpointing", lambda: recomputes)
        manager = ranks_manager(check=True)
        manager.routers = [(0, router := router_of(1))]
        manager.begin_pass("train", [microbatch(missing=False)], 0)
        manager.begin_forward(0, 0)
        scores = torch.randn(ROWS, NUM_EXPERTS)
        served = replay.RouterReplay(manager, 0, 1, torch.gather)
        _, experts = served.get_replay_topk(scores, TOPK, None, None, own)
        routing_map = torch.zeros_like(scores).bool().scatter(1, experts, True)
        manager.record_call(router, (), (None, routing_map))
        assert len(manager.recorder._signatures) == recomputes


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_with_deepep_the_experts_of_the_largest_probabilities_are_recorded(dispatcher):
    """A replayed expert whose probability is 0 gets no row there, though the map names it."""
    manager = ranks_manager(check=True)
    manager.routers = [(0, router := router_of(1, dispatcher))]
    manager.begin_pass("train", [microbatch(missing=False)], 0)
    manager.begin_forward(0, 0)
    scores = torch.randn(ROWS, NUM_EXPERTS)
    served = replay.RouterReplay(manager, 0, 1, torch.gather)
    _, experts = served.get_replay_topk(scores, TOPK, None, None, own)
    routing_map = torch.zeros_like(scores).bool().scatter(1, experts, True)
    for lost in (False, True):
        probs = routing_map.float()
        if lost:  # another expert's is larger than nothing
            probs[0, experts[0, 0]], probs[0, (~routing_map[0]).nonzero()[0]] = 0.0, 1e-9
        manager.record_call(router, (), (probs, routing_map))
    sound, found = manager.collect(0)
    assert (sound.fingerprint == found.fingerprint) == (dispatcher == "alltoall")
