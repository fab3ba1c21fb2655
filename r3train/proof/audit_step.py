"""One step's evidence judged again from its records: what is wrong, on which claim, and where."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from r3train.proof.audit_agreement import beaten_by, NATIVE
from r3train.proof.audit_read import Cell, StepEvidence
from r3train.proof.audit_result import Finding
from r3train.proof.check import COUNTERS, Failure, STAGES, StepExpectation, judge

_COLUMN = {name: i for i, name in enumerate(COUNTERS)}
_INT64 = (1 << 63) - 1
_APPLIED = ("fingerprint", "rows_recompute_differ")
_ROWS = ("rows_equal", "rows_overlap", "rows_mismatch")
# what records that are not there take with them
_LOST = ("num_calls", "fingerprint", "rows_replayed", "rows_filled")
_WORDS = {
    "num_calls": "router calls",
    "fingerprint": "route fingerprint",
    "rows_replayed": "rows replayed",
    "rows_filled": "rows with filled slots",
    "rows_native": "rows the router chose itself",
    "duplicate_rows": "rows with fewer experts than top-k",
    "map_deviation": "entries of the routing map beyond rows x top-k",
    "rows_recompute_differ": "recomputed rows that differ from the forward",
    "row kinds": "the kinds of rows, which do not add up to the rows of a call: their sum",
    "topk": "top-k of a call",
    "replay_idx_sum": "sum of the expert ids that were served",
}


def expectation_of(step: StepEvidence) -> StepExpectation:
    """What the rollout side recorded of the step, as the run judged by it."""
    line = step.line

    def by_layer(name: str) -> dict[int, int]:
        return {int(n): v for n, v in line[name].items()}

    return StepExpectation(
        step.step,
        {int(n): int(f, 16) for n, f in line["expected_fingerprints"].items()},
        rows_replayed=by_layer("expected_rows_replayed"),
        rows_filled=by_layer("expected_rows_filled"),
        num_calls={
            p: {s: {int(n): c for n, c in of.items()} for s, of in stages.items()}
            for p, stages in line["expected_calls"].items()
        },
    )


class StepJudge:
    """Judges one step; every finding goes to ``find`` as it is made.

    threshold: share of rows without a common expert that may be, in the place of the one that the
    run recorded; None takes the recorded one, and with it the run's own verdict on it.
    After ``judge``: ``lost``, whether calls are missing with their records, and ``silent``, the
    ranks that may have made them (not found here: whole files are judged by the caller);
    ``beaten``, layers whose agreement a control beats; ``waived``, whether the run itself judged
    that the step failed, by the threshold that was replaced alone.
    """

    def __init__(
        self, step: StepEvidence, find: Callable[[Finding], None], threshold: float | None
    ):
        self._step = step
        self._line = step.line
        self._find = find
        self._replaced = threshold is not None
        self.threshold = step.line["mismatch_threshold"] if threshold is None else threshold
        self._found = 0
        self.lost = False
        self.silent: Collection[int] = ()
        self.beaten: set[int] = set()
        self.waived = False

    def judge(self, expectation: StepExpectation, silent: Callable[[], Collection[int]]) -> None:
        """Find what is wrong; ``silent`` is asked for ranks without a record where calls are missing."""
        failures = self._failures(expectation)
        if any(f.what == "num_calls" and f.got < f.expected for f in failures):
            self.silent = silent()
            # a crash may take records with it, and a superseded step was trained again
            self.lost = bool(self.silent) or self._step.superseded
        for cell, ranks in sorted(self._step.unexpected.items()):
            self._at("covered", "router calls that nobody expected", cell, ranks)
        for f in failures:
            if not (self.lost and f.what in _LOST):
                self._failure(f)
        for (cell, name), (got, expected) in sorted(self._step.odd.items()):
            self._at("covered", _WORDS[name], cell, self._step.at_fault[cell, name], got, expected)
        for cell in sorted(self._step.cells):
            self._rows_of(cell)
            self._controls_of(cell)
        if not self._found:
            self._own_verdict()
            if not self.lost:
                self._own_counts()

    def _failures(self, expectation: StepExpectation) -> list[Failure]:
        """What the run's own check says of the sums of the records."""
        passes = tuple(self._line["passes"])
        layers = max(expectation.fingerprints, default=0)
        table = np.zeros((len(passes), len(STAGES), layers + 1, len(COUNTERS)), dtype=np.int64)
        for (p, s, layer), counted in self._step.cells.items():
            values = [min(value, _INT64) for value in counted]
            values[1] = _signed(counted[1])
            table[passes.index(p), STAGES.index(s), layer] = values
        # agreement is added up over the run instead: one expert of one is a model without chance
        return judge(
            table, passes, expectation, mismatch_threshold=float("inf"), num_experts=1, topk=1
        ).failures

    def _failure(self, f: Failure) -> None:
        cell = (f.replay_pass, f.stage, f.layer_number)
        got, expected = str(f.got), str(f.expected)
        if f.what == "fingerprint":
            got, expected = f"{f.got:#018x}", f"{f.expected:#018x}"
        ranks = self._suspects(cell, f.what)
        self._at(_claim(f.what), _WORDS.get(f.what, f.what), cell, ranks, got, expected)

    def _rows_of(self, cell: Cell) -> None:
        values = dict(zip(COUNTERS, self._step.cells[cell]))
        ranks = self._step.of_rank[cell]
        replayed, mismatch = values["rows_replayed"], values["rows_mismatch"]
        compared = sum(values[n] for n in _ROWS)
        if compared != replayed:
            what = "rows that agree, overlap and mismatch"
            self._at("covered", what, cell, ranks, str(compared), str(replayed))
        if mismatch > self.threshold * replayed:
            what = "rows that share no expert with the trainer's own choice"
            most = f"at most {self.threshold:g} of them"
            self._at("agreement", what, cell, ranks, f"{mismatch} of {replayed}", most)

    def _controls_of(self, cell: Cell) -> None:
        values = dict(zip(COUNTERS, self._step.cells[cell]))
        if cell[:2] == NATIVE and (beaten := beaten_by(values)):
            self.beaten.add(cell[2])
            what, got, expected = beaten.words()
            self._at("agreement", what, cell, (), got, expected)

    def _own_verdict(self) -> None:
        """What the run itself said, where the records do not show it."""
        line = self._line
        if line["passed"]:
            return
        error, failures = line["threshold_error"], line["failures"]
        if error and not self._replaced:
            self._at("agreement", f"the run itself judged it failed ({error:.200})")
        self.waived = bool(error) and self._replaced
        if failures or not error:
            text = "; ".join(map(_recorded_text, failures[:3])) or "no reason recorded"
            applied = any(f.get("what") in _APPLIED for f in failures) or not failures
            claim = "applied" if applied else "covered"
            self._at(claim, f"the run itself judged it failed ({text})")

    def _own_counts(self) -> None:
        for name in COUNTERS[2:]:
            counted = sum(values[_COLUMN[name]] for values in self._step.cells.values())
            if counted != self._line["counts"][name]:
                what = f"{name} of the step's records, against what the run counted then,"
                wanted = str(self._line["counts"][name])
                self._at("covered", what, got=str(counted), expected=wanted)

    def _suspects(self, cell: Cell, what: str) -> Collection[int]:
        """The ranks that a failure points at: at best the one, at worst all that hold the layer."""
        step = self._step
        if (cell, what) in step.at_fault:
            return step.at_fault[cell, what]
        of_rank = step.of_rank.get(cell, {})
        if what == "num_calls" and of_rank:
            usual = sorted(calls for calls, _ in of_rank.values())[len(of_rank) // 2]
            return [rank for rank, (calls, _) in of_rank.items() if calls != usual] or of_rank
        if what == "fingerprint":
            return self._wrong_fingerprints(cell, of_rank)
        return of_rank

    def _wrong_fingerprints(self, cell: Cell, of_rank: dict[int, list[int]]) -> Collection[int]:
        wrong: list[int] = []
        for place in self._line.get("places", []):
            own = sum(of_rank.get(rank, (0, 0))[1] for rank in place["ranks"]) % (1 << 64)
            if own != int(place["fingerprints"].get(str(cell[2]), "0x0"), 16):
                wrong += [rank for rank in place["ranks"] if rank in of_rank]
        if wrong:
            return wrong
        # every pass replays the same routes, so a rank whose passes differ is the one
        seen: dict[int, set[int]] = {}
        for (_, _, number), ranks in self._step.of_rank.items():
            if number == cell[2]:
                for rank, (_, fingerprint) in ranks.items():
                    seen.setdefault(rank, set()).add(fingerprint)
        return [rank for rank, values in seen.items() if len(values) > 1] or seen

    def _at(
        self,
        claim: str,
        what: str,
        cell: Cell | None = None,
        ranks: Collection[int] = (),
        got: str = "",
        expected: str = "",
    ) -> None:
        self._found += 1
        attempt = self._step.attempt if self._step.superseded else ""
        self._find(
            Finding(
                claim,
                what,
                self._step.step,
                tuple(sorted(ranks)),
                *(cell or (None, None, None)),
                got,
                expected,
                attempt,
            )
        )


def _claim(what: str) -> str:
    return "applied" if what in _APPLIED else "covered"


def _recorded_text(f: dict[str, Any]) -> str:
    def of(key: str) -> str:
        return f"{f.get(key)!s:.60}"

    place = f"{of('replay_pass')}/{of('stage')} layer {of('layer_number')}"
    return f"{place}: {of('what')} is {of('got')}, expected {of('expected')}"


def _signed(value: int) -> np.int64:
    return np.uint64(value % (1 << 64)).astype(np.int64)
