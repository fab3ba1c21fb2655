"""The table of charts, and its rows with the numbers of runs: what the page and plot.png draw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

from r3train.algo.gap_budget import PARTS
from r3train.observe.metric_table import row_of
from r3train.report.report_data import RunCurves

# Run colours, which read on a light and on a dark page; told apart by colour-blind readers too.
PALETTE = ("#2386c8", "#dd6a1b", "#0f9d76", "#c56a9f", "#a3821a", "#7c83e0", "#8a8f98")
_MAX_POINTS = 1000

Points = Sequence[tuple[float, float]]  # (step, value)


@dataclass(frozen=True)
class ChartRow:
    """A row of the table: metrics of one unit over the steps.

    keys: the first is a solid line, the others are dashed.  NAME stands for each evaluation set, which has a
    chart of its own, and N for the largest number that a run has.
    """

    title: str
    keys: tuple[str, ...]
    unit: str
    log: bool = False
    deviation: str = ""  # metric of half the height of a band around the first
    stacked: bool = False  # the keys are parts of a whole: each run has a chart of its own
    total: str = ""  # the whole, if the parts leave a rest
    zeros: bool = True  # False: left out if all numbers are 0, as the run does not use it


_PHASES = ("rollout_wait_s", "train_s", "publish_s", "eval_wait_s", "save_s")
CHARTS = (
    ChartRow(
        "Evaluation: NAME",
        ("eval/NAME/mean", "eval/NAME/pass_at_N"),
        "mean reward by weight version",
        deviation="eval/NAME/standard_error",
    ),
    ChartRow("Reward", ("rollout/reward_mean",), "mean", deviation="rollout/reward_std"),
    ChartRow("pass@k", ("rollout/pass_at_N", "rollout/pass_at_1"), "share of prompts", zeros=False),
    ChartRow("Loss", ("train/loss",), "mean over loss tokens"),
    ChartRow("Gradient norm", ("train/grad_norm",), "before clipping"),
    ChartRow("Response length", ("rollout/response_len_mean",), "tokens"),
    ChartRow("Truncated", ("rollout/truncated_share",), "share of responses", zeros=False),
    ChartRow("Entropy", ("train/entropy",), "nats per token"),
    ChartRow("KL from the reference", ("train/kl",), "nats per token", zeros=False),
    ChartRow("Clipped tokens", ("train/clip_share",), "share of loss tokens", zeros=False),
    ChartRow(
        "Log-prob gap",
        ("train/log_prob_gap_mean", "train/log_prob_gap_k3"),
        "|actor - engine|, nats per token; dashed: estimate k3 of their KL",
        log=True,
        zeros=False,
    ),
    ChartRow(
        "Budget of the log-prob gap",
        tuple(f"gap/{part}_k3" for part in PARTS),
        "what each cause adds to k3, nats per token",
        stacked=True,
    ),
    ChartRow("R3 verdict", ("r3/passed",), "1: passed, 0: failed"),
    ChartRow(
        "Routing agreement",
        ("r3/agreement", "r3/agreement_mismatch"),
        "share of rows with the replayed experts; dashed: with none of them",
    ),
    ChartRow("Staleness", ("rollout/staleness_mean",), "weight versions", zeros=False),
    ChartRow(
        "Time of a step",
        tuple(f"perf/{phase}" for phase in _PHASES),
        "seconds",
        stacked=True,
        total="perf/step_s",
    ),
    ChartRow("Agents' sessions", ("agent/sessions", "agent/failures"), "dashed: failed"),
    ChartRow("Agents' calls", ("agent/calls_mean", "agent/tool_calls_mean"), "dashed: of tools"),
    ChartRow("Agents' time", ("agent/session_s_mean", "agent/session_s_max"), "s; dashed: longest"),
    ChartRow("Agents' samples", ("agent/roots_mean", "agent/forks_mean"), "roots; dashed: forks"),
    ChartRow("Agents' refusals", ("agent/refused",), "requests", zeros=False),
    ChartRow("Agents' unread calls", ("agent/unread_calls",), "answers", zeros=False),
    ChartRow("Throughput", ("perf/tokens_per_s",), "generated tokens per second"),
)


@dataclass(frozen=True)
class Line:
    """A line of a chart, or a part of a stack; ``deviation`` has a number for each point, or none."""

    name: str
    colour: str
    points: Points
    dashed: bool = False
    deviation: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """Lines of a row of the table; ``missing`` names the numbers that cannot be drawn."""

    row: ChartRow
    title: str
    lines: list[Line] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def meaning(self) -> str:
        """Meanings of the metrics, a line each."""
        rows = ((key, row_of(key)) for key in self.row.keys)
        return "\n".join(f"{key}: {row.meaning}" for key, row in rows if row is not None)


def charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """The charts for which a run has numbers, in the table's order."""
    found = []
    for row in (expanded for row in CHARTS for expanded in _expand(row, runs)):
        if row.stacked:
            several = len(runs) > 1
            titles = [f"{row.title}: {run.name}" if several else row.title for run in runs]
            found += [_stack(row, title, run) for title, run in zip(titles, runs)]
        else:
            found.append(_chart(row, runs))
    return [chart for chart in found if chart.lines or chart.missing]


