"""Bytes a second from SGLang's payload to the routes on the device, and what filling holes costs.

    decode (base64 int32 -> uint8) -> pack -> slice -> install

The default is 64 samples x 8192 tokens x 48 layers x top 8 of 128 experts; bytes are those of the
uint8 routes.  Beside it, in the same run: a plain copy of the wire's bytes, which are what has to be
read (the memory's own speed), and the -1 fill against the formulation by one-hot int64
[rows, topk, experts].

    python -m benchmarks.route_path [--samples 64] [--tokens 8192] [--layers 48]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from r3train.trainer.megatron.cpu_device import prepare_device

DEVICE = prepare_device()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.measure import ratios, write_result  # noqa: E402
from benchmarks.samples import route_payload, sample_of_routes  # noqa: E402
from r3train.layout.microbatch import build_microbatch, slice_microbatch  # noqa: E402
from r3train.routing.padding import fill_missing  # noqa: E402
from r3train.routing.wire import decode_routed_experts  # noqa: E402
from r3train.trainer.megatron.replay import StagedRoutes  # noqa: E402
from r3train.types import RankTopology, RouteShape  # noqa: E402

SAMPLES_A_MICROBATCH = 4
# on a CPU every thread's work is this process's: its own time is free of what else the machine does
clock = time.perf_counter if torch.cuda.is_available() else time.process_time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the fill comparison")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {"path": measure_path(arguments), "fill": measure_fill(arguments)}
    write_result(arguments.output, result)


def measure_path(a: argparse.Namespace) -> dict[str, Any]:
    """Every stage over all samples, microbatch by microbatch, in GB of uint8 routes a second."""
    rows = a.tokens - 1
    payload = route_payload(rows, a.layers, a.topk, a.experts)
    route_shape = RouteShape(a.layers, a.topk, a.experts)
    one = rows * a.layers * a.topk
    stages = ("decode", "pack", "slice", "install")
    times: dict[str, list[float]] = {name: [] for name in (*stages, "wire_copy")}
    wire = np.frombuffer(payload, np.uint8)
    topology = RankTopology(moe_layer_numbers=(tuple(range(1, a.layers + 1)),))
    staged: list[StagedRoutes] = []
    for first in range(0, a.samples, SAMPLES_A_MICROBATCH):
        numbers = range(first, min(first + SAMPLES_A_MICROBATCH, a.samples))
        decoded = timed(
            times["decode"],
            lambda: [
                decode_routed_experts(
                    payload,
                    route_shape,
                    num_tokens=a.tokens,
                    sample=str(i),
                )
                for i in numbers
            ],
        )
        samples = [sample_of_routes(i, routes) for i, routes in zip(numbers, decoded)]
        microbatch = timed(
            times["pack"],
            lambda: build_microbatch(first, samples, cp_size=1, tp_size=1, route_shape=route_shape),
        )
        share = timed(times["slice"], lambda: slice_microbatch(microbatch, topology))
        staged.append(
            timed(times["install"], lambda: StagedRoutes.from_slice(share, a.experts, DEVICE))
        )
        for _ in numbers:
            timed(times["wire_copy"], wire.copy)
    total = one * a.samples
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = {name: sum(each) for name, each in times.items()}
    path = sum(seconds[name] for name in stages)
    return dict(
        shape=f"{a.samples} x {a.tokens} x {a.layers} x {a.topk} of {a.experts}",
        route_gigabytes=round(total / 1e9, 3),
        wire_gigabytes=round(len(payload) * a.samples / 1e9, 3),
        gigabytes_a_second={name: round(total / seconds[name] / 1e9, 3) for name in stages},
        whole_path_gigabytes_a_second=round(total / path / 1e9, 3),
        whole_path_seconds=round(path, 2),
        wire_gigabytes_a_second=round(len(payload) * a.samples / path / 1e9, 3),
        wire_copy_gigabytes_a_second=round(
            len(payload) * a.samples / seconds["wire_copy"] / 1e9, 3
        ),
        path_over_one_copy_of_the_wire=ratios(
            [sum(each) for each in zip(*(times[name] for name in stages))],
            [sum(g) for g in batched(times["wire_copy"], SAMPLES_A_MICROBATCH)],
        ),
        peak_memory_gigabytes=round(peak / 1e9, 2),
    )


def batched(values: list[float], size: int) -> list[list[float]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def timed(into: list[float], work: Callable[[], Any]) -> Any:
    started = clock()
    result = work()
    into.append(clock() - started)
    return result


def one_hot_fill(
    scores: torch.Tensor, experts: torch.Tensor, missing: torch.Tensor
) -> torch.Tensor:
    """The same fill with one-hot int64 [rows, topk, experts]: what ours is compared with."""
    one_hot = torch.nn.functional.one_hot(experts.masked_fill(missing, 0), scores.shape[1])
    used = (one_hot * ~missing[:, :, None]).sum(1) > 0
    best = scores.masked_fill(used, float("-inf")).topk(experts.shape[1], dim=1).indices
    nth = (missing.long().cumsum(1) - 1).clamp_min(0)
    return torch.where(missing, best.gather(1, nth), experts)


def measure_fill(a: argparse.Namespace) -> dict[str, Any]:
    """One layer of one microbatch, a tenth of its slots missing: seconds and ratio, interleaved."""
    rows = SAMPLES_A_MICROBATCH * a.tokens
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(rows, a.experts, generator=generator)
    experts = torch.rand(rows, a.experts, generator=generator).topk(a.topk, dim=1).indices
    missing = torch.rand(rows, a.topk, generator=generator) < 0.1
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(a.rounds + 1):
        first = timed(ours, lambda: fill_missing(scores, experts, missing))
        second = timed(theirs, lambda: one_hot_fill(scores, experts, missing))
        assert torch.equal(first, second)
    ratios = [b / a for a, b in zip(ours[1:], theirs[1:])]
    return dict(
        rows=rows,
        seconds=round(statistics.median(ours[1:]), 4),
        one_hot_seconds=round(statistics.median(theirs[1:]), 4),
        one_hot_over_ours=round(statistics.median(ratios), 2),
        ratio_range=[round(min(ratios), 2), round(max(ratios), 2)],
        mask_megabytes=round(rows * (a.experts + 1) / 1e6, 1),
        one_hot_megabytes=round(rows * a.topk * a.experts * 8 / 1e6, 1),
    )


if __name__ == "__main__":
    main()
