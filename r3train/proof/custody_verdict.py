"""custody: an agent's tokens that were sampled and delivered are trained exactly once, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from r3train.chat.token_ledger import ledger_problems, SessionLedger
from r3train.proof.step_verdict import Custody
from r3train.proof.verdicts import FAILED, PASSED
from r3train.types import Amount


@dataclass(frozen=True, slots=True)
class CustodyRecord(SessionLedger):
    """One session that was trained; a line of ``evidence/custody.jsonl``."""

    step: Amount  # the rollout_id


def judge_custody(records: Sequence[SessionLedger]) -> Custody | None:
    """The verdict on a step's sessions; None where it trained none."""
    if not records:
        return None
    failures = [text for record in records for text in ledger_problems(record)]
    tokens = sum(record.num_tokens for record in records)
    return Custody(FAILED if failures else PASSED, len(records), tokens, failures)
