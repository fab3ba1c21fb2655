"""A step at 64 to 4096 GPUs estimated: its bytes, its longest part, and the gain of ``--route-stores``.

    python -m benchmarks.scale_model                # with the constants that docs/internals/scale.md records
    python -m benchmarks.scale_model --measure      # measure them anew on this machine
    python -m benchmarks.scale_model --measure --write-docs

Rates of the route path are measured with the production code (JSON and base64 decoding, packing,
cutting, packing into messages, gloo between two processes), and of weights by gloo.  What needs the
cluster is assumed, and named so with the result: the network, NCCL, the arithmetic of the GPUs, and
generation, which is bound by the latency of a token: its seconds are a sample's tokens x that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from dataclasses import asdict, replace
from datetime import date
from typing import Any

from benchmarks.page import INTERNALS, render
from benchmarks.scale_costs import MODELS, ROUTES, Cluster, Cost, Model, cost
from benchmarks.scale_rates import Rates, measure

PAGE = INTERNALS / "scale.md"
GPU_COUNTS = (64, 128, 256, 512, 1024, 2048, 4096)
MANY_SAMPLES = 8  # times as many, to show where rank 0 is first
LONG_STALENESS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure the rates on this machine")
    parser.add_argument("--write-docs", action="store_true", help="write docs/internals/scale.md")
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


def recorded() -> tuple[Rates, str, str]:
    """The constants that docs/internals/scale.md was written with, their day and machine."""
    head = PAGE.read_text(encoding="utf-8").split("-->", 1)[0]
    record = json.loads(head[head.index("{") :])
    return Rates(**record["rates"]), record["date"], record["machine"]


def page(rates: Rates, cluster: Cluster, when: str, machine: str) -> str:
    """docs/internals/scale.md for these rates and this cluster."""

    def cost_of(model: Model, gpus: int, of: Cluster = cluster) -> Cost:
        return cost(model, gpus, rates, of)

    record = {"date": when, "machine": machine, "rates": asdict(rates)}
    return render(
        "scale",
        **record,
        record=json.dumps(record),
        cluster=cluster,
        many=replace(cluster, samples=MANY_SAMPLES * cluster.samples),
        long_staleness=LONG_STALENESS,
        models=MODELS,
        gpu_counts=GPU_COUNTS,
        cost=cost_of,
        outcome=lambda model: outcome(model, rates, cluster),
    )


def outcome(model: Model, rates: Rates, cluster: Cluster) -> dict[str, Any]:
    """Numbers of GPUs, samples and milliseconds from which on rank 0's routes take longest.

    A number of GPUs is None where no number of ``GPU_COUNTS`` is enough.
    """
    costs = [x for gpus in GPU_COUNTS if (x := cost(model, gpus, rates, cluster)).fits]
    last = costs[-1]
    routes_s = last.parts()[ROUTES]
    generation_over_routes = last.generation_s / routes_s
    return {
        "gpus": last.gpus,
        "longest": last.longest(),
        "longest_from": next((x.gpus for x in costs if x.longest() == ROUTES), None),
        "past_training": next((x.gpus for x in costs if x.parts()[ROUTES] > x.train_s), None),
        "enough_samples": math.ceil(cluster.samples * generation_over_routes),
        "quick_token_ms": 1000 * cluster.token_latency / generation_over_routes,
        "shorter": routes_s / last.parts(leaders=True)[ROUTES],
        "stage_weights_s": last.stage_weights_s,
    }


if __name__ == "__main__":
    main()
