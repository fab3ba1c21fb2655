"""The charts of a report as figures of plotly: plain dicts of ``data`` and ``layout``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from r3train.algo.gap_budget import PARTS
from r3train.observe.metric_table import row_of
from r3train.report.report_data import (
    budget_of,
    columns_of,
    HeatMap,
    REWARD,
    RunCurves,
    RunReport,
    STEP_S,
    StepCheck,
    TOKENS,
)
from r3train.audit.findings import ranges
from r3train.types import RowClass
from r3train.proof.verdicts import FAILED, NO_EVIDENCE, PASSED

# Run colours, which read on a light and on a dark page; told apart by colour-blind readers too.
PALETTE = ("#2386c8", "#dd6a1b", "#0f9d76", "#c56a9f", "#a3821a", "#7c83e0")
_PARTS_PALETTE = (*PALETTE, "#8a8f98")  # the last part is what is left
VERDICT_COLOURS = {PASSED: "#34b48c", NO_EVIDENCE: "#b9a68a", FAILED: "#d03a3a"}
_HEAT_SCALE = [[0, "rgba(15,157,118,0.06)"], [0.5, "rgba(15,157,118,0.3)"], [1, "rgb(15,157,118)"]]
_MAX_POINTS = 1000
_MAX_MARKED = 60  # points of a line that has a mark at each
_MAX_NAMED = 8  # failed steps of a strip

_STD, _PASS_AT = "rollout/reward_std", "rollout/pass_at_"
_RATE, _PUBLISHED = "perf/tokens_per_s", "perf/published_bytes"
_FAR, _P999 = "train/log_prob_gap_far_share", "train/log_prob_gap_p999"
# title: note, metrics of which the second is dashed; those of _LOG have a logarithmic axis
CHARTS = {
    "Reward": ("mean over the samples of a step, with their standard deviation", REWARD),
    "Groups of equal rewards": ("they teach nothing", "rollout/zero_variance_groups"),
    "Response length": ("tokens, mean", "rollout/response_len_mean"),
    "Truncated responses": (
        "share of responses cut at their longest length",
        "rollout/truncated_share",
    ),
    "Loss": ("", "train/loss"),
    "Learning rate": ("of the step's last optimizer step", "train/lr"),
    "Gradient norm": ("before clipping", "train/grad_norm"),
    "Clipped tokens": ("share of loss tokens whose ratio was clipped", "train/clip_share"),
    "Entropy": ("nats per token, of the actor", "train/entropy"),
    "Staleness": ("weight versions behind, mean", "rollout/staleness_mean"),
    "Slowest sample": ("seconds of generation", "rollout/generation_s_max"),
    "Throughput": ("generated tokens per second of wall time", _RATE),
    "Log-prob gap": (
        "|actor - engine|, nats: mean; dashed: the largest of a token",
        *("train/log_prob_gap_mean", "train/log_prob_gap_max"),
    ),
    "Log-prob gap, k3 KL": ("estimate of KL(engine, actor)", "train/log_prob_gap_k3"),
    "Extreme tokens": ("share with |gap| above ln 2", _FAR),
    "Log-prob gap, p99.9": ("nats; of a step's optimizer steps the largest p99.9", _P999),
    "Route drift": (
        "share of rows whose live choice left the replayed experts, mean over layers",
        "r3/drift_left",
    ),
    "Gate mass on replayed experts": (
        "over that on the live choice, mean over layers",
        "r3/drift_gate_mass",
    ),
    "Expert load": ("entropy of the live choice; 1: even", "r3/drift_load_entropy"),
    "Dead experts": ("chosen by no row, mean over layers", "r3/drift_dead_experts"),
    "Waiting": (
        "share of wall time; solid: training waits, dashed: generation idles",
        *("perf/train_wait_share", "perf/rollout_idle_share"),
    ),
    "Retractions": (
        "answers that a server retracted for lack of KV cache; dashed: samples trained with one",
        *("rollout/retracted", "rollout/retracted_samples"),
    ),
    "Routing agreement": (
        "share of rows with the replayed experts; dashed: chance",
        *("r3/agreement", "r3/agreement_chance_equal"),
    ),
    "Routing agreement by weight version": (
        "share of rows; solid: of the actor's own version, dashed: of staler ones",
        *("r3/agreement_current_equal", "r3/agreement_stale_equal"),
    ),
}
_LOG = ("Log-prob gap", "Log-prob gap, k3 KL", "Log-prob gap, p99.9")


@dataclass(frozen=True)
class Line:
    """One line of a chart; ``run`` is the 0-based number of its run, which colours it unless it is a part.

    part: its 0-based number among the parts of one run that the chart shows.
    """

    run: int
    name: str
    points: Sequence[tuple[float, float]]  # (step, value)
    dashed: bool = False
    errors: Sequence[float] = ()  # of each point, half the length of its bar; empty: no bars
    band: bool = False  # the errors are a band around the line, and no bars
    part: int | None = None

    @property
    def colour(self) -> str:
        """Colour of its run, or of its part."""
        if self.part is not None:
            return _PARTS_PALETTE[self.part % len(_PARTS_PALETTE)]
        return PALETTE[self.run % len(PALETTE)]


@dataclass(frozen=True)
class Chart:
    """Lines over the steps; ``missing`` names the numbers that are not drawn.

    about: what each metric means, a line each.  stacked: the lines are parts, drawn as areas one upon another.
    """

    title: str
    note: str
    lines: Sequence[Line]
    log: bool = False
    missing: Sequence[str] = ()
    over: str = "step"
    about: str = ""
    stacked: bool = False


def charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Every line chart for which one run has a number at least, or one that cannot be drawn."""
    reward, *others = (chart(title, runs) for title in CHARTS)
    parts = [c for i in range(len(runs)) for c in (_budget(i, runs), *_row_classes(i, runs))]
    out = [*_evaluations(runs), reward, _pass_at(runs), *others, _coverage(runs), *parts]
    return [c for c in out if c.missing or any(line.points for line in c.lines)]


