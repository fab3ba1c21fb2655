"""A running job's proof of one step, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from r3train.host_group import host_barrier, host_group
from r3train.proof.judge import (
    judge,
    misaligned,
    Served,
    step_line,
    StepExpectation,
    StepTotals,
    StepVerdict,
)
from r3train.proof.custody_verdict import CustodyRecord, judge_custody
from r3train.proof.recheck_verdict import judge_recheck, RecheckRecord
from r3train.proof.suspicion import Suspicions
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
    suspicions: Suspicions | None = None,
    check_interval: int = 1,
    rechecked: Sequence[RecheckRecord] | None = None,
    missed: int = 0,
    custody: Sequence[CustodyRecord] = (),
    served: Served | None = None,
    held: int | None = None,
) -> StepVerdict | None:
    """Write this rank's records, add up all ranks' sums, judge them and write the verdict.

    A collective.  Records that may be summed are written after the judgement, which tells whether they are
    right.  No verdict is written before the records of all ranks.  expectation: on rank 0 only, which
    alone has a verdict.  suspicions: see ``judge``.  rechecked: comparisons with samples that were rechecked, None without any
    to expect; missed: see ``Recheck``; custody: the sessions of agents; served: the
    canaries of the step's weights, None without any; held: servers whose checksums of these weights were judged.
    """
    suspicions = suspicions or Suspicions()
    if not evidence.summed:
        evidence.write(records)
    local_totals = StepTotals(shape)
    for record in records:
        local_totals.add(record)
    table = torch.from_numpy(local_totals.to_table(passes))
    dist.all_reduce(table, group=host_group())
    verdict = wrong = None
    if expectation is not None:
        totals = StepTotals.from_table(table.numpy(), passes, shape)
        verdict = judge(
            totals,
            expectation,
            shape,
            mismatch_threshold=mismatch_threshold,
            suspicions=suspicions,
        )
        if rechecked is not None:
            verdict = replace(verdict, recheck=judge_recheck(rechecked, missed, suspicions))
        verdict = replace(verdict, custody=judge_custody(custody), served=served, held=held)
        wrong = not verdict.passed or any(misaligned(totals, expectation))
    if evidence.summed:
        flag = torch.tensor([bool(wrong)])
        dist.broadcast(flag, src=0, group=host_group())
        evidence.write(records, as_sums=not flag.item())
        host_barrier()
    if expectation is None or verdict is None:
        return None
    evidence.write_recheck(rechecked or ())
    evidence.write_custody(custody)
    line = step_line(
        verdict,
        expectation,
        shape,
        world_size=dist.get_world_size(),
        mismatch_threshold=mismatch_threshold,
        calibrating=suspicions.calibrating,
        check_interval=check_interval,
    )
    evidence.write_step(line)
    return verdict
