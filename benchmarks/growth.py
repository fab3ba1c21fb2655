"""How the route path's cost grows: with tokens, layers, top-k, experts and ranks.

    python -m benchmarks.growth [--rounds 5]

One thing is changed at a time.  All shapes are measured in every round, and what is compared is a
shape with the base of the same round: CPU seconds of this process from SGLang's base64 to the routes
staged on the device, and for ranks of rank 0's cutting for all of them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3train.trainer.megatron.cpu_device import prepare_device

DEVICE = prepare_device()

import torch  # noqa: E402

from benchmarks.measure import ratios, spread, write_result  # noqa: E402
from benchmarks.samples import route_payload, sample_of_routes  # noqa: E402
from r3train.layout.microbatch import build_microbatch, slice_microbatch  # noqa: E402
from r3train.routing.wire import decode_routed_experts  # noqa: E402
from r3train.trainer.megatron.replay import StagedRoutes  # noqa: E402
from r3train.types import RankTopology, RouteShape  # noqa: E402

SAMPLES = 4


@dataclass(frozen=True)
class Shape:
    """Samples of a microbatch have these; the ranks are context-parallel."""

    tokens: int = 2048
    layers: int = 16
    topk: int = 8
    experts: int = 128
    ranks: int = 1


BASE = Shape()
GROWN = {
    "tokens": (4096, 8192),
    "layers": (32, 64),
    "topk": (16, 32),
    "experts": (254, 256, 512),
    "ranks": (2, 4, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write_result(arguments.output, measure(arguments.rounds))


def measure(rounds: int) -> dict[str, Any]:
    """Seconds of the base, and every grown shape's ratio to it."""
    shapes = {("base", 0): BASE}
    shapes |= {(n, v): replace(BASE, **{n: v}) for n, values in GROWN.items() for v in values}
    payloads = {
        s: route_payload(s.tokens - 1, s.layers, s.topk, s.experts) for s in shapes.values()
    }
    seconds: dict[tuple, list[float]] = {key: [] for key in shapes}
    for number in range(rounds + 1):
        for key, shape in shapes.items():
            took = one_path(shape, payloads[shape])
            if number:  # the first round warms up
                seconds[key].append(took)
    base = seconds[("base", 0)]
    return {
        "samples": SAMPLES,
        "base": {name: getattr(BASE, name) for name in GROWN},
        "base_s": spread(base),
        "grown": [
            {"what": name, "value": value, "over_base": ratios(seconds[(name, value)], base)}
            for name, values in GROWN.items()
            for value in values
        ],
    }


def one_path(s: Shape, wire: bytes) -> float:
    """Decode, pack, cut for every rank, stage rank 0's share: CPU seconds."""
    routes = RouteShape(s.layers, s.topk, s.experts)
    began = time.process_time()
    decoded = [
        decode_routed_experts(
            wire,
            routes,
            num_tokens=s.tokens,
            sample=str(i),
        )
        for i in range(SAMPLES)
    ]
    took = time.process_time() - began
    samples = [sample_of_routes(i, routes) for i, routes in enumerate(decoded)]
    places = [
        RankTopology(
            rank=rank,
            world_size=s.ranks,
            cp_rank=rank,
            cp_size=s.ranks,
            moe_layer_numbers=(tuple(range(1, s.layers + 1)),),
        )
        for rank in range(s.ranks)
    ]
    began = time.process_time()
    microbatch = build_microbatch(
        0,
        samples,
        cp_size=s.ranks,
        tp_size=1,
        route_shape=routes,
    )
    shares = [slice_microbatch(microbatch, place) for place in places]
    StagedRoutes.from_slice(shares[0], s.experts, DEVICE)
    return took + time.process_time() - began


if __name__ == "__main__":
    main()
