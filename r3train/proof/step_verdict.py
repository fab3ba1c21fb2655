"""One step's proof: router calls are added up, and the sums judged against the rollout's records.

A running job and ``r3train check-evidence`` use the same reducer (``StepTotals``) and the same verdict
(``judge_step``).  "Passed" and "never ran" are different answers: calls are compared with the number
expected, and a shortfall fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, get_args, Literal

import msgspec
import numpy as np

from r3train.proof.controls import beaten_by
from r3train.proof.suspicion import (
    ROWS_OF_NOTHING,
    Statistic,
    suspicion_texts,
    Suspicions,
    verdict_of,
)
from r3train.proof.verdicts import FAILED, PASSED, SUSPECT
from r3train.routing.agreement import chance_levels
from r3train.types import (
    Amount,
    Fingerprint,
    INDEXER,
    LayerNumber,
    Rank,
    ReplayEvidence,
    ReplayPass,
    ReplayStage,
    ROUTES,
    RouteShape,
    RowClass,
    SAMPLING_MASK,
    StreamName,
    Version,
)

# Of the files in evidence/; files of another version are refused.
EVIDENCE_VERSION = 5
STAGES: tuple[str, ...] = get_args(ReplayStage)
STREAMS: tuple[str, ...] = get_args(StreamName)
FORWARD, BACKWARD = STAGES
# A RowClass in evidence
RowLabel = Literal["decoded", "prefilled", "prefilled_again", "cached", "filled"]
# The shares of agreement of further streams begin so.
_SHARES = {SAMPLING_MASK: "kept", INDEXER: "indexer"}
# (pass, stream, stage, layer number)
Cell = tuple[str, str, str, int]
# Counters that steps.jsonl and the metrics have.
COUNTS = (
    "rows_replayed",
    "rows_filled",
    "rows_padding",
    "rows_native",
    "duplicate_rows",
    "map_deviation",
    "rows_equal",
    "rows_overlap",
    "rows_mismatch",
    "rows_recompute_differ",
    "control_token_minus",
    "control_token_plus",
    "control_layer_minus",
    "control_layer_plus",
    "rows_current",
    "rows_current_equal",
    "rows_current_mismatch",
)
# The distance of a call's values from those that a call can have: must be 0.
_IMPOSSIBLE = ("row_kinds_off", "topk_off", "replay_idx_sum_off", "part_rows_off")
# A cell's sums, in this order.
COUNTERS = ("num_calls", "fingerprint", *COUNTS, *_IMPOSSIBLE)
ERRORS = (
    "rows_native",
    "duplicate_rows",
    "map_deviation",
    "rows_recompute_differ",
    *_IMPOSSIBLE,
)
# On ranks that see copies of another rank's tokens only calls and their errors count.
_COUNTED_ON_COPIES = {
    "num_calls",
    "rows_native",
    "duplicate_rows",
    "map_deviation",
    *_IMPOSSIBLE,
}
_KEPT_ON_COPIES = [name in _COUNTED_ON_COPIES for name in COUNTERS]
_BEFORE_MAP = attrgetter(*COUNTS[: COUNTS.index("map_deviation")])
_AFTER_MAP = attrgetter(*COUNTS[COUNTS.index("map_deviation") + 1 :])
_FINGERPRINT = COUNTERS.index("fingerprint")
_MASK = (1 << 64) - 1
# Among so many rows a quarter of chance's share without a common expert is no rounding: half of the rows may be right, as on
# context-parallel ranks whose halves are another's.  Other streams have no chance level.
_GROSS_ROWS, _GROSS, _GROSS_OF_OTHERS, _GROSS_THRESHOLDS = 32, 0.25, 0.5, 10
# the first steps do not make more than this part of a gross share usual
_GROSS_OVER_USUAL = 8


def controls_pass(passes: Collection[str]) -> str:
    """The pass in whose forwards the trainer's own choice is compared: no weight has changed yet.

    passes: of a step.  The train pass takes the place of an old-log-prob pass that was skipped.
    """
    return "old_log_prob" if "old_log_prob" in passes else "train"


def agreement_counts(
    totals: StepTotals, expectation: StepExpectation, stream: str = ROUTES
) -> dict[int, dict[str, int]]:
    """The counters by layer where the trainer's own choice is compared: of first forwards."""
    if stream not in expectation.streams:
        return {}
    calls = expectation.streams[stream].calls
    replay_pass = controls_pass(calls)
    layers = sorted(calls[replay_pass][FORWARD])
    return {layer: totals.counters((replay_pass, stream, FORWARD, layer)) for layer in layers}


