"""What a report shows of one run, read from its directory."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r3train.evidence.audit import audit_run
from r3train.evidence.audit_read import EvidenceFiles
from r3train.evidence.audit_result import Audit
from r3train.evidence.check import COUNTERS, STAGES
from r3train.evidence.metrics import SAMPLES_FILE, numbers, read_metrics

_EQUAL, _REPLAYED = COUNTERS.index("rows_equal"), COUNTERS.index("rows_replayed")
_MAX_COLUMNS = 120
# parts of a step's wall time, in the order of the loop; log-probs are inside perf/train_s
TIMES = {
    "waiting for rollout": "perf/rollout_wait_s",
    "log-probs": "perf/log_prob_s",
    "training": "perf/train_s",
    "saving": "perf/save_s",
    "publishing weights": "perf/publish_s",
}


@dataclass(frozen=True)
class HeatMap:
    """Share of rows in which the trainer's own choice is the replayed one: [layers][columns]."""

    layers: list[int]
    columns: list[tuple[int, int]]  # first and last step of each
    values: list[list[float | None]]
    chance: float | None


@dataclass
class RunReport:
    """One run's name, settings, metrics, evidence and samples; parts that are missing are empty."""

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    audit: Audit | None = None
    heat: HeatMap | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def uses_r3(self) -> bool:
        return bool(self.config.get("replay", {}).get("use_rollout_routing_replay"))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and finite numbers of a metric."""
        steps, values = numbers(self.records, key)
        kept = [(s, v) for s, v in zip(steps, values) if math.isfinite(v)]
        return [s for s, _ in kept], [v for _, v in kept]

    def mean(self, key: str) -> float | None:
        values = self.series(key)[1]
        return sum(values) / len(values) if values else None

    def last_tenth(self, key: str) -> float | None:
        values = self.series(key)[1]
        tail = values[-max(1, len(values) // 10) :]
        return sum(tail) / len(tail) if tail else None

    def times(self) -> dict[str, float]:
        """Seconds of the whole run by what they went to."""
        sums = {name: sum(self.series(key)[1]) for name, key in TIMES.items()}
        sums["training"] = max(0.0, sums["training"] - sums["log-probs"])
        total = sum(self.series("perf/step_s")[1])
        sums["other"] = max(0.0, total - sum(sums.values()))
        return {name: value for name, value in sums.items() if value > 0}


def load_run(path: Path, name: str) -> RunReport:
    """Read a run directory.  Raises ValueError where it holds no metrics or damaged ones."""
    try:
        records = read_metrics(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no metrics.jsonl: is it a run directory?") from None
    run = RunReport(path, name, records=records, audit=audit_run(path), heat=_heat_map(path))
    try:
        run.config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass
    run.samples = _samples(path / SAMPLES_FILE)
    return run


def _heat_map(path: Path) -> HeatMap | None:
    """Agreement of layer by step in the old-log-prob pass, in at most 120 columns."""
    files = EvidenceFiles(path)
    if not files.judged_steps:
        return None
    width = max(1, -(-len(files.judged_steps) // _MAX_COLUMNS))
    column_of = {step: i // width for i, step in enumerate(files.judged_steps)}
    sums: dict[tuple[int, int], list[int]] = {}
    chance = None
    for step in files.steps():
        chance = step.line.get("agreement", {}).get("chance_equal", chance)
        for (replay_pass, stage, layer), values in step.cells.items():
            if replay_pass == "old_log_prob" and stage == STAGES[0]:
                cell = sums.setdefault((layer, column_of[step.step]), [0, 0])
                cell[0] += values[_EQUAL]
                cell[1] += values[_REPLAYED]
    layers = sorted({layer for layer, _ in sums})
    count = max(column_of.values()) + 1

    def share(layer: int, column: int) -> float | None:
        equal, rows = sums.get((layer, column), (0, 0))
        return equal / rows if rows else None

    judged = files.judged_steps
    columns = [
        (judged[c * width], judged[min((c + 1) * width, len(judged)) - 1]) for c in range(count)
    ]
    values = [[share(layer, c) for c in range(count)] for layer in layers]
    return HeatMap(layers, columns, values, chance) if layers else None


def _samples(path: Path) -> list[dict[str, Any]]:
    """The notable samples of the run: over all steps the worst, the slowest, the best."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                sample = json.loads(line)
                kind = sample["kind"]
            except (ValueError, KeyError, TypeError):
                continue  # a last line that was cut
            kept = kinds.setdefault(kind, [])
            kept.append(sample)
            if len(kept) > 200:
                kinds[kind] = _most(kind, kept, 3)
    return [s for kind in ("worst", "slowest", "best") for s in _most(kind, kinds.get(kind, []), 3)]


def _most(kind: str, samples: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    # of equals the latest: what the model writes now
    sign = -1 if kind == "worst" else 1
    key = "generation_s" if kind == "slowest" else "reward"
    order = sorted(samples, key=lambda s: (sign * s.get(key, 0), s.get("step", 0)))
    return order[::-1][:count]
