"""One step's proof: router calls are added up, and the sums judged against the rollout's records.

A running job and ``r3train check-evidence`` use the same reducer (``StepTotals``) and the same judge
(``judge``).  "Passed" and "never ran" are different answers: calls are compared with the number
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
from r3train.routing.agreement import chance_levels
from r3train.types import (
    Amount,
    Fingerprint,
    LayerNumber,
    Rank,
    ReplayEvidence,
    ReplayPass,
    ReplayStage,
    RouteShape,
    RowClass,
    Version,
)

# Of the files in evidence/; files of another version are refused.
EVIDENCE_VERSION = 1
STAGES: tuple[str, ...] = get_args(ReplayStage)
# A RowClass in evidence
RowLabel = Literal["decoded", "prefilled", "prefilled_again", "cached", "filled"]
# The stages of router calls, of sampling masks, and of an indexer's choices.
ROUTERS = ("replay_forward", "replay_backward")
SAMPLING_MASK = "sampling_mask"
INDEXERS = ("indexer_forward", "indexer_backward")
# (pass, stage, 1-based layer)
Cell = tuple[str, str, int]
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


def native(passes: Collection[str]) -> str:
    """The pass in whose forwards the trainer's own choice is compared: no weight has changed yet.

    passes: of a step.  The train pass takes the place of an old-log-prob pass that was skipped.
    """
    return "old_log_prob" if "old_log_prob" in passes else "train"


def own_choices(
    totals: StepTotals, expectation: StepExpectation, stage: str
) -> dict[int, dict[str, int]]:
    """The counters by layer where the trainer's own choice is compared; stage: that of a forward."""
    replay_pass = native(expectation.expected_calls)
    layers = expectation.expected_calls[replay_pass].get(stage, {})
    return {layer: totals.counters((replay_pass, stage, layer)) for layer in sorted(layers)}


class StepTotals:
    """Sums over router calls of one step, by pass, stage and layer.

    shape: of the model's routes.  ``cells`` holds the ``COUNTERS`` of each place in their order;
    fingerprints add mod 2^64.
    """

    def __init__(self, shape: RouteShape):
        self._shape = shape
        self.cells: dict[Cell, list[int]] = {}

    def add(self, call: ReplayEvidence) -> None:
        """Add one call, or a sum of calls."""
        rows = call.rows_replayed + call.rows_filled + call.rows_padding + call.rows_native
        of_router = call.stage in ROUTERS
        left = call.num_rows * call.topk if of_router else call.replay_idx_sum
        values = [
            call.num_calls,
            call.fingerprint,
            *_BEFORE_MAP(call),
            abs(call.map_sum - left),
            *_AFTER_MAP(call),
            abs(rows - call.num_rows),
            abs(call.topk - self._shape.topk) if call.stage not in INDEXERS else 0,
            self._idx_sum_off(call) if of_router else 0,
            _part_rows_off(call),
        ]
        if not call.counts_tokens:
            values = [v if kept else 0 for v, kept in zip(values, _KEPT_ON_COPIES)]
        self._add((call.replay_pass, call.stage, call.layer_number), values)

    def merge(self, other: StepTotals) -> None:
        """Add what another rank counted."""
        for cell, values in other.cells.items():
            self._add(cell, values)

    def counters(self, cell: Cell) -> dict[str, int]:
        """The sums of a place by name; zeros where nothing was called."""
        return dict(zip(COUNTERS, self.cells.get(cell) or [0] * len(COUNTERS)))

    def to_table(self, passes: Sequence[str]) -> np.ndarray:
        """int64[passes, stages, 2 * layers + 2, counters], to be added up over ranks.

        Layers are indexed by their 1-based number, after them come the output layer and the indexers;
        fingerprints stand in the int64's bits.
        """
        last = self._shape.indexer_layer(self._shape.num_layers)
        size = (len(passes), len(STAGES), last + 1, len(COUNTERS))
        table = np.zeros(size, dtype=np.uint64)
        for (replay_pass, stage, layer), values in self.cells.items():
            table[passes.index(replay_pass), STAGES.index(stage), layer] = np.array(
                values, dtype=np.uint64
            )
        return table.view(np.int64)

    @classmethod
    def of_table(cls, table: np.ndarray, passes: Sequence[str], shape: RouteShape) -> StepTotals:
        """The inverse of ``to_table``."""
        totals = cls(shape)
        for p, s, layer in np.argwhere(table.any(axis=-1)).tolist():
            values = table.view(np.uint64)[p, s, layer].tolist()
            totals.cells[passes[p], STAGES[s], layer] = values
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


