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
from matplotlib.ticker import EngFormatter, MaxNLocator

from r3train.observe.metrics import numbers, read_metrics, summarise
from r3train.report.report_data import HeatMap
from r3train.report.report_figures import Chart, PALETTE

PLOT_FILE = "plot.png"

# Wong's palette: told apart by colour-blind readers too
_BLUE, _ORANGE, _GREEN, _VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_GREY, _RED, _INK = "#6B7280", "#C1121F", "#1F2937"
_SILENT = "#D1D5DB"

Records = Sequence[Mapping[str, Any]]


def plot_run(run_dir: str | Path) -> Path:
    """Draw ``run_dir/metrics.jsonl`` as ``run_dir/plot.png`` and return the picture's path.

    Three panels over the steps: reward with its moving mean, log-prob gap on a log scale, and R3
    with its counts, its agreement and a verdict for each step.  A panel without its keys says so.
    Raises FileNotFoundError without metrics, and ValueError for a metrics file that is damaged.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir)
    # no pyplot: it keeps figures in a global list and looks for a display
    figure = Figure(figsize=(9.0, 9.6), dpi=140, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(hspace=0.01)
    heights = {_plot_reward: 1.1, _plot_gap: 0.9, _plot_counts: 0.85}
    if _any_finite(numbers(records, "r3/agreement")[1]):
        heights[_plot_agreement] = 0.4
    if any("r3/passed" in record for record in records):
        heights[_plot_verdicts] = 0.07
    drawn = figure.subplots(len(heights), 1, sharex=True, height_ratios=list(heights.values()))
    for axes, plot in zip(drawn, heights):
        _dress(axes)
        plot(axes, records)
    _set_step_axis(drawn[-1], records)
    figure.align_ylabels(drawn[:-1] if _plot_verdicts in heights else drawn)
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


def _plot_reward(axes: Axes, records: Records) -> None:
    _title(axes, "Reward")
    steps, rewards = numbers(records, "rollout/reward_mean")
    if not _any_finite(rewards):
        _say(axes, "no rewards yet")
        return
    low_steps, low = numbers(records, "rollout/reward_min")
    high_steps, high = numbers(records, "rollout/reward_max")
    # rewards of 0 and 1 alone would fill the whole panel at every step and tell nothing
    if low_steps == steps == high_steps and len(set(low)) + len(set(high)) > 2:
        label = "lowest to highest sample"
        axes.fill_between(steps, low, high, color=_BLUE, alpha=0.07, lw=0, label=label)
    axes.plot(steps, rewards, color=_BLUE, alpha=0.4, lw=1.0, label="step mean", **_marks(steps))
    window = max(2, round(len(steps) / 20))
    mean = moving_mean(rewards, window)
    if len(steps) > 1:
        axes.plot(steps, mean, color=_BLUE, lw=2.4, label=f"mean of the last {window} steps")
    final = mean[-1] if math.isfinite(mean[-1]) else rewards[-1]
    axes.annotate(
        f"{final:.2f}",
        (steps[-1], final),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color=_BLUE,
        fontweight="bold",
        annotation_clip=False,
    )
    axes.set_ylabel("reward")
    bottom, top = axes.get_ylim()
    if top - bottom < 0.2:
        # a flat line should look flat, not like noise under a magnifying glass
        axes.set_ylim((bottom + top) / 2 - 0.1, (bottom + top) / 2 + 0.1)
    _legend(axes)


def _plot_gap(axes: Axes, records: Records) -> None:
    _title(axes, "Log-prob gap, engine to trainer")
    curves = [
        ("train/log_prob_gap_max", "largest |gap| of a token", _ORANGE, 1.2),
        ("train/log_prob_gap_mean", "mean |gap|", _BLUE, 2.0),
    ]
    if not numbers(records, curves[1][0])[0]:
        curves.append(("train/log_prob_gap_k3", "KL(engine || trainer), k3", _GREY, 1.2))
    drawn = False
    for key, label, color, width in curves:
        # a log scale has no place for 0: leave those steps out rather than invent a height
        points = [(s, v) for s, v in zip(*numbers(records, key)) if math.isfinite(v) and v > 0]
        if points:
            drawn = True
            axes.plot(*zip(*points), color=color, lw=width, label=label, **_marks(points))
    if not drawn:
        measured = numbers(records, "train/log_prob_gap_mean")[1]
        _say(axes, "exactly 0 at every step" if _any_finite(measured) else "not measured")
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 100:
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / 10, middle * 10)
    axes.set_ylabel("|log p - log p'|")
    _legend(axes)


def _plot_counts(axes: Axes, records: Records) -> None:
    curves = (
        ("r3/rows_replayed", "replayed", _BLUE, 2.0),
        ("r3/rows_filled", "filled", _ORANGE, 1.2),
        ("r3/rows_mismatch", "no expert in common", _VERMILION, 1.2),
    )
    series = [(label, c, w, *numbers(records, key)) for key, label, c, w in curves]
    if not any(_any_finite(values) for *_, values in series):
        _title(axes, "R3")
        _say(axes, "R3 unchecked" if not any("r3/passed" in r for r in records) else "no counts")
        return
    words, color = r3_verdict(records)
    _title(axes, f"R3: {words}", color)
    top = 10.0
    # the rare counts go on top, and dashes keep two lines at 0 apart
    for place, (label, color, width, steps, values) in enumerate(series):
        if steps:
            top = max([top, *(value for value in values if math.isfinite(value))])
            style = _marks(steps)
            if place == 2:
                style |= {"ls": (0, (3, 3)), "marker": "x"} if style else {"ls": (0, (3, 3))}
            axes.plot(steps, values, color=color, lw=width, label=label, clip_on=False, **style)
    # symlog keeps 0 on the page: "none filled" must be seen, not be absent
    axes.set_yscale("symlog", linthresh=1.0, linscale=0.5)
    decades = math.ceil(math.log10(top))
    axes.set_yticks([0.0, *(10.0**d for d in range(0, decades + 1, 1 + decades // 6))])
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(-0.2, 10.0 ** (decades + 0.2))
    axes.set_ylabel("router rows per step")
    _legend(axes)


def _plot_agreement(axes: Axes, records: Records) -> None:
    steps, shares = numbers(records, "r3/agreement")
    percent = [100.0 * share for share in shares]
    lowest = min(value for value in percent if math.isfinite(value))
    low = min(90.0, math.floor(lowest / 10.0) * 10.0)
    axes.plot(steps, percent, color=_GREEN, lw=1.4, clip_on=False, **_marks(steps))
    axes.set_ylim(low, 100.0 + 0.08 * (100.0 - low))
    axes.set_yticks([low, (low + 100.0) / 2, 100.0])
    axes.yaxis.set_major_formatter("{x:g}%")
    axes.set_ylabel("agreement")
    axes.text(
        0.005,
        0.06,
        "rows in which the trainer's own router chose the same experts",
        transform=axes.transAxes,
        color=_GREY,
        fontsize=9,
    )


def _plot_verdicts(axes: Axes, records: Records) -> None:
    """A strip: green passed, red failed, grey where the check did not speak."""
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
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


def _set_step_axis(axes: Axes, records: Records) -> None:
    steps = [record["step"] for record in records] or [0]
    margin = max(0.5, 0.01 * (steps[-1] - steps[0]))
    axes.set_xlim(steps[0] - margin, steps[-1] + margin)
    if len(steps) == 1:
        axes.set_xticks(steps)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, steps=[1, 2, 5, 10]))
    axes.set_xlabel("training step", color=_INK)


def _dress(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.grid(True, axis="y", color="#E5E7EB", lw=0.8)
    axes.grid(True, axis="x", color="#F3F4F6", lw=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9CA3AF")
    axes.tick_params(colors="#4B5563", labelsize=9, length=3)
    axes.yaxis.label.set_color(_INK)


def _title(axes: Axes, words: str, color: str = _INK) -> None:
    axes.set_title(words, loc="left", fontsize=12, color=color, fontweight="bold", pad=7)


def _legend(axes: Axes) -> None:
    # on the title's line, at the right: never over the data
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.15,
        ncols=4,
        frameon=False,
        fontsize=9,
        labelcolor="#374151",
        handlelength=1.6,
        columnspacing=1.4,
    )


def _say(axes: Axes, words: str) -> None:
    axes.text(
        0.5,
        0.5,
        words,
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=_GREY,
        fontsize=14,
    )
    axes.set_yticks([])
    axes.grid(False)


def _marks(points: Sequence[Any]) -> dict[str, Any]:
    """Dots help while they can be told apart, and a single step is nothing but a dot."""
    return {"marker": "o", "ms": 3} if len(points) <= 80 else {}


def _any_finite(values: Sequence[float]) -> bool:
    return any(math.isfinite(value) for value in values)


def plot_chart(chart: Chart) -> Figure:
    """A line chart of a report."""
    figure, axes = _report_figure(3.6)
    for line in chart.lines:
        if line.points:
            # A space first: matplotlib leaves out what begins with an underscore.
            style = {"ls": "--", "alpha": 0.6} if line.dashed else {"label": f" {line.name}"}
            if len(line.points) == 1:
                style["marker"] = "o"
            style |= {"color": PALETTE[line.run % len(PALETTE)], "lw": 1.6}
            axes.errorbar(*zip(*line.points), yerr=line.errors or None, capsize=2, **style)
    if chart.log and any(line.points for line in chart.lines):
        axes.set_yscale("log")
    axes.set_title(chart.title, loc="left", fontweight="bold", pad=18)
    axes.text(0, 1.02, chart.note, transform=axes.transAxes, fontsize=8, color=_GREY)
    missing = [part for text in chart.missing for part in textwrap.wrap(text, 100)]
    axes.set_xlabel("\n".join([chart.over, *missing[:4]]), parse_math=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        for text in axes.legend(handles, labels, framealpha=0.8, edgecolor="none").get_texts():
            text.set_parse_math(False)  # a run's name may hold a $
    return figure


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
