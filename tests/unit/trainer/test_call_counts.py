"""The counts of router calls against loops over rows, through the manager and the replay objects as routers call them."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from r3train.cpu.device import prepare_device
from r3train.ids import token_uids
from r3train.routing.fingerprint import rollout_fingerprint
from r3train.types import RankSlice, ReplayEvidence, missing_marker

prepare_device()

from r3train.trainer.megatron import replay, replay_evidence  # noqa: E402
from r3train.trainer.megatron.replay import RouterReplay, RoutingReplayManager  # noqa: E402

# more layers than are counted at once
LAYERS = tuple(range(2, 21))
ROWS, REAL, TOPK, EXPERTS, HELD = 14, 11, 2, 8, 4
MISSING = missing_marker(np.uint8)


def make_slice(seed: int, microbatch_id: int = 0) -> RankSlice:
    """Random routes: a row without any, a slot without one in every third layer, and padding."""
    random = np.random.default_rng(seed)
    order = random.random((ROWS, len(LAYERS), EXPERTS)).argsort(axis=-1)
    routes = order[..., :TOPK].astype(np.uint8)
    routes[REAL:] = MISSING
    routes[4] = MISSING
    routes[2, ::3, 1] = MISSING
    uids = np.where(np.arange(ROWS) < REAL, np.arange(ROWS), -1)
    zeros = np.zeros(ROWS, np.int64)
    return RankSlice(
        microbatch_id=microbatch_id,
        cu_seqlens_padded=np.array([0, REAL, ROWS], np.int32),
        max_seqlen=REAL,
        loss_weights=np.array([1, 0], np.float32),
        tokens=zeros,
        labels=zeros,
        positions=zeros,
        loss_mask=zeros.astype(bool),
        rollout_log_probs=zeros.astype(np.float32),
        advantages=zeros.astype(np.float32),
        token_uids=uids,
        layer_numbers=np.array(LAYERS, np.int32),
        routes=routes,
        route_uids=uids,
        # of padding too, which is no row of the actor's version
        route_versions=random.integers(HELD - 1, HELD + 2, ROWS).astype(np.int32),
    )


class Calls:
    """A rank's routers: each call is served and recorded as Megatron's hooks do it."""

    def __init__(self, seed: int, *, counts_tokens: bool = True):
        self.manager = RoutingReplayManager(
            num_experts=EXPERTS,
            topk=TOPK,
            device=torch.device("cpu"),
            rank=5,
            counts_tokens=counts_tokens,
            checks=True,
        )
        random = torch.Generator().manual_seed(seed)
        self.scores = {n: torch.rand(ROWS, EXPERTS, generator=random) for n in LAYERS}
        self.served: dict[int, torch.Tensor] = {}
        config = SimpleNamespace(moe_token_dispatcher_type="alltoall")
        self.routers = {n: SimpleNamespace(layer_number=n, config=config) for n in LAYERS}
        self.manager.routers = [(0, router) for router in self.routers.values()]
        gates = lambda scores, experts: scores.gather(1, experts)  # noqa: E731
        self.replays = {n: RouterReplay(self.manager, 0, n, gates) for n in LAYERS}

    def own(self, layer: int) -> torch.Tensor:
        return self.scores[layer].topk(TOPK, dim=1).indices

    def call(self, layer: int, change=lambda routing_map: None, *, replayed: bool = True) -> None:
        """One call of a layer's router; change: what is wrong with the map that it returns."""

        def choose(scores, topk, num_groups=None, group_topk=None):
            return scores.topk(topk, dim=1)

        experts = self.own(layer)
        if replayed:
            experts = self.replays[layer].get_replay_topk(
                self.scores[layer], TOPK, None, None, choose
            )[1]
        self.served[layer] = experts
        routing_map = torch.zeros(ROWS, EXPERTS, dtype=torch.bool).scatter(1, experts, True)
        change(routing_map)
        self.manager.record_call(self.routers[layer], (), (routing_map.float(), routing_map))

    def forward(
        self, s: RankSlice, replay_pass: str = "old_log_prob", *, counts_controls=True
    ) -> None:
        self.manager.begin_pass(replay_pass, [s], HELD, counts_controls=counts_controls)
        self.manager.begin_forward(0, s.microbatch_id)

    def collected(self) -> dict[int, ReplayEvidence]:
        self.manager.end_pass()
        return {call.layer_number: call for call in self.manager.collect(9)}


