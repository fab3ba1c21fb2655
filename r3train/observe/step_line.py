"""The one line a person reads for every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.text import Text

_STYLES = {
    "passed": "green",
    "ok": "green",
    "failed": "bold red",
    "FAILED": "bold red",
    "unchecked": "dim",
}


def step_text(metrics: Mapping[str, Any], num_rollout: int, width: int | None) -> Text:
    """One step as a line of named numbers.

    metrics: keys of metrics.py; what is missing is left out, and what is not finite is shown in
    red.  With a width, the least important fields go until the line fits; None keeps them all.
    """
    # without a reward (--loss-type sft) the loss is what a person watches, and there is no gap
    rewarded = "rollout/reward_mean" in metrics
    # (importance, 0 stays whatever happens; the field), in the order of reading
    fields: list[tuple[int, Text | None]] = [
        (0, _step(metrics, num_rollout)),
        (0, _number(metrics, "reward", "rollout/reward_mean", "{:.3f}", "bold")),
        (3 if rewarded else 0, _number(metrics, "loss", "train/loss", "{:+.4f}")),
        (2, _number(metrics, "grad", "train/grad_norm", "{:.3g}", pad=7)),
        (1, _number(metrics, "gap", "train/log_prob_gap_mean", "{:.1e}") if rewarded else None),
        (0, _r3(metrics)),
        (0, _served(metrics)),
        (5, _number(metrics, "len", "rollout/response_len_mean", "{:.0f}", pad=3)),
        (4, _number(metrics, "", "perf/tokens_per_s", "{:,.0f} tok/s", pad=11)),
        (6, _times(metrics)),
        (7, _memory(metrics)),
    ]
    kept = [(rank, field) for rank, field in fields if field is not None]
    while width is not None and _length(kept) > width and max(rank for rank, _ in kept) > 0:
        kept.remove(max(kept, key=lambda ranked: ranked[0]))
    return Text("  ", no_wrap=True).join(field for _, field in kept)


def duration(seconds: float) -> str:
    """Seconds for a reader: "0.8 s", "42 s", "3 min 07 s", "2 h 05 min"."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def verdict_style(verdict: str) -> str:
    """The style of an R3 verdict; anything that is neither a pass nor a failure is a warning."""
    return _STYLES.get(verdict, "yellow")


def _step(metrics: Mapping[str, Any], num_rollout: int) -> Text:
    # its number as in files and plots, and how many are done
    step, digits = int(metrics["step"]), len(str(num_rollout))
    return Text(f"step {step:>{digits}} ({step + 1:>{digits}}/{num_rollout})", style="bold cyan")


def _number(
    metrics: Mapping[str, Any], label: str, key: str, form: str, style: str = "", pad: int = 0
) -> Text | None:
    value = metrics.get(key)
    if value is None:
        return None
    value = float(value)
    shown = form.format(value).rjust(pad)
    if not math.isfinite(value):
        style = "bold red"
    return Text.assemble((f"{label} ", "dim") if label else "", (shown, style))


def _r3(metrics: Mapping[str, Any]) -> Text:
    # without the check a step says nothing of replay, which may be on
    passed = metrics.get("r3/passed")
    verdict = "unchecked" if passed is None else "ok" if passed in (True, 1) else "FAILED"
    # 1 is suspect
    suspicions = (value or 0 for key, value in metrics.items() if key.endswith("/suspect"))
    if verdict == "ok" and max(suspicions, default=0) >= 1:
        verdict = "suspect"
    return Text.assemble(("R3 ", "dim"), (verdict, verdict_style(verdict)))


def _served(metrics: Mapping[str, Any]) -> Text | None:
    # of the update after the step; one that passed needs no words
    if metrics.get("served/passed") in (None, True, 1):
        return None
    return Text.assemble(("served ", "dim"), ("FAILED", verdict_style("FAILED")))


def _times(metrics: Mapping[str, Any]) -> Text | None:
    names = {
        "wait": "perf/rollout_wait_s",
        "train": "perf/train_s",
        "publish": "perf/publish_s",
    }
    parts = [f"{name} {metrics[key]:4.1f}" for name, key in names.items() if key in metrics]
    if not parts and "perf/step_s" in metrics:
        parts = [f"{metrics['perf/step_s']:.1f}"]
    return Text(f"{' '.join(parts)} s", style="dim") if parts else None


def _memory(metrics: Mapping[str, Any]) -> Text | None:
    for name, key in (("GPU", "perf/gpu_memory_peak_gb"), ("host", "perf/host_memory_gb")):
        if key in metrics:
            return Text(f"{name} {metrics[key]:.1f} GB", style="dim")
    return None


def _length(fields: list[tuple[int, Text]]) -> int:
    return sum(field.cell_len for _, field in fields) + 2 * (len(fields) - 1)
