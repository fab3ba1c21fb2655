"""A running job's verdict: the same sums and the same judge as check-evidence."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from r3train.host_group import join_ranks, leave_ranks
from r3train.audit.audit_run import audit_run
from r3train.proof.step_verdict import StepTotals
from r3train.proof.live import LiveProof, StepClaims
from r3train.proof.writer import EvidenceWriter, rank_file, STEPS_FILE
from tests.unit.evidence_dirs import (
    comparison,
    rows_apart,
    expectation_of,
    LAYERS,
    PASSES,
    records_of,
    SHAPE,
)


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
    records = [replace(r, **changes) for r in records_of(0, 0)]
    writer = EvidenceWriter(tmp_path, 0)
    verdict = LiveProof(writer, SHAPE, PASSES, 0.02).prove_step(records, expectation_of(0, {0}))
    writer.close()
    assert verdict.passed == passed
    audit = audit_run(tmp_path, keep_steps=True)
    assert audit.verdict == ("passed" if passed else "failed")
    assert audit.num_findings == len(verdict.failures)


def test_sums_come_out_of_a_table_as_they_went_in():
    totals = StepTotals(SHAPE)
    for call in [*records_of(0, 0), *records_of(0, 1)]:
        totals.add(replace(call, fingerprint=(1 << 64) - 3))
    again = StepTotals.from_table(totals.to_table(PASSES), PASSES, SHAPE)
    assert again.cells == totals.cells
    assert again.counters(("train", "routes", "replay_forward", 1))["fingerprint"] == (1 << 64) - 6


def prove(tmp_path, expectation, check_interval=1, **claims):
    records = [r for r in records_of(0, 0)]
    writer = EvidenceWriter(tmp_path, 0)
    proof = LiveProof(writer, SHAPE, PASSES, 0.02, check_interval=check_interval)
    verdict = proof.prove_step(records, expectation, StepClaims(**claims))
    writer.close()
    return verdict


def test_the_records_of_all_ranks_are_judged_and_one_rank_alone_fails(
    one_rank, tmp_path, monkeypatch
):
    both = expectation_of(0, {0, 1})
    assert {f.what for f in prove(tmp_path / "alone", both).failures} > {"num_calls", "fingerprint"}
    other = StepTotals(SHAPE)
    for record in records_of(0, 1):
        other.add(record)

    def sum_of_two_ranks(table, **_):
        table += torch.from_numpy(other.to_table(PASSES))

    monkeypatch.setattr(dist, "all_reduce", sum_of_two_ranks)
    verdict = prove(tmp_path / "both", both)
    assert verdict.passed and verdict.counts["num_calls"] == 2 * len(PASSES) * len(LAYERS)


def test_a_rank_without_the_expectation_writes_records_and_no_verdict(one_rank, tmp_path):
    assert prove(tmp_path, None) is None
    assert len(rank_file(tmp_path, 0).read_text().splitlines()) == len(PASSES) * len(LAYERS)
    assert (tmp_path / "evidence" / STEPS_FILE).read_text() == ""


@pytest.mark.parametrize("differ, verdict", [(0, "passed"), (99, "failed")])
def test_samples_that_were_computed_again_are_judged_with_the_step_and_written(
    one_rank, tmp_path, differ, verdict
):
    compared = [comparison(0, decoded=rows_apart({2: differ})), comparison(0, noise=None)]
    expectation = expectation_of(0, {0})
    found = prove(tmp_path, expectation, rechecked=compared, missed=2, check_interval=5)
    assert found.passed == (verdict == "passed") and not found.failures
    assert (found.recheck.verdict, found.recheck.parts, found.recheck.missed) == (verdict, 1, 2)
    (line,) = map(json.loads, (tmp_path / "evidence" / STEPS_FILE).read_text().splitlines())
    assert line["check_interval"] == 5 and line["recheck"]["missed"] == 2
    audit = audit_run(tmp_path)
    assert audit.claims["recheck"] == verdict
    assert audit.numbers["rechecked"]["parts"] == 1
    assert prove(tmp_path / "without", expectation).recheck is None
    nothing = prove(tmp_path / "nothing", expectation, rechecked=[])
    assert nothing.recheck.verdict == "no evidence" and nothing.passed
