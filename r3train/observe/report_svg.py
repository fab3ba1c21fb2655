"""Charts as SVG text: lines and verdicts over steps, a heat map, a split bar.  CSS colours them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from r3train.proof.findings import FAILED, NO_EVIDENCE, PASSED, ranges
from r3train.observe.report_evidence import HeatMap, StepCheck, columns_of

_W, _H = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 10, 26
_MAX_POINTS = 500
_MAX_WIDE = 100  # points of a line that is still one when it is wide


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
    """Lines over the steps; ``log`` leaves out what is not positive.

    ``missing`` says what the lines lack: numbers that no axis can show.
    """

    title: str
    note: str
    lines: Sequence[Line]
    log: bool = False
    missing: Sequence[str] = ()


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
        # differences of logarithms: the ratio of two numbers may be no number
        v, low, high = (math.log(n) if chart.log else n for n in (v, y0, y1))
        at = (v - low) / (high - low)
        return _H - _BOTTOM - at * (_H - _TOP - _BOTTOM)

    out = [f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="{escape(chart.title)}">']
    for t in ticks(y0, y1, chart.log):
        out.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        )
        out.append(f'<text x="{_LEFT - 5}" y="{y(t) + 4:.1f}" text-anchor="end">{short(t)}</text>')
    for t in ticks(x0, x1, False) if x1 > x0 else [x0]:
        if t == int(t):
            text = int(t) if t < 1e5 else short(t)
            out.append(f'<text x="{x(t):.1f}" y="{_H - 8}" text-anchor="middle">{text}</text>')
    out.append(_step_label(_H - 8))
    runs = 1 + max(line.run for line, _ in lines)
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
        # the first runs are wider: they stay visible below a later one that is like them
        wider = not line.dashed and len(points) <= _MAX_WIDE
        width = 1.8 + min(3.0, 1.6 * (runs - 1 - line.run)) * wider
        out.append(
            f'<polyline class="run{line.run % 6}{dash}" style="stroke-width:{width:.1f}"'
            f' points="{path}">{title}</polyline>'
        )
    return "".join(out) + "</svg>"


def _range(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return (low / 1.2, high * 1.2) if high > low else (low / 2, high * 2)
    if low == high == 0:
        return -0.06, 1.0  # what is never negative should not look as if it could be
    largest = max(abs(low), abs(high))
    # what differs by less than an axis can label is drawn as a constant
    pad = 0.06 * (high - low) if high - low > 1e-9 * largest else 0.1 * largest
    return low - pad, high + pad


def _step_label(y: float) -> str:
    return f'<text x="{_LEFT - 12}" y="{y}" text-anchor="end">step</text>'


def strip_svg(checks: Sequence[StepCheck]) -> str:
    """A cell a step, or a few steps of which the worst counts; a failed one is named above it."""
    columns = columns_of(checks)
    width = (_W - _LEFT - _RIGHT) / len(columns)
    failed = any(check.verdict == FAILED for check in checks)
    top, height = (20 if failed else 4), 22
    base = top + height + 17
    out = [f'<svg viewBox="0 0 {_W} {base + 7}" role="img" aria-label="R3 verdict by step">']
    named = -math.inf
    for c, column in enumerate(columns):
        found = [check.verdict for check in column]
        worst = next(v for v in (FAILED, NO_EVIDENCE, PASSED) if v in found)
        at = _LEFT + c * width
        gap = 1 if width > 4 else 0
        counts = ", ".join(f"{found.count(v)} {v}" for v in dict.fromkeys(found))
        steps = [check.step for check in column]
        title = f"step{'s' * (len(steps) > 1)} {ranges(steps)}: {counts}"
        out.append(
            f'<rect class="cell {css(worst)}" x="{at:.2f}" y="{top}" width="{width - gap:.2f}"'
            f' height="{height}"><title>{title}</title></rect>'
        )
        middle = at + width / 2
        if worst == FAILED and middle - named > 44:
            first = next(check.step for check in column if check.verdict == FAILED)
            out.append(
                f'<text class="mark" x="{middle:.1f}" y="14" {_anchor(middle)}>{first}</text>'
            )
            named = middle
    for c in sorted({0, len(columns) // 2, len(columns) - 1}):
        at, step = _LEFT + (c + 0.5) * width, columns[c][0].step
        out.append(f'<text x="{at:.1f}" y="{base}" {_anchor(at)}>{step}</text>')
    return "".join([*out, _step_label(base), "</svg>"])


def _anchor(x: float) -> str:
    return f'text-anchor="{"end" if x > _W - 24 else "middle"}"'


def css(words: str) -> str:
    """Words as the name of a CSS class."""
    return words.replace(" ", "-")


def heat_svg(heat: HeatMap) -> str:
    """Layers down, steps across; the darker, the more rows agree, from chance to all."""
    count, rows = len(heat.columns), len(heat.layers)
    height = max(4, min(18, 360 // rows))
    width = (_W - _LEFT - _RIGHT) / count
    above = 26
    total = above + rows * height + _BOTTOM
    low = heat.chance or 0.0
    out = [f'<svg viewBox="0 0 {_W} {total}" role="img" aria-label="agreement by layer and step">']
    out += _heat_key(low, "chance " if heat.chance is not None else "")
    stride = max(1, -(-rows // 20))
    for r, layer in enumerate(heat.layers):
        top = above + r * height
        if r % stride == 0:
            at = top + height / 2 + 4
            out.append(f'<text x="{_LEFT - 5}" y="{at:.1f}" text-anchor="end">{layer}</text>')
        for c, value in enumerate(heat.values[r]):
            if value is None:
                continue
            a, b = heat.columns[c]
            steps = f"step {a}" if a == b else f"steps {a} to {b}"
            out.append(
                f'<rect class="heat" x="{_LEFT + c * width:.2f}" y="{top}" width="{width + 0.3:.2f}"'
                f' height="{height - 1}" style="fill-opacity:{_opacity(value, low)}">'
                f"<title>layer {layer}, {steps}: {value:.1%}</title></rect>"
            )
    for c in sorted({0, count // 2, count - 1}):
        at, first = _LEFT + (c + 0.5) * width, heat.columns[c][0]
        out.append(f'<text x="{at:.1f}" y="{total - 9}" {_anchor(at)}>{first}</text>')
    return "".join([*out, _step_label(total - 9), "</svg>"])


def _opacity(value: float, low: float) -> str:
    strength = min(1.0, max(0.0, (value - low) / (1 - low)))
    return f"{0.06 + 0.94 * strength**2:.3f}"


def _heat_key(low: float, word: str) -> list[str]:
    """From chance to all rows, in the colours of the map, above it on the right."""
    end = _W - _RIGHT
    out = [f'<text x="{end}" y="14" text-anchor="end">100%</text>']
    for i in range(6):
        value = low + (1 - low) * i / 5
        out.append(
            f'<rect class="heat" x="{end - 122 + 14 * i}" y="5" width="14" height="11"'
            f' style="fill-opacity:{_opacity(value, low)}"/>'
        )
    return [*out, f'<text x="{end - 127}" y="14" text-anchor="end">{word}{low:.1%}</text>']


def bar_svg(parts: dict[str, float]) -> str:
    """One bar of shares of time, coloured by the parts' names."""
    total = sum(parts.values())
    if not total:
        return '<p class="none">no times</p>'
    out = [f'<svg class="bar" viewBox="0 0 {_W} 26" role="img" aria-label="time split">']
    at = 0.0
    for name, value in parts.items():
        width = value / total * _W
        out.append(
            f'<rect class="part-{css(name)}" x="{at:.2f}" y="2" width="{width:.2f}" height="22">'
            f"<title>{escape(name)}: {value:.3g} s, {value / total:.0%}</title></rect>"
        )
        if width > 34:
            out.append(
                f'<text class="on" x="{at + width / 2:.1f}" y="17" text-anchor="middle">{value / total:.0%}</text>'
            )
        at += width
    return "".join(out) + "</svg>"