class StepTotals:
    """Sums over calls of one step, by pass, stream, stage and layer.

    shape: of the model's routes.  ``cells`` holds the ``COUNTERS`` of each place in their order;
    fingerprints add mod 2^64.
    """

    def __init__(self, shape: RouteShape):
        self._shape = shape
        self.cells: dict[Cell, list[int]] = {}

    def add(self, call: ReplayEvidence) -> None:
        """Add one call, or a sum of calls."""
        rows = call.rows_replayed + call.rows_filled + call.rows_padding + call.rows_native
        is_router = call.stream == ROUTES
        left = call.num_rows * call.topk if is_router else call.replay_idx_sum
        values = [
            call.num_calls,
            call.fingerprint,
            *_BEFORE_MAP(call),
            abs(call.map_sum - left),
            *_AFTER_MAP(call),
            abs(rows - call.num_rows),
            abs(call.topk - self._shape.topk) if call.stream != INDEXER else 0,
            self._idx_sum_off(call) if is_router else 0,
            _part_rows_off(call),
        ]
        if not call.counts_tokens:
            values = [v if kept else 0 for v, kept in zip(values, _KEPT_ON_COPIES)]
        self._add((call.replay_pass, call.stream, call.stage, call.layer_number), values)

    def merge(self, other: StepTotals) -> None:
        """Add what another rank counted."""
        for cell, values in other.cells.items():
            self._add(cell, values)

    def counters(self, cell: Cell) -> dict[str, int]:
        """The sums of a place by name; zeros where nothing was called."""
        return dict(zip(COUNTERS, self.cells.get(cell) or [0] * len(COUNTERS)))

    def to_table(self, passes: Sequence[str]) -> np.ndarray:
        """int64[passes, streams, stages, layers + 1, counters], to be added up over ranks.

        Layers are indexed by their number; fingerprints stand in the int64's bits.
        """
        size = len(passes), len(STREAMS), len(STAGES), self._shape.num_layers + 1, len(COUNTERS)
        table = np.zeros(size, dtype=np.uint64)
        for (replay_pass, stream, stage, layer), values in self.cells.items():
            place = passes.index(replay_pass), STREAMS.index(stream), STAGES.index(stage), layer
            table[place] = np.array(values, dtype=np.uint64)
        return table.view(np.int64)

    @classmethod
    def from_table(cls, table: np.ndarray, passes: Sequence[str], shape: RouteShape) -> StepTotals:
        """The inverse of ``to_table``."""
        totals = cls(shape)
        for p, stream, stage, layer in np.argwhere(table.any(axis=-1)).tolist():
            values = table.view(np.uint64)[p, stream, stage, layer].tolist()
            totals.cells[passes[p], STREAMS[stream], STAGES[stage], layer] = values
        return totals

    def _add(self, cell: Cell, values: Sequence[int]) -> None:
        sums = self.cells.get(cell)
        summed = list(values) if sums is None else [a + b for a, b in zip(sums, values)]
        summed[_FINGERPRINT] &= _MASK
        self.cells[cell] = summed

    def _idx_sum_off(self, call: ReplayEvidence) -> int:
        """The distance of ``replay_idx_sum`` from the sums that rows of distinct experts can have.

        Padding and missing slots are filled with distinct experts too.  A row that the router chose
        itself was served nothing.
        """
        if call.rows_native:
            return 0
        low, high = expert_id_sums(call.num_rows, self._shape.topk, self._shape.num_experts)
        return max(low - call.replay_idx_sum, call.replay_idx_sum - high, 0)