_KEY = ("step", "rank", "replay_pass", "stage", "vp_stage", "layer_number", "topk", "counts_tokens")
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
    replay_pass = native(expectation.expected_calls)
    for stage in (ROUTERS[0], INDEXERS[0]):
        for layer, values in own_choices(totals, expectation, stage).items():
            if beaten := beaten_by(values, of_indexer=stage in INDEXERS):
                yield (replay_pass, stage, layer), beaten


class Place(msgspec.Struct, frozen=True):
    """The ranks of one data-parallel rank, and the fingerprint that they must have in each layer."""

    ranks: list[Rank]
    fingerprints: dict[LayerNumber, Fingerprint]


class StepExpectation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the rollout side knows of a step before the trainer has run.

    Per-layer values are by 1-based layer number.  ``expected_calls`` counts router calls over all ranks.
    ``places``: where to look if a fingerprint is wrong.
    """

    step: Amount
    expected_fingerprints: dict[LayerNumber, Fingerprint]
    expected_rows_replayed: dict[LayerNumber, Amount]  # rows whose every slot was recorded
    expected_rows_filled: dict[LayerNumber, Amount]  # real rows with at least one slot missing
    # rows that no server computed, as many in every router; None of a rollout that no server generated
    rows_never_computed: Amount | None
    # rows of the weight version that the actor holds
    expected_rows_current: dict[ReplayPass, Amount]
    # the same for tokens with a sampling mask that were sampled at the actor's version; None without any
    expected_masks_current: dict[ReplayPass, Amount] | None = None
    # rows that need no choice of an indexer: their tokens are all chosen, or no server computed them; None without one
    expected_rows_implied: Amount | None = None
    # rows by class and weight version; None where a sample's classes are not known
    rows_by_class: dict[RowLabel, dict[Version, Amount]] | None = None
    expected_calls: dict[ReplayPass, dict[ReplayStage, dict[LayerNumber, Amount]]]
    places: list[Place] = []

    def rows_of_class(self, row_class: RowClass) -> int:
        """Rows of a class over all weight versions."""
        assert self.rows_by_class is not None
        return sum(self.rows_by_class.get(row_class.label, {}).values())

    def total_calls(self) -> int:
        """Router calls over all passes and layers."""
        places = [(s, of) for stages in self.expected_calls.values() for s, of in stages.items()]
        return sum(sum(of.values()) for stage, of in places if stage in ROUTERS)


@dataclass(frozen=True)
class Failure:
    """One quantity that is not as it must be, and its place."""

    replay_pass: str
    stage: str
    layer_number: int
    what: str
    got: int
    expected: int | float

    def __str__(self) -> str:
        return (
            f"{self.replay_pass}/{self.stage} layer {self.layer_number}: {self.what} is "
            f"{self.got}, expected {self.expected}"
        )


@dataclass(frozen=True)
class Sampling:
    """Samples that their servers rechecked (see ``rechecked``).

    verdict: passed, failed or no evidence; parts: comparisons that were judged; missed: chosen
    samples without one.
    """

    verdict: str
    parts: Amount
    missed: Amount
    failures: list[Failure]


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

    verdict: passed or failed; servers: readings of all canaries, several of a server that was restarted;
    inconclusive: comparisons by which no server could be seen to move, because the actor hardly did; decided_by: the first
    test that failed.
    """

    verdict: str
    servers: Amount
    inconclusive: Amount
    decided_by: str
    failures: list[str]


