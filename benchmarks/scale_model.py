"""What a step moves at 64 to 4096 GPUs, where it waits first, and what leaders of their own change.

    python benchmarks/scale_model.py                # with the constants that docs/scale.md records
    python benchmarks/scale_model.py --measure      # measure them anew on this machine
    python benchmarks/scale_model.py --measure --write-docs

Rates of the route path are measured with the production code (JSON and base64 decoding, packing,
cutting, packing into messages, gloo between two processes).  What needs the cluster (network,
training, generation) is an assumption, listed with the result.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
GIGA = 1e9
GPU_COUNTS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Model:
    """What decides the bytes of a model's routes and weights."""

    name: str
    layers: int  # decoder layers: SGLang sends a row of each
    moe_layers: int
    topk: int
    experts: int
    parameters: float
    active_parameters: float
    tp: int
    pp: int
    cp: int

    @property
    def id_bytes(self) -> int:
        return 1 if self.experts <= 255 else 2

    @property
    def model_ranks(self) -> int:
        """GPUs that hold one replica of the dense weights: one data-parallel rank."""
        return self.tp * self.pp * self.cp


MODELS = (
    Model("Qwen3-235B-A22B", 94, 94, 8, 128, 235e9, 22e9, 4, 4, 1),
    Model("DeepSeek-V3", 61, 58, 8, 256, 671e9, 37e9, 4, 8, 1),
    Model("60 layers, top 8 of 128", 60, 60, 8, 128, 120e9, 12e9, 4, 2, 1),
)


@dataclass(frozen=True)
class Rates:
    """Measured on one core: GB/s of uint8 route bytes unless said otherwise."""

    http_read: float  # of an answer's bytes, from another process of this machine
    parse: float  # of an answer's bytes, its routes lifted out
    log_prob_parse: float  # of an answer's bytes beside its routes
    decode: float
    pack_and_cut: float  # of every rank's share together
    message: float  # of slices made into one message
    gloo_send: float  # of a message, between two processes of one machine
    unpack: float


@dataclass(frozen=True)
class Cluster:
    """What cannot be measured here."""

    samples: int = 1024  # a step's, whatever the number of GPUs
    tokens: int = 32768  # of a sample
    trainer_share: float = 0.5  # of the GPUs; the others generate
    network: float = 40.0  # GB/s in and out of one node
    gpu_flops: float = 4e14  # sustained, bf16
    forwards_a_step: float = 5.0  # old log-probs 1, train 3, recomputation 1
    gpu_memory: float = 141.0  # GB
    optimizer_bytes: float = 18.0  # a parameter: bf16 weight, fp32 main, gradient and moments
    weight_broadcast: float = 40.0  # GB/s from one sender to all engines
    stream_bytes: float = 49.0  # a token: tokens, labels, masks, log-probs, advantages, uids
    log_prob_json: float = 40.0  # bytes a token of an answer, beside its routes
    staleness: int = 1


@dataclass(frozen=True)
class Cost:
    """One configuration's step."""

    gpus: int
    data_ranks: int
    fits: bool
    train_s: float
    route_bytes: float
    wire_bytes: float
    rank0_memory: float
    rank0: dict[str, float]  # seconds by stage when rank 0 does it all
    leader: dict[str, float]  # seconds by stage when each data-parallel leader does its own
    rank0_beside_leaders: dict[str, float]  # what is then left to rank 0
    weights_s: float
    stage_weights_s: float  # each pipeline stage sending its own

    @property
    def first(self) -> str:
        """What takes longest in a step whose routes all pass through rank 0."""
        seconds = {
            "training": self.train_s,
            "rank 0's routes": sum(self.rank0.values()),
            "weight sync": self.weights_s,
        }
        return max(seconds, key=seconds.__getitem__)