_KEY = (
    "step",
    "rank",
    "replay_pass",
    "stream",
    "stage",
    "vp_stage",
    "layer_number",
    "topk",
    "counts_tokens",
)
_key_of = attrgetter(*_KEY)
_SUMMED = [f.name for f in fields(ReplayEvidence) if f.name not in {*_KEY, "microbatch_id"}]


def sums_of(calls: Iterable[ReplayEvidence]) -> list[ReplayEvidence]:
    """The calls of a step, added up by pass, stage and layer.

    Faults of opposite sign would cancel in a sum, so only calls that were judged one by one, and in
    which nothing is wrong, may be added.
    """
    groups: dict[tuple, list[ReplayEvidence]] = {}
    for call in calls:
        groups.setdefault(_key_of(call), []).append(call)
    return [_sum_of(group) for group in groups.values()]


def _sum_of(calls: Sequence[ReplayEvidence]) -> ReplayEvidence:
    sums: dict[str, Any] = {name: sum(getattr(c, name) for c in calls) for name in _SUMMED}
    sums["fingerprint"] &= _MASK
    return replace(calls[0], microbatch_id=min(c.microbatch_id for c in calls), **sums)


def _part_rows_off(call: ReplayEvidence) -> int:
    """Return by how much a count of current rows exceeds its total; 0 if consistent."""
    equal, mismatch = call.rows_current_equal, call.rows_current_mismatch
    return max(
        0,
        call.rows_current - (call.rows_replayed + call.rows_filled),
        equal + mismatch - call.rows_current,
        equal - call.rows_equal,
        mismatch - call.rows_mismatch,
    )


def expert_id_sums(num_rows: int, topk: int, num_experts: int) -> tuple[int, int]:
    """The least and the largest sum of expert ids 0..num_experts-1 in rows of ``topk`` distinct ones."""
    low = topk * (topk - 1) // 2
    return num_rows * low, num_rows * (topk * (num_experts - 1) - low)


def misaligned(
    totals: StepTotals, expectation: StepExpectation
) -> Iterator[tuple[Cell, tuple[str, str, str]]]:
    """Yield the places in which a misaligned choice clearly agrees better than the replayed one, see ``beaten_by``."""
    for stream, expected in expectation.streams.items():
        for layer, values in agreement_counts(totals, expectation, stream).items():
            if beaten := beaten_by(values, indexer=stream == INDEXER):
                yield (controls_pass(expected.calls), stream, FORWARD, layer), beaten


class Place(msgspec.Struct, frozen=True):
    """The ranks of one data-parallel rank, and the fingerprint that they must have in each layer of a stream."""

    ranks: list[Rank]
    fingerprints: dict[StreamName, dict[LayerNumber, Fingerprint]]


class StreamExpectation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the rollout side knows of one stream of a step before the trainer has run."""

    fingerprints: dict[LayerNumber, Fingerprint]
    rows_replayed: dict[LayerNumber, Amount]  # rows whose every slot was recorded
    rows_filled: dict[LayerNumber, Amount]  # real rows with at least one slot missing
    # rows that rightly have no choice, as many in every layer: no server computed them, or an indexer chooses all of
    # their tokens.  None where nobody knows: no server generated the rollout, or the stream is of sampling masks.
    rows_without_choice: Amount | None
    rows_current: dict[ReplayPass, Amount]  # rows of the weight version that the actor holds
    calls: dict[ReplayPass, dict[ReplayStage, dict[LayerNumber, Amount]]]  # over all ranks


class StepExpectation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the rollout side knows of a step before the trainer has run.

    ``places``: where to look if a fingerprint is wrong.
    """

    step: Amount
    streams: dict[StreamName, StreamExpectation]
    # rows by class and weight version; None where a sample's classes are not known
    rows_by_class: dict[RowLabel, dict[Version, Amount]] | None = None
    places: list[Place] = []

    def rows_of_class(self, row_class: RowClass) -> int:
        """Rows of a class over all weight versions."""
        assert self.rows_by_class is not None
        return sum(self.rows_by_class.get(row_class.label, {}).values())

    def total_calls(self) -> int:
        """Router calls over all passes and layers."""
        passes = self.streams[ROUTES].calls.values()
        return sum(sum(layers.values()) for stages in passes for layers in stages.values())


