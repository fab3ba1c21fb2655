"""What passes through rank 0 with every route, and what is left to it with --route-stores.

    SGLang's answers -> decode -> deal, pack, cut -> every rank's slices

Local processes stand for 2 and 4 data-parallel leaders (and with --pipeline for further stages of
each); a process that hands out one and the same
synthetic answer stands for the engine.  Client, stores, dealing, cutting and gloo are the
production code.  Both ways run in turns, in the same processes.

Seconds are processor seconds of a process, so that they do not depend on what else runs: rank 0's
in all, and the busiest leader's.  Rank 0 is a leader too; "coordinator" is its share when requests
go to the other leaders' stores alone: what stays at rank 0 however many leaders there are.

    python -m benchmarks.route_stores [--leaders 2 4] [--samples 8] [--tokens 4096]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist
from aiohttp import web

from benchmarks.measure import counted_sends, ratios, spread, write_result
from benchmarks.samples import route_payload
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


def serve_engine(shape: Shape, ports: Any) -> None:
    """The process that stands for SGLang."""
    output_len = shape.tokens - PROMPT_LEN
    answer = orjson.dumps(
        {
            "output_ids": [7] * output_len,
            "meta_info": {
                "prompt_tokens": PROMPT_LEN,
                "completion_tokens": output_len,
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-1.2345678, 7, None]] * output_len,
                "weight_versions": [{"version": "0", "start": 0, "end": output_len}],
                "routed_experts": shape.route_payload.decode(),
            },
        }
    )

    async def reply(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", reply)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.put((runner.addresses[0][1], len(answer)))
        await asyncio.Event().wait()

    asyncio.run(serve())


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


def work(rank: int, leaders: int, shape: Shape, engine: str, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=leaders * shape.pipeline
    )
    me = Rank(rank, leaders, shape, engine)
    ways = {"without": "", "with": "all", "coordinator": "others"}
    rounds: dict[str, list] = {way: [] for way in ways}
    for number in range(shape.rounds + 1):
        for way, stores in ways.items():
            found = gather_json(me.round(stores))
            if number:  # the first warms up
                rounds[way].append(found)
    fetches = [gather_json(me.fetch()) for _ in range(shape.rounds + 1)][1:]
    if rank == 0:
        results.put((rounds, fetches))
    dist.barrier()
    me.close()
    dist.destroy_process_group()


def summary(
    leaders: int, shape: Shape, answer_bytes: int, rounds: dict[str, list], fetches: list
) -> dict[str, Any]:
    """Medians over the rounds, and ratios of rounds that ran one after the other."""
    total = shape.samples * leaders * shape.route_bytes
    sums = {sum(rank["checksum"] for rank in found) for way in rounds.values() for found in way}
    assert len(sums) == 1, "both ways must bring the same routes"

    def median(way: str, value: Any) -> float:
        return statistics.median(value(found) for found in rounds[way])

    def cpu(r: dict) -> float:
        return r["answers_cpu_s"] + r["slices_cpu_s"]

    def of(way: str) -> dict[str, Any]:
        return dict(
            rank0_cpu_s=round(median(way, lambda f: cpu(f[0])), 3),
            rank0_answers_cpu_s=round(median(way, lambda f: f[0]["answers_cpu_s"]), 3),
            rank0_slices_cpu_s=round(median(way, lambda f: f[0]["slices_cpu_s"]), 3),
            busiest_other_leader_cpu_s=round(median(way, lambda f: max(map(cpu, f[1:leaders]))), 3),
            all_ranks_cpu_s=round(median(way, lambda f: sum(map(cpu, f))), 3),
            wall_s=round(median(way, lambda f: f[0]["answers_wall_s"] + f[0]["slices_wall_s"]), 3),
            rank0_wire_gb=round(
                median(way, lambda f: f[0]["client_wire_bytes"] + f[0]["store_wire_bytes"]) / 1e9, 4
            ),
            rank0_client_wire_gb=round(median(way, lambda f: f[0]["client_wire_bytes"]) / 1e9, 4),
            rank0_sent_gb=round(median(way, lambda f: f[0]["sent_bytes"]) / 1e9, 4),
            busiest_fetched_gb=round(
                median(way, lambda f: max(r["fetched_bytes"] for r in f)) / 1e9, 4
            ),
        )

    without, with_ = rounds["without"], rounds["with"]
    answers = shape.samples * leaders
    coordinator = of("coordinator")
    return dict(
        leaders=leaders,
        samples=answers,
        route_gigabytes=round(total / 1e9, 4),
        answer_megabytes=round(answer_bytes / 1e6, 3),
        without=of("without"),
        with_stores=of("with"),
        coordinator=coordinator,
        rank0_cpu_without_over_with=ratios(
            [cpu(found[0]) for found in without], [cpu(found[0]) for found in with_]
        ),
        rank0_cpu_without_over_coordinator=ratios(
            [cpu(found[0]) for found in without], [cpu(found[0]) for found in rounds["coordinator"]]
        ),
        fetch_gigabytes_a_second=dict(
            wall=spread([f[1]["bytes"] / f[1]["fetch_wall_s"] / 1e9 for f in fetches]),
            of_the_reader=spread([f[1]["bytes"] / f[1]["fetch_cpu_s"] / 1e9 for f in fetches]),
            of_the_store=spread([f[1]["bytes"] / f[0]["store_cpu_s"] / 1e9 for f in fetches]),
        ),
        rank0_cpu_s_per_route_gb=dict(
            without=round(of("without")["rank0_cpu_s"] / total * 1e9, 3),
            with_stores=round(of("with")["rank0_cpu_s"] / total * 1e9, 3),
        ),
        coordinator_ms_per_answer=round(coordinator["rank0_answers_cpu_s"] / answers * 1e3, 3),
        leader_cpu_s_per_route_gb=round(
            of("with")["busiest_other_leader_cpu_s"] / (total / leaders) * 1e9, 3
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaders", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--samples", type=int, default=8, help="of each leader, a round")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pipeline", type=int, default=1, help="stages of each data-parallel rank")
    parser.add_argument("--output", type=Path)
    a = parser.parse_args()
    shape = Shape(a.samples, a.tokens, a.layers, a.topk, a.rounds, a.pipeline)
    spawn = multiprocessing.get_context("spawn")
    ports = spawn.Queue()
    engine = spawn.Process(target=serve_engine, args=(shape, ports), daemon=True)
    engine.start()
    try:
        port, answer_bytes = ports.get(timeout=60)
        results = []
        for leaders in a.leaders:
            found = spawn.Queue()
            with tempfile.TemporaryDirectory() as directory:
                store = str(Path(directory) / "store")
                arguments = (leaders, shape, f"127.0.0.1:{port}", store, found)
                world = range(leaders * shape.pipeline)
                ranks = [spawn.Process(target=work, args=(i, *arguments)) for i in world]
                for rank in ranks:
                    rank.start()
                rounds, fetches = found.get(timeout=1200)
                for rank in ranks:
                    rank.join(timeout=60)
            results.append(summary(leaders, shape, answer_bytes, rounds, fetches))
    finally:
        engine.kill()
        engine.join()
    asked = {name: value for name, value in vars(a).items() if name != "output"}
    cores = len(os.sched_getaffinity(0))
    write_result(a.output, {"shape": asked, "cores": cores, "results": results})


if __name__ == "__main__":
    main()
