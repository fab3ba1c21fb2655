"""Growth of the route path's cost with tokens, layers, top-k, experts and ranks.

    python -m benchmarks.growth [--rounds 5]

One thing is changed at a time.  All shapes are measured in every round, and each is compared with the
base of the same round: CPU seconds of this process from SGLang's base64 to the routes staged on the
device, and for ranks of rank 0's cutting for all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.route_path import Microbatch  # first: it prepares the device

import torch

from benchmarks.measure import flags, ratios, spread, write_result

BASE = Microbatch(samples=4, tokens=2048, layers=16, topk=8, experts=128)
GROWN = {
    "tokens": (4096, 8192),
    "layers": (32, 64),
    "topk": (16, 32),
    "experts": (254, 256, 512),
    "ranks": (2, 4, 8),
}


def main() -> None:
    arguments = flags(__doc__, rounds=5)
    torch.set_num_threads(1)
    write_result(arguments.output, measure(arguments.rounds))


def measure(rounds: int) -> dict[str, Any]:
    """Seconds of the base, and every grown shape's ratio to it."""
    grown = [(name, value) for name, values in GROWN.items() for value in values]
    grown.insert(0, ("tokens", BASE.tokens))  # the base again
    shapes = [BASE, *(replace(BASE, **{name: value}) for name, value in grown)]
    payloads = [shape.payload() for shape in shapes]
    seconds: list[list[float]] = [[] for _ in shapes]
    for number in range(rounds + 1):
        for shape, payload, of_shape in zip(shapes, payloads, seconds, strict=True):
            took, _ = shape.stage(payload)
            if number:  # the first round warms up
                of_shape.append(sum(took.values()))
    base, *others = seconds
    return {
        "samples": BASE.samples,
        "base": {name: getattr(BASE, name) for name in GROWN},
        "base_s": spread(base),
        "grown": [
            {"what": name, "value": value, "over_base": ratios(of_shape, base)}
            for (name, value), of_shape in zip(grown, others, strict=True)
        ],
    }


if __name__ == "__main__":
    main()
