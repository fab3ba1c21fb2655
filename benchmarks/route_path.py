"""Bytes per second from SGLang's payload to the routes on the device, and the cost of filling holes.

    decode (base64 -> uint8) -> pack -> slice -> install and serve every layer, in each of two passes

What a server of this project sends (a byte an id) is measured beside what SGLang itself sends (int32).

The default is 64 samples x 8192 tokens x 48 layers x top 8 of 128 experts; bytes are those of the
uint8 routes.  Beside it, in the same run: a plain copy of the wire's bytes, all of which have to be
read (the memory's own speed), and the -1 fill against the formulation by one-hot int64
[rows, topk, experts].

    python -m benchmarks.route_path [--samples 64] [--tokens 8192] [--layers 48]
"""

from __future__ import annotations

import argparse
import base64
import pickle
import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from r3train.cpu.device import prepare_device

DEVICE = prepare_device()

import numpy as np  # noqa: E402
import orjson  # noqa: E402
import pybase64  # noqa: E402
import torch  # noqa: E402

from benchmarks.measure import (
    flags,
    in_turns,
    own_clock,
    ratios,
    spread,
    write_result,
)  # noqa: E402
from benchmarks.samples import route_payload, sample_of_routes  # noqa: E402
from r3train.engine.sglang_http import parse_answer  # noqa: E402
from r3train.layout.microbatch import build_microbatch, slice_microbatch  # noqa: E402
from r3train.routing.padding import fill_missing  # noqa: E402
from r3train.routing.wire import decode_routed_experts, shortened  # noqa: E402
from r3train.trainer.megatron.replay import StagedRoutes  # noqa: E402
from r3train.types import RankTopology, RouteShape  # noqa: E402

SAMPLES_A_MICROBATCH = 4
STAGES = ("decode", "pack", "slice", "install", "serve")
PASSES = 2  # old log-probs and train, each of which asks for the routes of every layer
clock = own_clock()


@dataclass(frozen=True)
class Microbatch:
    """The shape of one microbatch; its ranks are context-parallel."""

    samples: int
    tokens: int
    layers: int
    topk: int
    experts: int
    ranks: int = 1

    @property
    def route_bytes(self) -> int:
        """Bytes of all samples' uint8 routes."""
        return self.samples * (self.tokens - 1) * self.layers * self.topk

    def payload(self) -> bytes:
        """One sample's routes as SGLang sends them."""
        return route_payload(self.tokens - 1, self.layers, self.topk, self.experts)

    def stage(self, payload: bytes) -> tuple[dict[str, float], StagedRoutes]:
        """Seconds of each stage, all ranks cut and rank 0 installed, and what is then on the device."""
        shape = RouteShape(self.layers, self.topk, self.experts)
        layers = (tuple(range(1, self.layers + 1)),)
        places = [
            RankTopology(
                rank=rank,
                world_size=self.ranks,
                cp_rank=rank,
                cp_size=self.ranks,
                moe_layer_numbers=layers,
            )
            for rank in range(self.ranks)
        ]
        seconds: dict[str, float] = {}

        def timed(name: str, work: Callable[[], Any]) -> Any:
            began = clock()
            result = work()
            seconds[name] = seconds.get(name, 0.0) + clock() - began
            return result

        decoded = timed(
            "decode",
            lambda: [
                decode_routed_experts(payload, shape, num_tokens=self.tokens, sample=str(i))
                for i in range(self.samples)
            ],
        )
        samples = [sample_of_routes(i, routes) for i, routes in enumerate(decoded)]
        microbatch = timed(
            "pack",
            lambda: build_microbatch(0, samples, cp_size=self.ranks, tp_size=1, route_shape=shape),
        )
        shares = timed("slice", lambda: [slice_microbatch(microbatch, p) for p in places])
        for _ in range(PASSES):
            staged = timed(
                "install", lambda: StagedRoutes.from_slice(shares[0], self.experts, DEVICE)
            )
            timed("serve", lambda: self.serve(staged))
        return seconds, staged

    def serve(self, staged: StagedRoutes) -> None:
        """Read the routes of every layer as its router gets them in a pass."""
        for column in range(self.layers):
            staged.routes[:, column].long()


def main() -> None:
    a = flags(__doc__, samples=64, tokens=8192, layers=48, topk=8, experts=128, rounds=5)
    torch.set_num_threads(1)
    write_result(
        a.output, {"path": measure_path(a), "fill": measure_fill(a), "wire": measure_wire(a)}
    )


