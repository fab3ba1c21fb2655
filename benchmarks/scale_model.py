"""What a step moves at 64 to 4096 GPUs, which part takes longest, and what leaders of their own change.

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
import os
import platform
from datetime import date
from pathlib import Path

from benchmarks.scale_costs import Cluster
from benchmarks.scale_page import page
from benchmarks.scale_rates import Rates, measure

PAGE = Path(__file__).resolve().parents[1] / "docs" / "internals" / "scale.md"


def recorded() -> tuple[Rates, str, str]:
    """The constants that docs/internals/scale.md was written with."""
    head = PAGE.read_text(encoding="utf-8").split("-->", 1)[0]
    record = json.loads(head[head.index("{") :])
    return Rates(**record["rates"]), record["date"], record["machine"]


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


if __name__ == "__main__":
    main()
