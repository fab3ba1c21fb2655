"""Rates of the route path and of weights on one core, by the production code: scale_model's constants."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.measure import in_turns, of_gloo_ranks
from benchmarks.samples import answering, route_payload, sample_of_routes

GIGA = 1e9


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
    gloo_weights: float  # of weights: in buckets, flattened and broadcast to one process by gloo


def measure() -> Rates:
    """The production code's rates, on one core: medians of several rounds."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import numpy as np
    import msgspec

    from r3train.layout.microbatch import build_microbatch, slice_microbatch
    from r3train.loop.distribute import pack_records, unpack_records
    from r3train.engine.sglang_http import parse_answer
    from r3train.routing.wire import decode_routed_experts
    from r3train.types import RankTopology, RouteShape

    tokens, layers, topk, experts, tp, pp = 8192, 48, 8, 128, 2, 4
    routes = RouteShape(layers, topk, experts)
    rows = tokens - 1
    payload = route_payload(rows, layers, topk, experts).decode()
    beside = {"output_token_logprobs": [[-0.5 - i / tokens, i, None] for i in range(tokens)]}
    answer = msgspec.json.encode({"meta_info": {"routed_experts": payload, **beside}})
    light = msgspec.json.encode({"meta_info": beside})
    size = rows * layers * topk

    def decode() -> np.ndarray:
        return decode_routed_experts(payload, routes, num_tokens=tokens, sample="0")

    samples = [sample_of_routes(i, decode()) for i in range(2)]
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
        batch = build_microbatch(0, samples, cp_size=1, tp_size=tp, route_shape=routes)
        return [slice_microbatch(batch, place) for place in places]

    slices = cut()
    messages = [pack_records([s]) for s in slices]
    sent = sum(len(m) for m in messages)
    return Rates(
        http_read=measure_http(answer),
        parse=rate(len(answer), lambda: parse_answer(answer)),
        log_prob_parse=rate(len(light), lambda: parse_answer(light)),
        decode=rate(size, decode),
        pack_and_cut=rate(2 * size, cut),
        message=rate(sent, lambda: [pack_records([s]) for s in slices]),
        gloo_send=measure_gloo(),
        unpack=rate(sent, lambda: [unpack_records(m) for m in messages]),
        gloo_weights=measure_gloo(weights=True),
    )


def rate(num_bytes: int, work: Callable[[], object], rounds: int = 9) -> float:
    """GB per second: the median round, the first one left out."""
    seconds = in_turns({"work": work}, rounds)["work"]
    return round(num_bytes / statistics.median(seconds) / GIGA, 2)


def measure_http(answer: bytes) -> float:
    """GB per second of answers read by the production client from a server in another process."""
    from r3train.engine.sglang_http import SGLangHTTP

    with answering(answer) as addr, asyncio.Runner() as runner:
        http = SGLangHTTP([addr])
        found = rate(len(answer), lambda: runner.run(http._send("POST", http.urls[0], None)))
        runner.run(http.aclose())
    return found


def measure_gloo(num_bytes: int = 1 << 27, *, weights: bool = False) -> float:
    """GB per second of one gloo send between two processes over loopback, or of weights published."""
    return round(num_bytes / of_gloo_ranks(2, _send_seconds, num_bytes, weights) / GIGA, 2)


def _send_seconds(rank: int, num_bytes: int, weights: bool) -> float:
    import torch
    import torch.distributed as dist

    from r3train.engine.publish import buckets, flatten

    message = torch.ones(num_bytes, dtype=torch.uint8)
    # experts' matrices in bfloat16, in buckets of a fourth, as DistributedPublisher sends them
    matrices = [(str(i), part) for i, part in enumerate(message.view(torch.bfloat16).chunk(32))]
    memory = torch.empty(num_bytes // 4, dtype=torch.uint8)

    def publish() -> None:
        for bucket in buckets(matrices, num_bytes // 4):
            dist.broadcast(memory if rank else flatten(bucket, memory), 0)

    def send() -> None:
        dist.send(message, 1) if rank == 0 else dist.recv(message, 0)

    def one() -> None:
        publish() if weights else send()
        dist.barrier()

    dist.barrier()
    return statistics.median(in_turns({"one": one}, rounds=5)["one"])
