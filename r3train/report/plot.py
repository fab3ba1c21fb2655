"""The charts of a run as pictures by matplotlib: plot.png, and one file for each."""

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

from r3train.observe.metrics import summarise
from r3train.report.charts import Chart, charts
from r3train.report.report_data import load_curves

PLOT_FILE = "plot.png"
# Wong's palette: told apart by colour-blind readers too
_GREEN, _VERMILION = "#009E73", "#D55E00"
_GREY, _RED = "#6B7280", "#C1121F"
_MARKED = 80  # points of a line that has a mark at each


def plot_run(run_dir: str | Path) -> Path:
    """Draw the charts of a run directory as ``run_dir/plot.png`` and return the picture's path.

    Raises ValueError for a directory without metrics, and for a file that is damaged.
    """
    run_dir = Path(run_dir)
    run = load_curves(run_dir, "")
    drawn = charts([run])
    rows = max(1, math.ceil(len(drawn) / 3))
    # no pyplot: it keeps figures in a global list and looks for a display
    figure = Figure((13, 0.5 + 2.7 * rows), dpi=110, facecolor="white", layout="constrained")
    panels = figure.subplots(rows, 3, squeeze=False).flat
    for axes, chart in zip(panels, drawn):
        draw(axes, chart)
    for axes in panels[len(drawn) :]:
        axes.set_visible(False)
    words, colour = r3_verdict(run.records)
    figure.suptitle(f"{len(run.records)} steps; R3: {words}", color=colour, fontweight="bold")
    path = run_dir / PLOT_FILE
    figure.savefig(path)
    return path


def plot_chart(chart: Chart) -> Figure:
    """One chart as a picture of its own."""
    figure = Figure((6.4, 3.6), dpi=140, facecolor="white", layout="constrained")
    draw(figure.subplots(), chart)
    return figure


def draw(axes: Axes, chart: Chart) -> None:
    """Draw a chart, with a legend where it has several lines."""
    labels = [f" {line.name}" for line in chart.lines]  # a "_" at the start would hide one
    if chart.row.stacked:
        steps = [step for step, _ in chart.lines[0].points]
        values = [[value for _, value in line.points] for line in chart.lines]
        colours = [line.colour for line in chart.lines]
        axes.stackplot(steps, values, colors=colours, labels=labels, alpha=0.8)
    else:
        for line, label in zip(chart.lines, labels):
            steps, values = map(np.asarray, zip(*line.points))
            marker = "o" if len(steps) <= _MARKED else None
            style = "--" if line.dashed else "-"
            axes.plot(steps, values, style, color=line.colour, label=label, marker=marker, ms=2.5)
            if line.deviation:
                low, high = values - line.deviation, values + line.deviation
                axes.fill_between(steps, low, high, color=line.colour, alpha=0.14, lw=0)
    if len(chart.lines) > 1:
        for text in axes.legend(fontsize=7, framealpha=0.8, edgecolor="none").get_texts():
            text.set_parse_math(False)  # a run's name may hold a $
    axes.set_title(chart.title, loc="left", fontweight="bold", fontsize=10, parse_math=False)
    missing = [part for text in chart.missing for part in textwrap.wrap(text, 60)]
    words = "\n".join([chart.row.unit, *missing[:3]])
    axes.set_xlabel(words, fontsize=8, color=_GREY, parse_math=False)
    if chart.row.log and chart.lines:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def r3_verdict(records: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
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