def _expand(row: ChartRow, runs: Sequence[RunCurves]) -> list[ChartRow]:
    """Put the names and numbers that the runs have into a row's title and keys."""
    if "NAME" in row.title:
        names = sorted({line["name"] for run in runs for line in run.evaluations})
        rows = []
        for name in names:
            keys = tuple(key.replace("NAME", name) for key in row.keys)
            deviation = row.deviation.replace("NAME", name)
            title = row.title.replace("NAME", name)
            rows += _expand(replace(row, title=title, keys=keys, deviation=deviation), runs)
        return rows
    present = {key for run in runs for record in [*run.records, *run.evaluations] for key in record}
    keys = []
    for key in row.keys:
        if key.endswith("_N"):
            start = key[: -len("N")]
            numbers = [k.removeprefix(start) for k in present if re.fullmatch(r".*_\d{1,9}", k)]
            key = start + max((n for n in numbers if n.isdecimal()), key=int, default="1")
        keys.append(key)
    return [replace(row, keys=tuple(dict.fromkeys(keys)))]


def _chart(row: ChartRow, runs: Sequence[RunCurves]) -> Chart:
    chart = Chart(row, row.title)
    for run, colour in zip(runs, cycle(PALETTE)):
        deviations = dict(run.series(row.deviation)[0])
        for key in row.keys:
            points, missing = run.series(key, positive=row.log)
            metric = key.rpartition("/")[2]
            name = f"{run.name}, {metric}" if run.name and len(row.keys) > 1 else run.name or metric
            if missing:
                axis = " (logarithmic axis)" if row.log else ""
                chart.missing.append(f"{name}: not drawn{axis}: {missing}")
            if points:
                whole = key == row.keys[0] and deviations.keys() >= dict(points).keys()
                widths = [(step, deviations[step]) for step, _ in points] if whole else []
                widths = [width for _, width in thinned(widths)]
                dashed = key != row.keys[0]
                chart.lines.append(Line(name, colour, thinned(points), dashed, widths))
    numbers = [value for run in runs for key in row.keys for value in run.numbers(key)]
    return Chart(row, row.title) if not row.zeros and not any(numbers) else chart


def _stack(row: ChartRow, title: str, run: RunCurves) -> Chart:
    """The parts of one run, a part below 0 as 0; ``rest`` is what they leave of the total."""
    parts = {key.rpartition("/")[2]: dict(run.series(key)[0]) for key in row.keys}
    if run.uses_r3 is not False:
        parts.pop("routing_k3", None)  # replay takes it out of the gap
    totals = dict(run.series(row.total)[0])
    steps = sorted(totals or {step for points in parts.values() for step in points})
    if totals:
        named = {step: sum(points.get(step, 0.0) for points in parts.values()) for step in steps}
        parts["other"] = {step: totals[step] - named[step] for step in steps}
    chart = Chart(row, title)
    for (name, points), colour in zip(parts.items(), cycle(PALETTE)):
        line = [(step, max(points.get(step, 0.0), 0.0)) for step in steps]
        if any(value for _, value in line):
            chart.lines.append(Line(name, colour, thinned(line)))
    return chart


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most 1000 points: the means of equally many neighbours."""
    width = max(1, -(-len(points) // _MAX_POINTS))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(sum(s for s, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups]
