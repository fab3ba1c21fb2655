"""Accounts of every prompt and sample in run directories and checkpoints: trained once, none lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from r3train.loop import prompt_log
from r3train.loop.run_state import BUFFER_FILE
from r3train.loop.replay_source import load_rollout, rollout_path
from r3train.loop.rollout_file import read_samples
from r3train.generation.buffer import OUTCOMES_FILE
from r3train.types import RolloutSample


def audited(run_dirs: list[Path]) -> list[dict]:
    """The prompt log of a run and its continuations, in which nothing is missing or twice."""
    records = prompt_log.read(run_dirs)
    assert not any(prompt_log.faults(records).values())
    return records


def trained_groups(records: list[dict]) -> list[int]:
    return [group for record in records for group in record["group_ids"]]


def trained_samples(records: list[dict]) -> list[int]:
    return [sample for record in records for group in record["sample_ids"] for sample in group]


def all_trained_once(run_dirs: list[Path], num_rollout: int) -> None:
    """Rollouts of four groups of four, whole and in order, and no sample thrown away."""
    records = audited(run_dirs)
    assert trained_groups(records) == list(range(4 * num_rollout))
    assert all(len(group) == 4 for record in records for group in record["sample_ids"])
    # no complete sample was thrown away with a group that was dropped or generated again
    outcomes = [json.loads(line) for d in run_dirs for line in (d / OUTCOMES_FILE).open()]
    assert {o["outcome"] for o in outcomes} <= {"trained", "unused"}


def dumped_samples(run_dir: Path, steps: Iterable[int]) -> dict[int, RolloutSample]:
    """The samples that a run trained in these rollouts; none of one that it did not train."""
    directory = run_dir / "rollouts"
    groups = (
        group
        for step in steps
        if rollout_path(directory, step).exists()
        for group in load_rollout(directory, step)
    )
    return {sample.sample_id: sample for group in groups for sample, _ in group}


def buffered_samples(checkpoint: Path, step: int) -> dict[int, RolloutSample]:
    """The complete samples that wait in the buffer of a checkpoint."""
    samples, _ = read_samples(checkpoint / f"iter_{step:07d}" / BUFFER_FILE)
    return {sample.sample_id: sample for sample, _ in samples}


def trained_as_they_were(
    kept: Mapping[int, RolloutSample], later: Mapping[int, RolloutSample]
) -> None:
    """Assert that the kept samples were trained later with the same tokens and experts."""
    for sample_id, sample in kept.items():
        assert later[sample_id].token_ids.tolist() == sample.token_ids.tolist()
        assert (later[sample_id].routed_experts == sample.routed_experts).all()
