"""A running job's proof of one step, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from r3train.host_group import host_group
from r3train.proof.check import judge, step_line, StepExpectation, StepTotals, StepVerdict
from r3train.proof.rescored import judge_rescored, RescoredRecord
from r3train.proof.writer import EvidenceWriter
from r3train.types import ReplayEvidence, RouteShape


def prove_step(
    evidence: EvidenceWriter,
    records: Sequence[ReplayEvidence],
    expectation: StepExpectation | None,
    shape: RouteShape,
    *,
    passes: Sequence[str],
    mismatch_threshold: float,
    rescored: Sequence[RescoredRecord] | None = None,
    missed: int = 0,
) -> StepVerdict | None:
    """Write this rank's records, add up all ranks' sums, judge them and write the verdict.

    A collective.  expectation: on rank 0 alone, which alone has a verdict.  rescored: comparisons
    with samples that were computed again, None without any to expect; missed: see ``Sampling``.
    """
    evidence.write(records)
    own = StepTotals(shape)
    for record in records:
        own.add(record)
    table = torch.from_numpy(own.to_table(passes))
    dist.all_reduce(table, group=host_group())
    if expectation is None:
        return None
    totals = StepTotals.of_table(table.numpy(), passes, shape)
    verdict = judge(totals, expectation, shape, mismatch_threshold=mismatch_threshold)
    if rescored is not None:
        evidence.write_rescored(rescored)
        verdict = replace(verdict, sampling=judge_rescored(rescored, missed))
    line = step_line(
        verdict,
        expectation,
        shape,
        world_size=dist.get_world_size(),
        mismatch_threshold=mismatch_threshold,
    )
    evidence.write_step(line)
    return verdict
