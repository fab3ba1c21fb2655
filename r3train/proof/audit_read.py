"""A run's evidence files, step by step and in bounded memory, whatever a crash left of them.

The rank files are read side by side in windows of steps: what is in memory is a few steps' sums,
not their records.  Where a run was started several times in one directory, the last finished time
that a step was trained counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from r3train.proof.audit_lines import BrokenLines, JsonLine, json_lines
from r3train.proof.audit_shapes import check_record, check_step, expert_id_sums
from r3train.proof.check import COUNTED_ON_COPIES, COUNTERS, STAGES
from r3train.proof.writer import EVIDENCE_DIR, STEPS_FILE

# (pass, stage, 1-based layer)
Cell = tuple[str, str, int]
# per-rank sums held at once; about 200 bytes each
_BUDGET = 400_000
# places that only damaged files have many of
_MAX_ODD_CELLS = 50
_MAX_UNFINISHED = 1000
_RANK_FILE = re.compile(r"rank_([0-9]{5,7})\.jsonl", re.ASCII)
_ERRORS = ("rows_native", "duplicate_rows", "map_deviation", "rows_recompute_differ")
_ROW_KINDS = ("rows_replayed", "rows_filled", "rows_padding", "rows_native")
_DERIVED = ("num_calls", "fingerprint", "map_deviation")


@dataclass
class StepEvidence:
    """One judged step as it was run: its line in steps.jsonl, and sums over the rank files.

    ``cells`` holds the counters of ``check.COUNTERS`` in their order; ``of_rank`` the calls and the
    fingerprint of each rank; ``at_fault`` the ranks on whose own records a counter of errors is not 0,
    or a value is not what a call can have; ``odd`` the first such value and what it must be;
    ``unexpected`` the ranks that called a router where the step has none.  ``superseded``: a later
    start trained the step again, and its time counts.
    """

    step: int
    attempt: str
    line: dict[str, Any]
    superseded: bool = False
    cells: dict[Cell, list[int]] = field(default_factory=dict)
    of_rank: dict[Cell, dict[int, list[int]]] = field(default_factory=dict)
    at_fault: dict[tuple[Cell, str], set[int]] = field(default_factory=dict)
    odd: dict[tuple[Cell, str], tuple[str, str]] = field(default_factory=dict)
    unexpected: dict[Cell, set[int]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    num_records: int = 0

    def add(self, r: dict[str, Any]) -> None:
        """Add one record that ``check_record`` let through."""
        cell: Cell = (r["replay_pass"], r["stage"], r["layer_number"])
        rank, copies = r["rank"], not r.get("counts_tokens", True)
        self.ranks.add(rank)
        self.num_records += 1
        if not self._expects(cell):
            if cell in self.unexpected or len(self.unexpected) < _MAX_ODD_CELLS:
                self.unexpected.setdefault(cell, set()).add(rank)
            return
        derived = {
            "num_calls": 1,
            "fingerprint": int(r["fingerprint"], 16),
            "map_deviation": abs(r["map_sum"] - r["num_rows"] * self.line["topk"]),
        }
        values = [derived[n] if n in _DERIVED else r[n] for n in COUNTERS]
        for name in _ERRORS:
            if derived.get(name) or (name not in derived and r[name]):
                self.at_fault.setdefault((cell, name), set()).add(rank)
        for name, got, expected in self._odd_values(r):
            self.at_fault.setdefault((cell, name), set()).add(rank)
            self.odd.setdefault((cell, name), (got, expected))
        sums = self.cells.setdefault(cell, [0] * len(COUNTERS))
        for i, name in enumerate(COUNTERS):
            if not copies or name in COUNTED_ON_COPIES:
                sums[i] += values[i]
        own = self.of_rank.setdefault(cell, {}).setdefault(rank, [0, 0])
        own[0] += 1
        own[1] = (own[1] + (0 if copies else values[1])) % (1 << 64)

    def _odd_values(self, r: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
        """Values of one record that no call can have: name, got, expected."""
        topk = self.line["topk"]
        rows = sum(r[kind] for kind in _ROW_KINDS)
        if rows != r["num_rows"]:
            yield "row kinds", str(rows), str(r["num_rows"])
        if r["topk"] != topk:
            yield "topk", str(r["topk"]), str(topk)
        # a row that the router chose itself was served nothing
        if not r["rows_native"]:
            low, high = expert_id_sums(r["num_rows"], topk, self.line["num_experts"])
            if not low <= r["replay_idx_sum"] <= high:
                yield "replay_idx_sum", str(r["replay_idx_sum"]), f"from {low} to {high}"

    def _expects(self, cell: Cell) -> bool:
        replay_pass, stage, layer = cell
        known = replay_pass in self.line["passes"] and stage in STAGES
        return known and str(layer) in self.line["expected_fingerprints"]


class EvidenceFiles:
    """The evidence of one run directory; what is odd about the files is known after ``steps()``."""

    def __init__(self, run_dir: Path):
        self.directory = run_dir / EVIDENCE_DIR
        self.broken = BrokenLines()
        self.truncated: list[str] = []  # files whose last line was never finished
        self.out_of_order: dict[int, int] = {}  # rank -> records
        # attempt -> steps with records and no verdict; the first 1000 such steps
        self.unfinished: dict[str, set[int]] = {}
        self._num_unfinished = 0
        self.speakers: set[int] = set()  # ranks with a record, before steps() of the first ones
        self.num_records = 0
        self.rank_files: dict[int, Path] = {}
        for path in sorted(self.directory.glob("rank_*.jsonl")):
            if match := _RANK_FILE.fullmatch(path.name):
                self.rank_files[int(match[1])] = path
        self._index_steps()

    def _index_steps(self) -> None:
        """Where each line of steps.jsonl is, and which of several for one step counts."""
        self._entries: list[tuple[str, int, int]] = []  # attempt, step, offset
        path = self.directory / STEPS_FILE
        starts = _Starts()
        if path.exists():
            for line in self._lines(path):
                if line.value is None:
                    continue
                try:
                    check_step(line.value)
                except ValueError as error:
                    self.broken.add(path.name, line.number, f"not a step's verdict: {error}")
                    continue
                step = line.value["step"]
                attempt = starts.name(line.value, step, again=True)
                self._entries.append((attempt, step, line.begin))
        self._place = {(a, s): i for i, (a, s, _) in enumerate(self._entries)}
        latest = {step: i for i, (_, step, _) in enumerate(self._entries)}
        self._counting = set(latest.values())
        self.judged_steps = sorted(latest)

    @property
    def attempts(self) -> list[str]:
        """Starts of the run that left anything, in order."""
        return list(dict.fromkeys([a for a, _, _ in self._entries] + sorted(self.unfinished)))

    @property
    def superseded(self) -> list[tuple[str, int]]:
        """(attempt, step) of every verdict that a later one for the same step replaces."""
        return [e[:2] for i, e in enumerate(self._entries) if i not in self._counting]

    def judged_in(self, attempt: str) -> list[int]:
        """Steps that one start of the run judged."""
        return [step for a, step, _ in self._entries if a == attempt]

    def judged_after(self, attempt: str) -> set[int]:
        """Steps that later starts judged: the names of starts sort as they began."""
        return {step for later, step, _ in self._entries if later > attempt}

    def _lines(self, path: Path, offset: int = 0, number: int = 0) -> Iterator[JsonLine]:
        """The lines from ``offset`` on; what is odd about one is kept."""
        try:
            for line in json_lines(path, offset, number):
                number = line.number
                if line.cut:
                    self.truncated.append(path.name)
                elif line.odd:
                    self.broken.add(path.name, line.number, line.odd)
                yield line
        except OSError as error:
            self.broken.add(path.name, number + 1, f"cannot be read: {error.strerror}")

    def steps(self, *, superseded: bool = False) -> Iterator[StepEvidence]:
        """Every judged step that counts, or every one at all, in the order of the file."""
        readers = {rank: _RankReader(path) for rank, path in self.rank_files.items()}
        self.speakers = {rank for rank, path in self.rank_files.items() if _speaks(path, rank)}
        begin = 0
        while begin < len(self._entries):
            stages = self._step_at(begin).line["expected_calls"]
            cells = sum(len(layers) for s in stages.values() for layers in s.values()) or 100
            end = begin + max(1, min(256, _BUDGET // (cells * max(1, len(readers)))))
            end = min(end, len(self._entries))
            wanted = (i for i in range(begin, end) if superseded or i in self._counting)
            window = {i: self._step_at(i) for i in wanted}
            for rank, reader in readers.items():
                self._read(rank, reader, window, begin, end)
            yield from window.values()
            begin = end
        for rank, reader in readers.items():  # what follows the last verdict
            self._read(rank, reader, {}, begin, begin)

    def _step_at(self, i: int) -> StepEvidence:
        attempt, step, offset = self._entries[i]
        with (self.directory / STEPS_FILE).open("rb") as file:
            file.seek(offset)
            line = orjson.loads(file.readline())
        return StepEvidence(step, attempt, line, superseded=i not in self._counting)

    def _read(
        self, rank: int, reader: _RankReader, window: dict[int, StepEvidence], begin: int, end: int
    ) -> None:
        """Add a rank's records up to the first that belongs behind the window."""
        for line in self._lines(reader.path, reader.offset, reader.number):
            record = line.value
            if record is not None:
                try:
                    check_record(record, rank)
                except ValueError as error:
                    self.broken.add(reader.path.name, line.number, f"not a record: {error}")
                    record = None
            if record is not None:
                step = record["step"]
                attempt = reader.starts.name(record, step)
                place = self._place.get((attempt, step))
                if place is not None and place >= end:
                    return
                self.num_records += 1
                if place is None:
                    self._keep_unfinished(attempt, step)
                elif place < begin:
                    self.out_of_order[rank] = self.out_of_order.get(rank, 0) + 1
                elif place in window:
                    window[place].add(record)
            reader.offset, reader.number = line.end, line.number

    def _keep_unfinished(self, attempt: str, step: int) -> None:
        if self._num_unfinished < _MAX_UNFINISHED:
            steps = self.unfinished.setdefault(attempt, set())
            self._num_unfinished += step not in steps
            steps.add(step)


def _speaks(path: Path, rank: int) -> bool:
    """Whether a rank left one record at least: one without layers with experts leaves none."""
    try:
        for line in json_lines(path):
            try:
                check_record(line.value or {}, rank)
            except ValueError:
                continue
            return True
    except OSError:
        pass  # told when the steps are read
    return False


class _Starts:
    """Names the start of the run that a line belongs to; without one, a step going back is a start."""

    def __init__(self) -> None:
        self._number, self._last = 1, -1

    def name(self, line: dict, step: int, *, again: bool = False) -> str:
        if line.get("attempt"):
            return line["attempt"]
        if step < self._last or (again and step == self._last):
            self._number += 1
        self._last = step
        return f"number {self._number}"


class _RankReader:
    """Where the reading of one rank's file stands."""

    def __init__(self, path: Path):
        self.path, self.offset, self.number, self.starts = path, 0, 0, _Starts()