@contextmanager
def recomputing(monkeypatch, *, forward: bool):
    """Inside of a checkpointed forward, or of its recomputation."""
    with monkeypatch.context() as patch:
        for module in (replay, replay_evidence):
            patch.setattr(module, "is_checkpointing", lambda: True)
        with torch.set_grad_enabled(not forward):
            yield


def expected(calls: Calls, s: RankSlice, layer: int, routes: np.ndarray) -> dict[str, int]:
    """The counts of a right call, by loops over rows.  routes: as the rollout left them [m, l, K]."""
    column = LAYERS.index(layer)
    own, served = calls.own(layer).tolist(), calls.served[layer].tolist()
    whole = [t for t in range(REAL) if MISSING not in routes[t, column]]
    current = [t for t in range(REAL) if s.route_versions[t] == HELD]
    shared = {t: len(set(own[t]) & set(served[t])) for t in whole}

    def equal_to(other) -> int:
        return sum(set(own[t]) == set(np.asarray(other(t)).tolist()) for t in whole)

    def of_layer(step: int):
        return lambda t: routes[t, (column + step) % len(LAYERS)]

    return dict(
        num_rows=ROWS,
        rows_replayed=len(whole),
        rows_filled=REAL - len(whole),
        rows_padding=ROWS - REAL,
        rows_native=0,
        duplicate_rows=0,
        topk=TOPK,
        replay_idx_sum=sum(map(sum, served)),
        map_sum=ROWS * TOPK,
        rows_equal=sum(n == TOPK for n in shared.values()),
        rows_overlap=sum(0 < n < TOPK for n in shared.values()),
        rows_mismatch=sum(n == 0 for n in shared.values()),
        rows_current=len(current),
        rows_current_equal=sum(shared[t] == TOPK for t in whole if t in current),
        rows_current_mismatch=sum(shared[t] == 0 for t in whole if t in current),
        rows_recompute_differ=0,
        control_token_minus=equal_to(lambda t: served[t - 1]),
        control_token_plus=equal_to(lambda t: served[(t + 1) % ROWS]),
        control_layer_minus=equal_to(of_layer(-1)),
        control_layer_plus=equal_to(of_layer(1)),
    )


def fingerprint_of(routes: np.ndarray, layer: int) -> int:
    """Of the recorded slots of real rows [m, K], as the rollout's side takes it."""
    every = np.full((REAL, max(LAYERS), TOPK), MISSING, np.uint8)
    every[:, layer - 1] = routes[:REAL]
    return int(rollout_fingerprint(token_uids(0, REAL), every, np.array([layer]))[0])


def counts(call: ReplayEvidence, of: dict[str, int]) -> dict[str, int]:
    return {name: getattr(call, name) for name in of}


def agreeing(calls: Calls, routes: np.ndarray) -> None:
    """Let the trainer's own choice be the rollout's in some rows, and another row's or layer's in some."""
    for column, layer in enumerate(LAYERS):
        scores = calls.scores[layer]
        for t, experts in enumerate(
            (
                routes[0, column],
                routes[1, column],
                routes[5, column, :1],
                routes[7, column],
                routes[6, column],
                routes[5, (column + 1) % len(LAYERS)],
                routes[6, (column - 1) % len(LAYERS)],
            )
        ):
            row = (0, 1, 5, 8, 7, 9, 10)[t]
            scores[row, torch.from_numpy(experts.astype(np.int64)).clamp(max=EXPERTS - 1)] += 1