def chart(title: str, runs: Sequence[RunCurves]) -> Chart:
    """One of ``CHARTS`` with the lines of the runs."""
    note, *keys = CHARTS[title]
    log, lines, missing = title in _LOG, [], []
    for i, run in enumerate(runs):
        for key, name in zip(keys, (run.name, f"{run.name}, dashed")):
            points = run.series(key, positive=log)
            if words := run.left_out(key, positive=log):
                axis = " (logarithmic axis)" if log else ""
                missing.append(f"{name}: not drawn{axis}: {words}")
            if key == _RATE and len(points) > 1 and _ends_without_update(run):
                step, rate = points.pop()
                note += (
                    f"; not drawn: {rate:,.0f} of {name} at its last step, which publishes nothing"
                )
            errors = dict(run.series(_STD)) if key == REWARD else {}
            errors = [errors[s] for s, _ in points] if errors.keys() >= dict(points).keys() else []
            lines.append(Line(i, name, points, name != run.name, errors, band=key == REWARD))
    return Chart(title, note, lines, log, missing, about=_about(keys))


def _about(keys: Sequence[str]) -> str:
    rows = ((key, row_of(key)) for key in keys)
    return "\n".join(f"{key}: {row.meaning}" for key, row in rows if row is not None)


def _ends_without_update(run: RunCurves) -> bool:
    """True where the last step alone published no weights: it is shorter than all others."""
    published = [_PUBLISHED in record for record in run.records]
    return not published[-1] and all(published[:-1])


def _pass_at(runs: Sequence[RunReport]) -> Chart:
    """pass@k of the rollouts: of the largest k, and dashed pass@1."""
    keys = {key for run in runs for record in run.records for key in record}
    ks = sorted(
        int(n) for key in keys if (n := key.removeprefix(_PASS_AT)) != key and n.isdecimal()
    )
    shown = {k: f"{_PASS_AT}{k}" for k in (ks[-1:] + ks[:1] if len(ks) > 1 else ks)}
    lines = []
    for i, run in enumerate(runs):
        for k, key in shown.items():
            dashed = k != ks[-1]
            lines.append(Line(i, f"{run.name}, pass@{k}", run.series(key), dashed))
    note = "; ".join(("dashed: " if k != ks[-1] else "") + f"pass@{k}" for k in shown)
    return Chart("pass@k of the rollouts", note, lines, about=_about([*shown.values()]))


