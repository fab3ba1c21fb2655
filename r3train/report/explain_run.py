"""``r3train explain RUN``: what a run's log-prob gap is made of, on a screen of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from r3train.algo.gap_budget import PARTS
from r3train.config.sources import plain
from r3train.report.report_data import budget_of, load_curves

_WIDTH, _BAR = 80, 20
_WINDOW = 5  # steps of a moving mean: single steps of few rechecked tokens jump

# what a part is, and the settings that act on it
ABOUT = {
    "server": (
        "its decode against its prefill",
        "--bf16 (float32 has a thousandth of it), --sglang-enable-deterministic-inference,"
        " --sglang-attention-backend",
    ),
    "kernels": (
        "server against actor",
        "--bf16 (float32 has a thousandth of it), --sglang-moe-runner-backend, --attention-backend",
    ),
    "routing": ("the actor's own experts", "--use-rollout-routing-replay, which removes it"),
    "cache": ("a cached prefix", "--flush-cache-on-update, --sglang-disable-radix-cache"),
    "staleness": (
        "tokens of older weights",
        "--max-weight-staleness, --lr; --use-tis corrects for it",
    ),
    "rest": (
        "what no part explains",
        "--pause-generation-mode abort (a resumed sample keeps rows of older weights);"
        " --r3-recheck-share measures more tokens",
    ),
}


def explain_run(run_dir: Path) -> list[str]:
    """Say which part of a run's gap dominates, since when, and what acts on it: lines of 80 columns at most.

    Raises ValueError for a directory without a step that has a budget.
    """
    run = load_curves(run_dir, str(run_dir))
    budget = budget_of(run)
    steps = sorted(budget.get("rest", {}))
    if not steps:
        raise ValueError(f"{run_dir}: no step has a budget of the log-prob gap (gap/rest_k3)")
    last = steps[-max(1, min(len(steps) // 10, 50)) :]
    sums = {part: max(_mean(values, last), 0.0) for part, values in budget.items()}
    total = sum(sums.values())
    most = max(sums, key=sums.__getitem__)
    span = f"step {last[0]}" if len(last) == 1 else f"steps {last[0]} to {last[-1]}"
    mean = _mean(dict(run.series("train/log_prob_gap_mean")[0]), last)
    lines = [
        *textwrap.wrap(f"{plain(str(run_dir))}: {len(steps)} steps", _WIDTH),
        f"log-prob gap of {span}: mean {mean:.3g} nats, k3 {total:.3g}",
        "",
        f"{'part':<10} {'k3':>9} {'share':>6}",
    ]
    for part in PARTS:
        if part not in budget:
            if part != "routing" or run.uses_r3 is False:
                lines.append(f"{part:<10} {'-':>9} {'':>6} not measured: {ABOUT[part][0]}")
            continue
        share = sums[part] / total if total else 0.0
        bar = "#" * round(_BAR * share)
        line = f"{part:<10} {sums[part]:>9.2g} {share:>6.0%} {bar:<{_BAR}} {ABOUT[part][0]}"
        lines.append(line.rstrip())
    lines.append("")
    if not total:
        return [*lines, "The servers' log-probs are the actor's."]
    since = since_when(budget, steps, most)
    began = "from the first step on" if since == steps[0] else f"since step {since}"
    lines.append(f"{most} dominates, {began}. What acts on it:")
    lines += textwrap.wrap(
        ABOUT[most][1],
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    return [*lines, "r3train docs gap says what each part is; r3train report draws them by step."]


def since_when(budget: Mapping[str, Mapping[int, float]], steps: Sequence[int], part: str) -> int:
    """Find the step since which a part has been the largest, by means of 5 steps."""
    since = steps[-1]
    for end in range(len(steps), 0, -1):
        window = steps[max(0, end - _WINDOW) : end]
        means = {name: _mean(values, window) for name, values in budget.items()}
        if max(means, key=means.__getitem__) != part:
            break
        since = steps[end - 1]
    return since


def _mean(values: Mapping[int, float], steps: Sequence[int]) -> float:
    """The mean over the steps that have a number; 0 without any."""
    found = [values[step] for step in steps if step in values]
    return sum(found) / len(found) if found else 0.0