@pytest.mark.parametrize("seed", range(4))
def test_every_count_of_a_forward_is_that_of_a_loop_over_its_rows(seed):
    s, calls = make_slice(seed), Calls(seed)
    routes = s.routes.copy()
    agreeing(calls, routes)
    calls.forward(s)
    for layer in LAYERS:
        calls.call(layer)
    found, sums = calls.collected(), dict.fromkeys(expected(calls, s, LAYERS[0], routes), 0)
    assert list(found) == list(LAYERS)
    for layer, call in found.items():
        wanted = expected(calls, s, layer, routes)
        assert counts(call, wanted) == wanted
        assert call.fingerprint == fingerprint_of(routes[:, LAYERS.index(layer)], layer)
        place = (call.step, call.rank, call.replay_pass, call.stage, call.vp_stage)
        assert place == (9, 5, "old_log_prob", "replay_forward", 0)
        assert call.counts_tokens and call.num_calls == 1
        for name, value in wanted.items():
            sums[name] += value
    # every kind of row and every control was there to be counted
    never = ("rows_native", "duplicate_rows", "rows_recompute_differ")
    assert {name for name, value in sums.items() if not value} == set(never)


def test_controls_are_counted_in_the_first_forwards_alone_and_copies_are_marked():
    for counts_controls, replay_pass in ((False, "old_log_prob"), (True, "train")):
        s, calls = make_slice(0), Calls(0, counts_tokens=False)
        agreeing(calls, s.routes.copy())
        calls.forward(s, replay_pass, counts_controls=counts_controls)
        for layer in LAYERS:
            calls.call(layer)
        found = calls.collected()
        assert not any(call.counts_tokens for call in found.values())
        total = sum(call.control_token_minus + call.control_layer_plus for call in found.values())
        assert (total > 0) == counts_controls


def test_a_fault_in_a_returned_map_is_counted_in_its_own_layer():
    s, calls = make_slice(1), Calls(1)
    routes = s.routes.copy()
    calls.forward(s)

    def another(routing_map):  # of row 3, whose slots were recorded
        experts = routes[3, LAYERS.index(5)]
        free = next(e for e in range(EXPERTS) if e not in experts)
        routing_map[3, int(experts[1])], routing_map[3, free] = False, True

    def fewer(routing_map):
        routing_map[6, int(routes[6, LAYERS.index(6), 0])] = False

    def more(routing_map):
        experts = set(routes[7, LAYERS.index(7)].tolist())
        routing_map[7, next(e for e in reversed(range(EXPERTS)) if e not in experts)] = True

    faults = {5: another, 6: fewer, 7: more}
    for layer in LAYERS:
        calls.call(layer, faults.get(layer, lambda routing_map: None))
    found = calls.collected()
    right = {n: fingerprint_of(routes[:, LAYERS.index(n)], n) for n in LAYERS}
    wrong = [n for n in LAYERS if found[n].fingerprint != right[n] and n != 7]
    assert wrong == [5, 6]
    changed = routes[:, LAYERS.index(5)].copy()
    changed[3, 1] = next(e for e in range(EXPERTS) if e not in changed[3])
    assert found[5].fingerprint == fingerprint_of(changed, 5)
    changed = routes[:, LAYERS.index(6)].copy()
    changed[6, 0] = MISSING
    assert found[6].fingerprint == fingerprint_of(changed, 6)
    assert {n for n in LAYERS if found[n].duplicate_rows} == {6}
    sums = {n: found[n].map_sum - ROWS * TOPK for n in LAYERS}
    assert {n: off for n, off in sums.items() if off} == {6: -1, 7: 1}


def test_a_router_that_chooses_for_itself_is_counted_as_native_among_others_that_do_not():
    s, calls = make_slice(2), Calls(2)
    routes = s.routes.copy()
    calls.forward(s)
    for layer in LAYERS:
        calls.call(layer, replayed=layer not in (4, 9))
    found = calls.collected()
    for layer in (4, 9):
        call = found[layer]
        zero = ("rows_replayed", "rows_filled", "rows_equal", "rows_overlap", "rows_mismatch")
        zero += ("rows_current", "rows_current_equal", "replay_idx_sum", "control_token_plus")
        assert not any(getattr(call, name) for name in zero)
        assert (call.rows_native, call.rows_padding, call.map_sum) == (REAL, 3, ROWS * TOPK)
        assert call.fingerprint == fingerprint_of(calls.own(layer).numpy().astype(np.uint8), layer)
    wanted = expected(calls, s, 10, routes)
    assert counts(found[10], wanted) == wanted