def _evaluations(runs: Sequence[RunReport]) -> list[Chart]:
    """A chart for each evaluation set: its mean reward, and pass@k of the largest k above 1."""
    out = []
    for name in dict.fromkeys(name for run in runs for name in run.evaluations):
        keys = {key for run in runs for line in run.evaluations.get(name, ()) for key in line}
        most = max((int(k.removeprefix("pass_at_")) for k in keys if "pass_at_" in k), default=1)
        lines = []
        for i, run in enumerate(runs):
            errors = dict(run.evaluated(name, "standard_error"))
            points = run.evaluated(name, "mean")
            bars = [errors.get(version, 0.0) for version, _ in points] if errors else []
            lines.append(Line(i, run.name, points, errors=bars))
            if most > 1:
                passed = run.evaluated(name, f"pass_at_{most}")
                lines.append(Line(i, f"{run.name}, pass@{most}", passed, dashed=True))
        note = "mean reward and its standard error" + (f"; dashed: pass@{most}" if most > 1 else "")
        out.append(Chart(f"Evaluation: {name}", note, lines, over="weight version"))
    return out


def _coverage(runs: Sequence[RunReport]) -> Chart:
    lines = []
    for i, run in enumerate(runs):
        rows = [(c.step, c.rows_share()) for c in run.checks if c.rows_share() is not None]
        calls = [(c.step, c.calls_share()) for c in run.checks if c.calls_share() is not None]
        lines += [Line(i, run.name, rows), Line(i, f"{run.name}, calls", calls, dashed=True)]
    note = "share of rows replayed as recorded; dashed: router calls made of those expected"
    return Chart("R3 coverage", note, lines)


def _budget(place: int, runs: Sequence[RunReport]) -> Chart:
    """The parts of a run's log-prob gap one upon another, by their k3; a part below 0 counts as 0."""
    run = runs[place]
    found = budget_of(run)
    steps = sorted({step for of in found.values() for step in of})
    lines = [
        Line(place, part, [(s, max(of.get(s, 0.0), 0.0)) for s in steps], part=PARTS.index(part))
        for part, of in found.items()
    ]
    title = "Budget of the log-prob gap" + (f": {run.name}" if len(runs) > 1 else "")
    note = "what each cause adds to k3, the estimate of KL(engine, actor)"
    return Chart(title, note, lines, about=_about(["gap/server_k3"]), stacked=True)


def _row_classes(place: int, runs: Sequence[RunReport]) -> list[Chart]:
    """Rows of routes of a run by class, and the gap of each class; without numbers of a class it has no line."""
    run = runs[place]
    of_run = f": {run.name}" if len(runs) > 1 else ""
    shares, gaps = [], []
    counts = {c.label: dict(run.series(f"rows/{c.label}")) for c in RowClass}
    steps = sorted(set.intersection(*map(set, counts.values())))
    totals = {step: sum(of[step] for of in counts.values()) for step in steps}
    for part, (label, of) in enumerate(counts.items()):
        points = [(step, of[step] / totals[step]) for step in steps if totals[step]]
        if any(share for _, share in points):
            shares.append(Line(place, label, points, part=part))
        key = f"train/log_prob_gap_mean_rows_{label}"
        if points := run.series(key, positive=True):
            gaps.append(Line(place, label, points, part=part))
    note = "share of the rows of routes, by how a server came to them"
    rows = Chart(
        f"Rows by class{of_run}", note, shares, about=_about(["rows/decoded"]), stacked=True
    )
    note = "|actor - engine|, nats, mean over tokens by the row that predicted them"
    about = _about(["train/log_prob_gap_mean_rows_decoded"])
    return [rows, Chart(f"Log-prob gap by class of row{of_run}", note, gaps, log=True, about=about)]


