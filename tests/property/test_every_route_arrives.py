"""Every real (sample, position, layer) reaches exactly one place, with its own route.

Index arithmetic only: no model, no ranks.  The routes encode where they belong, so anything
misplaced names itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3train.config.pipeline_layout import parse_pipeline_layout
from r3train.cpu.device import prepare_device
from r3train.layout.microbatch import build_microbatch, slice_microbatch, Streams
from r3train.loop.prepare import build_microbatches, deal_samples
from r3train.ids import token_uids
from r3train.config.pipeline_layout import stage_layer_numbers
from r3train.types import (
    Prompt,
    RankTopology,
    RolloutSample,
    RouteShape,
    TrainSample,
    missing_marker,
)

TOPK = 2
MARKER = missing_marker(np.uint16)


def expected_routes(uids: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """uint16[rows, layers, K] that only this token and layer would have."""
    mixed = uids[:, None] * 7919 + layers[None] * 104729
    return np.stack([(mixed * 31 + k) % MARKER for k in range(TOPK)], axis=-1).astype(np.uint16)


def sample_of(sample_id: int, num_tokens: int, num_layers: int) -> TrainSample:
    layers = np.arange(1, num_layers + 1)
    prompt = Prompt("p", 0, "", np.zeros(1, np.int32), None)
    sample = RolloutSample(
        sample_id=sample_id,
        group_id=0,
        prompt=prompt,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        prompt_len=1,
        loss_mask=np.arange(num_tokens) >= 1,
        rollout_log_probs=np.zeros(num_tokens, np.float32),
        routed_experts=expected_routes(token_uids(sample_id, num_tokens)[:-1], layers),
        weight_versions=np.zeros(num_tokens, np.int32),
        finish_reason="stop",
    )
    return TrainSample(sample, 0.0, np.zeros(num_tokens, np.float32))


@st.composite
def topologies(draw) -> dict:
    pp, vpp = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    vpp = vpp if pp > 1 else 1
    per_chunk = draw(st.integers(1, 2))
    first = draw(st.none() | st.integers(1, 2)) if pp > 1 else None
    middle = (pp - (first is not None)) * per_chunk * vpp
    return dict(
        cp=draw(st.integers(1, 4)),
        tp=draw(st.integers(1, 4)),
        sp=draw(st.booleans()),
        dp=draw(st.integers(1, 2)),
        pp=pp,
        vpp=vpp,
        first=None if first is None else first * vpp,
        num_layers=middle + (0 if first is None else first * vpp),
    )


@settings(max_examples=150)
@given(
    topology=topologies(),
    lengths=st.lists(st.integers(2, 23), min_size=1, max_size=7),
    dense=st.sets(st.integers(1, 16), max_size=4),
    budget=st.integers(23, 64),
)
def test_every_real_sample_position_and_layer_reaches_exactly_its_place(
    topology, lengths, dense, budget
):
    t = topology
    sp = t["sp"] and t["tp"] > 1
    chunks = stage_layer_numbers(
        t["num_layers"], t["pp"], vpp_size=t["vpp"], first=t["first"], last=None
    )
    samples = [sample_of(i, n, t["num_layers"]) for i, n in enumerate(lengths)]
    places = [
        RankTopology(
            dp_rank=dp_rank,
            dp_size=t["dp"],
            tp_rank=tp_rank,
            tp_size=t["tp"],
            cp_rank=cp_rank,
            cp_size=t["cp"],
            pp_rank=pp_rank,
            pp_size=t["pp"],
            vpp_size=t["vpp"],
            sequence_parallel=sp,
            moe_layer_numbers=tuple(tuple(n for n in c if n not in dense) for c in chunks[pp_rank]),
        )
        for dp_rank, tp_rank, cp_rank, pp_rank in product(
            *(range(t[size]) for size in ("dp", "tp", "cp", "pp"))
        )
    ]
    shape = RouteShape(t["num_layers"], TOPK, 300)
    dealt = deal_samples(samples, places[0], budget)
    built = build_microbatches(dealt, places[0], Streams(shape))
    last_rows = [token_uids(i, n)[-1] for i, n in enumerate(lengths)]
    arrivals: dict[tuple[int, int], list] = {}
    for place in places:
        for microbatch in built[place.dp_rank]:
            s = slice_microbatch(microbatch, place)
            real = s.route_uids >= 0
            expected = expected_routes(s.route_uids[real], s.layer_numbers)
            expected[np.isin(s.route_uids[real], last_rows)] = MARKER
            np.testing.assert_array_equal(s.routes[real], expected)
            assert (s.routes[~real] == MARKER).all()
            for layer in s.layer_numbers.tolist():
                arrivals.setdefault((layer, place.tp_rank), []).append(s.route_uids[real])
    every = np.sort(np.concatenate([token_uids(i, n) for i, n in enumerate(lengths)]))
    for layer in range(1, t["num_layers"] + 1):
        if layer in dense:
            assert not any(key[0] == layer for key in arrivals)
            continue
        by_rank = [np.concatenate(arrivals[layer, r]) for r in range(t["tp"])]
        # sequence parallelism splits the rows over TP; without it each TP rank has all of them
        for uids in [np.concatenate(by_rank)] if sp else by_rank:
            np.testing.assert_array_equal(np.sort(uids), every)


def test_27_layers_over_2_stages_with_13_in_the_first():
    (first,), (second,) = stage_layer_numbers(27, 2, vpp_size=1, first=13, last=None)
    assert first == tuple(range(1, 14)) and second == tuple(range(14, 28))


def test_61_layers_over_4_stages_and_2_virtual_ones_with_uneven_ends():
    stages = parse_pipeline_layout("Et*7|(t*8|)*6t*6L", 4)
    assert [[len(c) for c in stage] for stage in stages] == [[7, 8], [8, 8], [8, 8], [8, 6]]
    assert stages[0] == [tuple(range(1, 8)), tuple(range(32, 40))]
    assert stages[3] == [tuple(range(24, 32)), tuple(range(56, 62))]
    prepare_device()
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    megatron = PipelineParallelLayerLayout.from_str("Et*7|(t*8|)*6t*6L", 4)
    for pp_rank, stage in enumerate(stages):
        for vp_stage, chunk in enumerate(stage):
            # Megatron's own arithmetic, its process groups told where they are
            where = megatron.layout[pp_rank][vp_stage]
            assert sum(layer.name == "decoder" for layer in where) == len(chunk)


@pytest.mark.parametrize(
    ("num_layers", "stages", "ranks", "shape"),
    [
        # 27 layers (DeepSeek-V2-Lite) in 13 + 14, and DeepSeek-V3's 61 in 8 chunks, at paper size
        (
            27,
            stage_layer_numbers(27, 2, vpp_size=1, first=13, last=None),
            dict(pp_size=2, cp_size=2),
            (64, 6),
        ),
        (61, parse_pipeline_layout("Et*7|(t*8|)*6t*6L", 4), dict(pp_size=4, cp_size=2), (256, 8)),
    ],
)
def test_rows_of_paper_size_reach_their_layers(num_layers, stages, ranks, shape):
    num_experts, topk = shape
    rng = np.random.default_rng(0)
    dtype = np.uint8 if num_experts <= 255 else np.uint16
    num_tokens = 8192
    routes = rng.integers(0, num_experts, (num_tokens - 1, num_layers, topk)).astype(dtype)
    base = sample_of(5, num_tokens, 1)
    sample = replace(base, sample=replace(base.sample, routed_experts=routes))
    microbatch = build_microbatch(
        0, [sample], Streams(RouteShape(num_layers, topk, num_experts)), cp_size=2, tp_size=4
    )
    uid0 = token_uids(5, num_tokens)[0]
    seen = np.zeros((num_tokens - 1, num_layers), dtype=np.int64)
    for pp_rank, cp_rank, tp_rank in product(range(len(stages)), range(2), range(4)):
        topology = RankTopology(
            **ranks,
            pp_rank=pp_rank,
            cp_rank=cp_rank,
            tp_rank=tp_rank,
            tp_size=4,
            sequence_parallel=True,
            moe_layer_numbers=tuple(stages[pp_rank]),
        )
        s = slice_microbatch(microbatch, topology)
        position = s.route_uids - uid0
        recorded = (s.route_uids >= 0) & (position < num_tokens - 1)
        own = position[recorded][:, None], s.layer_numbers[None] - 1
        np.testing.assert_array_equal(s.routes[recorded], routes[own])
        seen[own] += 1
    assert (seen == 1).all()