@dataclass(frozen=True)
class Failure:
    """One quantity that is not as it must be, and its place."""

    replay_pass: str
    stream: str
    stage: str
    layer_number: int
    what: str
    got: int
    expected: int | float

    def __str__(self) -> str:
        place = place_name(self.replay_pass, self.stream, self.stage)
        return f"{place} layer {self.layer_number}: {self.what} is {self.got}, expected {self.expected}"


@dataclass(frozen=True)
class Recheck:
    """Samples that their servers rechecked (see ``rechecked``).

    verdict: passed, suspect, failed or no evidence; parts: comparisons that were judged; missed: chosen
    samples without one; failures: of exact tests; statistics: of the step, on each server.
    """

    verdict: str
    parts: Amount
    missed: Amount
    failures: list[Failure]
    statistics: list[Statistic] = field(default_factory=list)


@dataclass(frozen=True)
class Custody:
    """The sessions of agents that a step trained (see ``custody_verdict``).

    verdict: passed or failed; tokens: those that were sampled and delivered.
    """

    verdict: str
    sessions: Amount
    tokens: Amount
    failures: list[str]


@dataclass(frozen=True)
class Served:
    """The canaries of one weight version on all servers (see ``served_verdict``).

    verdict: passed, suspect or failed; servers: records of all canaries, several of a server that was restarted;
    inconclusive: comparisons by which no server could be seen to move, because the actor hardly did; decided_by: the first
    test that failed; suspects: lines of the statistics that may fail if they stay as they are.
    """

    verdict: str
    servers: Amount
    inconclusive: Amount
    decided_by: str
    failures: list[str]
    suspects: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepVerdict:
    """The outcome of one step.

    counts: ``COUNTS`` and calls of routers over all passes and layers.  statistics: the share of current rows without a
    common expert, of each stream; limit: of their sums.  threshold_error: the place that is farthest above the threshold,
    where a sum has reached the limit or the place is gross.  above_threshold: the same as a failure.  stale_warning: where
    rows of other weights are above the threshold, which fails nothing.
    recheck: None where no sample was to be rechecked.  custody: None where no agent made the samples.  served: of the
    weight version that the step trained, None without canaries; a failure has ended the run before.  held: servers
    whose own checksums of these weights were judged; None where they are not read.
    """

    step: int
    failures: list[Failure]
    above_threshold: list[Failure]
    threshold_error: str | None
    counts: dict[str, int]
    agreement: dict[str, float] = field(default_factory=dict)
    stale_warning: str | None = None
    statistics: list[Statistic] = field(default_factory=list)
    limit: float = 0.0
    recheck: Recheck | None = None
    custody: Custody | None = None
    served: Served | None = None
    held: int | None = None

    @property
    def passed(self) -> bool:
        """True unless the step failed: a suspect one passes."""
        true = self.recheck is None or self.recheck.verdict != FAILED
        true &= self.custody is None or not self.custody.failures
        return true and not self.failures and self.threshold_error is None

    @property
    def verdict(self) -> str:
        """passed, suspect or failed."""
        if not self.passed:
            return FAILED
        suspect = bool(self.suspects) or (self.served is not None and bool(self.served.suspects))
        return SUSPECT if suspect else PASSED

    @property
    def suspects(self) -> list[str]:
        """A line for each suspect statistic of agreement and recheck."""
        rechecked = self.recheck.statistics if self.recheck else []
        return suspicion_texts([*self.statistics, *rechecked], self.limit, f"step {self.step}")

    def failed_claim(self) -> tuple[str, str]:
        """Return ("claim", text) if replay, recheck or custody failed, ("threshold", text) if only that was exceeded.

        ("", "") for a step that passed.  The text has the first failures; the threshold's is a contract.
        """
        if self.passed:
            return "", ""
        failures: list[Any] = list(self.failures)
        if self.recheck is not None and self.recheck.verdict == FAILED:
            statistics = self.recheck.statistics
            over = [s for s in statistics if verdict_of([s], self.limit) == FAILED]
            failures += self.recheck.failures
            failures += suspicion_texts(over, self.limit, f"step {self.step}")
        failures += [f"custody: {text}" for text in self.custody.failures] if self.custody else []
        kind = "claim" if failures else "threshold"
        if self.threshold_error is not None:
            return kind, self.threshold_error
        shown = "\n  ".join(str(f) for f in failures[:8])
        more = len(failures) - 8
        rest = f"\n  and {more} more" if more > 0 else ""
        return kind, f"R3 check failed at step {self.step}:\n  {shown}{rest}"


