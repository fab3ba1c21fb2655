"""Runs side by side as one self-contained HTML page: no script, no font, no file beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2

from r3train.proof.command import claim_facts, headline
from r3train.proof.findings import FAILED, MAX_FINDINGS, NO_EVIDENCE, PASSED, ranges
from r3train.observe.report_data import RunReport
from r3train.observe.report_evidence import StepCheck
from r3train.observe.report_metrics import CHARTS, COMPARED, PAIRS
from r3train.observe.report_svg import Chart, Line, bar_svg, chart_svg, css, heat_svg, strip_svg
from r3train.observe.step_line import duration

_KINDS = {"worst": "Lowest reward", "slowest": "Slowest", "best": "Highest reward"}
_VERDICTS = {PASSED: "passed", FAILED: "failed", NO_EVIDENCE: "without evidence"}
# dark enough for white words, and none of the runs'
_PART_COLOURS = {
    "waiting for rollout": "#b45309",
    "route exchange": "#be123c",
    "log-probs": "#7c3aed",
    "training": "#0f766e",
    "weight sync": "#be185d",
    "saving": "#4d7c0f",
    "other": "#64748b",
    "rollout": "#1d4ed8",
    "idle": "#64748b",
}
# half of a character beyond 16 bits, alone: no encoding has it
_LONE = re.compile("[\ud800-\udfff]")


def charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Every line chart that has a number in one run at least, or one that cannot be drawn."""
    out = []
    for key, title, note, log in CHARTS:
        lines = [Line(i, run.name, *run.series(key, positive=log)) for i, run in enumerate(runs)]
        out.append(Chart(title, note, lines, log, _missing(runs, key, log)))
    for solid, dashed, title, note in PAIRS:
        lines = []
        for i, run in enumerate(runs):
            lines.append(Line(i, run.name, *run.series(solid)))
            lines.append(Line(i, f"{run.name}, dashed", *run.series(dashed), dashed=True))
        missing = _missing(runs, solid, False) + _missing(runs, dashed, False)
        out.append(Chart(title, note, lines, missing=missing))
    out.append(_coverage(runs))
    return [c for c in out if c.missing or any(line.values for line in c.lines)]


def _missing(runs: Sequence[RunReport], key: str, log: bool) -> list[str]:
    """What the runs have under a metric that no axis shows."""
    found = [(run.name, run.left_out(key, positive=log)) for run in runs]
    axis = " (logarithmic axis)" if log else ""
    return [f"{name}: not drawn{axis}: {words}" for name, words in found if words]


def _coverage(runs: Sequence[RunReport]) -> Chart:
    lines = []
    for i, run in enumerate(runs):
        whole = [(c.step, c.rows_replayed / c.rows) for c in run.checks if c.rows]
        calls = [(c.step, c.calls / c.calls_expected) for c in run.checks if c.calls_expected]
        for name, pairs, dashed in ((run.name, whole, False), (f"{run.name}, calls", calls, True)):
            lines.append(Line(i, name, [s for s, _ in pairs], [v for _, v in pairs], dashed))
    note = "share of rows replayed as recorded; dashed: router calls made of those expected"
    return Chart("R3 coverage", note, lines)