@dataclass(frozen=True)
class StepVerdict:
    """The outcome of one step.

    counts: ``COUNTS`` and calls of routers over all passes and layers.  above_threshold: current rows without a
    common expert, where there are more than may be; ``expected`` is the most.  stale_warning: where
    rows of other weights are above the threshold, which fails nothing.
    sampling: None where no sample was to be rechecked.  custody: None where no agent made the samples.  served: of the
    weight version that the step trained, None without canaries; a failure has ended the run before.
    """

    step: int
    failures: list[Failure]
    above_threshold: list[Failure]
    threshold_error: str | None
    counts: dict[str, int]
    agreement: dict[str, float] = field(default_factory=dict)
    stale_warning: str | None = None
    sampling: Sampling | None = None
    custody: Custody | None = None
    served: Served | None = None

    @property
    def passed(self) -> bool:
        true = self.sampling is None or not self.sampling.failures
        true &= self.custody is None or not self.custody.failures
        return true and not self.failures and self.threshold_error is None

    def failed_claim(self) -> tuple[str, str]:
        """Return ("replay", text) if replay was not exact, ("threshold", text) if only that was exceeded.

        ("", "") for a step that passed.  The text has the first failures; the threshold's is a contract.
        """
        if self.passed:
            return "", ""
        failures: list[Any] = self.failures + (self.sampling.failures if self.sampling else [])
        failures += [f"custody: {text}" for text in self.custody.failures] if self.custody else []
        kind = "replay" if failures else "threshold"
        if self.threshold_error is not None:
            return kind, self.threshold_error
        shown = "\n  ".join(str(f) for f in failures[:8])
        more = len(failures) - 8
        rest = f"\n  and {more} more" if more > 0 else ""
        return kind, f"R3 check failed at step {self.step}:\n  {shown}{rest}"


