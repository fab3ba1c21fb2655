"""docs/internals/scale.md from the scale model's numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, fields, replace

from benchmarks.scale_costs import MODELS, Cluster, Cost, Model, cost
from benchmarks.scale_rates import GIGA, Rates

GPU_COUNTS = (64, 128, 256, 512, 1024, 2048, 4096)
MANY_SAMPLES = 8  # times as many, to show where rank 0 is first
LONG_STALENESS = 4
_RANK_0 = "rank 0's routes"


def page(rates: Rates, cluster: Cluster, when: str, machine: str) -> str:
    """docs/internals/scale.md; its first comment holds the constants that a later run takes."""
    return "\n".join(_lines(rates, cluster, when, machine)) + "\n"


def _lines(rates: Rates, c: Cluster, when: str, machine: str) -> Iterator[str]:
    record = {"date": when, "machine": machine, "rates": asdict(rates)}
    yield f"<!-- written by: benchmarks/scale_model.py --write-docs; {json.dumps(record)} -->"
    yield ""
    yield "# At scale, on paper"
    yield ""
    yield f"A step of {c.samples:,} samples of {c.tokens:,} tokens, whatever the number of GPUs: what it"
    yield "moves, and which part of it takes longest. **Nothing on this page has been run on a cluster.**"
    yield ""
    yield "    python -m benchmarks.scale_model --measure --write-docs"
    yield ""
    yield f"Measured with the production code on one core ({when}, {machine}), GB/s: " + ", ".join(
        f"{f.name.replace('_', ' ')} {getattr(rates, f.name)}" for f in fields(Rates)
    ) + "."
    yield ""
    yield f"Given: {_settings(c, 'work')}."
    yield ""
    yield f"Counted from our formats: {_settings(c, 'counted')}."
    yield ""
    yield f"Assumed, not measured: {_settings(c, 'assumed')}."
    yield ""
    for model in MODELS:
        yield from _model_lines(model, rates, c)
    yield from _answer(rates, c)


def _settings(c: Cluster, kind: str) -> str:
    return "; ".join(
        f"{getattr(c, f.name):g} {f.metadata['what']}"
        for f in fields(Cluster)
        if f.metadata["kind"] == kind
    )


def _model_lines(model: Model, rates: Rates, c: Cluster) -> Iterator[str]:
    last = cost(model, GPU_COUNTS[-1], rates, c)
    flops = model.forward_flops(c.tokens)
    yield f"## {model.name}"
    yield ""
    yield (
        f"{model.layers} layers, top {model.topk} of {model.experts}; TP {model.tp}, PP {model.pp}, CP"
        f" {model.cp}. Routes of a step: {last.wire_bytes / GIGA:,.0f} GB on the wire,"
        f" {last.route_bytes / GIGA:,.0f} GB held; {last.rank0_memory / GIGA:,.0f} GB in the host memory"
        f" of rank 0 at staleness {c.staleness}. Attention is"
        f" {1 - 2 * model.active_parameters / flops:.0%} of the trainer's arithmetic. Generation"
        f" {last.generation_s:,.0f} s; weight sync {last.weights_s:,.1f} s by NCCL, and"
        f" {2 * model.parameters / rates.gloo_weights / GIGA:,.0f} s by gloo as measured."
    )
    yield ""
    yield (
        "| GPUs | data ranks | training s | routes through rank 0 s | a leader's own routes s |"
        " rank 0 beside them s | longest | then |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for gpus in GPU_COUNTS:
        x = cost(model, gpus, rates, c)
        if not x.fits:
            yield f"| {gpus} | | does not fit | | | | | |"
            continue
        longest = x.longest()
        yield (
            f"| {gpus} | {x.data_ranks} | {x.train_s:,.0f} | {sum(x.rank0.values()):,.0f} |"
            f" {sum(x.leader.values()):,.1f} | {sum(x.rank0_beside_leaders.values()):,.1f} |"
            f" {longest} | {x.longest(but=longest)} |"
        )
    yield ""
    yield f"Seconds by stage at {GPU_COUNTS[-1]} GPUs. Rank 0 that does it all: {_stages(last.rank0, 0)}."
    yield f"A leader: {_stages(last.leader, 2)}. Rank 0 beside it: {_stages(last.rank0_beside_leaders, 1)}."
    yield ""


def _stages(seconds: dict[str, float], digits: int) -> str:
    return ", ".join(f"{name} {s:,.{digits}f}" for name, s in seconds.items())


def _answer(rates: Rates, c: Cluster) -> Iterator[str]:
    gpus, many = GPU_COUNTS[-1], replace(c, samples=MANY_SAMPLES * c.samples)
    yield "## Is it rank 0?"
    yield ""
    yield "Generation is one token after another, and no GPU that is added makes it shorter. What hides it is"
    yield "overlap: a rollout is generated while the one before it trains, and a step takes the longest of"
    yield "generation and weight sync, of its own training, and of rank 0's work (`drain`). Rollouts that span"
    yield f"updates (`in_place`, `abort`) have {LONG_STALENESS + 1} steps from their first token to the update that they are trained"
    yield f"into at a staleness of {LONG_STALENESS}."
    yield ""
    yield (
        f"| seconds of a step at {gpus} GPUs, at least: through rank 0 / `--route-stores` |"
        f" {c.samples:,} samples | {many.samples:,} samples | {c.samples:,}, spanning, staleness"
        f" {LONG_STALENESS} |"
    )
    yield "|---|---|---|---|"
    for model in MODELS:
        one, eight = cost(model, gpus, rates, c), cost(model, gpus, rates, many)
        yield (
            f"| {model.name} | {_both(one)} | {_both(eight)} | {_both(one, spanning=LONG_STALENESS)} |"
        )
    yield ""
    for model in MODELS:
        yield _conclusion(model, rates, c)
    yield ""
    yield "Receiving, parsing and decoding go on beside training, on threads of one process; for cutting and"
    yield "sending the step waits. With `--route-stores` each data-parallel leader does all of it for its own"
    yield "ranks (docs/internals/architecture.md); `benchmarks/route_stores.py` measures what that saves rank 0 here. Left"
    yield "to rank 0 are the tokens and log-probs of all answers, as JSON, and the token streams, once to each"
    yield "leader."


def _both(x: Cost, spanning: int | None = None) -> str:
    return " / ".join(
        f"{x.step_s(leaders=leaders, spanning=spanning):,.0f}" for leaders in (False, True)
    )


def _conclusion(model: Model, rates: Rates, c: Cluster) -> str:
    costs = [x for g in GPU_COUNTS if (x := cost(model, g, rates, c)).fits]
    last = costs[-1]
    routes, split = sum(last.rank0.values()), last.parts(leaders=True)[_RANK_0]
    by_generation = last.generation_s / routes  # times that the one outlasts the other
    return (
        f"- {model.name}: {_first(costs)} At {last.gpus} GPUs they are longest from"
        f" {math.ceil(c.samples * by_generation):,} samples a step on, or where a token takes less than"
        f" {1000 * c.token_latency / by_generation:.1f} ms. `--route-stores` makes the path"
        f" {routes / split:,.0f} times shorter. Every pipeline stage sending its own weights would make the"
        f" sync {last.stage_weights_s:,.1f} s (not built)."
    )


def _first(costs: list[Cost]) -> str:
    """Whether rank 0's routes are longest anywhere, and where they outlast training."""
    first = next((x.gpus for x in costs if x.longest() == _RANK_0), None)
    past_training = next((x.gpus for x in costs if sum(x.rank0.values()) > x.train_s), None)
    said = f"from {first} GPUs on" if first else f"no: {costs[-1].longest()} is longest in the end"
    if past_training is None:
        return f"{said}; rank 0's routes never outlast training."
    return f"{said}; rank 0's routes outlast training from {past_training} GPUs on."