def judge_step(
    totals: StepTotals,
    expectation: StepExpectation,
    shape: RouteShape,
    *,
    mismatch_threshold: float,
    suspicions: Suspicions | None = None,
) -> StepVerdict:
    """Judge the totals of all ranks.

    mismatch_threshold: the largest share of current rows without a common expert.  Rows
    of other weights may disagree though replay and trainer are right.  suspicions: of the steps before, of this start; None
    for a step that is judged alone.
    """
    suspicions = suspicions or Suspicions()
    failures: list[Failure] = []
    above: list[tuple[float, Failure, str]] = []
    current_rows: dict[str, list[int]] = {stream: [0, 0] for stream in expectation.streams}
    gross = {stream: _gross_share(stream, shape, mismatch_threshold) for stream in current_rows}
    gross_error = False
    stale: list[tuple[float, str]] = []
    counts = dict.fromkeys((*COUNTS, "num_calls"), 0)
    cells = list(_cells(expectation))
    for cell in cells:
        replay_pass, stream, _, layer = cell
        is_router, got = stream == ROUTES, totals.counters(cell)
        for name in counts if is_router else ():
            counts[name] += got[name]
        for name, (value, expected) in _determined(cell, got, expectation).items():
            if value != expected:
                failures.append(Failure(*cell, name, value, expected))
        # the current rows with a missing slot are not compared: there are at most those replayed
        current = min(got["rows_current"], got["rows_replayed"])
        mismatch, allowed = got["rows_current_mismatch"], mismatch_threshold * current
        older, older_rows = got["rows_mismatch"] - mismatch, got["rows_replayed"] - current
        place = f"at step {expectation.step}, {place_name(*cell[:3])}, layer {layer}"
        current_rows[stream][0] += current
        current_rows[stream][1] += mismatch
        gross_error |= current >= _GROSS_ROWS and mismatch > gross[stream] * current
        if mismatch > allowed:
            error = (
                f"R3 mismatch tokens ({mismatch}) > threshold ({allowed:g}) {place}, of {current} rows "
                f"of the weights that the actor holds: staleness does not explain them (of {older_rows} "
                f"rows of other weights, which are not judged, {older} mismatch)"
            )
            failure = Failure(*cell, "rows_current_mismatch", mismatch, allowed)
            above.append((mismatch / current, failure, error))
        if not is_router or replay_pass == "ref_log_prob":
            continue
        if older > mismatch_threshold * older_rows:
            stale.append((older / max(older_rows, 1), f"{older} of {older_rows} rows {place}"))
    for cell in sorted(totals.cells.keys() - set(cells)):
        failures.append(Failure(*cell, "num_calls", totals.cells[cell][0], 0))
    counts["num_calls_expected"] = expectation.total_calls()
    agreement = agreement_shares(list(agreement_counts(totals, expectation).values()), shape)
    for stream in _SHARES:
        agreement |= _further_agreement(totals, expectation, stream)
    warning = None
    if stale:
        warning = (
            f"R3 staleness: {max(stale)[1]}, share no expert with the trainer's own choice, more than the "
            "threshold; older weights computed them, or optimizer steps came before: they are not judged"
        )
    statistics = [
        suspicions.see(
            stream,
            0,
            mismatch / rows,
            start=mismatch_threshold / 2,
            least=ROWS_OF_NOTHING / rows,
            may_fall=False,
            highest=gross[stream] / _GROSS_OVER_USUAL,
        )
        for stream, (rows, mismatch) in current_rows.items()
        if rows
    ]
    failed = gross_error or suspicions.verdict(statistics) == FAILED
    above.sort(key=lambda found: -found[0])
    return StepVerdict(
        expectation.step,
        failures,
        [failure for _, failure, _ in above] if failed else [],
        above[0][2] if failed and above else None,
        counts,
        agreement,
        warning,
        statistics,
        suspicions.limit,
    )