def judge(
    totals: StepTotals,
    expectation: StepExpectation,
    shape: RouteShape,
    *,
    mismatch_threshold: float,
) -> StepVerdict:
    """Judge the totals of all ranks.

    mismatch_threshold: the largest share of current rows without a common expert in any place.  Rows
    of other weights may disagree though replay and trainer are right.
    """
    failures: list[Failure] = []
    above: list[Failure] = []
    threshold_error = None
    stale: list[tuple[float, str]] = []
    counts = dict.fromkeys((*COUNTS, "num_calls"), 0)
    places = [
        (replay_pass, stage, layer)
        for replay_pass in expectation.expected_calls
        for stage in STAGES
        for layer in expectation.expected_fingerprints
    ]
    for cell in places:
        got = totals.counters(cell)
        for name in counts if cell[1] in ROUTERS else ():
            counts[name] += got[name]
        wanted = _wanted(cell, got, expectation)
        got["rows_compared"] = got["rows_equal"] + got["rows_overlap"] + got["rows_mismatch"]
        if "rows_of_classes" in wanted:
            filled = expectation.rows_of_class(RowClass.FILLED)
            got["rows_of_classes"] = sum(map(expectation.rows_of_class, RowClass)) - filled
            got["rows_of_class_filled"] = filled
        if "rows_left_out" in wanted:
            rightly = expectation.rows_never_computed
            if cell[1] in INDEXERS:
                rightly = expectation.expected_rows_implied
            got["rows_left_out"] = expectation.expected_rows_filled[cell[2]] - (rightly or 0)
        failures += [Failure(*cell, n, got[n], v) for n, v in wanted.items() if got[n] != v]
        # the current rows with a missing slot are not compared: there are at most those replayed
        current = min(got["rows_current"], got["rows_replayed"])
        mismatch, allowed = got["rows_current_mismatch"], mismatch_threshold * current
        older, of_older = got["rows_mismatch"] - mismatch, got["rows_replayed"] - current
        place = f"at step {expectation.step}, {cell[0]}/{cell[1]}, layer {cell[2]}"
        if mismatch > allowed:
            above.append(Failure(*cell, "rows_current_mismatch", mismatch, allowed))
            threshold_error = threshold_error or (
                f"R3 mismatch tokens ({mismatch}) > threshold ({allowed:g}) {place}, of {current} rows "
                f"of the weights that the actor holds: staleness does not explain them (of {of_older} "
                f"rows of other weights, which are not judged, {older} mismatch)"
            )
        if cell[1] not in ROUTERS or cell[0] == "ref_log_prob":
            continue
        if older > mismatch_threshold * of_older:
            stale.append((older / max(of_older, 1), f"{older} of {of_older} rows {place}"))
    for cell in sorted(totals.cells.keys() - set(places)):
        failures.append(Failure(*cell, "num_calls", totals.cells[cell][0], 0))
    counts["num_calls_expected"] = expectation.total_calls()
    own_choice = list(own_choices(totals, expectation, ROUTERS[0]).values())
    agreement = agreement_shares(own_choice, shape)
    for label, stage in (("kept", SAMPLING_MASK), ("indexer", INDEXERS[0])):
        agreement |= _further_agreement(totals, expectation, stage, label)
    warning = None
    if stale:
        warning = (
            f"R3 staleness: {max(stale)[1]}, share no expert with the trainer's own choice, more than the "
            "threshold; older weights computed them, or optimizer steps came before: they are not judged"
        )
    return StepVerdict(
        expectation.step, failures, above, threshold_error, counts, agreement, warning
    )


def _wanted(cell: Cell, got: dict[str, int], expectation: StepExpectation) -> dict[str, int]:
    """The only right value of each quantity that has one."""
    replay_pass, stage, layer = cell
    calls = expectation.expected_calls[replay_pass].get(stage, {}).get(layer, 0)
    wanted = {"num_calls": calls, **dict.fromkeys(ERRORS, 0)}
    if calls:
        wanted["fingerprint"] = expectation.expected_fingerprints[layer]
        # recorded rows that were left over would be missing here
        wanted["rows_replayed"] = expectation.expected_rows_replayed[layer]
        wanted["rows_filled"] = expectation.expected_rows_filled[layer]
        never = expectation.rows_never_computed
        if stage in INDEXERS and expectation.expected_rows_implied is not None:
            wanted["rows_left_out"] = 0
        if stage in ROUTERS and never is not None:
            # a server that computes a row and does not report it leaves the choice to the trainer
            wanted["rows_left_out"] = 0
            if expectation.rows_by_class is not None:
                replayed, filled = (
                    expectation.expected_rows_replayed[layer],
                    expectation.expected_rows_filled[layer],
                )
                wanted["rows_of_classes"] = replayed + filled - never
                wanted["rows_of_class_filled"] = never
        current = expectation.expected_rows_current
        if stage == SAMPLING_MASK:
            current = expectation.expected_masks_current or {}
        wanted["rows_current"] = current[replay_pass]
    return {**wanted, "rows_compared": got["rows_replayed"]}


def _further_agreement(
    totals: StepTotals, expectation: StepExpectation, stage: str, label: str
) -> dict[str, float]:
    """Shares of rows with the trainer's own choice, and with none of it; of sampling masks or of indexers."""
    of = own_choices(totals, expectation, stage).values()
    rows = sum(values["rows_replayed"] for values in of)
    names = ("equal", "mismatch") if rows else ()
    return {
        f"{label}_{name}": sum(values[f"rows_{name}"] for values in of) / rows for name in names
    }


