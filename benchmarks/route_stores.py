"""Work of rank 0 when all routes pass through it, and its rest with ``--route-stores``.

    SGLang's answers -> decode -> deal, pack, cut -> every rank's slices

Local processes stand for 2 and 4 data-parallel leaders (and with --pipeline for further stages of
each), and one for the engine: it gives the same synthetic answer to every request, --samples a
leader and round.  Client, stores, dealing, cutting and gloo are the production code.  Both ways run
in turns, in the same processes.

Seconds are processor seconds of a process, so that they do not depend on what else runs: rank 0's
in all, and the busiest leader's.  Rank 0 is a leader too; "coordinator" is its share when requests
go to the other leaders' stores alone: the part that stays at rank 0 however many leaders there are.

    python -m benchmarks.route_stores [--leaders 2 4] [--samples 8] [--tokens 4096]
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import torch.distributed as dist

from benchmarks.measure import (
    counted_sends,
    flags,
    of_gloo_ranks,
    ratios,
    spreads,
    write_result,
)
from benchmarks.samples import answering, route_payload
from r3train.config import RunConfig
from r3train.loop.prepare import prepare
from r3train.loop.scatter import gather_json, scatter_slices
from r3train.engine.backend import SamplingParams
from r3train.route_stores import tickets
from r3train.route_stores.exchange import RouteExchange
from r3train.route_stores.node import RouteNode
from r3train.route_stores.relay import Keys, RouteRelay
from r3train.types import RouteShape
from r3train.engine.client import SGLangClient
from r3train.generation import stitch
from r3train.types import Prompt, RankTopology, RolloutSample, TrainSample

PROMPT_LEN = 256
EXPERTS = 128
TOKEN = "a key for processes of this machine"
# way -> leaders whose stores take requests; "": none, the routes pass through rank 0
WAYS = {"without": "", "with": "all", "coordinator": "others"}


@dataclass(frozen=True)
class Shape:
    samples: int  # of each leader, a round
    tokens: int
    layers: int
    topk: int
    rounds: int
    pipeline: int = 1  # stages of each data-parallel rank

    @property
    def routes(self) -> RouteShape:
        return RouteShape(self.layers, self.topk, EXPERTS)

    @property
    def route_bytes(self) -> int:
        return (self.tokens - 1) * self.layers * self.topk

    @property
    def route_payload(self) -> bytes:
        return route_payload(self.tokens - 1, self.layers, self.topk, EXPERTS)


def answer_of(shape: Shape) -> bytes:
    """SGLang's answer with the routes of one sample."""
    output_len = shape.tokens - PROMPT_LEN
    return orjson.dumps(
        {
            "output_ids": [7] * output_len,
            "meta_info": {
                "prompt_tokens": PROMPT_LEN,
                "completion_tokens": output_len,
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-1.2345678, 7, None]] * output_len,
                "num_retractions": 0,
                "weight_versions": [{"version": "0", "start": 0, "end": output_len}],
                "routed_experts": shape.route_payload.decode(),
            },
        }
    )


