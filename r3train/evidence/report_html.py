"""Runs side by side as one self-contained HTML page: no script, no font, no file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2

from r3train.evidence.audit_command import claim_facts, headline
from r3train.evidence.report_data import RunReport
from r3train.evidence.report_svg import Chart, Line, bar_svg, chart_svg, heat_svg
from r3train.evidence.step_line import duration

# metric, title, note, logarithmic
_CHARTS = (
    ("rollout/reward_mean", "Reward", "mean over the samples of a step", False),
    ("train/loss", "Loss", "", False),
    ("train/entropy", "Entropy", "nats a token, of the actor", False),
    ("rollout/response_len_mean", "Response length", "tokens", False),
    ("rollout/staleness_mean", "Staleness", "weight versions behind, mean", False),
    ("rollout/generation_s_max", "Slowest sample", "seconds of generation", False),
    ("perf/tokens_per_s", "Throughput", "generated tokens a second of wall time", False),
    ("train/grad_norm", "Gradient norm", "before clipping", False),
    ("train/log_prob_gap_mean", "Log-prob gap, mean", "|actor - engine|, nats", True),
    ("train/log_prob_gap_k3", "Log-prob gap, k3 KL", "estimate of KL(engine, actor)", True),
    ("train/log_prob_gap_far_share", "Extreme tokens", "share with |gap| above ln 2", False),
    ("train/log_prob_gap_p999", "Log-prob gap, p99.9", "nats", True),
    ("train/log_prob_gap_max", "Log-prob gap, largest", "nats", True),
)
_COMPARED = (
    ("reward, last tenth of the steps", "rollout/reward_mean", True),
    ("log-prob gap, mean", "train/log_prob_gap_mean", False),
    ("k3 KL, mean", "train/log_prob_gap_k3", False),
    ("share of tokens with |gap| above ln 2", "train/log_prob_gap_far_share", False),
    ("p99.9 of the gap, mean over steps", "train/log_prob_gap_p999", False),
    ("largest gap, mean over steps", "train/log_prob_gap_max", False),
    ("tokens a second, mean", "perf/tokens_per_s", False),
    ("seconds a step, mean", "perf/step_s", False),
)


def charts(runs: Sequence[RunReport]) -> list[Chart]:
    """Every line chart that has a number in one run at least."""
    out = []
    for key, title, note, log in _CHARTS:
        lines = [Line(i, run.name, *run.series(key)) for i, run in enumerate(runs)]
        if any(line.values for line in lines):
            out.append(Chart(title, note, lines, log))
    lines = []
    for i, run in enumerate(runs):
        lines.append(Line(i, run.name, *run.series("r3/agreement")))
        steps, values = run.series("r3/agreement_chance_equal")
        lines.append(Line(i, f"{run.name}: chance", steps, values, dashed=True))
    if any(line.values for line in lines):
        note = "share of rows with the replayed experts; dashed: chance"
        out.append(Chart("Routing agreement", note, lines))
    return out


def render(runs: Sequence[RunReport]) -> str:
    """The page.  Texts of samples are escaped: they are data of strangers."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    safe = jinja2.filters.do_mark_safe
    return environment.from_string(_PAGE).render(
        runs=[_run(i, run) for i, run in enumerate(runs)],
        charts=[
            {"title": c.title, "note": c.note, "svg": safe(chart_svg(c))} for c in charts(runs)
        ],
        compared=_compared(runs),
    )


def _run(i: int, run: RunReport) -> dict[str, Any]:
    safe = jinja2.filters.do_mark_safe
    audit, parts = run.audit, run.times()
    total = sum(parts.values())
    return {
        "i": i,
        "name": run.name,
        "path": str(run.path),
        "steps": len(run.records),
        "wall": duration(total) if total else "unknown",
        "reward": run.last_tenth("rollout/reward_mean"),
        "r3": "on" if run.uses_r3 else ("off" if run.config else "unknown"),
        "verdict": audit.verdict,
        "headline": headline(audit),
        "claims": [(c, v, claim_facts(audit)[c]) for c, v in audit.claims.items()],
        "findings": [str(f) for f in audit.findings[:10]],
        "notes": audit.notes,
        "heat": safe(heat_svg(run.heat)) if run.heat else None,
        "chance": run.heat.chance if run.heat else None,
        "bar": safe(bar_svg(parts)),
        "parts": [(j, n, duration(v), v / total) for j, (n, v) in enumerate(parts.items())],
        "samples": run.samples,
    }


def _compared(runs: Sequence[RunReport]) -> list[tuple[str, list[str], str]]:
    """Numbers of every run, and the last run's share of the first's."""
    out = []
    for name, key, last in _COMPARED:
        values = [run.last_tenth(key) if last else run.mean(key) for run in runs]
        if any(value is not None for value in values):
            shown = ["-" if v is None else f"{v:.4g}" for v in values]
            first, final = values[0], values[-1]
            ratio = f"{final / first:.2f} x" if first and final is not None else ""
            out.append((name, shown, ratio if len(runs) > 1 else ""))
    return out


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
  --good: #047857; --bad: #b91c1c; --unsure: #92400e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --soft: #9ca3af; --line: #374151;
  --paper: #111827; --panel: #1f2937; --c0: #4ea8de; --c1: #f08a4b; --c2: #34d399; --c3: #e7a3c6;
  --c4: #e5c14a; --c5: #93c5fd; --good: #34d399; --bad: #f87171; --unsure: #fbbf24; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 16px; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 4px 0 12px; } h2 { font-size: 18px; margin: 28px 0 10px; }
