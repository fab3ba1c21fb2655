"""The log lines of a router call: their shapes are what log scrapers of other programs look for."""

from __future__ import annotations

from r3train.proof.writer import evidence_lines
from tests.unit.evidence_dirs import record


def test_a_call_has_the_two_lines_of_the_contract():
    call = record(0, 3, "train", 1, num_rows=4096, topk=8, replay_idx_sum=1234567, rows_mismatch=5)
    assert evidence_lines(call) == (
        "R3 wrapper: replay_forward branch taken (rank 3, n_tokens=4096, topk=8, "
        "replay_idx_sum=1234567)",
        "R3 check (rank 3, stage replay_forward): n_tokens=4096 mismatch=5 (0.12%)",
    )