def measure_path(a: argparse.Namespace) -> dict[str, Any]:
    """Every stage over all samples, microbatch by microbatch, in GB of uint8 routes a second."""
    whole = Microbatch(a.samples, a.tokens, a.layers, a.topk, a.experts)
    payload = whole.payload()
    wire = np.frombuffer(payload, np.uint8)
    there = wire.copy()
    for _ in range(2):  # the second rollout counts: the first one pays for fresh memory
        path, copies, installed = [], [], []
        for first in range(0, a.samples, SAMPLES_A_MICROBATCH):
            part = replace(whole, samples=min(SAMPLES_A_MICROBATCH, a.samples - first))
            seconds, staged = part.stage(payload)
            path.append(seconds)
            installed.append(staged)  # a job holds them all
            began = clock()
            for _ in range(part.samples):
                np.copyto(there, wire)
            copies.append(clock() - began)
    of_stage = {name: sum(seconds[name] for seconds in path) for name in STAGES}
    path_s = sum(of_stage.values())
    route_gb, wire_gb = whole.route_bytes / 1e9, len(payload) * a.samples / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return dict(
        shape=f"{a.samples} x {a.tokens} x {a.layers} x {a.topk} of {a.experts}",
        route_gigabytes=round(route_gb, 3),
        wire_gigabytes=round(wire_gb, 3),
        gigabytes_a_second={name: round(route_gb / s, 3) for name, s in of_stage.items()},
        whole_path_gigabytes_a_second=round(route_gb / path_s, 3),
        whole_path_seconds=round(path_s, 2),
        wire_gigabytes_a_second=round(wire_gb / path_s, 3),
        wire_copy_gigabytes_a_second=round(wire_gb / sum(copies), 3),
        path_over_one_copy_of_the_wire=ratios([sum(x.values()) for x in path], copies),
        peak_memory_gigabytes=round(peak / 1e9, 2),
    )


def measure_wire(a: argparse.Namespace) -> dict[str, Any]:
    """One answer's routes in the scheduler, in the server's event loop and in rank 0: int32, again, short."""
    payload = base64.b64decode(route_payload(a.tokens - 1, a.layers, a.topk, a.experts))
    shape = RouteShape(a.layers, a.topk, a.experts)
    ids = torch.frombuffer(bytearray(payload), dtype=torch.int32).view(-1, a.layers, a.topk)
    # what each leaves to the next
    left: dict[str, dict[str, bytes]] = {"int32": {}, "int32 again": {}, "short": {}}

    def scheduler(arm: str) -> None:
        sent = shortened(ids.numpy()) if arm == "short" else ids
        left[arm]["scheduler"] = pickle.dumps(sent)

    def event_loop(arm: str) -> None:
        text = pickle.loads(left[arm]["scheduler"])
        if not isinstance(text, str):
            text = pybase64.b64encode(text.numpy().tobytes()).decode("utf-8")
        left[arm]["event loop"] = orjson.dumps({"meta_info": {"routed_experts": text}})

    def rank_0(arm: str) -> None:
        text = parse_answer(left[arm]["event loop"])["meta_info"]["routed_experts"]
        decode_routed_experts(text, shape, num_tokens=a.tokens, sample="0")

    found: dict[str, Any] = {}
    for name, work in (
        ("scheduler", scheduler),
        ("event loop", event_loop),
        ("rank 0", rank_0),
    ):
        arms = {arm: partial(work, arm) for arm in left}
        seconds = in_turns(arms, 4 * a.rounds, clock=clock)
        found[name] = {
            "milliseconds": {arm: spread([1e3 * s for s in each]) for arm, each in seconds.items()},
            "short_over_int32": ratios(seconds["short"], seconds["int32"]),
            "again_over_int32": ratios(seconds["int32 again"], seconds["int32"]),
        }
    kept = ids.numel() * shape.dtype.itemsize
    sizes = {arm: round(len(sent["event loop"]) / kept, 2) for arm, sent in left.items()}
    return {"parts": found, "wire_over_kept": sizes}


def one_hot_fill(
    scores: torch.Tensor, experts: torch.Tensor, missing: torch.Tensor
) -> torch.Tensor:
    """The fill that ours is compared with: by one-hot int64 [rows, topk, experts]."""
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
    given = (scores, experts, missing)
    assert torch.equal(fill_missing(*given), one_hot_fill(*given))
    arms = {"ours": lambda: fill_missing(*given), "one_hot": lambda: one_hot_fill(*given)}
    seconds = in_turns(arms, a.rounds, clock=clock)
    over = [b / a for a, b in zip(seconds["ours"], seconds["one_hot"], strict=True)]
    return dict(
        rows=rows,
        seconds=round(statistics.median(seconds["ours"]), 4),
        one_hot_seconds=round(statistics.median(seconds["one_hot"]), 4),
        one_hot_over_ours=round(statistics.median(over), 2),
        ratio_range=[round(min(over), 2), round(max(over), 2)],
        mask_megabytes=round(rows * (a.experts + 1) / 1e6, 1),
        one_hot_megabytes=round(rows * a.topk * a.experts * 8 / 1e6, 1),
    )


if __name__ == "__main__":
    main()
