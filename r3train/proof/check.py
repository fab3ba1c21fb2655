"""The verdict on a step's evidence: applied, covered, agreement, each on its own.

Pure: totals over all ranks against what the rollout side says must have happened.  "Passed" and
"never ran" are different answers: calls are compared with the number expected, and a shortfall
fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from r3train.routing.agreement import chance_levels
from r3train.types import ReplayEvidence

STAGES = ("replay_forward", "replay_backward")

# what is summed over calls and ranks, in the order of the totals' last axis
COUNTERS = (
    "num_calls",
    "fingerprint",
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
)
_COLUMN = {name: i for i, name in enumerate(COUNTERS)}
# On ranks that see copies of another rank's tokens only errors count, rows do not.
COUNTED_ON_COPIES = ("num_calls", "rows_native", "duplicate_rows", "map_deviation")


@dataclass(frozen=True)
class StepExpectation:
    """What the rollout side knows of a step before the trainer has run.

    Per-layer values are by 1-based layer number.  ``num_calls[pass][stage][layer]`` counts router
    calls over all ranks.
    """

    step: int
    fingerprints: dict[int, int]  # unsigned 64-bit
    rows_replayed: dict[int, int]  # rows whose every slot was recorded
    rows_filled: dict[int, int]  # real rows with at least one slot missing
    num_calls: dict[str, dict[str, dict[int, int]]]
    # the same fingerprints for the ranks that share a data-parallel rank: where to look
    fingerprints_of_ranks: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)

    def to_json(self) -> dict:
        """The expectation for evidence/steps.jsonl: what ``check-evidence`` judges by again.

        Fingerprints are hexadecimal: JSON readers outside Python lose the low bits of integers.
        """
        return {
            "expected_fingerprints": {str(n): f"{f:#018x}" for n, f in self.fingerprints.items()},
            "expected_rows_replayed": {str(n): v for n, v in self.rows_replayed.items()},
            "expected_rows_filled": {str(n): v for n, v in self.rows_filled.items()},
            "expected_calls": {
                p: {s: {str(n): c for n, c in of.items()} for s, of in stages.items()}
                for p, stages in self.num_calls.items()
            },
        }

    def places_to_json(self) -> list[dict]:
        """Fingerprints of each data-parallel rank: written for a failed step, to find its ranks."""
        return [
            {"ranks": ranks, "fingerprints": {str(n): f"{f:#018x}" for n, f in own.items()}}
            for ranks, own in self.fingerprints_of_ranks.items()
        ]


@dataclass(frozen=True)
class Failure:
    """One thing that is not as it must be."""

    replay_pass: str
    stage: str
    layer_number: int
    what: str
    got: int
    expected: int

    def __str__(self) -> str:
        return (
            f"{self.replay_pass}/{self.stage} layer {self.layer_number}: {self.what} is "
            f"{self.got}, expected {self.expected}"
        )


@dataclass(frozen=True)
class StepVerdict:
    """The outcome of one step; ``counts`` are over all passes and layers."""

    step: int
    failures: list[Failure]
    threshold_error: str | None
    counts: dict[str, int]
    agreement: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.failures and self.threshold_error is None

    def raise_if_failed(self) -> None:
        """Raise AssertionError with the first failures; the threshold's text is a contract."""
        if self.threshold_error is not None:
            raise AssertionError(self.threshold_error)
        if self.failures:
            shown = "\n  ".join(str(f) for f in self.failures[:8])
            more = len(self.failures) - 8
            rest = f"\n  and {more} more" if more > 0 else ""
            raise AssertionError(f"R3 check failed at step {self.step}:\n  {shown}{rest}")


def totals(
    records: Iterable[ReplayEvidence], passes: tuple[str, ...], num_layers: int
) -> np.ndarray:
    """Sum one rank's records: int64[passes, stages, num_layers + 1, counters].

    Layers are indexed by their 1-based number.  Fingerprints add mod 2^64 in the int64's bits, so
    totals of ranks may be added the same way.
    """
    out = np.zeros((len(passes), len(STAGES), num_layers + 1, len(COUNTERS)), dtype=np.int64)
    for r in records:
        values = {
            "num_calls": 1,
            "map_deviation": abs(r.map_sum - r.num_rows * r.topk),
            "fingerprint": r.fingerprint - (1 << 64) if r.fingerprint >> 63 else r.fingerprint,
        }
        cell = out[passes.index(r.replay_pass), STAGES.index(r.stage), r.layer_number]
        for name, column in _COLUMN.items():
            if r.counts_tokens or name in COUNTED_ON_COPIES:
                with np.errstate(over="ignore"):
                    cell[column] += np.int64(values.get(name, getattr(r, name, 0)))
    return out