class Rank:
    """One rank's process; the first pipeline stages lead."""

    def __init__(self, rank: int, leaders: int, shape: Shape, engine: str) -> None:
        self.shape, self.engine, self.leaders, self.rank = shape, engine, leaders, rank
        layers = tuple(range(1, shape.layers + 1))
        stages = np.array_split(layers, shape.pipeline)
        self.topologies = [
            RankTopology(
                rank=stage * leaders + i,
                world_size=shape.pipeline * leaders,
                dp_rank=i,
                dp_size=leaders,
                pp_rank=stage,
                pp_size=shape.pipeline,
                moe_layer_numbers=(tuple(stages[stage].tolist()),),
            )
            for stage in range(shape.pipeline)
            for i in range(leaders)
        ]
        self.config = RunConfig.from_toml(
            "configs/tiny_cpu.toml",
            dict(
                use_rollout_routing_replay=True,
                global_batch_size=None,
                max_tokens_per_gpu=2 * shape.tokens,
            ),
        )
        # as much of a checkpoint's facts as routes need
        self.hf = SimpleNamespace(route_shape=shape.routes, moe_layer_numbers=layers)
        self.node = None
        if rank < leaders:
            self.node = RouteNode(rank, TOKEN, shape.routes, "127.0.0.1")
        ports = gather_json(self.node.start() if self.node is not None else None)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports[:leaders]]
        if self.node is not None:
            self.node.connect(self.urls)
        self.keys = Keys(leaders) if rank == 0 else None
        self.exchange = RouteExchange(
            self.topologies, rank, self.hf.moe_layer_numbers, node=self.node, keys=self.keys
        )

    async def generate(self, stores: str) -> tuple[list[RolloutSample], int]:
        """All samples of a round, and the base64 bytes of routes that came to the client."""
        client = SGLangClient(
            [self.engine],
            routes=tickets.TICKETS if stores else self.shape.routes,
            transport=RouteRelay(self.urls, TOKEN, self.keys) if stores else None,
            max_concurrency=8,
        )
        prompt = Prompt("p", 0, "", np.zeros(PROMPT_LEN, np.int32), None)
        sampling = SamplingParams(self.shape.tokens - PROMPT_LEN)
        count = self.shape.samples * self.leaders
        groups = list(range(count))
        if stores == "others":  # every store in turn but rank 0's own
            groups = [
                i // (self.leaders - 1) * self.leaders + 1 + i % (self.leaders - 1) for i in groups
            ]
        try:
            begun = [
                stitch.begin(prompt, sample_id=i, group_id=group) for i, group in enumerate(groups)
            ]
            answers = await asyncio.gather(
                *(client.generate(stitch.next_request(sample, sampling)) for sample in begun)
            )
            return list(map(stitch.extend, begun, answers)), client.route_wire_bytes
        finally:
            await client.aclose()

    def round(self, stores: str) -> dict[str, Any]:
        """One rollout, from the engine's answers to every rank's slices."""
        found: dict[str, Any] = {}
        samples: list[RolloutSample] = []
        before = self.counts()
        with measured(found, "answers"):
            if self.rank == 0:
                samples, found["client_wire_bytes"] = asyncio.run(self.generate(stores))
        with counted_sends() as sent, measured(found, "slices"):
            prepared = None
            if self.rank == 0:
                zeros = np.zeros(self.shape.tokens, np.float32)
                prepared = prepare(
                    0,
                    [TrainSample(s, 0.0, zeros) for s in samples],
                    self.config,
                    self.hf,
                    tickets.TICKETS if stores else self.shape.routes,
                    self.topologies,
                    passes=("train",),
                )
            count = -(-self.shape.samples // 2)  # two samples a microbatch
            if stores:
                slices = self.exchange.slices(prepared, count)
            else:
                microbatches = prepared.microbatches if prepared is not None else None
                slices = scatter_slices(microbatches, self.topologies, count)
        found["sent_bytes"] = sum(sent.values())
        found |= {name: count - before[name] for name, count in self.counts().items()}
        found["checksum"] = int(sum(int(s.routes.sum(dtype=np.uint64)) for s in slices))
        return found

    def counts(self) -> dict[str, int]:
        """Bytes that this rank's store has fetched from others and received of the engine so far."""
        if self.node is None:
            return {"fetched_bytes": 0, "store_wire_bytes": 0}
        wire_bytes = self.node.store.counts()["wire_bytes"]
        return {"fetched_bytes": self.node.fetched_bytes, "store_wire_bytes": wire_bytes}

    def fetch(self, num_bytes: int = 1 << 27) -> dict[str, float]:
        """Rows from rank 0's store to rank 1 over HTTP: seconds of both, and processor seconds."""
        rows = num_bytes // (self.shape.layers * self.shape.topk)
        shape = rows, self.shape.layers, self.shape.topk
        key = self.leaders << 38  # a key of store 0 that rank 0 never draws
        if self.rank == 0:
            self.node.store.put(key, np.ones(shape, np.uint8))
        found: dict[str, Any] = {}
        numbers = tickets.issue(key, rows)
        cpu = time.process_time()
        with measured(found, "fetch"):
            if self.rank == 1:
                self.node.fetch(numbers)[1].result()
        found["store_cpu_s"] = time.process_time() - cpu
        if self.rank == 0:
            self.node.store.release([key])
        return {**found, "bytes": math.prod(shape)}

    def close(self) -> None:
        self.exchange.close()
        if self.node is not None:
            self.node.close()


@contextmanager
def measured(into: dict[str, Any], name: str) -> Iterator[None]:
    """Wall and processor seconds of a phase that all ranks begin and end together."""
    dist.barrier()
    wall, cpu = time.monotonic(), time.process_time()
    yield
    own = time.process_time() - cpu
    dist.barrier()
    into[f"{name}_wall_s"] = time.monotonic() - wall
    # a leader's store works on while rank 0 does
    into[f"{name}_cpu_s"] = own if dist.get_rank() == 0 else time.process_time() - cpu


def work(rank: int, leaders: int, shape: Shape, engine: str) -> tuple[dict[str, list], list]:
    """All rounds of each way and all fetches: lists of what each rank found, without the first."""
    me = Rank(rank, leaders, shape, engine)
    rounds: dict[str, list] = {way: [] for way in WAYS}
    for _ in range(shape.rounds + 1):
        for way, stores in WAYS.items():
            rounds[way].append(gather_json(me.round(stores)))
    fetches = [gather_json(me.fetch()) for _ in range(shape.rounds + 1)]
    dist.barrier()
    me.close()
    return {way: found[1:] for way, found in rounds.items()}, fetches[1:]


def cpu_s(found: dict[str, Any]) -> float:
    """Processor seconds of one rank's round."""
    return found["answers_cpu_s"] + found["slices_cpu_s"]


# figure of a round, from what all ranks found and the number of leaders
FIGURES = {
    "rank0_cpu_s": lambda ranks, _: cpu_s(ranks[0]),
    "rank0_answers_cpu_s": lambda ranks, _: ranks[0]["answers_cpu_s"],
    "rank0_slices_cpu_s": lambda ranks, _: ranks[0]["slices_cpu_s"],
    "busiest_other_leader_cpu_s": lambda ranks, leaders: max(map(cpu_s, ranks[1:leaders])),
    "all_ranks_cpu_s": lambda ranks, _: sum(map(cpu_s, ranks)),
    "wall_s": lambda ranks, _: ranks[0]["answers_wall_s"] + ranks[0]["slices_wall_s"],
    "rank0_wire_gb": lambda ranks, _: (
        (ranks[0]["client_wire_bytes"] + ranks[0]["store_wire_bytes"]) / 1e9
    ),
    "rank0_client_wire_gb": lambda ranks, _: ranks[0]["client_wire_bytes"] / 1e9,
    "rank0_sent_gb": lambda ranks, _: ranks[0]["sent_bytes"] / 1e9,
    "busiest_fetched_gb": lambda ranks, _: max(r["fetched_bytes"] for r in ranks) / 1e9,
}


def summary(
    leaders: int, shape: Shape, answer_bytes: int, rounds: dict[str, list], fetches: list
) -> dict[str, Any]:
    """Medians over the rounds, and ratios of rounds that ran one after the other."""
    answers = shape.samples * leaders
    total_gb = answers * shape.route_bytes / 1e9
    sums = {sum(rank["checksum"] for rank in ranks) for way in rounds.values() for ranks in way}
    assert len(sums) == 1, "all ways must bring the same routes"
    without, with_stores, coordinator = (
        {
            name: round(statistics.median(figure(ranks, leaders) for ranks in rounds[way]), 4)
            for name, figure in FIGURES.items()
        }
        for way in WAYS
    )
    rank0 = {way: [cpu_s(ranks[0]) for ranks in rounds[way]] for way in WAYS}
    speeds = {
        "wall": [f[1]["bytes"] / f[1]["fetch_wall_s"] / 1e9 for f in fetches],
        "of_the_reader": [f[1]["bytes"] / f[1]["fetch_cpu_s"] / 1e9 for f in fetches],
        "of_the_store": [f[1]["bytes"] / f[0]["store_cpu_s"] / 1e9 for f in fetches],
    }
    return dict(
        leaders=leaders,
        samples=answers,
        route_gigabytes=round(total_gb, 4),
        answer_megabytes=round(answer_bytes / 1e6, 3),
        without=without,
        with_stores=with_stores,
        coordinator=coordinator,
        rank0_cpu_without_over_with=ratios(rank0["without"], rank0["with"]),
        rank0_cpu_without_over_coordinator=ratios(rank0["without"], rank0["coordinator"]),
        fetch_gigabytes_a_second=spreads(speeds),
        rank0_cpu_s_per_route_gb=dict(
            without=round(without["rank0_cpu_s"] / total_gb, 3),
            with_stores=round(with_stores["rank0_cpu_s"] / total_gb, 3),
        ),
        coordinator_ms_per_answer=round(coordinator["rank0_answers_cpu_s"] / answers * 1e3, 3),
        leader_cpu_s_per_route_gb=round(
            with_stores["busiest_other_leader_cpu_s"] / (total_gb / leaders), 3
        ),
    )


def main() -> None:
    a = flags(
        __doc__, leaders=[2, 4], samples=8, tokens=4096, layers=48, topk=8, rounds=5, pipeline=1
    )
    shape = Shape(a.samples, a.tokens, a.layers, a.topk, a.rounds, a.pipeline)
    answer = answer_of(shape)
    results = []
    with answering(answer) as engine:
        for leaders in a.leaders:
            found = of_gloo_ranks(leaders * shape.pipeline, work, leaders, shape, engine)
            results.append(summary(leaders, shape, len(answer), *found))
    asked = {name: value for name, value in vars(a).items() if name != "output"}
    cores = len(os.sched_getaffinity(0))
    write_result(a.output, {"shape": asked, "cores": cores, "results": results})


if __name__ == "__main__":
    main()