def test_a_choice_that_another_layer_was_given_is_none_of_this_one():
    s, calls = make_slice(2), Calls(2)
    calls.forward(s)
    calls.call(4)
    choice = replay_evidence.Choice(3, calls.scores[3], calls.own(3), calls.own(3))
    calls.manager.recorder.note_choice(choice)
    calls.call(5, replayed=False)
    calls.call(6, replayed=False)
    found = calls.collected()
    assert [found[n].rows_native for n in (4, 5, 6)] == [0, REAL, REAL]


def recomputed(monkeypatch, noise: dict[int, torch.Tensor], *, skip=()):
    """A train pass whose layers are recomputed, with noise on the scores of some; the second calls."""
    slices = [make_slice(0), make_slice(1, 1)]
    calls = Calls(0)
    calls.manager.begin_pass("train", slices, HELD, counts_controls=False)
    for s in slices:
        calls.manager.begin_forward(0, s.microbatch_id)
        calls.scores = {n: scores + s.microbatch_id for n, scores in calls.scores.items()}
        with recomputing(monkeypatch, forward=True):
            for layer in LAYERS:
                if layer not in skip:
                    calls.call(layer)
    for s in reversed(slices):
        calls.manager.begin_backward(0, s.microbatch_id)
        with recomputing(monkeypatch, forward=False):
            for layer in reversed(LAYERS):
                kept = calls.scores[layer]
                if s.microbatch_id == 1:
                    calls.scores[layer] = kept + noise.get(layer, 0)
                calls.call(layer)
                calls.scores[layer] = kept
        calls.scores = {n: scores - s.microbatch_id for n, scores in calls.scores.items()}
    calls.manager.end_pass()
    every = calls.manager.collect(0)
    return {(c.microbatch_id, c.layer_number): c for c in every if c.stage == "replay_backward"}


def test_a_recomputation_repeats_its_own_forwards_scores_but_for_the_noise_of_kernels(monkeypatch):
    def at(row: int, size: float) -> torch.Tensor:
        noise = torch.zeros(ROWS, EXPERTS)
        noise[row, 2] = size
        return noise

    found = recomputed(monkeypatch, {3: at(1, 1e-5), 5: at(1, 0.1), 7: at(1, 0.1) + at(8, 0.1)})
    differ = {place: c.rows_recompute_differ for place, c in found.items()}
    assert {place: n for place, n in differ.items() if n} == {(1, 5): 1, (1, 7): 2}
    assert len(found) == 2 * len(LAYERS)
    # a forward that was never seen: no row is its own
    found = recomputed(monkeypatch, {}, skip=(6,))
    differ = {place: c.rows_recompute_differ for place, c in found.items()}
    assert {place: n for place, n in differ.items() if n} == {(0, 6): ROWS, (1, 6): ROWS}


def test_scores_of_a_pass_are_not_compared_with_a_later_ones(monkeypatch):
    s, calls = make_slice(0), Calls(0)
    calls.forward(s, "train")
    with recomputing(monkeypatch, forward=True):
        calls.call(2)
    staged = weakref.ref(calls.manager.staged(0))
    calls.manager.end_pass()
    gc.collect()
    assert staged() is None, "its routes stay"
    calls.forward(s, "train")
    calls.manager.begin_backward(0, 0)
    with recomputing(monkeypatch, forward=False):
        calls.call(2)
    calls.manager.end_pass()
    first, second = calls.manager.collect(0)
    assert (first.rows_recompute_differ, second.rows_recompute_differ) == (0, ROWS)
    assert calls.manager.collect(0) == []


def test_the_map_of_a_flex_dispatcher_is_that_of_its_largest_probabilities():
    """A right map next to probabilities of other experts, to which rows are then sent."""
    s, calls = make_slice(0), Calls(0)
    routes, router = s.routes.copy(), calls.routers[3]
    found = []
    for kind in ("alltoall", "flex"):
        router.config, router.topk = SimpleNamespace(moe_token_dispatcher_type=kind), TOPK
        calls.forward(s)
        experts = calls.replays[3].get_replay_topk(
            calls.scores[3], TOPK, None, None, lambda scores, topk, *_: scores.topk(topk, dim=1)
        )[1]
        probs = torch.ones(ROWS, EXPERTS).scatter(1, experts, 0.0)
        routing_map = torch.zeros(ROWS, EXPERTS, dtype=torch.bool).scatter(1, experts, True)
        calls.manager.record_call(router, (), (probs, routing_map))
        found.append(calls.collected()[3])
    right = fingerprint_of(routes[:, LAYERS.index(3)], 3)
    assert [call.fingerprint == right for call in found] == [True, False]
    assert {call.map_sum for call in found} == {ROWS * TOPK}


