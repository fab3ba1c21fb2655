"""A running job's verdict: the same sums and the same judge as check-evidence."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from r3train.host_group import join_ranks, leave_ranks
from r3train.proof.audit import audit_run
from r3train.proof.check import StepTotals
from r3train.proof.live import prove_step
from r3train.proof.writer import EvidenceWriter
from tests.unit.evidence_dirs import expectation_of, PASSES, records_of, SHAPE, with_versions


@pytest.fixture
def one_rank(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    join_ranks("gloo", dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


@pytest.mark.parametrize(
    "changes, passed",
    [({}, True), ({"fingerprint": 1}, False), ({"replay_idx_sum": 0}, False), ({"topk": 3}, False)],
)
def test_a_job_and_check_evidence_say_the_same_of_the_same_records(
    one_rank, tmp_path, changes, passed
):
    records = [replace(with_versions(r), **changes) for r in records_of(0, 0)]
    writer = EvidenceWriter(tmp_path, 0)
    verdict = prove_step(
        writer,
        records,
        expectation_of(0, {0}, versions=True),
        SHAPE,
        passes=PASSES,
        mismatch_threshold=0.02,
    )
    writer.close()
    assert verdict.passed == passed
    audit = audit_run(tmp_path, keep_steps=True)
    assert audit.verdict == ("passed" if passed else "failed")
    assert audit.steps[0].counts == verdict.counts and audit.num_findings == len(verdict.failures)


def test_sums_come_out_of_a_table_as_they_went_in():
    totals = StepTotals(SHAPE)
    for call in [*records_of(0, 0), *records_of(0, 1)]:
        totals.add(replace(call, fingerprint=(1 << 64) - 3))
    again = StepTotals.of_table(totals.to_table(PASSES), PASSES, SHAPE)
    assert again.cells == totals.cells
    assert again.counters(("train", "replay_forward", 1))["fingerprint"] == (1 << 64) - 6