def render(runs: Sequence[RunReport]) -> str:
    """The page.  Texts of samples are escaped: they are data of strangers."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["css"] = css
    safe = jinja2.filters.do_mark_safe
    text = environment.from_string(_PAGE).render(
        runs=[_run(i, run) for i, run in enumerate(runs)],
        charts=[
            {"title": c.title, "note": c.note, "missing": c.missing, "svg": safe(chart_svg(c))}
            for c in charts(runs)
        ],
        compared=_compared(runs),
        part_colours=_PART_COLOURS.items(),
    )
    return _LONE.sub("\ufffd", text)


def _run(i: int, run: RunReport) -> dict[str, Any]:
    safe = jinja2.filters.do_mark_safe
    audit, parts = run.audit, run.times()
    total = sum(parts.values())
    bars = {
        "training loop": _visible(parts),
        "rollout, at the same time": _visible(run.rollout()),
    }
    return {
        "i": i,
        "name": run.name,
        "path": str(run.path),
        "steps": len(run.records),
        "wall": _seconds(total) if total else "unknown",
        "reward": _reward(run.last_tenth("rollout/reward_mean")),
        "r3": {None: "unknown", True: "on", False: "off"}[run.uses_r3],
        "verdict": audit.verdict,
        "headline": headline(audit),
        "claims": [(c, v, claim_facts(audit)[c]) for c, v in audit.claims.items()],
        "findings": [str(f) for f in audit.findings[:10]],
        "more_findings": max(0, audit.num_findings - 10),
        "unmarked": audit.num_findings > MAX_FINDINGS,
        "notes": audit.notes,
        "notices": run.notices,
        "strip": safe(strip_svg(run.checks)) if run.checks else None,
        "checks": _counts(run.checks),
        "coverage": _coverage_words(run.checks),
        "heat": safe(heat_svg(run.heat)) if run.heat else None,
        "bars": [
            (words, safe(bar_svg(of)), [(n, _seconds(v)) for n, v in of.items()])
            for words, of in bars.items()
            if of
        ],
        "samples": [
            {**s.model_dump(), "kind": _KINDS[s.kind], "reward": _reward(s.reward)}
            for s in run.samples
        ],
    }


def _visible(parts: dict[str, float]) -> dict[str, float]:
    """The parts of a bar that are a thousandth of it at least: others have no width and no tenth."""
    least = sum(parts.values()) / 1000
    return {name: value for name, value in parts.items() if value > least}


def _counts(checks: Sequence[StepCheck]) -> list[tuple[str, str]]:
    """How many steps have each verdict, with its class, and which those are that did not pass."""
    out = []
    for verdict, words in _VERDICTS.items():
        steps = [c.step for c in checks if c.verdict == verdict]
        if steps or verdict == PASSED:
            text = f"{len(steps)} step{'s' * (len(steps) != 1)} {words}"
            which = f": step{'s' * (len(steps) != 1)} {ranges(steps)}"
            out.append((css(verdict), text if verdict == PASSED else text + which))
    return out


def _coverage_words(checks: Sequence[StepCheck]) -> str:
    """Calls and rows over the steps with evidence."""
    judged = [c for c in checks if c.calls_expected]
    if not judged:
        return ""
    short = [c for c in judged if c.calls != c.calls_expected]
    calls = "every expected router call was made at every step with evidence"
    if short:
        worst = min(short, key=lambda c: c.calls / c.calls_expected)
        calls = (
            f"router calls are not those expected at step{'s' * (len(short) > 1)}"
            f" {ranges(c.step for c in short)} (step {worst.step}: {worst.calls} of"
            f" {worst.calls_expected})"
        )
    shares = [c.rows_replayed / c.rows for c in judged if c.rows]
    if not shares:
        return calls
    low, high = (f"{share:.1%}" for share in (min(shares), max(shares)))
    span = low if low == high else f"{low} to {high}"
    return (
        f"{calls}; {span} of a step's rows replayed as recorded, in the rest missing slots filled"
    )


def _compared(runs: Sequence[RunReport]) -> list[tuple[str, list[str], str]]:
    """Numbers of every run, and the last run's share of the first's."""
    out = []
    for name, key, last in COMPARED:
        values = [run.last_tenth(key) if last else run.mean(key) for run in runs]
        if any(value is not None for value in values):
            shown = ["-" if v is None else f"{v:.4g}" for v in values]
            first, final = values[0], values[-1]
            ratio = final / first if first and final is not None else None
            out.append((name, shown, "" if ratio is None or len(runs) == 1 else _times(ratio)))
    return out


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x" if 0.01 <= abs(ratio) < 1000 else f"{ratio:.2g} x"


def _reward(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return duration(value) if value < 1e9 else f"{value:.3g} s"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>r3train: {{ runs | map(attribute="name") | join(", ") }}</title>
<style>
:root { --ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; --paper: #fff; --panel: #f9fafb;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #8a6d00; --c5: #56b4e9;
  --good: #047857; --bad: #b91c1c; --unsure: #92400e; --warn: #fffbeb; --pass: #6ee7b7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --soft: #9ca3af; --line: #374151;
  --paper: #111827; --panel: #1f2937; --c0: #4ea8de; --c1: #f08a4b; --c2: #34d399; --c3: #e7a3c6;
  --c4: #e5c14a; --c5: #93c5fd; --good: #34d399; --bad: #f87171; --unsure: #fbbf24;
  --warn: #2b2410; --pass: #047857; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 16px; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 22px; margin: 4px 0 12px; } h2 { font-size: 18px; margin: 28px 0 10px; }
h3 { font-size: 15px; margin: 0; } h3.of-run { margin: 16px 0 8px; } p { margin: 4px 0; }
.note, .none { color: var(--soft); font-size: 13px; }
.grid-of { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.by-height { align-items: start; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px;
  min-width: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { width: 100%; max-width: 640px; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--soft); } svg text.on { fill: #fff; font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke-linejoin: round; } .dashed { stroke-dasharray: 4 4; opacity: .7; }
{% for i in range(6) %}
polyline.run{{ i }} { stroke: var(--c{{ i }}); } circle.run{{ i }} { fill: var(--c{{ i }}); }
.key{{ i }}::before { content: ""; display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; background: var(--c{{ i }}); }
{% endfor %}
{% for part, colour in part_colours %}
.part-{{ part | css }} { fill: {{ colour }}; }
.key-{{ part | css }}::before { content: ""; display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; background: {{ colour }}; }
{% endfor %}
.cell.passed { fill: var(--pass); } .cell.failed { fill: var(--bad); }
.cell.no-evidence { fill: var(--paper); stroke: var(--unsure); stroke-dasharray: 2 2; }
svg text.mark { fill: var(--bad); font-weight: 700; }
.counts span { font-weight: 600; margin-right: 14px; display: inline-block; } .missing { color: var(--unsure); font-size: 13px; }
.left-out { background: var(--warn); border-color: var(--unsure); margin-top: 14px; }
.heat { fill: var(--c2); } .passed { color: var(--good); } .failed { color: var(--bad); }
.no-evidence { color: var(--unsure); } .verdict { font-weight: 600; }
th[class^=key], td[class^=key], .verdict { white-space: nowrap; } p.verdict { white-space: normal; }
.legend span { margin-right: 14px; display: inline-block; max-width: calc(100% - 14px); font-size: 13px; }
p.failed { font-size: 13px; } p.verdict, p.counts { font-size: 15px; }
th[class^=key], td[class^=key] { position: relative; padding-left: 17px; }
th[class^=key]::before, td[class^=key]::before { position: absolute; left: 0; top: 9px; }
@media (max-width: 500px) { th, td { padding-right: 8px; font-size: 13px; }
  th[class^=key], td[class^=key] { white-space: normal; overflow-wrap: anywhere; min-width: 92px; }
  td.what { min-width: 104px; } svg text { font-size: 13px; } }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; font-size: 13px; max-height: 220px;
  overflow-y: auto; }
</style>
</head>
<body>
<h1>r3train report</h1>
<div class="scroll"><table>
<tr><th>run</th><th>steps</th><th>wall time</th><th>reward</th><th>R3</th><th>evidence</th></tr>
{% for run in runs %}
<tr><td class="key{{ run.i % 6 }}">{{ run.name }}</td><td class="n">{{ run.steps }}</td><td class="n">{{ run.wall }}</td>
<td class="n">{{ run.reward }}</td><td>{{ run.r3 }}</td>
<td class="verdict {{ run.verdict | css }}">{{ run.verdict }}</td></tr>
{% endfor %}
</table></div>
{% for run in runs if not run.steps %}
<p class="none"><b class="key{{ run.i % 6 }}">{{ run.name }}</b>: no steps: metrics.jsonl has none.</p>
{% endfor %}
{% for run in runs if run.notices %}
<div class="panel left-out"><h3 class="key{{ run.i % 6 }}">Left out: {{ run.name }}</h3>
{% for text in run.notices %}<p>{{ text }}</p>{% endfor %}
</div>
{% endfor %}
{% if compared %}
<h2>{{ "Side by side" if runs | length > 1 else "In numbers" }}</h2>
<div class="scroll"><table>
<tr><th></th>{% for run in runs %}<th class="key{{ run.i % 6 }}">{{ run.name }}</th>{% endfor %}
{% if runs | length > 1 %}<th>last / first</th>{% endif %}</tr>
{% for name, values, ratio in compared %}
<tr><td class="what">{{ name }}</td>{% for v in values %}<td class="n">{{ v }}</td>{% endfor %}
{% if runs | length > 1 %}<td class="n">{{ ratio }}</td>{% endif %}</tr>
{% endfor %}
</table></div>
{% endif %}
{% if charts %}
<h2>Over the steps</h2>
<p class="legend">{% for run in runs %}<span class="key{{ run.i % 6 }}">{{ run.name }}</span>{% endfor %}</p>
<div class="grid-of">
{% for chart in charts %}
<div class="panel"><h3>{{ chart.title }}</h3><p class="note">{{ chart.note }}&nbsp;</p>{{ chart.svg }}
{% for text in chart.missing %}<p class="missing">{{ text }}</p>{% endfor %}
</div>
{% endfor %}
</div>
{% endif %}
<h2>Where the time went</h2>
<div class="grid-of">
{% for run in runs %}
<div class="panel"><h3 class="key{{ run.i % 6 }}">{{ run.name }}</h3>
{% for words, bar, parts in run.bars %}
<p class="note">{{ words }}</p>{{ bar }}
<p class="legend">{% for part, seconds in parts %}<span class="key-{{ part | css }}">{{ part }} {{ seconds }}</span>
{% endfor %}</p>
{% else %}
<p class="none">no times</p>
{% endfor %}
</div>
{% endfor %}
</div>
<p class="note">Rollout runs beside training, so it has a bar of its own: the seconds with a request in
flight (perf/rollout_s), and those with none.</p>
<h2>R3</h2>
<div class="grid-of by-height">
{% for run in runs %}
<div class="panel"><h3 class="key{{ run.i % 6 }}">{{ run.name }}</h3>
<p class="verdict {{ run.verdict | css }}">{{ run.headline }}</p>
{% if run.strip %}
{% if run.checks | length > 1 or run.verdict != "passed" %}<p class="counts">{% for class, text in run.checks %}<span class="{{ class }}">{{ text }}</span> {% endfor %}</p>{% endif %}
{{ run.strip }}
{% if run.unmarked %}<p class="missing">Of so many findings not every one marks its step here.</p>{% endif %}
{% if run.coverage %}<p class="note">Coverage: {{ run.coverage }}.</p>{% endif %}
{% endif %}
{% for text in run.findings %}<p class="failed">{{ text }}</p>{% endfor %}
{% if run.more_findings %}<p class="failed">and {{ run.more_findings }} more: r3train check-evidence lists them</p>{% endif %}
{% if run.verdict != "no evidence" %}
<table>
{% for claim, verdict, fact in run.claims %}
<tr><td class="n">{{ claim }}</td><td class="n {{ verdict | css }}">{{ verdict }}</td><td>{{ fact }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% for text in run.notes %}<p class="note">{{ text }}</p>{% endfor %}
{% if run.heat %}
<p class="note">Agreement by layer (down) and step (across): share of rows with the same experts.</p>
{{ run.heat }}
{% endif %}
</div>
{% endfor %}
</div>
{% if runs | selectattr("samples") | list %}
<h2>Samples</h2>
<p class="note">The lowest rewards, the slowest to generate, the highest rewards.</p>
{% for run in runs if run.samples %}
<h3 class="key{{ run.i % 6 }} of-run">{{ run.name }}</h3>
<div class="grid-of">
{% for s in run.samples %}
<div class="panel"><h3>{{ s.kind }}, step {{ s.step }}</h3>
<p class="note">reward {{ s.reward }}, {{ s.response_len }} tokens{% if s.generation_s %} in {{ "%.3g" % s.generation_s }} s{% endif %}{% if s.finish_reason %}, {{ s.finish_reason }}{% endif %}</p>
<pre><b>{{ s.prompt }}</b>
{% if s.text %}{{ s.text }}{% else %}<i>(empty)</i>{% endif %}</pre></div>
{% endfor %}
</div>
{% endfor %}
{% endif %}
</body>
</html>
"""