def test_each_chunk_of_a_rank_has_its_own_microbatch():
    """As in an interleaved schedule: one chunk is a microbatch ahead of the other."""
    slices, calls = [make_slice(0), make_slice(1, 1)], Calls(0)
    routes = [s.routes.copy() for s in slices]
    calls.manager.routers = [(int(n >= 10), router) for n, router in calls.routers.items()]
    for n, of in calls.replays.items():
        of.vp_stage = int(n >= 10)
    calls.manager.begin_pass("train", slices, HELD)
    for microbatches in ((0, 1), (1, 0)):
        for vp_stage, microbatch in enumerate(microbatches):
            calls.manager.begin_forward(vp_stage, microbatch)
        for layer in (3, 12):
            calls.call(layer)
    calls.manager.end_pass()
    places = []
    for call in calls.manager.collect(0):
        of = routes[call.microbatch_id][:, LAYERS.index(call.layer_number)]
        assert call.fingerprint == fingerprint_of(of, call.layer_number)
        places.append((call.layer_number, call.vp_stage, call.microbatch_id))
    assert places == [(3, 0, 0), (12, 1, 1), (3, 0, 1), (12, 1, 0)]


def test_gates_are_those_of_the_score_function_and_without_the_experts_bias():
    scores = torch.tensor([[1.0, 3.0, 2.0], [0.5, -1.0, 4.0]])
    experts = torch.tensor([[1, 0], [2, 1]])
    bias = torch.tensor([0.25, 0.5, 1.0])

    def gates(function: str, pre_softmax: bool, biased: bool) -> torch.Tensor:
        config = SimpleNamespace(
            moe_router_score_function=function, moe_router_pre_softmax=pre_softmax
        )
        router = SimpleNamespace(config=config, enable_expert_bias=biased, expert_bias=bias)
        return replay.gate_values(router, scores, experts)

    chosen = torch.tensor([[3.0, 1.0], [4.0, -1.0]])
    # up to a factor of the row the softmax over all experts
    softmax = scores.softmax(1).gather(1, experts) / scores.softmax(1).amax(1, keepdim=True)
    torch.testing.assert_close(gates("softmax", False, False), softmax)
    assert torch.equal(gates("softmax", True, False), chosen)
    assert torch.equal(gates("sigmoid", False, False), chosen)
    unbiased = torch.tensor([[2.5, 0.75], [3.0, -1.5]])
    assert torch.equal(gates("sigmoid", False, True), unbiased)


def test_one_row_more_or_less_than_was_staged_is_refused_by_its_layer():
    s, calls = make_slice(0), Calls(0)
    calls.forward(s)
    calls.scores[3] = calls.scores[3][:-1]
    with pytest.raises(AssertionError, match="layer 3: the router sees 13 rows, 14 are staged"):
        calls.call(3)


def test_after_an_exception_no_call_of_the_broken_pass_is_collected_with_a_later_ones():
    s, calls = make_slice(0), Calls(0)
    calls.forward(s)
    for layer in LAYERS:  # some are counted already, others wait for their neighbours
        calls.call(layer)
    calls.manager.reset()
    assert calls.manager.collect(9) == []
    calls.forward(s)
    calls.call(7)
    assert list(calls.collected()) == [7]


def test_calls_that_are_not_to_be_checked_leave_no_record():
    s, calls = make_slice(0), Calls(0)
    calls.manager.records = False
    calls.forward(s)
    calls.call(3)
    calls.manager.end_pass()
    assert calls.manager.collect(0) == []
    calls.manager.records = True
    calls.forward(replace(make_slice(0), microbatch_id=3))
    calls.call(3)
    assert [c.microbatch_id for c in calls.collected().values()] == [3]
