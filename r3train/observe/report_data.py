"""What a report shows of one run, read from its directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r3train.proof.audit import audit_run
from r3train.proof.findings import Audit, ranges
from r3train.observe.metrics import numbers
from r3train.observe.report_evidence import HeatMap, StepCheck, read_evidence
from r3train.observe.report_metrics import ROLLOUT_S, STEP_S, TIMES
from r3train.observe.report_read import Sample, read_samples, read_steps, read_uses_r3

_KINDS = ("worst", "slowest", "best")
# within these a scale, a sum and a mean of a run's numbers stay numbers
_SMALLEST, _LARGEST = 1e-300, 1e300


@dataclass
class RunReport:
    """One run's name, settings, metrics, evidence and samples; parts that are missing are empty.

    ``notices`` say what of the run's files was left out and why.
    """

    path: Path
    name: str
    uses_r3: bool | None = None  # None: not known
    records: list[dict[str, Any]] = field(default_factory=list)
    audit: Audit | None = None
    heat: HeatMap | None = None
    checks: list[StepCheck] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def series(self, key: str, *, positive: bool = False) -> tuple[list[int], list[float]]:
        """Steps and numbers of a metric that can be drawn; ``positive`` for a logarithmic axis."""
        pairs = [(s, v) for s, v in zip(*numbers(self.records, key)) if _drawable(v, positive)]
        return [s for s, _ in pairs], [v for _, v in pairs]

    def left_out(self, key: str, *, positive: bool = False) -> str:
        """What ``series`` leaves out, in words: "nan at steps 2, 4"; empty where it is nothing."""
        steps: dict[str, list[int]] = {}
        for step, value in zip(*numbers(self.records, key)):
            if not _drawable(value, positive):
                steps.setdefault(f"{value:.3g}", []).append(step)
        words = [f"{v} at step{'s' * (len(of) > 1)} {ranges(of)}" for v, of in steps.items()]
        return "; ".join(words[:3]) + f"; and {len(words) - 3} more" * (len(words) > 3)

    def mean(self, key: str) -> float | None:
        values = self.series(key)[1]
        return sum(values) / len(values) if values else None

    def last_tenth(self, key: str) -> float | None:
        values = self.series(key)[1]
        tail = values[-max(1, len(values) // 10) :]
        return sum(tail) / len(tail) if tail else None

    def times(self) -> dict[str, float]:
        """Seconds of the whole run by what they went to, in the order of ``TIMES``."""
        sums = {name: sum(self.series(key)[1]) for name, key, _ in TIMES}
        for name, _, within in TIMES:
            if within:
                sums[within] = max(0.0, sums[within] - sums[name])
        total = sum(self.series(STEP_S)[1])
        sums["other"] = max(0.0, total - sum(sums.values()))
        return {name: value for name, value in sums.items() if value > 0}

    def rollout(self) -> dict[str, float]:
        """Seconds with a request in flight, and what is left of the steps; empty: not recorded.

        Rollout runs beside training, so it is no part of ``times``.
        """
        pairs = zip(*self.series(ROLLOUT_S))
        seconds = {step: rollout_s for step, rollout_s in pairs if rollout_s >= 0}
        if not seconds:
            return {}
        busy = sum(seconds.values())
        total = sum(step_s for step, step_s in zip(*self.series(STEP_S)) if step in seconds)
        return {"rollout": busy, "idle": max(0.0, total - busy)}


def load_run(path: Path, name: str) -> RunReport:
    """Read a run directory.  Raises ValueError where its metrics are missing or cannot be read."""
    run = RunReport(path, name)
    run.records = read_steps(path, run.notices)
    run.uses_r3 = read_uses_r3(path, run.notices)
    run.samples = _notable(path, run.notices)
    run.audit = audit_run(path, keep_steps=True)
    run.heat, run.checks = read_evidence(run.audit, run.records)
    return run


def _drawable(value: float, positive: bool) -> bool:
    return (value == 0 and not positive) or (
        _SMALLEST <= (value if positive else abs(value)) <= _LARGEST
    )


def _notable(path: Path, notices: list[str]) -> list[Sample]:
    """The notable samples of the run: over all steps the worst, the slowest, the best."""
    kinds: dict[str, list[Sample]] = {kind: [] for kind in _KINDS}
    for sample in read_samples(path, notices):
        kept = kinds[sample.kind]
        kept.append(sample)
        if len(kept) > 200:
            kinds[sample.kind] = _most(sample.kind, kept)
    return [sample for kind, kept in kinds.items() for sample in _most(kind, kept)]


def _most(kind: str, samples: list[Sample]) -> list[Sample]:
    """The three that are most of their kind; of equals the latest: what the model writes now."""

    def rank(s: Sample) -> tuple[float, int]:
        value = (s.generation_s or 0.0) if kind == "slowest" else s.reward
        return (-value if kind == "worst" else value), s.step

    return sorted(samples, key=rank, reverse=True)[:3]
