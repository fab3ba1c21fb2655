"""Charts as SVG text: lines over steps, a heat map, a split bar.  Colours come from CSS classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from r3train.evidence.report_data import HeatMap

_W, _H = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 10, 26
_MAX_POINTS = 500


@dataclass(frozen=True)
class Line:
    """One line of a chart; ``run`` is the 0-based number of its run, which colours it."""

    run: int
    name: str
    steps: Sequence[float]
    values: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over the steps; ``log`` leaves out what is not positive."""

    title: str
    note: str
    lines: Sequence[Line]
    log: bool = False


def thinned(steps: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """At most 500 points: means of equal runs of steps."""
    width = -(-len(steps) // _MAX_POINTS) or 1
    out = []
    for i in range(0, len(steps), width):
        s, v = steps[i : i + width], values[i : i + width]
        out.append((sum(s) / len(s), sum(v) / len(v)))
    return out


def ticks(low: float, high: float, log: bool) -> list[float]:
    """A few round numbers within the range."""
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        stride = max(1, -(-(last - first) // 4))
        decades = [10.0**e for e in range(first, last + 1, stride)]
        return decades if len(decades) > 1 else ticks(low, high, False)
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    size *= next(m for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    first = math.ceil(low / size - 1e-9)
    return [n * size for n in range(first, math.floor(high / size + 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis."""
    if value == 0 or 0.001 <= abs(value) < 10000:
        return f"{value:.4g}"
    if 1000 <= abs(value) < 1e6:
        return f"{value / 1000:.3g}k"
    return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")


def chart_svg(chart: Chart) -> str:
    """A line chart, or a sentence where it has no number."""
    lines = []
    for line in chart.lines:
        points = thinned(line.steps, line.values)
        points = [(s, v) for s, v in points if not chart.log or v > 0]
        if points:
            lines.append((line, points))
    if not lines:
        return '<p class="none">no numbers</p>'
    xs = [s for _, points in lines for s, _ in points]
    ys = [v for _, points in lines for _, v in points]
    x0, x1 = min(xs), max(xs)
    y0, y1 = _range(min(ys), max(ys), chart.log)

    def x(s: float) -> float:
        return _LEFT + (s - x0) / ((x1 - x0) or 1) * (_W - _LEFT - _RIGHT)

    def y(v: float) -> float:
        at = (math.log(v / y0) / math.log(y1 / y0)) if chart.log else (v - y0) / (y1 - y0)
        return _H - _BOTTOM - at * (_H - _TOP - _BOTTOM)

    out = [f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="{escape(chart.title)}">']
    for t in ticks(y0, y1, chart.log):
        out.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        )
        out.append(f'<text x="{_LEFT - 5}" y="{y(t) + 4:.1f}" text-anchor="end">{short(t)}</text>')
    for t in ticks(x0, x1, False) if x1 > x0 else [x0]:
        if t == int(t):
            out.append(f'<text x="{x(t):.1f}" y="{_H - 8}" text-anchor="middle">{int(t)}</text>')
    for line, points in lines:
        dash = " dashed" if line.dashed else ""
        title = f"<title>{escape(line.name)}: last {short(points[-1][1])}</title>"
        if len(points) == 1:
            s, v = points[0]
            out.append(
                f'<circle class="run{line.run % 6}" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3">{title}</circle>'
            )
            continue
        path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in points)
        out.append(f'<polyline class="run{line.run % 6}{dash}" points="{path}">{title}</polyline>')
    return "".join(out) + "</svg>"


def _range(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return (low / 1.2, high * 1.2) if high > low else (low / 2, high * 2)
    if low == high == 0:
        return -0.06, 1.0  # what is never negative should not look as if it could be
    pad = 0.06 * (high - low) or abs(high) * 0.1
    return low - pad, high + pad


def heat_svg(heat: HeatMap) -> str:
    """Layers down, steps across; the darker, the more rows agree, from chance to all."""
    count, rows = len(heat.columns), len(heat.layers)
    height = max(4, min(18, 360 // rows))
    width = (_W - _LEFT - _RIGHT) / count
    total = _TOP + rows * height + _BOTTOM
    low = heat.chance or 0.0
    out = [f'<svg viewBox="0 0 {_W} {total}" role="img" aria-label="agreement by layer and step">']
    stride = max(1, -(-rows // 20))
    for r, layer in enumerate(heat.layers):
        top = _TOP + r * height
        if r % stride == 0:
            at = top + height / 2 + 4
            out.append(f'<text x="{_LEFT - 5}" y="{at:.1f}" text-anchor="end">{layer}</text>')
        for c, value in enumerate(heat.values[r]):
            if value is None:
                continue
            strength = min(1.0, max(0.0, (value - low) / ((1 - low) or 1)))
            a, b = heat.columns[c]
            steps = f"step {a}" if a == b else f"steps {a} to {b}"
            out.append(
                f'<rect class="heat" x="{_LEFT + c * width:.2f}" y="{top}" width="{width + 0.3:.2f}"'
                f' height="{height - 1}" style="fill-opacity:{0.06 + 0.94 * strength**2:.3f}">'
                f"<title>layer {layer}, {steps}: {value:.1%}</title></rect>"
            )
    for c in sorted({0, count // 2, count - 1}):
        at, first = _LEFT + (c + 0.5) * width, heat.columns[c][0]
        out.append(f'<text x="{at:.1f}" y="{total - 9}" text-anchor="middle">{first}</text>')
    return "".join(out) + "</svg>"


def bar_svg(parts: dict[str, float]) -> str:
    """One bar of shares of time."""
    total = sum(parts.values())
    if not total:
        return '<p class="none">no times</p>'
    out = [f'<svg class="bar" viewBox="0 0 {_W} 26" role="img" aria-label="time split">']
    at = 0.0
    for i, (name, value) in enumerate(parts.items()):
        width = value / total * _W
        out.append(
            f'<rect class="part{i}" x="{at:.2f}" y="2" width="{width:.2f}" height="22">'
            f"<title>{escape(name)}: {value:.1f} s, {value / total:.0%}</title></rect>"
        )
        if width > 34:
            out.append(
                f'<text class="on" x="{at + width / 2:.1f}" y="17" text-anchor="middle">{value / total:.0%}</text>'
            )
        at += width
    return "".join(out) + "</svg>"