def cost(model: Model, gpus: int, rates: Rates, c: Cluster) -> Cost:
    """Bytes and seconds of one step; pure."""
    trainers = int(gpus * c.trainer_share)
    data_ranks = max(1, trainers // model.model_ranks)
    tokens = c.samples * c.tokens
    routes = tokens * model.layers * model.topk * model.id_bytes
    wire = tokens * model.layers * model.topk * 4 * 4 / 3
    answers = wire + tokens * c.log_prob_json
    kept = routes * model.moe_layers / model.layers  # sequence parallelism: every row to one rank
    # every tensor and pipeline rank of a replica gets the token streams
    streams = tokens * c.stream_bytes
    copies = streams * model.tp * model.pp
    train_s = 2 * c.forwards_a_step * model.active_parameters * tokens / (trainers * c.gpu_flops)
    memory = model.parameters * c.optimizer_bytes / trainers
    others = (trainers - 1) / trainers
    share = 1 / data_ranks

    def seconds(answer: float, route: float, cut: float, sent: float) -> dict[str, float]:
        return {
            "receive": answer / min(c.network, rates.http_read) / GIGA,
            "parse": answer / rates.parse / GIGA,
            "decode": route / rates.decode / GIGA,
            "cut": cut / rates.pack_and_cut / GIGA,
            "message": sent / rates.message / GIGA,
            "send": sent / rates.gloo_send / GIGA,
        }

    leader = seconds(answers * share, routes * share, kept * share, kept * share)
    # a leader's microbatches hold samples of all stores: nearly all of its rows come from others,
    # over HTTP, and as many bytes go out
    leader["exchange"] = routes * share * (1 - share) * 2 / min(c.network, rates.http_read) / GIGA
    weights = model.parameters * 2
    return Cost(
        gpus=gpus,
        data_ranks=data_ranks,
        fits=memory <= 0.8 * c.gpu_memory * GIGA and trainers >= model.model_ranks,
        train_s=train_s,
        route_bytes=routes,
        wire_bytes=wire,
        rank0_memory=routes * (c.staleness + 2),
        rank0=seconds(answers, routes, kept, (kept + copies) * others),
        leader=leader,
        rank0_beside_leaders={
            "parse": tokens * c.log_prob_json / rates.log_prob_parse / GIGA,
            "message": copies * others / rates.message / GIGA,
            "send": copies * others / rates.gloo_send / GIGA,
        },
        weights_s=weights / c.weight_broadcast / GIGA,
        stage_weights_s=weights / model.pp / c.weight_broadcast / GIGA,
    )


# ---- measured constants -----------------------------------------------------------------------


def measure() -> Rates:
    """The production code's rates, on one core: medians of several rounds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import numpy as np
    import orjson
    import pybase64

    from r3train.layout.microbatch import build_microbatch, slice_microbatch
    from r3train.loop.scatter import pack_slices, unpack_slices
    from r3train.rollout import sglang_json
    from r3train.routing.wire import decode_routed_experts
    from r3train.types import Prompt, RankTopology, RolloutSample, TrainSample

    tokens, layers, topk, experts, tp, pp = 8192, 48, 8, 128, 2, 4
    rows = tokens - 1
    ids = np.random.default_rng(0).integers(0, experts, (rows, layers, topk)).astype("<i4")
    payload = pybase64.b64encode(ids.tobytes()).decode()
    beside = {"output_token_logprobs": [[-0.5 - i / tokens, i, None] for i in range(tokens)]}
    answer = orjson.dumps({"meta_info": {"routed_experts": payload, **beside}})
    light = orjson.dumps({"meta_info": beside})
    size = rows * layers * topk

    def decode() -> np.ndarray:
        return decode_routed_experts(
            payload,
            num_tokens=tokens,
            num_layers=layers,
            topk=topk,
            num_experts=experts,
            sample="0",
        )

    zeros = np.zeros(tokens, np.float32)
    samples = [
        TrainSample(
            RolloutSample(
                sample_id=i,
                group_id=i,
                prompt=Prompt("p", i, "", np.zeros(0, np.int32), None),
                token_ids=np.zeros(tokens, np.int32),
                prompt_len=1,
                loss_mask=np.ones(tokens, bool),
                rollout_log_probs=zeros,
                routed_experts=decode(),
                weight_versions=np.zeros(tokens, np.int32),
                finish_reason="stop",
            ),
            reward=0.0,
            advantages=zeros,
        )
        for i in range(2)
    ]
    share = layers // pp
    places = [
        RankTopology(
            tp_rank=t,
            tp_size=tp,
            pp_rank=p,
            pp_size=pp,
            sequence_parallel=True,
            moe_layer_numbers=(tuple(range(p * share + 1, (p + 1) * share + 1)),),
        )
        for p in range(pp)
        for t in range(tp)
    ]

    def cut() -> list:
        batch = build_microbatch(0, samples, cp_size=1, tp_size=tp, route_shape=(layers, topk))
        return [slice_microbatch(batch, place) for place in places]

    slices = cut()
    messages = [pack_slices([s]) for s in slices]
    sent = sum(len(m) for m in messages)
    return Rates(
        http_read=measure_http(answer),
        parse=rate(len(answer), lambda: sglang_json.loads(answer)),
        log_prob_parse=rate(len(light), lambda: sglang_json.loads(light)),
        decode=rate(size, decode),
        pack_and_cut=rate(2 * size, cut),
        message=rate(sent, lambda: [pack_slices([s]) for s in slices]),
        gloo_send=measure_gloo(),
        unpack=rate(sent, lambda: [unpack_slices(m) for m in messages]),
    )


def rate(num_bytes: int, work: Callable[[], object], rounds: int = 9) -> float:
    """GB a second: the median round, the first one left out."""
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return round(num_bytes / statistics.median(seconds[1:]) / GIGA, 2)


def measure_http(answer: bytes, rounds: int = 8) -> float:
    """GB a second of answers read by the production client from a server in another process."""
    import asyncio

    from r3train.rollout.sglang_http import SGLangHTTP

    context = multiprocessing.get_context("spawn")
    ports = context.SimpleQueue()
    server = context.Process(target=_serve, args=(answer, ports), daemon=True)
    server.start()

    async def read() -> float:
        http, seconds = SGLangHTTP([f"127.0.0.1:{ports.get()}"]), []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            await http._send("POST", http.urls[0], None)
            seconds.append(time.perf_counter() - began)
        await http.aclose()
        return statistics.median(seconds[1:])

    try:
        return round(len(answer) / asyncio.run(read()) / GIGA, 2)
    finally:
        server.terminate()
        server.join()


def _serve(answer: bytes, ports) -> None:
    import asyncio

    from aiohttp import web

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/", lambda request: _answered(web.Response(body=answer)))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


async def _answered(response):
    return response


def measure_gloo(num_bytes: int = 1 << 27) -> float:
    """GB a second of one gloo send between two processes over loopback."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=_gloo_rank, args=(r, f"{directory}/store", num_bytes, results))
            for r in (0, 1)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return round(num_bytes / results.get() / GIGA, 2)


def _gloo_rank(rank: int, store: str, num_bytes: int, results) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    message, seconds = torch.ones(num_bytes, dtype=torch.uint8), []
    for _ in range(6):
        dist.barrier()
        began = time.perf_counter()
        dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        results.put(statistics.median(seconds[1:]))
    dist.destroy_process_group()


# ---- the page ---------------------------------------------------------------------------------


def page(rates: Rates, cluster: Cluster, when: str, machine: str) -> str:
    """docs/scale.md; its first comment holds the constants that a later run takes."""
    return "\n".join(_page_lines(rates, cluster, when, machine)) + "\n"


def _page_lines(rates: Rates, c: Cluster, when: str, machine: str) -> Iterator[str]:
    record = {"date": when, "machine": machine, "rates": asdict(rates)}
    yield f"<!-- written by: benchmarks/scale_model.py --write-docs; {json.dumps(record)} -->"
    yield ""
    yield "# At scale, on paper"
    yield ""
    yield f"A step of {c.samples:,} samples of {c.tokens:,} tokens, whatever the number of GPUs; half of"
    yield "them train. Rates were measured with the production code on one core; the network, the GPUs"
    yield "and training are assumptions. **Nothing on this page has been run on a cluster.**"
    yield ""
    yield "    python benchmarks/scale_model.py --measure --write-docs"
    yield ""
    yield f"| measured on {when}, {machine} | GB/s on one core |"
    yield "|---|---|"
    for field in fields(Rates):
        yield f"| {field.name.replace('_', ' ')} | {getattr(rates, field.name)} |"
    yield ""
    yield "Assumed: " + ", ".join(
        f"{f.name.replace('_', ' ')} {getattr(c, f.name):g}" for f in fields(Cluster)
    )
    yield ""
    for model in MODELS:
        yield from _model_lines(model, rates, c)
    yield "## What is first"
    yield ""
    yield from _conclusions(rates, c)


def _model_lines(model: Model, rates: Rates, c: Cluster) -> Iterator[str]:
    yield f"## {model.name}"
    yield ""
    some = cost(model, GPU_COUNTS[-1], rates, c)
    yield (
        f"{model.layers} layers, top {model.topk} of {model.experts}; TP {model.tp}, PP {model.pp}, CP"
        f" {model.cp}. Routes of a step: {some.wire_bytes / GIGA:,.0f} GB on the wire,"
        f" {some.route_bytes / GIGA:,.0f} GB held; {some.rank0_memory / GIGA:,.0f} GB in the host memory"
        f" of rank 0 at staleness {c.staleness}."
    )
    yield ""
    yield (
        "| GPUs | data ranks | training s | routes through rank 0 s | a leader's own routes s |"
        " rank 0 beside them s | weight sync s | first |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for gpus in GPU_COUNTS:
        x = cost(model, gpus, rates, c)
        if not x.fits:
            yield f"| {gpus} | | does not fit | | | | | |"
            continue
        yield (
            f"| {gpus} | {x.data_ranks} | {x.train_s:,.0f} | {sum(x.rank0.values()):,.0f} |"
            f" {sum(x.leader.values()):,.1f} | {sum(x.rank0_beside_leaders.values()):,.1f} |"
            f" {x.weights_s:,.1f} | {x.first} |"
        )
    yield ""
    worst = cost(model, GPU_COUNTS[-1], rates, c)
    parts = ", ".join(f"{name} {s:,.0f}" for name, s in worst.rank0.items())
    yield f"Rank 0's seconds, by stage, at {GPU_COUNTS[-1]} GPUs: {parts}."
    yield ""


def _conclusions(rates: Rates, c: Cluster) -> Iterator[str]:
    for model in MODELS:
        costs = [x for g in GPU_COUNTS if (x := cost(model, g, rates, c)).fits]
        first = next((x for x in costs if x.first == "rank 0's routes"), None)
        last = costs[-1]
        ratio = sum(last.rank0.values()) / (
            sum(last.leader.values()) + sum(last.rank0_beside_leaders.values())
        )
        where = f"from {first.gpus} GPUs on" if first else "nowhere up to 4096 GPUs"
        yield (
            f"- {model.name}: rank 0's route path outlasts training {where}. With `--route-stores`"
            f" the path is {ratio:,.0f} times shorter at {last.gpus} GPUs, and"
            f" {'weight sync' if last.weights_s > last.train_s else 'training'} is what a step waits"
            f" for; every pipeline stage sending its own weights would make the sync"
            f" {last.stage_weights_s:,.1f} s (not built)."
        )
    yield ""
    yield "The route path overlaps with training up to the cutting: receiving, parsing and decoding are"
    yield "done while the step before trains, on the threads of one process. With `--route-stores` each"
    yield "data-parallel leader receives, decodes, exchanges and cuts its own (docs/architecture.md);"
    yield "what it saves rank 0 on this machine is measured by `benchmarks/route_stores.py`. What is left to"
    yield "rank 0 then are log-probs as JSON and the token streams, which it sends to every rank itself."


def recorded() -> tuple[Rates, str, str]:
    """The constants that docs/scale.md was written with."""
    head = PAGE.read_text(encoding="utf-8").split("-->", 1)[0]
    record = json.loads(head[head.index("{") :])
    return Rates(**record["rates"]), record["date"], record["machine"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure the rates on this machine")
    parser.add_argument("--write-docs", action="store_true", help="write docs/scale.md")
    parser.add_argument("--samples", type=int, default=Cluster.samples)
    parser.add_argument("--tokens", type=int, default=Cluster.tokens)
    options = parser.parse_args()
    cluster = Cluster(samples=options.samples, tokens=options.tokens)
    if options.measure:
        rates, when = measure(), date.today().isoformat()
        machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    else:
        rates, when, machine = recorded()
    text = page(rates, cluster, when, machine)
    if options.write_docs:
        PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
