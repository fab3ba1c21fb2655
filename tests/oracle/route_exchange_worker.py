"""One rank of test_route_exchange: slices by way of route stores next to slices cut by rank 0.

    torchrun --nproc-per-node 4 -m tests.oracle.route_exchange_worker DIRECTORY [--corrupt]

Real gloo ranks and real stores over HTTP; no model.  Writes what was equal to rank_N.json.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist

from r3train.config import RunConfig
from r3train.host_group import join_ranks, leave_ranks
from r3train.loop.prepare import Preparation
from r3train.loop.recorded import Recorded
from r3train.loop.route_transport import RoutesOnRank0
from r3train.loop.distribute import gather_json, pack_records
from r3train.route_stores import handles
from r3train.route_stores.node import RouteNode
from r3train.route_stores.relay import Keys
from r3train.route_stores.stores import RouteStores, leader_ranks
from r3train.config.pipeline_layout import stage_layer_numbers
from r3train.types import (
    Prompt,
    RankTopology,
    RolloutSample,
    RouteShape,
    TrainSample,
    missing_marker,
)

from tests.unit.hf_model import facts

LAYERS, TOPK, NUM_SAMPLES = 4, 2, 14
TOPOLOGIES = {
    "dp4": {},
    "tp2_sp_dp2": dict(tp=2, sp=True),
    "cp2_dp2": dict(cp=2),
    "pp2_dp2": dict(pp=2),
    "tp2_sp_cp2": dict(tp=2, sp=True, cp=2),
    "vpp2_pp2_dp2": dict(pp=2, vpp=2),
}


@contextmanager
def counted_sends() -> Iterator[Counter[int]]:
    """Bytes that this rank sends with ``isend``, by receiver."""
    sent: Counter[int] = Counter()
    isend = dist.isend

    def counting(message: Any, dst: int, group: Any) -> Any:
        sent[dst] += message.numel() * message.element_size()
        return isend(message, dst=dst, group=group)

    with mock.patch.object(dist, "isend", counting):
        yield sent


def places(world: int, tp=1, cp=1, pp=1, vpp=1, sp=False) -> list[RankTopology]:
    """Every rank's place, in Megatron's order: tensor, context, data, pipeline."""
    dp = world // (tp * cp * pp)
    layers = stage_layer_numbers(LAYERS, pp, vpp_size=vpp, first=None, last=None)
    out = []
    for rank in range(world):
        rest, tp_rank = divmod(rank, tp)
        rest, cp_rank = divmod(rest, cp)
        pp_rank, dp_rank = divmod(rest, dp)
        own = dict(tp_rank=tp_rank, cp_rank=cp_rank, pp_rank=pp_rank, dp_rank=dp_rank)
        sizes = dict(tp_size=tp, cp_size=cp, pp_size=pp, dp_size=dp, vpp_size=vpp)
        out.append(
            RankTopology(
                rank=rank,
                world_size=world,
                sequence_parallel=sp,
                moe_layer_numbers=tuple(layers[pp_rank]),
                **own,
                **sizes,
            )
        )
    return out


def make_samples(rng: np.random.Generator, dtype: type, first_id: int) -> list[TrainSample]:
    """Samples of many lengths, some rows with missing slots, some wholly missing."""
    samples = []
    for i in range(NUM_SAMPLES):
        n = int(rng.integers(2, 40))
        routes = rng.integers(0, 16, (n - 1, LAYERS, TOPK)).astype(dtype)
        routes[rng.random(routes.shape) < 0.05] = missing_marker(dtype)
        routes[rng.random(n - 1) < 0.2] = missing_marker(dtype)
        samples.append(
            TrainSample(
                RolloutSample(
                    sample_id=first_id + i,
                    group_id=i,
                    prompt=Prompt("p", 0, "", np.zeros(1, np.int32), None),
                    token_ids=rng.integers(0, 99, n).astype(np.int32),
                    prompt_len=1,
                    loss_mask=np.arange(n) > 0,
                    rollout_log_probs=rng.random(n).astype(np.float32),
                    routed_experts=routes,
                    weight_versions=np.zeros(n, np.int32),
                    finish_reason="stop",
                ),
                0.0,
                rng.random(n).astype(np.float32),
            )
        )
    return samples


def stored(
    samples: list[TrainSample],
    rng: np.random.Generator,
    node: RouteNode | None,
    keys: Keys,
) -> list[TrainSample]:
    """Cut every sample's rows into parts, and keep each in a store of its own; on all ranks alike.

    A part of missing rows alone is kept nowhere, and has no handle.
    """
    out = []
    for s in samples:
        routes = s.sample.routed_experts
        cuts = sorted({0, len(routes), *rng.integers(0, len(routes) + 1, 3).tolist()})
        numbers = np.full((len(routes), *handles.HANDLES.row), handles.HANDLES.missing, np.uint64)
        for a, b in zip(cuts, cuts[1:]):
            store = int(rng.integers(keys.num_stores))
            if (routes[a:b] == missing_marker(routes.dtype)).all():
                continue
            key = keys.new(s.sample.group_id, store)
            if node is not None and node.index == store:
                # with rows around them that are not these
                node.store.put(key, np.concatenate([routes[:1], routes[a:b], routes[:1]]))
            numbers[a:b] = handles.issue(key, 1 + b - a)[1:]
        out.append(replace(s, sample=replace(s.sample, routed_experts=numbers)))
    return out


def check(name: str, dtype: type, corrupt: bool, steps_per_rollout: int) -> dict[str, object]:
    rank, world = dist.get_rank(), dist.get_world_size()
    topologies = places(world, **TOPOLOGIES[name])
    leaders = leader_ranks(topologies)
    experts = 16 if dtype == np.uint8 else 300
    routes = RouteShape(LAYERS, TOPK, experts)
    hf = facts(num_hidden_layers=LAYERS, num_experts=experts, num_experts_per_tok=TOPK)
    config = RunConfig.from_toml(
        "configs/tiny_cpu.toml",
        dict(
            use_rollout_routing_replay=True,
            enable_r3_correctness_check=True,
            rollout_batch_size=NUM_SAMPLES // 2,
            n_samples_per_prompt=2,
            global_batch_size=NUM_SAMPLES // steps_per_rollout,
            max_tokens_per_gpu=64,
        ),
    )
    plain = RoutesOnRank0(routes, hf.moe_layer_numbers)
    plain.open(topologies[rank])
    stores = RouteStores(config, routes, hf.moe_layer_numbers)
    stores.open(topologies[rank])
    node, keys = stores.node, stores.keys or Keys(len(leaders))  # all ranks draw as rank 0 does
    rng, found = np.random.default_rng(7), {}
    to_rank_0 = Preparation(config, hf, plain.row_shape, topologies, ("train",))
    to_stores = replace(to_rank_0, row_shape=stores.row_shape)
    try:
        for rollout in range(2):
            samples = make_samples(rng, dtype, 100 * rollout)
            direct_of = None
            if rank == 0:
                direct_of = to_rank_0.prepare(rollout, samples)
            [count] = gather_json(direct_of.counts if direct_of else None)[:1]
            count = sum(count)
            assert count > 1, "several microbatches"
            with counted_sends() as sent:
                direct = plain.slices(direct_of, count)
            expected = plain.recorded(direct_of)
            found[f"sent_directly_{rollout}"] = dict(sent)
            kept = stored(samples, rng, node, keys)
            if corrupt and node is not None and node.index == len(leaders) - 1:
                victim = next(iter(node.store._rows_by_key.values()))
                victim[1, 0, 0] ^= 1
            dist.barrier()
            prepared = None
            if rank == 0:
                prepared = to_stores.prepare(rollout, kept)
            with counted_sends() as sent:
                via = stores.slices(prepared, count)
            found[f"sent_{rollout}"] = dict(sent)
            found["group"] = [t.rank for t in topologies if t.dp_rank == topologies[rank].dp_rank]
            recorded = stores.recorded(prepared)
            same = np.array_equal(pack_records(direct), pack_records(via))
            found[f"slices_{rollout}"] = bool(same)
            found[f"routes_bytes_{rollout}"] = sum(s.routes.nbytes for s in via)
            if expected is not None:
                found[f"recorded_{rollout}"] = same_records(recorded, expected)
            if node is not None:
                found[f"held_{rollout}"] = len(node.store._rows_by_key)
                found[f"fetched_{rollout}"] = node.fetched_bytes
            stores.metrics()
    finally:
        dist.barrier()
        stores.close()
    return found


def same_records(a: Recorded, b: Recorded) -> bool:
    return np.array_equal(a.fingerprints, b.fingerprints) and np.array_equal(
        a.whole_rows, b.whole_rows
    )


def main() -> None:
    directory, corrupt = Path(sys.argv[1]), "--corrupt" in sys.argv
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    join_ranks("gloo", store, rank, world_size, timeout=timedelta(minutes=3))
    names = ["dp4"] if corrupt else list(TOPOLOGIES)
    found = {name: check(name, np.uint8, corrupt, 1) for name in names}
    if not corrupt:
        found["dp4_uint16_two_steps"] = check("dp4", np.uint16, False, 2)
    (directory / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))
    leave_ranks()


if __name__ == "__main__":
    main()
