"""--r3-evidence summed: what evidence of every call catches, sums of right calls catch too."""

from __future__ import annotations

import gzip
import json
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from r3train.data import rotated_files
from r3train.host_group import join_ranks, leave_ranks
from r3train.audit.audit_run import audit_run
from r3train.proof.step_verdict import StepTotals, sums_of
from r3train.proof.live import LiveProof
from r3train.proof.suspicion import Suspicions
from r3train.proof.writer import EvidenceWriter, rank_file
from tests.unit.evidence_dirs import (
    edit,
    expectation_of,
    PASSES,
    record,
    records_of,
    SHAPE,
    write_run,
)

MICROBATCHES = 4
CELLS = 6  # 2 passes, 3 layers


@pytest.fixture
def one_rank(caplog):
    caplog.set_level(logging.CRITICAL)
    join_ranks("gloo", dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


def prove(run_dir: Path, calls, *, summed: bool):
    """One step of a job with these calls: its verdict, and the lines of its evidence."""
    writer = EvidenceWriter(run_dir, 0, summed=summed)
    proof = LiveProof(writer, SHAPE, PASSES, 0.02, Suspicions(1.0, 0))
    verdict = proof.prove_step(calls, expectation_of(0, {0}, MICROBATCHES))
    writer.close()
    return verdict, [json.loads(line) for line in rank_file(run_dir, 0).open()]


def at(calls, changes, *places):
    """The calls, changed where (pass, layer, microbatch) begins as one of ``places`` does."""
    where = [(c.replay_pass, c.layer_number, c.microbatch_id) for c in calls]
    found = [any(w[: len(place)] == place for place in places) for w in where]
    changed = [replace(c, **changes(c)) if hit else c for c, hit in zip(calls, found)]
    assert changed != calls
    return changed


def swapped(calls):
    of = {(c.replay_pass, c.microbatch_id, c.layer_number): c.fingerprint for c in calls}
    other = {1: 2, 2: 1, 3: 3}
    return [
        replace(c, fingerprint=of[c.replay_pass, c.microbatch_id, other[c.layer_number]])
        for c in calls
    ]


def native(c):
    zero = dict.fromkeys(("rows_replayed", "rows_filled", "rows_equal", "rows_overlap"), 0)
    current = dict.fromkeys(("rows_mismatch", "rows_current", "rows_current_equal"), 0)
    return {**zero, **current, "rows_native": c.rows_replayed + c.rows_filled, "fingerprint": 7}


def opposite(name: str, by: int):
    """One call with too much and one with too little, which a sum does not show."""

    def change(calls):
        more = at(calls, lambda c: {name: getattr(c, name) + by}, ("train", 2, 0))
        return at(more, lambda c: {name: getattr(c, name) - by}, ("train", 2, 1))

    return change


TRAIN_2_1 = ("train", 2, 1)
# --plant-bug's route bugs as their evidence has them, and faults that no bug of its plants
PLANTED = {
    "one_expert": lambda cs: at(cs, lambda c: {"fingerprint": c.fingerprint ^ 8}, TRAIN_2_1),
    "token_shift": lambda cs: at(cs, lambda c: {"fingerprint": c.fingerprint ^ 3}, ("train",)),
    "layer_swap": swapped,
    "bypass": lambda cs: at(cs, native, TRAIN_2_1),
    "a call that is missing": lambda cs: cs[:-1],
    "a call made twice": lambda cs: [*cs, cs[-1]],
    "a call made twice and another not": lambda cs: [*cs[:-1], cs[-4]],
    "mismatch": lambda cs: at(
        cs,
        lambda c: {"rows_mismatch": 10, "rows_equal": 81, "rows_current_mismatch": 10},
        ("train",),
    ),
    "recomputed": lambda cs: at(cs, lambda c: {"rows_recompute_differ": 1}, TRAIN_2_1),
    "duplicates": lambda cs: at(cs, lambda c: {"duplicate_rows": 1}, TRAIN_2_1),
    "maps that cancel": opposite("map_sum", 5),
    "rows that cancel": opposite("rows_padding", 2),
    "ids that cancel": opposite("replay_idx_sum", 800),
    "top-k of a call": lambda cs: at(cs, lambda c: {"topk": 3, "map_sum": 330}, TRAIN_2_1),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_whatever_calls_catch_sums_catch_and_every_call_is_there(fault, one_rank, tmp_path):
    calls = PLANTED[fault]([r for r in records_of(0, 0, MICROBATCHES)])
    verdict, lines = prove(tmp_path / "calls", calls, summed=False)
    of_sums, lines_of_sums = prove(tmp_path / "summed", calls, summed=True)
    assert not verdict.passed and of_sums == verdict
    assert lines_of_sums == lines and len(lines) == len(calls)
    audits = [audit_run(tmp_path / name) for name in ("calls", "summed")]
    assert audits[0].verdict == "failed" and audits[0].findings == audits[1].findings


def test_a_right_step_is_one_record_and_two_lines_a_pass_stage_and_layer(
    one_rank, tmp_path, caplog
):
    calls = [r for r in records_of(0, 0, MICROBATCHES)]
    prove(tmp_path / "calls", calls, summed=False)
    caplog.set_level(logging.INFO, "r3train.proof.writer")
    verdict, lines = prove(tmp_path / "summed", calls, summed=True)
    assert verdict.passed and len(lines) == CELLS
    for line in lines:
        assert (line["num_calls"], line["num_rows"], line["rows_equal"]) == (4, 440, 360)
    said = [m for m in caplog.messages if m.startswith(("R3 wrapper", "R3 check"))]
    shape = (
        "R3 wrapper: replay_forward branch taken (rank 0, n_tokens=440, topk=2, "
        "replay_idx_sum=3108), calls=4",
        "R3 check (rank 0, stage replay_forward): n_tokens=440 mismatch=4 (0.91%), calls=4",
    )
    assert len(said) == 2 * CELLS and tuple(said[:2]) == shape
    one, other = (audit_run(tmp_path / n, keep_steps=True) for n in ("calls", "summed"))
    assert one.verdict == other.verdict == "passed" and one.steps == other.steps
    assert one.numbers == other.numbers and one.agreement == other.agreement


def test_a_step_in_which_a_misalignment_agrees_better_has_every_call(one_rank, tmp_path):
    """The job passes it, and check-evidence does not."""
    calls = [r for r in records_of(0, 0, MICROBATCHES)]
    beaten = {"rows_equal": 30, "rows_overlap": 70, "rows_mismatch": 0, "rows_current_equal": 20}
    calls = [replace(c, **beaten, control_token_plus=99) for c in calls]
    verdict, lines = prove(tmp_path, calls, summed=True)
    assert verdict.passed and len(lines) == len(calls)
    assert audit_run(tmp_path).claims["agreement"] == "failed"


def test_sums_have_the_totals_of_their_calls_on_every_kind_of_rank():
    """Of chunks, recomputations, sampling masks, and copies of tokens."""
    calls = [
        replace(r, **changes)
        for r in records_of(0, 0, MICROBATCHES)
        for changes in (
            {"fingerprint": (1 << 64) - 5},
            {"stage": "replay_backward"},
            {"stream": "sampling_mask", "layer_number": 1, "map_sum": r.replay_idx_sum},
            {"vp_stage": 1, "layer_number": r.layer_number + 4},
            {"counts_tokens": False, "rows_recompute_differ": 3},
        )
    ]
    sums = sums_of(calls)
    one, other = StepTotals(SHAPE), StepTotals(SHAPE)
    for call in calls:
        one.add(call)
    for call in sums:
        other.add(call)
    assert one.cells == other.cells and len(sums) <= len(calls) / 3
    assert sum(s.num_calls for s in sums) == len(calls) == len(set(map(id, calls)))
    (summed,) = sums_of([record(0, 0, "train", 1, microbatch_id=m) for m in (2, 1)])
    assert (summed.microbatch_id, summed.num_calls, summed.rows_current) == (1, 2, 60)


DAMAGES = {
    "a record is gone": (lambda rs: rs[:-1], "num_calls"),
    "a record is there twice": (lambda rs: [*rs, rs[-1]], "num_calls"),
    "a call less": (lambda rs: [{**rs[0], "num_calls": 3}, *rs[1:]], "num_calls"),
    "a call more": (lambda rs: [{**rs[0], "num_calls": 5}, *rs[1:]], "num_calls"),
    "no call": (lambda rs: [{**rs[0], "num_calls": 0}, *rs[1:]], "at `$.num_calls`, got 0"),
    "an expert": (lambda rs: [{**rs[0], "fingerprint": "0x1"}, *rs[1:]], "fingerprint"),
    "a row": (lambda rs: [{**rs[0], "rows_padding": 25}, *rs[1:]], "row_kinds_off"),
    "a row's map": (lambda rs: [{**rs[0], "map_sum": 881}, *rs[1:]], "map_deviation"),
    "ids": (lambda rs: [{**rs[0], "replay_idx_sum": 2}, *rs[1:]], "replay_idx_sum_off"),
    "a native row": (lambda rs: [{**rs[0], "rows_native": 1}, *rs[1:]], "rows_native"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_sums_that_were_altered_fail(damage, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    run = write_run(tmp_path, range(2), summed=True, microbatches=MICROBATCHES)
    assert audit_run(run).verdict == "passed"
    change, what = DAMAGES[damage]
    edit(run, 1, change)
    audit = audit_run(run)
    assert audit.verdict == "failed"
    assert any(what in f.what for f in audit.findings), audit.findings


@pytest.mark.parametrize("first", [True, False], ids=["summed first", "calls first"])
def test_a_run_that_was_resumed_with_the_other_setting_passes(first, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    run = write_run(tmp_path, range(3), summed=first, microbatches=3)
    again = {"attempt": "2026-01-02T00:00:00Z", "microbatches": 3}
    write_run(run, range(2, 5), summed=not first, **again)
    audit = audit_run(run)
    assert audit.verdict == "passed" and audit.numbers["num_calls"] == 5 * 2 * 3 * CELLS
    edit(run, 0, lambda rs: rs[1:])
    assert audit_run(run).verdict == "failed"


# -- parts ---------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(rotated_files, "PART_BYTES", 6000)
    monkeypatch.setattr(rotated_files, "MEMBER_BYTES", 2000)


@pytest.mark.parametrize("summed", [False, True], ids=["calls", "summed"])
def test_evidence_in_parts_is_judged_as_evidence_in_one_file(summed, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    how = {"summed": summed, "microbatches": 2}
    whole = audit_run(write_run(tmp_path / "whole", range(9), **how), keep_steps=True)
    monkeypatch.setattr(rotated_files, "PART_BYTES", 6000)
    monkeypatch.setattr(rotated_files, "MEMBER_BYTES", 2000)
    run = write_run(tmp_path / "parts", range(5), **how)
    again = {"attempt": "2026-01-01T00:00:00Z", **how}
    write_run(run, range(5, 9), **again)  # numbers go on
    names = [path.name for path in rotated_files.parts_of(rank_file(run, 1))]
    assert names[0].startswith("rank_00001.00001.steps_0-") and names[-1] == "rank_00001.jsonl"
    assert len(names) > 3 and all(name.endswith(".jsonl.gz") for name in names[:-1])
    audit = audit_run(run, keep_steps=True)
    assert audit.verdict == "passed"
    assert audit.steps == whole.steps and audit.numbers == whole.numbers


def in_parts(tmp_path: Path) -> tuple[Path, list[Path]]:
    run = write_run(tmp_path, range(9), summed=True)
    return run, rotated_files.parts_of(rank_file(run, 1))


def test_a_part_that_is_gone_or_damaged_fails_and_is_named(small_parts, tmp_path):
    run, (first, second, *_) = in_parts(tmp_path)
    content = second.read_bytes()
    second.unlink()
    audit = audit_run(run)
    assert audit.verdict == "failed" and {f.what for f in audit.findings} == {"num_calls"}
    damaged = [
        content[:-9],
        b"",
        b"not gzip",
        content[:40] + bytes(9) + content[49:],
        gzip.compress(gzip.decompress(content)[:-9]),
    ]
    for bad in damaged:
        second.write_bytes(bad)
        audit = audit_run(run)
        assert audit.verdict == "failed"
        assert not bad or audit.findings[0].what.startswith(f"{second.name}"), audit.findings
    # as one member, as gzip itself writes it
    second.write_bytes(gzip.compress(gzip.decompress(content)))
    assert audit_run(run).verdict == "passed"


def test_what_a_crash_left_of_a_part_is_read_and_then_finished(small_parts, tmp_path):
    run, (first, *_) = in_parts(tmp_path)
    plain = first.with_suffix("")
    scratch = first.with_name(first.name + ".tmp")
    plain.write_bytes(gzip.decompress(first.read_bytes()))
    scratch.write_bytes(first.read_bytes()[:50])
    assert audit_run(run).verdict == "passed"  # the part is there twice, and counts once
    first.unlink()
    assert audit_run(run).verdict == "passed"
    write_run(run, range(9, 10), summed=True)
    assert first.exists() and not plain.exists() and not scratch.exists()
    with rank_file(run, 1).open("a") as file:
        file.write('{"attempt": "2026')
    assert audit_run(run).verdict == "passed"  # torn at its end, as a kill leaves it


def test_a_part_that_cannot_be_compressed_stays_plain(small_parts, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rotated_files.gzip, "compress", full)
    run, found = in_parts(tmp_path)
    assert len(found) > 2 and all(path.suffix == ".jsonl" for path in found)
    assert not list(run.glob("evidence/*.tmp")) and audit_run(run).verdict == "passed"