def agreement_shares(layers: Sequence[Mapping[str, int]], shape: RouteShape) -> dict[str, float]:
    """Shares of rows in the ``native`` place, against chance and the misaligned controls.

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
        own = sum(values[f"rows_current_{name}"] for values in layers)
        if current:
            shares[f"current_{name}"] = own / current
        if rows > current:
            others = sum(values[f"rows_{name}"] for values in layers) - own
            shares[f"stale_{name}"] = others / (rows - current)
    chance = chance_levels(shape.num_experts, shape.topk)
    return {**shares, **{f"chance_{name}": share for name, share in chance.items()}}


def step_line(
    verdict: StepVerdict,
    expectation: StepExpectation,
    shape: RouteShape,
    *,
    world_size: int,
    mismatch_threshold: float,
    check_interval: int = 1,
) -> dict[str, Any]:
    """The line of ``evidence/steps.jsonl``: the verdict, and all that it was judged by.

    A failed step has the fingerprints of each data-parallel rank next to it, to find its ranks.
    """

    def hexadecimal(fingerprints: dict[int, int]) -> dict[int, str]:
        return {layer: f"{value:#018x}" for layer, value in fingerprints.items()}

    expected = msgspec.structs.asdict(expectation)
    expected["expected_fingerprints"] = hexadecimal(expectation.expected_fingerprints)
    expected["places"] = [
        {"ranks": place.ranks, "fingerprints": hexadecimal(place.fingerprints)}
        for place in expectation.places
    ]
    if verdict.passed:
        del expected["places"]
    return {
        "version": EVIDENCE_VERSION,
        "step": verdict.step,
        "passed": verdict.passed,
        "passes": list(expectation.expected_calls),
        "world_size": world_size,
        "num_experts": shape.num_experts,
        "topk": shape.topk,
        "mismatch_threshold": mismatch_threshold,
        **({} if check_interval == 1 else {"check_interval": check_interval}),
        **expected,
        "counts": verdict.counts,
        "agreement": verdict.agreement,
        "failures": [asdict(f) for f in verdict.failures],
        "threshold_error": verdict.threshold_error,
        "stale_warning": verdict.stale_warning,
        **({} if verdict.sampling is None else {"sampling": asdict(verdict.sampling)}),
        **({} if verdict.custody is None else {"custody": asdict(verdict.custody)}),
        **({} if verdict.served is None else {"served": asdict(verdict.served)}),
    }


def expected_calls(
    *,
    passes: tuple[str, ...],
    num_microbatches: int,
    ranks_per_stage: int,
    moe_layers: Iterable[int],
    recomputed: Iterable[int],
    kept_layers: Collection[int] = (),
    indexers: Mapping[int, bool] | None = None,
) -> dict[str, dict[str, dict[int, int]]]:
    """Router calls over all ranks: a layer is called once per microbatch on each rank of its stage.

    num_microbatches: of one rank, over all optimizer steps of the rollout.  kept_layers: the output layer
    where sampling masks are applied, once per microbatch on each rank of the last stage.  indexers: layers whose
    indexer's choice is replayed, by their number in the evidence, each with True where it is recomputed.
    """
    each = num_microbatches * ranks_per_stage
    forward = {layer: each for layer in moe_layers}
    recomputed = set(recomputed)
    again = {layer: each for layer in forward if layer in recomputed}
    kept: dict[str, dict[int, int]] = {}
    if kept_layers:
        kept[SAMPLING_MASK] = dict.fromkeys(kept_layers, each)
    calls = {}
    for p in passes:
        trains = p == "train"
        calls[p] = dict(zip(ROUTERS, (forward, again if trains else {}))) | kept
        if indexers:
            twice = [layer for layer, is_recomputed in indexers.items() if is_recomputed]
            calls[p][INDEXERS[0]] = dict.fromkeys(indexers, each)
            calls[p][INDEXERS[1]] = dict.fromkeys(twice, each) if trains else {}
    return calls
