"""Metrics of a step under the keys that people, plots and scripts read (see evidence.metrics)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3train.rl.advantages import GroupStats
from r3train.types import TrainSample


@dataclass(frozen=True)
class RolloutReport:
    """What the rollout's metrics are made of, beside its samples."""

    rollout_id: int
    groups: GroupStats


def rollout_metrics(report: RolloutReport, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Rewards, lengths, staleness of one rollout."""
    lengths = np.array([s.sample.response_len for s in samples])
    oldest = [
        int(s.sample.weight_versions[s.sample.prompt_len :].min(initial=1 << 30)) for s in samples
    ]
    staleness = [report.rollout_id - v for v in oldest if v < 1 << 30]
    groups = report.groups
    return {
        "rollout/reward_mean": groups.mean,
        "rollout/reward_std": groups.std,
        "rollout/reward_min": groups.min,
        "rollout/reward_max": groups.max,
        "rollout/zero_variance_groups": groups.num_zero_variance,
        "rollout/num_groups": groups.num_groups,
        "rollout/num_samples": len(samples),
        "rollout/response_len_mean": float(lengths.mean()),
        "rollout/tokens": int(lengths.sum()),
        "rollout/truncated": sum(s.sample.finish_reason == "length" for s in samples),
        "rollout/aborted": sum(s.sample.finish_reason == "abort" for s in samples),
        "rollout/staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "rollout/staleness_max": max(staleness, default=0),
    }


# the trainer's names -> ours, where they differ
_NAMES = {
    "clipped": "clip_share",
    "log_prob_gap_abs": "log_prob_gap_mean",
    "log_prob_gap_far": "log_prob_gap_far_share",
}
_LAST = ("lr",)
_MAX = ("log_prob_gap_max",)
_SUM = ("num_loss_tokens",)


def train_metrics(reports: Sequence[dict[str, float]]) -> dict[str, Any]:
    """One set of numbers from the optimizer steps of a rollout: means, but for maxima and sums."""
    out: dict[str, Any] = {}
    for name in reports[0]:
        values = [r[name] for r in reports]
        if name in _MAX:
            value = max(values)
        elif name in _SUM:
            value = sum(values)
        else:
            value = values[-1] if name in _LAST else float(np.mean(values))
        out[f"train/{_NAMES.get(name, name)}"] = value
    return out
