"""A running job's proof of one step, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from r3train.host_group import host_barrier, host_group
from r3train.proof.step_verdict import (
    judge_step,
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


@dataclass(frozen=True)
class StepClaims:
    """Records and verdicts that rank 0 has of a step next to its replay.

    To judge with the step: rechecked: comparisons with samples that were rechecked, None without any to expect; missed:
    see ``Recheck``; custody: the sessions of agents.  Judged before the step, where a fault has ended the run: served:
    the verdict of the canaries on its weights, None without any; held: servers whose checksums of these weights were right.
    """

    rechecked: Sequence[RecheckRecord] | None = None
    missed: int = 0
    custody: Sequence[CustodyRecord] = ()
    served: Served | None = None
    held: int | None = None


@dataclass(frozen=True, eq=False)
class LiveProof:
    """Proof of a run's steps: by which rule they are judged, and where the evidence goes.

    passes: those that replay; suspicions: see ``judge_step``; check_interval: rollouts between two steps that are judged.
    """

    evidence: EvidenceWriter
    shape: RouteShape
    passes: Sequence[str]
    mismatch_threshold: float
    suspicions: Suspicions = field(default_factory=Suspicions)
    check_interval: int = 1

    def prove_step(
        self,
        records: Sequence[ReplayEvidence],
        expectation: StepExpectation | None,
        claims: StepClaims = StepClaims(),
    ) -> StepVerdict | None:
        """Write this rank's records, add up all ranks' sums, judge them and write the verdict.

        A collective.  Records that may be summed are written after the judgement, which tells whether they are
        right.  No verdict is written before the records of all ranks.  expectation: on rank 0 only, which
        alone has a verdict.
        """
        evidence = self.evidence
        if not evidence.summed:
            evidence.write(records)
        totals = self._sum_over_ranks(records)
        verdict = wrong = None
        if expectation is not None:
            verdict = self._judge(totals, expectation, claims)
            wrong = not verdict.passed or any(misaligned(totals, expectation))
        if evidence.summed:
            flag = torch.tensor([bool(wrong)])
            dist.broadcast(flag, src=0, group=host_group())
            evidence.write(records, as_sums=not flag.item())
            host_barrier()
        if expectation is None or verdict is None:
            return None
        evidence.write_recheck(claims.rechecked or ())
        evidence.write_custody(claims.custody)
        line = step_line(
            verdict,
            expectation,
            self.shape,
            world_size=dist.get_world_size(),
            mismatch_threshold=self.mismatch_threshold,
            calibrating=self.suspicions.calibrating,
            check_interval=self.check_interval,
        )
        evidence.write_step(line)
        return verdict

    def _sum_over_ranks(self, records: Sequence[ReplayEvidence]) -> StepTotals:
        local_totals = StepTotals(self.shape)
        for record in records:
            local_totals.add(record)
        table = torch.from_numpy(local_totals.to_table(self.passes))
        dist.all_reduce(table, group=host_group())
        return StepTotals.from_table(table.numpy(), self.passes, self.shape)

    def _judge(
        self, totals: StepTotals, expectation: StepExpectation, claims: StepClaims
    ) -> StepVerdict:
        verdict = judge_step(
            totals,
            expectation,
            self.shape,
            mismatch_threshold=self.mismatch_threshold,
            suspicions=self.suspicions,
        )
        if claims.rechecked is not None:
            recheck = judge_recheck(claims.rechecked, claims.missed, self.suspicions)
            verdict = replace(verdict, recheck=recheck)
        custody = judge_custody(claims.custody)
        return replace(verdict, custody=custody, served=claims.served, held=claims.held)