def _gross_share(stream: str, shape: RouteShape, mismatch_threshold: float) -> float:
    """The share of rows without a common expert that no rounding makes."""
    share = _GROSS_OF_OTHERS
    if stream == ROUTES:
        share = _GROSS * chance_levels(shape.num_experts, shape.topk)["mismatch"]
    return max(share, min(1.0, _GROSS_THRESHOLDS * mismatch_threshold))


def _cells(expectation: StepExpectation) -> Iterator[Cell]:
    """Yield every place in which a step's streams may be called."""
    for stream, expected in expectation.streams.items():
        for replay_pass in expected.calls:
            for stage in STAGES:
                for layer in expected.fingerprints:
                    yield replay_pass, stream, stage, layer


def place_name(replay_pass: str, stream: str, stage: str) -> str:
    """Name a pass and a stage in messages: "train/replay_forward", of another stream "train/indexer/replay_forward"."""
    return "/".join((replay_pass, stage) if stream == ROUTES else (replay_pass, stream, stage))


def _determined(
    cell: Cell, got: Mapping[str, int], expectation: StepExpectation
) -> dict[str, tuple[int, int]]:
    """Return got and expected of every quantity that is determined."""
    replay_pass, stream, stage, layer = cell
    expected = expectation.streams[stream]
    calls = expected.calls[replay_pass][stage].get(layer, 0)
    found = {"num_calls": (got["num_calls"], calls)} | {name: (got[name], 0) for name in ERRORS}
    if calls:
        replayed, filled = expected.rows_replayed[layer], expected.rows_filled[layer]
        found |= {
            "fingerprint": (got["fingerprint"], expected.fingerprints[layer]),
            # recorded rows that were left over would be missing here
            "rows_replayed": (got["rows_replayed"], replayed),
            "rows_filled": (got["rows_filled"], filled),
            "rows_current": (got["rows_current"], expected.rows_current[replay_pass]),
        }
        if (without := expected.rows_without_choice) is not None:
            # a server that computes a row and does not report it leaves the choice to the trainer
            found["rows_left_out"] = filled - without, 0
            if stream == ROUTES and expectation.rows_by_class is not None:
                filled_rows = expectation.rows_of_class(RowClass.FILLED)
                every = sum(map(expectation.rows_of_class, RowClass))
                found["rows_of_classes"] = every - filled_rows, replayed + filled - without
                found["rows_of_class_filled"] = filled_rows, without
    compared = got["rows_equal"] + got["rows_overlap"] + got["rows_mismatch"]
    found["rows_compared"] = compared, got["rows_replayed"]
    return found


def _further_agreement(
    totals: StepTotals, expectation: StepExpectation, stream: str
) -> dict[str, float]:
    """Shares of a further stream's rows with the trainer's own choice, and with none of it."""
    layers = agreement_counts(totals, expectation, stream).values()
    rows = sum(values["rows_replayed"] for values in layers)
    names = ("equal", "mismatch") if rows else ()
    return {
        f"{_SHARES[stream]}_{name}": sum(values[f"rows_{name}"] for values in layers) / rows
        for name in names
    }