def judge(
    table: np.ndarray,
    passes: tuple[str, ...],
    expectation: StepExpectation,
    *,
    mismatch_threshold: float,
    num_experts: int,
    topk: int,
) -> StepVerdict:
    """Judge the totals of all ranks.

    table: int64[passes, stages, layers + 1, counters], see ``totals``.
    """
    failures: list[Failure] = []
    threshold_error = None
    counts = dict.fromkeys(COUNTERS[2:], 0)
    counts["num_calls"] = counts["num_calls_expected"] = 0
    for p, replay_pass in enumerate(passes):
        for s, stage in enumerate(STAGES):
            for layer in expectation.fingerprints:
                cell = dict(zip(COUNTERS, table[p, s, layer].tolist()))
                calls = expectation.num_calls[replay_pass][stage].get(layer, 0)
                counts["num_calls_expected"] += calls
                for name in counts:
                    counts[name] += cell.get(name, 0)
                wanted = {
                    "num_calls": calls,
                    "rows_native": 0,
                    "duplicate_rows": 0,
                    "map_deviation": 0,
                    "rows_recompute_differ": 0,
                }
                if calls:
                    wanted["fingerprint"] = expectation.fingerprints[layer]
                    # recorded rows that were left over would be missing here
                    wanted["rows_replayed"] = expectation.rows_replayed[layer]
                    wanted["rows_filled"] = expectation.rows_filled[layer]
                    cell["fingerprint"] &= (1 << 64) - 1
                failures += [
                    Failure(replay_pass, stage, layer, name, cell[name], value)
                    for name, value in wanted.items()
                    if cell[name] != value
                ]
                allowed = mismatch_threshold * cell["rows_replayed"]
                if threshold_error is None and cell["rows_mismatch"] > allowed:
                    threshold_error = (
                        f"R3 mismatch tokens ({cell['rows_mismatch']}) > threshold ({allowed:g}) "
                        f"at step {expectation.step}, {replay_pass}/{stage}, layer {layer}, of "
                        f"{cell['rows_replayed']} rows"
                    )
    agreement = _agreement(table, passes, num_experts, topk)
    return StepVerdict(expectation.step, failures, threshold_error, counts, agreement)


def _agreement(
    table: np.ndarray, passes: tuple[str, ...], num_experts: int, topk: int
) -> dict[str, float]:
    """Shares of rows in the old-log-prob pass, beside chance and the misaligned controls."""
    if "old_log_prob" not in passes:
        return {}
    sums = table[passes.index("old_log_prob"), 0].sum(0)
    rows = int(sums[_COLUMN["rows_replayed"]])
    if not rows:
        return {}
    shares = {
        name.removeprefix("rows_"): float(sums[_COLUMN[name]]) / rows
        for name in COUNTERS
        if name in ("rows_equal", "rows_overlap", "rows_mismatch") or name.startswith("control_")
    }
    shares.update({f"chance_{k}": v for k, v in chance_levels(num_experts, topk).items()})
    return shares


def expected_calls(
    *,
    passes: tuple[str, ...],
    num_microbatches: int,
    ranks_per_stage: int,
    moe_layers: Iterable[int],
    recomputed: Iterable[int],
) -> dict[str, dict[str, dict[int, int]]]:
    """Router calls over all ranks: a layer is called once a microbatch on each rank of its stage.

    num_microbatches: of one rank, over all optimizer steps of the rollout.
    """
    each = num_microbatches * ranks_per_stage
    forward = {layer: each for layer in moe_layers}
    recomputed = set(recomputed)
    again = {layer: each for layer in forward if layer in recomputed}
    return {
        p: {"replay_forward": forward, "replay_backward": again if p == "train" else {}}
        for p in passes
    }