h3 { font-size: 15px; margin: 0; } p { margin: 4px 0; }
.note, .none { color: var(--soft); font-size: 13px; }
.grid-of { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px;
  min-width: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { width: 100%; max-width: 640px; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--soft); } svg text.on { fill: #fff; font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .dashed { stroke-dasharray: 4 4; opacity: .7; }
{% for i in range(6) %}
polyline.run{{ i }} { stroke: var(--c{{ i }}); } circle.run{{ i }}, .part{{ i }} { fill: var(--c{{ i }}); }
.key{{ i }}::before { content: ""; display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; background: var(--c{{ i }}); }
{% endfor %}
.heat { fill: var(--c2); } .passed { color: var(--good); } .failed { color: var(--bad); }
.no-evidence { color: var(--unsure); } .verdict { font-weight: 600; }
th[class^=key], td[class^=key], .verdict { white-space: nowrap; } p.verdict { white-space: normal; }
.legend span { margin-right: 14px; white-space: nowrap; font-size: 13px; }
@media (max-width: 500px) { th, td { padding-right: 8px; font-size: 13px; } svg text { font-size: 13px; } }
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
<td class="n">{{ "%.3f" % run.reward if run.reward is not none else "-" }}</td><td>{{ run.r3 }}</td>
<td class="verdict {{ run.verdict | replace(' ', '-') }}">{{ run.verdict }}</td></tr>
{% endfor %}
</table></div>
{% if compared %}
<h2>{{ "Side by side" if runs | length > 1 else "In numbers" }}</h2>
<div class="scroll"><table>
<tr><th></th>{% for run in runs %}<th class="key{{ run.i % 6 }}">{{ run.name }}</th>{% endfor %}
{% if runs | length > 1 %}<th>last / first</th>{% endif %}</tr>
{% for name, values, ratio in compared %}
<tr><td>{{ name }}</td>{% for v in values %}<td class="n">{{ v }}</td>{% endfor %}
{% if runs | length > 1 %}<td class="n">{{ ratio }}</td>{% endif %}</tr>
{% endfor %}
</table></div>
{% endif %}
<h2>Over the steps</h2>
<p class="legend">{% for run in runs %}<span class="key{{ run.i % 6 }}">{{ run.name }}</span>{% endfor %}</p>
<div class="grid-of">
{% for chart in charts %}
<div class="panel"><h3>{{ chart.title }}</h3><p class="note">{{ chart.note }}&nbsp;</p>{{ chart.svg }}</div>
{% endfor %}
</div>
<h2>Where the time went</h2>
<div class="grid-of">
{% for run in runs %}
<div class="panel"><h3 class="key{{ run.i % 6 }}">{{ run.name }}</h3>{{ run.bar }}
<p class="legend">{% for j, name, seconds, share in run.parts %}<span class="key{{ j }}">{{ name }} {{ seconds }}</span>
{% endfor %}</p></div>
{% endfor %}
</div>
<h2>R3</h2>
<div class="grid-of">
{% for run in runs %}
<div class="panel"><h3 class="key{{ run.i % 6 }}">{{ run.name }}</h3>
<p class="verdict {{ run.verdict | replace(' ', '-') }}">{{ run.headline }}</p>
{% if run.verdict != "no evidence" %}
<table>
{% for claim, verdict, fact in run.claims %}
<tr><td class="n">{{ claim }}</td><td class="n {{ verdict | replace(' ', '-') }}">{{ verdict }}</td><td>{{ fact }}</td></tr>
{% endfor %}
</table>
{% for text in run.findings %}<p class="failed">{{ text }}</p>{% endfor %}
{% endif %}
{% for text in run.notes %}<p class="note">{{ text }}</p>{% endfor %}
{% if run.heat %}
<p class="note">Agreement by layer (down) and step (across): from chance
{% if run.chance is not none %}({{ "%.1f" % (100 * run.chance) }}%){% endif %}, pale, to all rows, full colour.</p>
{{ run.heat }}
{% endif %}
</div>
{% endfor %}
</div>
{% if runs | selectattr("samples") | list %}
<h2>Samples</h2>
<p class="note">The lowest rewards, the slowest to generate, the highest rewards.</p>
<div class="grid-of">
{% for run in runs %}{% for s in run.samples %}
<div class="panel"><h3 class="key{{ run.i % 6 }}">{{ s.kind }}, step {{ s.step }}</h3>
<p class="note">reward {{ "%.3f" % s.reward }}, {{ s.response_len }} tokens{% if s.generation_s %} in {{ "%.3g" % s.generation_s }} s{% endif %}, {{ s.finish_reason }}</p>
<pre><b>{{ s.prompt }}</b>
{{ s.text }}</pre></div>
{% endfor %}{% endfor %}
</div>
{% endif %}
</body>
</html>
"""