def agreement_shares(layers: Sequence[Mapping[str, int]], shape: RouteShape) -> dict[str, float]:
    """Shares of rows in the place of ``controls_pass``, against chance and the misaligned controls.

    layers: the counters there of each layer.
    ``current_...`` and ``stale_...`` are shares of the rows of the actor's own version and of the
    others, where there are any.  Empty where no row was replayed in these layers.
    """
    rows = sum(values["rows_replayed"] for values in layers)
    if not rows:
        return {}
    shares = {
        name.removeprefix("rows_"): sum(values[name] for values in layers) / rows
        for name in COUNTS
        if name in ("rows_equal", "rows_overlap", "rows_mismatch") or name.startswith("control_")
    }
    current = sum(min(v["rows_current"], v["rows_replayed"]) for v in layers)
    for name in ("equal", "mismatch"):
        current_rows = sum(values[f"rows_current_{name}"] for values in layers)
        if current:
            shares[f"current_{name}"] = current_rows / current
        if rows > current:
            stale_rows = sum(values[f"rows_{name}"] for values in layers) - current_rows
            shares[f"stale_{name}"] = stale_rows / (rows - current)
    chance = chance_levels(shape.num_experts, shape.topk)
    return {**shares, **{f"chance_{name}": share for name, share in chance.items()}}


def step_line(
    verdict: StepVerdict,
    expectation: StepExpectation,
    shape: RouteShape,
    *,
    world_size: int,
    mismatch_threshold: float,
    calibrating: int,
    check_interval: int = 1,
) -> dict[str, Any]:
    """The line of ``evidence/steps.jsonl``: the verdict, and all that it was judged by.

    A failed step has the fingerprints of each data-parallel rank next to it, to find its ranks.
    """

    def hexadecimal(fingerprints: dict[int, int]) -> dict[int, str]:
        return {layer: f"{value:#018x}" for layer, value in fingerprints.items()}

    expected = msgspec.to_builtins(expectation)
    for stream in expected["streams"].values():
        stream["fingerprints"] = hexadecimal(stream["fingerprints"])
    for place in expected["places"]:
        streams = place["fingerprints"].items()
        place["fingerprints"] = {stream: hexadecimal(layers) for stream, layers in streams}
    if verdict.passed:
        del expected["places"]
    return {
        "version": EVIDENCE_VERSION,
        "step": verdict.step,
        "passed": verdict.passed,
        "verdict": verdict.verdict,
        "passes": list(expectation.streams[ROUTES].calls),
        "world_size": world_size,
        "num_experts": shape.num_experts,
        "topk": shape.topk,
        "mismatch_threshold": mismatch_threshold,
        "suspect_limit": verdict.limit,
        "calibrating": calibrating,
        **({} if check_interval == 1 else {"check_interval": check_interval}),
        **expected,
        "counts": verdict.counts,
        "agreement": verdict.agreement,
        "statistics": [asdict(s) for s in verdict.statistics],
        "failures": [asdict(f) for f in verdict.failures],
        "threshold_error": verdict.threshold_error,
        "stale_warning": verdict.stale_warning,
        **({} if verdict.recheck is None else {"recheck": asdict(verdict.recheck)}),
        **({} if verdict.custody is None else {"custody": asdict(verdict.custody)}),
        **({} if verdict.served is None else {"served": asdict(verdict.served)}),
        **({} if verdict.held is None else {"held": verdict.held}),
    }


def expected_calls(
    layers: Iterable[int], num_calls: int, passes: Iterable[str], recomputed: Collection[int] = ()
) -> dict[str, dict[str, dict[int, int]]]:
    """Return the calls of a stream, {pass: {stage: {layer: number}}}.

    Each layer is called ``num_calls`` times in a pass, and those in ``recomputed`` as often again in the train pass.
    """
    forward = dict.fromkeys(layers, num_calls)
    again = {layer: num_calls for layer in forward if layer in recomputed}
    return {p: {FORWARD: forward, BACKWARD: again if p == "train" else {}} for p in passes}