def chart_figure(chart: Chart) -> dict[str, Any] | None:
    """A line chart; None where it has no number."""
    drawn = [(line, thinned(line.points)) for line in chart.lines if line.points]
    if not drawn:
        return None
    values = [value for _, points in drawn for _, value in points]
    bars = [(v, e) for line, _ in drawn for (_, v), e in zip(line.points, line.errors)]
    values += [value + sign * error for value, error in bars for sign in (-1, 1)]
    if chart.stacked:
        values = [0.0, *(sum(of) for of in zip(*([v for _, v in points] for _, points in drawn)))]
    low, high = axis_range(min(values), max(values), chart.log)
    last_run = max(line.run for line, _ in drawn)
    data = []
    for line, points in drawn:
        # The lines of the first runs are wider: they stay visible below a later one like them.
        width = 1.6 if line.dashed else 1.8 + min(3.0, 1.5 * (last_run - line.run))
        if line.band and line.errors:
            data.append(_band(line, points))
        data.append(
            {
                "type": "scatter",
                "meta": line.run,
                "name": escape(line.name),  # plotly reads markup in names
                "x": [step for step, _ in points],
                "y": [value for _, value in points],
                "mode": "lines+markers" if len(points) <= _MAX_MARKED else "lines",
                "marker": {"size": 4 if len(points) > 1 else 8},
                "line": {
                    "color": line.colour,
                    "width": width,
                    "dash": "dot" if line.dashed else "solid",
                },
            }
        )
        if chart.stacked:
            data[-1] |= {"stackgroup": "parts", "fill": "tonexty", "mode": "lines"}
            data[-1]["line"]["width"] = 0.5
        if line.errors and not line.band and len(points) == len(line.points):
            data[-1]["error_y"] = {"array": list(line.errors), "thickness": 1, "width": 3}
    steps = [step for _, points in drawn for step, _ in points]
    x_axis = {"title": {"text": chart.over, "standoff": 4}, "tickformat": "d", "nticks": 8}
    if max(steps) - min(steps) < 8:
        x_axis["dtick"] = 1
    y_axis = {"range": [low, high], "nticks": 6, "hoverformat": ".4~g"}
    if chart.log:
        exponents = {"exponentformat": "power", "minor": {"ticks": ""}}
        y_axis |= {"type": "log", "range": [math.log10(low), math.log10(high)], **exponents}
    layout = _layout(202, x_axis, y_axis) | {"hovermode": "x unified"}
    if any(line.part is not None for line, _ in drawn):  # colours name parts, and the page's runs
        layout |= {
            "showlegend": True,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        }
    return {"data": data, "layout": layout}


