"""A log of trained prompts, one line per rollout, and its faults: none lost, none trained twice.

A rollout that is trained again after a crash, from an older checkpoint, has a second line.  The
later line counts, because the weights of the first are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from r3train.data.json_lines import append_lines, read_lines
from r3train.types import Scored

FILE = "prompts.jsonl"


def append(
    run_dir: Path, rollout_id: int, groups: Sequence[Sequence[Scored]], skipped: int
) -> None:
    """Record one trained rollout; ``skipped`` of its optimizer steps were not finite."""
    first = [group[0][0] for group in groups]
    record = {
        "step": rollout_id,
        "group_ids": [sample.group_id for sample in first],
        "prompt_ids": [sample.prompt.prompt_id for sample in first],
        "sample_ids": [[sample.sample_id for sample, _ in group] for group in groups],
        "weight_versions": [
            [int(sample.weight_versions.max(initial=-1)) for sample, _ in group] for group in groups
        ],
        "skipped_steps": skipped,
    }
    append_lines(run_dir / FILE, [record])


def read(run_dirs: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of a run and its resumptions, oldest first, in order of step.

    Raises ValueError, with file and line, for a line that is no record.
    """
    steps: dict[int, dict[str, Any]] = {}
    for run_dir in run_dirs:
        for record in read_lines(run_dir / FILE):
            steps[record["step"]] = record
    return [steps[step] for step in sorted(steps)]


def faults(records: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """List rollouts that are missing, and groups and samples that were trained twice."""
    steps = [record["step"] for record in records]
    groups = [g for record in records for g in record["group_ids"]]
    samples = [s for record in records for group in record["sample_ids"] for s in group]
    return {
        "missing_steps": sorted(set(range(max(steps, default=-1) + 1)) - set(steps)),
        "groups_twice": _twice(groups),
        "samples_twice": _twice(samples),
    }


def _twice(values: Sequence[int]) -> list[int]:
    return sorted(value for value, count in Counter(values).items() if count > 1)
