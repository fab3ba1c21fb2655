"""Pictures by matplotlib: one of a whole run, and the charts of a report."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from r3train.observe.metrics import read_metrics, summarise
from r3train.report.report_data import HeatMap, R3_PASSED, RunCurves
from r3train.report.report_figures import axis_range, Chart, chart, PALETTE

PLOT_FILE = "plot.png"

# Wong's palette: told apart by colour-blind readers too
_GREEN, _VERMILION = "#009E73", "#D55E00"
_GREY, _RED, _INK = "#6B7280", "#C1121F", "#1F2937"
_SILENT = "#D1D5DB"
_MARKED = 80  # points of a line that has a mark at each
_OVERVIEW = ("Reward", "Log-prob gap", "Routing agreement")

Records = Sequence[Mapping[str, Any]]


def plot_run(run_dir: str | Path) -> Path:
    """Draw ``run_dir/metrics.jsonl`` as ``run_dir/plot.png`` and return the picture's path.

    Three charts of a report over the steps: reward with its moving mean, log-prob gap, and routing
    agreement with R3's verdict for each step.  One without its numbers says so.
    Raises FileNotFoundError without metrics, and ValueError for a metrics file that is damaged.
    """
    run_dir = Path(run_dir)
    run = RunCurves("", read_metrics(run_dir))
    verdicts = any(R3_PASSED in record for record in run.records)
    heights = [1.1, 0.9, 0.7] + [0.06] * verdicts
    # no pyplot: it keeps figures in a global list and looks for a display
    figure = Figure(figsize=(9.0, 8.4), dpi=140, facecolor="white", layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes, title in zip(panels, _OVERVIEW):
        _draw(axes, chart(title, [run]))
        axes.set_xlabel("")
    words, color = r3_verdict(run.records)
    panels[2].set_title(f"R3: {words}; {_OVERVIEW[2].lower()}", color=color, **_TITLE)
    if len(rewards := run.series("rollout/reward_mean")) > 1:
        window = max(2, round(len(rewards) / 20))
        steps, values = zip(*rewards)
        panels[0].lines[0].set_alpha(0.4)
        label = f"mean of the last {window} steps"
        means = moving_mean(values, window)
        mean = panels[0].plot(steps, means, color=PALETTE[0], lw=2.4, label=label)
        panels[0].legend(handles=mean, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    if verdicts:
        _plot_verdicts(panels[3], run.records)
    panels[-1].set_xlabel("step")
    path = run_dir / PLOT_FILE
    figure.savefig(path)
    return path


def moving_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Mean of the last ``window`` values at each point, of as many as there are at the start.

    values: float[n].  Returns float64[n]; values that are not finite are left out of the means.
    """
    array = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    ends = np.arange(1, len(array) + 1)
    starts = np.maximum(0, ends - window)
    rows = counts[ends] - counts[starts]
    return np.where(rows > 0, (sums[ends] - sums[starts]) / np.maximum(rows, 1), math.nan)


def r3_verdict(records: Records) -> tuple[str, str]:
    """The run's R3 verdict in words and the colour to say it in."""
    summary = summarise(list(records))
    failed, verdict = summary["failed_steps"], summary["r3"]
    if verdict == "failed":
        named = ", ".join(str(step) for step in failed[:4]) + (", ..." if len(failed) > 4 else "")
        return f"FAILED at step{'s' * (len(failed) > 1)} {named}", _RED
    if verdict == "incomplete":
        silent = sum(r.get("r3/passed") is None and not r.get("r3/unchecked") for r in records)
        return f"no verdict at {silent} of {len(records)} steps", _VERMILION
    if verdict == "passed":
        steps = len(records)
        if unchecked := sum(bool(record.get("r3/unchecked")) for record in records):
            return f"passed at all {steps - unchecked} steps that were checked, of {steps}", _GREEN
        return (f"passed at all {steps} steps" if steps > 1 else "passed at its one step"), _GREEN
    return "check off, no verdict", _GREY


def _plot_verdicts(axes: Axes, records: Records) -> None:
    """A strip: green passed, red failed, grey where the check did not speak."""
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    failures = []
    colors = []
    for record in records:
        passed = record.get("r3/passed")
        colors.append(_SILENT if passed is None else _GREEN if passed in (True, 1) else _RED)
        if colors[-1] == _RED:
            failures.append(record["step"])
    axes.bar([record["step"] for record in records], 1.0, width=1.0, color=colors, lw=0)
    # one failure among a thousand steps is thinner than a pixel: draw it again at a fixed width
    axes.vlines(failures, 0, 1, color=_RED, lw=2.0)
    axes.set_ylabel("verdict", rotation=0, ha="right", va="center")