def _band(line: Line, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The area within the errors of a line, whose ``points`` are thinned."""
    errors = [e for _, e in thinned([(step, e) for (step, _), e in zip(line.points, line.errors)])]
    steps = [step for step, _ in points]
    above = [value + error for (_, value), error in zip(points, errors)]
    below = [value - error for (_, value), error in zip(points, errors)]
    return {
        **{"type": "scatter", "meta": line.run, "name": f"{escape(line.name)}, deviation"},
        **{"x": steps + steps[::-1], "y": above + below[::-1], "fill": "toself", "mode": "none"},
        "fillcolor": f"{PALETTE[line.run % len(PALETTE)]}24",
        "hoverinfo": "skip",
    }


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 1000 points: the means of equally many neighbours."""
    width = max(1, -(-len(points) // _MAX_POINTS))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(sum(s for s, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups]


def axis_range(low: float, high: float, log: bool) -> tuple[float, float]:
    """The ends of an axis that shows values from ``low`` to ``high``."""
    if log:
        return (low / 1.2, high * 1.2) if high > low else (low / 10, high * 10)
    if low == high == 0:
        return -0.06, 1.0  # what is never negative should not look as if it could be
    largest = max(abs(low), abs(high))
    # what differs by less than an axis can label is drawn as a constant
    pad = 0.06 * (high - low) if high - low > 1e-9 * largest else 0.1 * largest
    return low - pad, high + pad


def strip_figure(checks: Sequence[StepCheck]) -> dict[str, Any]:
    """A cell a step, or a few steps of which the worst counts; failed ones are named above it."""
    columns = columns_of(checks)
    order = [PASSED, NO_EVIDENCE, FAILED]
    labels, worst, words, marks = [], [], [], []
    for column in columns:
        found = [check.verdict for check in column]
        steps = ranges(check.step for check in column)
        labels.append(str(column[0].step))
        worst.append(max(order.index(verdict) for verdict in found))
        counts = ", ".join(f"{found.count(v)} {v}" for v in dict.fromkeys(found))
        words.append(f"step{'s' * (len(column) > 1)} {steps}: {counts}")
    failed = [i for i, column in enumerate(columns) if order[worst[i]] == FAILED]
    for i in failed[:: -(-len(failed) // _MAX_NAMED) or 1]:
        step = next(check.step for check in columns[i] if check.verdict == FAILED)
        mark = {"x": i, "y": 1, "yref": "paper", "yanchor": "bottom", "text": str(step)}
        marks.append(mark | {"showarrow": False, "font": {"color": VERDICT_COLOURS[FAILED]}})
    scale = [[i / 2, VERDICT_COLOURS[verdict]] for i, verdict in enumerate(order)]
    cells = {
        **{"type": "heatmap", "x": labels, "y": [""], "z": [worst], "text": [words]},
        **{"zmin": 0, "zmax": 2, "colorscale": scale, "showscale": False},
        **{"hovertemplate": "%{text}<extra></extra>", "xgap": 1 if len(columns) < 80 else 0},
    }
    layout = _layout(100, _step_axis(len(columns)), {"fixedrange": True, "visible": False})
    layout["margin"]["t"] = 22  # the failed steps
    return {"data": [cells], "layout": layout | {"annotations": marks}}


def heat_figure(heat: HeatMap) -> dict[str, Any]:
    """Layers down, steps across; the darker, the more rows, from chance or none on."""
    low, most = heat.chance or 0.0, heat.most
    middle = (most + low) / 2
    shown = ("chance " if heat.chance is not None else "") + f"{low:.1%}"
    spans = [str(a) if a == b else f"{a} to {b}" for a, b in heat.columns]
    cells = {
        **{"type": "heatmap", "x": [str(first) for first, _ in heat.columns]},
        **{"y": [str(layer) for layer in heat.layers], "z": heat.values},
        **{
            "zmin": low,
            "zmax": most,
            "colorscale": _HEAT_SCALE,
            "text": [spans] * len(heat.layers),
        },
        "hovertemplate": "layer %{y}, step %{text}: %{z:.1%}<extra></extra>",
        **{"xgap": 1 if len(spans) < 80 else 0, "ygap": 1 if len(heat.layers) < 60 else 0},
        "colorbar": {
            **{"orientation": "h", "thickness": 10, "len": 0.7, "x": 0.5, "y": 1.0},
            **{"yanchor": "bottom", "ypad": 4, "outlinewidth": 0, "ticklabelposition": "outside"},
            "tickvals": [low, middle, most],
            "ticktext": [shown, f"{middle:.1%}", "100%" if most == 1 else f"{most:.1%}"],
        },
    }
    height = 98 + len(heat.layers) * max(4, min(18, 360 // len(heat.layers)))
    y_axis = {"type": "category", "autorange": "reversed", "nticks": 20, "title": {"text": "layer"}}
    layout = _layout(height, _step_axis(len(spans)), y_axis)
    layout["margin"]["t"] = 42  # the scale of colours
    return {"data": [cells], "layout": layout}


def _step_axis(columns: int) -> dict[str, Any]:
    every = max(1, -(-columns // 10))
    title = {"text": "step", "standoff": 10}
    return {"type": "category", "title": title, "tickmode": "linear", "tick0": 0, "dtick": every}


def _layout(height: int, x_axis: dict[str, Any], y_axis: dict[str, Any]) -> dict[str, Any]:
    clear = "rgba(0,0,0,0)"  # the page's own colour shows, light or dark
    return {
        **{"height": height, "showlegend": False, "paper_bgcolor": clear, "plot_bgcolor": clear},
        "margin": {"l": 8, "r": 8, "t": 10, "b": 40},
        "modebar": {"bgcolor": clear, "color": "#94a3b8", "activecolor": "#64748b"},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "xaxis": {"zeroline": False, "showgrid": False, "ticks": ""} | x_axis,
        "yaxis": {"automargin": True, "zeroline": False, "ticks": "", "separatethousands": True}
        | y_axis,
    }
