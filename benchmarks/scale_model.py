"""What a step moves at 64 to 4096 GPUs, where it waits first, and what leaders of their own change.

    python -m benchmarks.scale_model                # with the constants that docs/scale.md records
    python -m benchmarks.scale_model --measure      # measure them anew on this machine
    python -m benchmarks.scale_model --measure --write-docs

Rates of the route path are measured with the production code (JSON and base64 decoding, packing,
cutting, packing into messages, gloo between two processes).  What needs the cluster (network,
training, generation) is an assumption, listed with the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path

from benchmarks.scale_rates import GIGA, Rates, measure

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
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
    # a token of a microbatch, and of a slice: tokens, labels, positions, uids, rows 8 each; log-probs
    # and advantages 4 each; a mask
    stream_bytes: float = 49.0
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
    # every tensor and pipeline rank of a replica gets the token streams: from rank 0, or with leaders
    # from its own, which got them from rank 0
    streams = tokens * c.stream_bytes
    copies = streams * model.tp * model.pp
    train_s = 2 * c.forwards_a_step * model.active_parameters * tokens / (trainers * c.gpu_flops)
    memory = model.parameters * c.optimizer_bytes / trainers
    others = (trainers - 1) / trainers
    share = 1 / data_ranks

    def sending(num_bytes: float) -> dict[str, float]:
        return {
            "message": num_bytes / rates.message / GIGA,
            "send": num_bytes / rates.gloo_send / GIGA,
        }

    def seconds(of_all: float, others: float) -> dict[str, float]:
        """A rank that does ``of_all`` of the route path, and sends ``others`` of what it cuts."""
        cut = (kept + copies) * of_all
        return {
            "receive": answers * of_all / min(c.network, rates.http_read) / GIGA,
            "parse": answers * of_all / rates.parse / GIGA,
            "decode": routes * of_all / rates.decode / GIGA,
            "cut": cut / rates.pack_and_cut / GIGA,
            **sending(cut * others),
        }

    leader = seconds(share, (model.model_ranks - 1) / model.model_ranks)
    # a leader's microbatches hold samples of all stores: nearly all of its rows come from others,
    # over HTTP, and as many bytes go out
    leader["exchange"] = routes * share * (1 - share) * 2 / min(c.network, rates.http_read) / GIGA
    leader["unpack"] = streams * share / rates.unpack / GIGA
    weights = model.parameters * 2
    return Cost(
        gpus=gpus,
        data_ranks=data_ranks,
        fits=memory <= 0.8 * c.gpu_memory * GIGA and trainers >= model.model_ranks,
        train_s=train_s,
        route_bytes=routes,
        wire_bytes=wire,
        rank0_memory=routes * (c.staleness + 2),
        rank0=seconds(1.0, others),
        leader=leader,
        rank0_beside_leaders={
            "parse": tokens * c.log_prob_json / rates.log_prob_parse / GIGA,
            "pack": streams / rates.pack_and_cut / GIGA,
            **sending(streams * (1 - share)),
        },
        weights_s=weights / c.weight_broadcast / GIGA,
        stage_weights_s=weights / model.pp / c.weight_broadcast / GIGA,
    )


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
    yield "    python -m benchmarks.scale_model --measure --write-docs"
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
    yield f"Seconds by stage at {GPU_COUNTS[-1]} GPUs. Rank 0 that does it all: {_stages(worst.rank0, 0)}."
    yield f"A leader: {_stages(worst.leader, 2)}. Rank 0 beside it: {_stages(worst.rank0_beside_leaders, 1)}."
    yield ""


def _stages(seconds: dict[str, float], digits: int) -> str:
    return ", ".join(f"{name} {s:,.{digits}f}" for name, s in seconds.items())


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
    yield "data-parallel leader receives, decodes and exchanges its own, and cuts for its ranks"
    yield "(docs/architecture.md); what it saves rank 0 on this machine is measured by"
    yield "`benchmarks/route_stores.py`. What is left to rank 0 then are the tokens and log-probs of all"
    yield "answers, as JSON, and the token streams, of which it sends each leader its own, once."


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
