"""The table of ``make bench``: a row for each figure that a decision rests on; all others are in the JSON.

Pure: no clock, no machine.  A figure is the median of its rounds with the smallest and the largest in
brackets.  A benchmark that failed is named with its error in the place of its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.measure import spread

Result = Mapping[str, Any]
Spread = Mapping[str, float]  # median, low, high


def _replay_overhead(r: Result) -> dict[str, Spread]:
    return {
        "train step, replay / without": r["replay_over_native"],
        "train step, replay and check / without": r["check_over_native"],
        "train step with replay, old log-probs reused / computed": r["skipped_over_replay"],
        "noise: a second actor / the first": r["again_over_replay"],
    }


def _rollout_rate(r: Result) -> dict[str, Spread]:
    rates = r["over_no_routes"]
    return {
        "tokens a CPU second of the server, with routes / without": rates["recorded and returned"],
        "noise: another server without / the first": rates["no routes, another server"],
    }


def _weight_sync(r: Result) -> dict[str, Spread]:
    copies = r["over_copy"]
    return {
        "publish by broadcast / one copy of the bytes": copies["broadcast"],
        "publish by disk / one copy": copies["disk"],
        "publish by shared memory / one copy": copies["memory"],
        "noise: publish by shared memory again / one copy": copies["memory_again"],
    }


def _async_overlap(r: Result) -> dict[str, Spread]:
    return {
        "step, asynchronous / synchronous": spread([run["ratio"] for run in r["runs"]]),
        "noise: synchronous again / synchronous": spread([run["ratio_again"] for run in r["runs"]]),
    }


def _start_up(r: Result) -> dict[str, Spread]:
    return {
        "first trained step / a server's start alone": r["over_server_alone"],
        "first trained step, s": r["total_s"],
        "noise: a server's start again / before": r["server_alone_again"],
    }


def _against_trl(r: Result) -> dict[str, Spread]:
    found = {}
    for name, shape in r["shapes"].items():
        found[f"samples/s, r3train / TRL, {name}"] = shape["over_trl"]["r3train"]
        found[f"noise: the same job again / the first, {name}"] = shape["again_over_ours"]
    return found


def _agent_endpoint(r: Result) -> dict[str, Spread]:
    found = {}
    for calls in r["calls"]:
        what = f"{calls['turns']} calls"
        found[f"an agent's call over a turn of an environment, {what}, ms"] = calls["more_ms"]
        noise = f"noise: CPU s, the endpoint again / the first, {what}"
        found[noise] = calls["again_over_endpoint"]
    memory = r["memory"]
    what = f"{memory['sessions']} sessions of {memory['turns']} calls"
    found[f"longest hold of the event loop, {what}, ms"] = spread([memory["longest_ms"]])
    found[f"longest garbage collection, {what}, ms"] = spread([memory["longest_gc_ms"]])
    return found


def _rank0_rate(r: Result) -> dict[str, Spread]:
    found = {}
    for size in r["sizes"]:
        tokens = size["tokens"]
        rate = size["samples_a_second"]["short"]
        found[f"samples/s of {tokens} tokens that rank 0 takes in"] = rate
        found[f"CPU s, ids of a byte / int32, {tokens} tokens"] = size["short_over_int32"]
        found[f"noise: ids of a byte again / the first, {tokens} tokens"] = size["again_over_short"]
    return found


# benchmark -> its figures by what they are
FIGURES: dict[str, Callable[[Result], dict[str, Spread]]] = {
    "replay_overhead": _replay_overhead,
    "rollout_rate": _rollout_rate,
    "weight_sync": _weight_sync,
    "async_overlap": _async_overlap,
    "start_up": _start_up,
    "against_trl": _against_trl,
    "agent_endpoint": _agent_endpoint,
    "rank0_rate": _rank0_rate,
}


def table(results: Result) -> str:
    """benchmarks/RESULTS.md from {benchmark: its result, or {"error": ...}} and ``machine``."""
    m = results["machine"]
    lines = [
        "<!-- written by: make bench (benchmarks/run_all.py --write-results) -->",
        "",
        "# Results of the benchmarks",
        "",
        f"{m['date']}: {m['cores']} cores ({m['cpu']}), {m['memory_gb']} GB, {m['gpu'] or 'no GPU'}, "
        f"torch {m['torch']}; load {m['load_before']:g} before the first benchmark.",
        "",
        "A figure is the median of interleaved rounds (smallest to largest).",
        "",
        "| benchmark | what | figure |",
        "|---|---|---|",
    ]
    for name, figures in FIGURES.items():
        result = results.get(name, {"error": "not measured"})
        if "error" in result:
            lines.append(f"| {name} | {result['error'].replace('|', '/')} | |")
            continue
        lines += [
            f"| {name} | {what} | {figure(value)} |" for what, value in figures(result).items()
        ]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Three significant digits: 1,234 or 12.3 or 0.0123 or 1.2e-05."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def figure(value: Spread) -> str:
    """Median, and the range that the rounds took."""
    return f"{number(value['median'])} ({number(value['low'])} to {number(value['high'])})"
