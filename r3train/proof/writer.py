"""R3 evidence of one rank: two log lines and one JSON record a router call, or a sum of right calls.

The line shapes are a public contract: log scrapers look for them.  Those of a sum have the number of calls
after them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from r3train.config.files import naming, open_regular
from r3train.data import rotated_files
from r3train.data.json_lines import append_lines, cut_truncated_line
from r3train.proof.step_verdict import sums_of
from r3train.proof.custody_verdict import CustodyRecord
from r3train.proof.recheck_verdict import RecheckRecord
from r3train.proof.served_verdict import ServedRecord
from r3train.proof.weights_verdict import WeightsRecord
from r3train.types import ReplayEvidence, ROUTES

logger = logging.getLogger(__name__)

EVIDENCE_DIR = "evidence"
STEPS_FILE = "steps.jsonl"
RECHECK_FILE = "rechecked.jsonl"
CUSTODY_FILE = "custody.jsonl"
SERVED_FILE = "served.jsonl"
WEIGHTS_FILE = "weights.jsonl"
_STEP = re.compile(rb'"step": (\d+)')


def rank_file(run_dir: Path, rank: int) -> Path:
    """Path of a rank's latest records: ``run_dir/evidence/rank_NNNNN.jsonl``.

    Earlier ones are in its parts, ``rank_NNNNN.00001.steps_0-119.jsonl.gz`` and so on.
    """
    return run_dir / EVIDENCE_DIR / f"rank_{rank:05d}.jsonl"


def evidence_lines(record: ReplayEvidence, *, is_sum: bool = False) -> tuple[str, str]:
    """The two lines of a replayed call, as the peers' logs have them, or of a sum of calls."""
    share = record.rows_mismatch / max(record.num_rows, 1)
    calls = f", calls={record.num_calls}" if is_sum else ""
    return (
        f"R3 wrapper: {record.stage} branch taken (rank {record.rank}, "
        f"n_tokens={record.num_rows}, topk={record.topk}, "
        f"replay_idx_sum={record.replay_idx_sum}){calls}",
        f"R3 check (rank {record.rank}, stage {record.stage}): n_tokens={record.num_rows} "
        f"mismatch={record.rows_mismatch} ({share:.2%}){calls}",
    )


class EvidenceWriter:
    """Appends a rank's records; exists only while the R3 check is on.

    ``attempt`` is the same on all ranks and grows with every start in one run directory: a step
    that was trained again after a crash is told apart from the first time by it.  summed: a step in
    which nothing is wrong may be written as the sums of its calls.
    """

    def __init__(self, run_dir: Path, rank: int, attempt: str = "", *, summed: bool = False):
        self.summed = summed
        self._attempt = attempt
        self._path = rank_file(run_dir, rank)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rotated_files.finish_parts(self._path)
        self._file = _opened(self._path)
        with open_regular(self._path) as lines:
            steps = map(_STEP.search, lines)
            self._steps_in_file = {int(step[1]) for step in steps if step}
        self._run_dir = run_dir
        self._steps = self._rechecked = None
        if rank == 0:
            self._steps, self._rechecked = (
                _opened(run_dir / EVIDENCE_DIR / name) for name in (STEPS_FILE, RECHECK_FILE)
            )

    def write(self, records: Sequence[ReplayEvidence], *, as_sums: bool = False) -> None:
        """Log and store the records of one step, or their sums, then flush."""
        for record in sums_of(records) if as_sums else records:
            # a native call took no replay branch
            if record.rows_native == 0 and record.stream == ROUTES:
                for line in evidence_lines(record, is_sum=as_sums):
                    logger.info(line)
            fields = {"attempt": self._attempt, **asdict(record)}
            if not as_sums:
                del fields["num_calls"]
            # hex: JSON readers outside Python lose the low bits of 64-bit integers
            fields["fingerprint"] = f"{record.fingerprint:#018x}"
            with naming(self._path):
                self._file.write(json.dumps(fields) + "\n")
            self._steps_in_file.add(record.step)
        with naming(self._path):
            self._file.flush()
        if self._file.tell() >= rotated_files.PART_BYTES:
            self._file.close()
            steps = f".steps_{min(self._steps_in_file)}-{max(self._steps_in_file)}"
            self._steps_in_file.clear()

            def begin_anew() -> None:
                self._file = _opened(self._path)

            rotated_files.close_part(self._path, steps, begin_anew)

    def write_recheck(self, records: Sequence[RecheckRecord]) -> None:
        """Store the comparisons of one step (rank 0 only)."""
        if self._rechecked is not None:
            with naming(Path(self._rechecked.name)):
                for record in records:
                    line = {"attempt": self._attempt, **asdict(record)}
                    self._rechecked.write(json.dumps(line) + "\n")
                self._rechecked.flush()

    def write_custody(self, records: Sequence[CustodyRecord]) -> None:
        """Store the custody of one step's sessions (rank 0 only); without any no file is made."""
        lines = [{"attempt": self._attempt, **asdict(record)} for record in records]
        if lines:
            append_lines(self._run_dir / EVIDENCE_DIR / CUSTODY_FILE, lines)

    def write_served(self, records: Sequence[ServedRecord]) -> None:
        """Store what the servers said of the canaries after one update (rank 0 only)."""
        lines = [{"attempt": self._attempt, **asdict(record)} for record in records]
        append_lines(self._run_dir / EVIDENCE_DIR / SERVED_FILE, lines)

    def write_weights(self, records: Sequence[WeightsRecord]) -> None:
        """Store what the servers held after one update (rank 0 only)."""
        lines = [{"attempt": self._attempt, **asdict(record)} for record in records]
        append_lines(self._run_dir / EVIDENCE_DIR / WEIGHTS_FILE, lines)

    def write_step(self, verdict: dict) -> None:
        """Store the step's verdict (rank 0 only)."""
        if self._steps is not None:
            with naming(Path(self._steps.name)):
                self._steps.write(json.dumps({"attempt": self._attempt, **verdict}) + "\n")
                self._steps.flush()

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._steps, self._rechecked):
            if file is not None:
                # what a full disk did not take is in its buffer, and the error of that was raised
                with suppress(OSError):
                    file.close()


def _opened(path: Path) -> TextIO:
    cut_truncated_line(path)
    return path.open("a", encoding="utf-8")