def plot_chart(line_chart: Chart) -> Figure:
    """A line chart of a report."""
    figure, axes = _report_figure(3.6)
    _draw(axes, line_chart)
    if axes.get_legend_handles_labels()[0]:
        for text in axes.legend(framealpha=0.8, edgecolor="none").get_texts():
            text.set_parse_math(False)  # a run's name may hold a $
    return figure


_TITLE: dict[str, Any] = {"loc": "left", "fontweight": "bold", "pad": 18}


def _draw(axes: Axes, line_chart: Chart) -> None:
    points = [point for line in line_chart.lines for point in line.points]
    bounds: list[float] = []
    if line_chart.stacked and points:
        areas = [[value for _, value in line.points] for line in line_chart.lines]
        steps = [step for step, _ in line_chart.lines[0].points]
        colors = [line.colour for line in line_chart.lines]
        labels = [f" {line.name}" for line in line_chart.lines]
        axes.stackplot(steps, areas, colors=colors, labels=labels, alpha=0.8)
        bounds += [0.0, max(map(sum, zip(*areas)))]
    for line in line_chart.lines:
        if line.points and not line_chart.stacked:
            # A space first: matplotlib leaves out what begins with an underscore.
            style = {"ls": "--", "alpha": 0.6} if line.dashed else {"label": f" {line.name}"}
            if len(line.points) <= _MARKED:
                style |= {"marker": "o", "ms": 3}
            style |= {"color": line.colour, "lw": 1.6}
            steps, values = map(np.asarray, zip(*line.points))
            if line.band and line.errors:
                low, high = values - line.errors, values + line.errors
                axes.fill_between(steps, low, high, color=style["color"], alpha=0.14, lw=0)
                bounds += [*low, *high]
            bars = line.errors if line.errors and not line.band else None
            axes.errorbar(steps, values, yerr=bars, capsize=2, **style)
    axes.set_title(line_chart.title, **_TITLE)
    axes.text(0, 1.02, line_chart.note, transform=axes.transAxes, fontsize=8, color=_GREY)
    missing = [part for text in line_chart.missing for part in textwrap.wrap(text, 100)]
    axes.set_xlabel("\n".join([line_chart.over, *missing[:4]]), parse_math=False)
    if not points:
        words = missing[0] if missing else "no numbers"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", color=_GREY)
        axes.set_yticks([])
        return
    if line_chart.log:
        axes.set_yscale("log")
    else:
        bounds += [value for _, value in points]
        axes.set_ylim(axis_range(min(bounds), max(bounds), log=False))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plot_heat(heat: HeatMap, title: str) -> Figure:
    """Shares of rows by layer and step, from chance or none on."""
    low, most = heat.chance or 0.0, heat.most
    rows = [[math.nan if v is None else v for v in row] for row in heat.values]
    figure, axes = _report_figure(min(9.0, max(2.4, 1.4 + 0.16 * len(rows))))
    scale = {"cmap": "Greens", "vmin": low, "vmax": most}
    image = axes.imshow(rows, aspect="auto", interpolation="nearest", **scale)
    steps = [first for first, _ in heat.columns]
    for set_ticks, labels in ((axes.set_xticks, steps), (axes.set_yticks, heat.layers)):
        stride = max(1, -(-len(labels) // 10))
        set_ticks(range(0, len(labels), stride), [str(label) for label in labels[::stride]])
    axes.set_xlabel("step")
    axes.set_ylabel("layer")
    axes.set_title(title, loc="left", fontweight="bold", parse_math=False)
    bar = figure.colorbar(image, ax=axes, label="share of rows")
    chance = "chance " if heat.chance is not None else ""
    ticks = [low, (most + low) / 2, most]
    bar.set_ticks(ticks, labels=[f"{chance}{low:.1%}", f"{ticks[1]:.1%}", f"{most:.1%}"])
    return figure


def _report_figure(height: float) -> tuple[Figure, Axes]:
    # no pyplot: it keeps figures in a global list and looks for a display
    figure = Figure(figsize=(6.4, height), dpi=140, facecolor="white", layout="constrained")
    return figure, figure.subplots()
