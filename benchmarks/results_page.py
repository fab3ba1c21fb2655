"""docs/internals/results.md from what the agreement study found: pure, no clock, no machine."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.markdown import INTERNALS, Result, range_of, table

RESULTS_PAGE = INTERNALS / "results.md"

_STATS = (
    ("k3", "k3 KL"),
    ("mean", "mean gap, nats"),
    ("p999", "p99.9 gap, nats"),
    ("max", "largest gap, nats"),
    ("far_share", "share of tokens with a gap above ln 2"),
)


def results_page(result: Result) -> str:
    """What the agreement study found."""
    m, runs = result["machine"], result["runs"]
    some = runs[0]
    settings = list(dict.fromkeys(run["initializer_range"] for run in runs))
    seeds = len({run["seed"] for run in runs})
    lines = [
        "<!-- written by: python -m benchmarks.agreement --write-docs, and by make bench -->",
        "",
        "# Results: what R3 does to the gap between engine and trainer",
        "",
        f"Measured on {m['date']}, {m['cores']} cores, {m['gpu'] or 'no GPU'}, torch {m['torch']}:",
        "",
        f"    {result['command']}",
        "",
        f"A real SGLang server in {result['server_dtype']} generates; the same tokens then go through the"
        " Megatron actor, without R3 and with it. Nothing is trained, so every difference is one of"
        f" arithmetic and routing. {some['layers']} MoE layers, hidden size {some['hidden']}, top"
        f" {some['topk']} of {some['experts']} experts; {seeds} seed{'s' * (seeds > 1)}, {some['samples']} samples and"
        f" {some['float32']['off']['tokens']:,} response tokens each.",
        "",
        "Ratios are of the same seed with R3 over without, below 1 where R3 helps; a figure is the median"
        " of the seeds, (smallest to largest).",
        "",
    ]
    for setting in settings:
        own = [run for run in runs if run["initializer_range"] == setting]
        if setting is not None:
            lines += [f"## Random weights of standard deviation {setting:g}", ""]
            lines += ["The checkpoint is in bfloat16: engine and actor hold the same numbers.", ""]
        for actor in ("float32", "bfloat16"):
            lines += table(
                (f"actor in {actor}", "with / without", "without R3", "with R3"),
                ([words, *_paired(own, actor, key)] for key, words in _STATS),
            )
        lines += _layers(own)
    lines += _meaning(runs)
    return "\n".join(lines).rstrip() + "\n"


def _paired(runs: list[Result], actor: str, key: str) -> list[str]:
    off = [run[actor]["off"][key] for run in runs]
    on = [run[actor]["on"][key] for run in runs]
    over = [b / a for a, b in zip(off, on) if a]
    none = len(runs) - len(over)
    ratio = f"none without R3 in {none} of {len(runs)} seeds" if none else range_of(over)
    return [ratio, range_of(off), range_of(on)]


def _layers(runs: list[Result]) -> Iterator[str]:
    yield "Rows whose own top-k is another set than the engine's, medians of the seeds; under R3 it is what"
    yield "the router would have chosen by itself, for what is used is the engine's choice:"
    yield ""
    rows = []
    for i in range(runs[0]["layers"]):
        row = [str(i + 1)]
        for actor in ("float32", "bfloat16"):
            off = [run[actor]["layers_off"]["differ"][i] for run in runs]
            on = [run[actor]["layers_on"]["differ"][i] for run in runs]
            over = [b / a for a, b in zip(off, on) if a]
            row += [range_of(over) if len(over) == len(runs) else "none differ without R3"]
            row += [f"{median(off):.1%}", f"{median(on):.1%}"]
        rows.append(row)
    head = ["layer"]
    for actor in ("float32", "bfloat16"):
        head += [f"{actor}: with / without", "without R3", "with R3"]
    yield from table(head, rows)
    margin, logit_std = (
        [v for run in runs for v in run["float32"]["layers_off"][key]]
        for key in ("margin", "logit_std")
    )
    yield f"Router logits: standard deviation over the experts {range_of(logit_std)}; the last chosen expert"
    yield f"leads the next by {range_of(margin)} (means of layers)."
    yield ""


def _meaning(runs: list[Result]) -> Iterator[str]:
    yield "## What this shows and what it cannot"
    yield ""
    yield "- Same tokens, same weights: what replay removes is the part of the gap that routing made. Without"
    yield "  it a changed expert changes the input of every later layer, and disagreement grows with depth."
    yield "- The weights are random unless a checkpoint was named, and so is what routing does: gates are"
    yield "  neither uniform nor sharp, and the larger the weights, the more one other expert changes."
    yield "  How sharp a trained router is, this setting does not know."
    yield "- The paper ([arXiv 2510.11370](https://arxiv.org/abs/2510.11370)) reports a k3 KL of 1.5e-3"
    yield "  without and 7.5e-4 with R3 on Qwen3-30B-A3B, a ratio of 0.5. A ratio nearer to 0 here does not"
    yield "  mean that R3 does more here: what it cannot remove (other kernels, sharding, attention) is"
    yield "  another gap on GPUs and at that size. The two ratios are not comparable."
    yield "- What it does to learning is not measured here."
    if all(run[a]["off"]["far_share"] == 0 for run in runs for a in ("float32", "bfloat16")):
        yield "- No token has a gap above ln 2: this says nothing about the extreme tokens that the paper counts."
