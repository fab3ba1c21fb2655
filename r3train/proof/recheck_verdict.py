"""recheck: answers against what their own server says when it computes them again.

The other claims begin at the bytes that a server sent.  Here some samples are rechecked by a
prefill under the same weights, and rows and log-probs are compared with those that were delivered.
Prefill and decode round differently, so near a tie a router may choose another expert, and all that follows a little
more often.  How often is measured at the start of generation, by answers that are rechecked at once, and by the run's first steps.

A row differs if its set of experts does.  Three statistics of a step on each server are compared with the usual ones (see
``suspicion``): the share of decoded rows that differ, that of prefilled rows, and the mean difference of log-probs.  Two
faults are gross, and fail at once: another weight version than the sample's, and a layer whose rows nearly all differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from r3train.layout.provenance import classes_of_tokens
from r3train.proof.step_verdict import Failure, Recheck
from r3train.proof.suspicion import (
    bounded_mean,
    ROWS_OF_NOTHING,
    Statistic,
    Suspicions,
)
from r3train.proof.verdicts import FAILED, NO_EVIDENCE
from r3train.types import (
    Amount,
    LayerNumber,
    missing_marker,
    Rechecked,
    RecheckPart,
    RecheckedRollout,
    ROUTES,
    RolloutSample,
    RowClass,
)

# the pass of a failure
AGAIN = "rechecked"

# In the measurement a larger share is no rounding: a fault at the start must not excuse itself.
_MOST_SHARE = 0.3
# No rounding changes so many of a layer's rows where it changed fewer than a tenth in the measurement.
_GROSS_SHARE, _GROSS_ROWS, _GROSS_NOISE = 0.8, 8, 0.1
# A share is measured on some hundred rows, and cannot be told from 0 below this.
_LEAST_SHARE = 1e-4
# In nats: means that cannot be told from none.  A server in half precision rounds a logit between 4 and 8 to 1/32.
_LEAST_OFF, _LEAST_OFF_HALF = 1e-6, 1e-3
# A run's first steps may raise what was measured so many times: its answers are longer, and its batches larger.
_MOST_TIMES, _SHARE_OF_NOTHING = 10.0, 1e-3
# Below this share of differing rows log-probs behind one are not counted: it changes all that follow.
_RARE = 0.01
# nats that a log-prob which is no finite number is off by
_NOT_FINITE = 1e9


@dataclass(frozen=True, slots=True)
class RowsApart:
    """Rows of a layer that were computed twice, and those with other experts, of the layers with experts.

    >>> RowsApart(200, {2: 1, 3: 2}).share
    0.0075
    """

    rows: Amount
    differ: dict[LayerNumber, Amount]

    @property
    def pairs(self) -> int:
        """Pairs of a row and a layer."""
        return self.rows * len(self.differ)

    @property
    def share(self) -> float:
        """The share of the pairs that differ."""
        return sum(self.differ.values()) / max(self.pairs, 1)


@dataclass(frozen=True, slots=True)
class Noise:
    """The differences that rounding alone makes on a server, as measured at the start.

    log_prob_off: the mean, in nats; least_off: what cannot be told from none.
    """

    decoded: RowsApart
    prefilled: RowsApart
    num_log_probs: Amount
    log_prob_off: Annotated[float, Meta(ge=0)]
    least_off: Annotated[float, Meta(ge=0)]

    @property
    def rows_seldom_differ(self) -> bool:
        """True if less than one row of a hundred differed, over all layers."""
        differ = sum(self.decoded.differ.values()) + sum(self.prefilled.differ.values())
        return differ < _RARE * max(self.decoded.rows + self.prefilled.rows, 1)

    @property
    def usual_off(self) -> float:
        """The mean difference of log-probs that is usual at the start."""
        return max(self.log_prob_off, self.least_off)


@dataclass(frozen=True, slots=True)
class RecheckRecord:
    """One comparison; a line of ``evidence/rechecked.jsonl``.

    decoded, prefilled: rows without a missing slot, by the way in which the server came to them.
    """

    step: Amount  # the rollout_id
    sample_id: Amount
    part: RecheckPart
    server: Amount
    weight_version: Annotated[int, Meta(ge=-1)]  # of the part's tokens
    held_version: Amount  # that the server said it holds
    first_row: Amount
    decoded: RowsApart
    prefilled: RowsApart
    num_log_probs: Amount
    # the mean, of which no token counts more than 30 times the usual difference
    log_prob_off: Annotated[float, Meta(ge=0)]
    log_prob_off_max: Annotated[float, Meta(ge=0)]
    noise: Noise | None  # None: not measured, so there is nothing to judge by

    @property
    def num_rows(self) -> int:
        """Rows of a layer that were compared."""
        return self.decoded.rows + self.prefilled.rows


def measured_noise(
    pairs: Iterable[tuple[RolloutSample, Rechecked]], moe_layers: Sequence[int], dtype: str
) -> dict[int, Noise]:
    """The noise of each server, from samples that it drew and rechecked at once.

    dtype: in which servers compute, as torch spells it.
    """
    least_off = _LEAST_OFF if dtype == "float32" else _LEAST_OFF_HALF
    differences: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for sample, again in pairs:
        differ, _, decoded = _differing_rows(sample, again, moe_layers)
        found = differ, decoded, _log_probs_off(sample, again)
        differences.setdefault(again.server, []).append(found)
    noise = {}
    for server, found in differences.items():
        differ, decoded = (np.concatenate([part[i] for part in found]) for i in (0, 1))
        off = np.concatenate([off[~np.isnan(off)] for _, _, off in found])
        noise[server] = Noise(
            _rows_apart(differ[decoded], moe_layers),
            _rows_apart(differ[~decoded], moe_layers),
            len(off),
            float(off.mean()) if len(off) else 0.0,
            least_off,
        )
    return noise


def compare(
    step: int,
    sample: RolloutSample,
    again: Rechecked,
    noise: Noise | None,
    moe_layers: Sequence[int],
    *,
    log_probs: bool,
) -> RecheckRecord:
    """Compare a sample as it was delivered, with its routes, with what was rechecked.

    log_probs: False where the temperature is not 1, at which servers score a given text.
    """
    differ, whole, decoded = _differing_rows(sample, again, moe_layers)
    off = _log_probs_off(sample, again)
    counted = ~np.isnan(off) & log_probs
    if noise is not None and noise.rows_seldom_differ and differ.any():
        # one expert chosen otherwise changes all that follows; so many are the rows' own business
        counted[np.flatnonzero(whole)[differ.any(axis=1)].min() :] = False
    off = off[counted]
    return RecheckRecord(
        step=step,
        sample_id=sample.sample_id,
        part=again.part,
        server=again.server,
        weight_version=again.weight_version,
        held_version=again.held_version,
        first_row=again.first_row,
        decoded=_rows_apart(differ[decoded], moe_layers),
        prefilled=_rows_apart(differ[~decoded], moe_layers),
        num_log_probs=len(off),
        log_prob_off=bounded_mean(off, noise.usual_off) if noise is not None else 0.0,
        log_prob_off_max=float(off.max(initial=0.0)),
        noise=noise,
    )


def compare_rollout(
    step: int,
    rechecked: RecheckedRollout,
    samples: Iterable[RolloutSample],
    read: Callable[[RolloutSample], RolloutSample],
    moe_layers: Sequence[int],
    *,
    log_probs: bool,
    dtype: str,
) -> list[RecheckRecord]:
    """Compare all that was rechecked of a rollout; ``read`` gives a sample its routes.

    log_probs, dtype: as ``compare`` and ``measured_noise`` take them.
    """
    noise = measured_noise(rechecked.noise, moe_layers, dtype)
    return [
        compare(step, read(sample), again, noise.get(again.server), moe_layers, log_probs=log_probs)
        for sample, again in _comparable(rechecked, samples)
    ]


def _comparable(
    rechecked: RecheckedRollout, samples: Iterable[RolloutSample]
) -> Iterator[tuple[RolloutSample, Rechecked]]:
    """Yield what was rechecked with its sample, as far as the two can be compared."""
    samples_by_id = {sample.sample_id: sample for sample in samples}
    for again in rechecked.parts:
        if _was_given_up(samples_by_id.get(again.sample_id), again):
            continue
        sample = samples_by_id[again.sample_id]
        assert np.array_equal(sample.token_ids[: len(again.token_ids)], again.token_ids)
        # of a request that waited for an update the prompt was computed under the newer version
        if again.part != "prompt" or _first_version(sample) == again.weight_version:
            yield sample, again


def log_probs_twice(
    rechecked: RecheckedRollout, samples: Iterable[RolloutSample]
) -> tuple[np.ndarray, np.ndarray]:
    """Gather the log-probs of a rollout's rechecked tokens, as delivered and as computed again: float32[N] each."""
    delivered, computed = [], []
    for sample, again in _comparable(rechecked, samples):
        generated = _generated_in_part(sample, again)
        first, end = again.first_row + 1, len(again.token_ids)
        delivered.append(sample.rollout_log_probs[first:end][generated])
        computed.append(again.log_probs[generated])
    none = [np.zeros(0, np.float32)]
    return np.concatenate(delivered or none), np.concatenate(computed or none)


def _was_given_up(sample: RolloutSample | None, again: Rechecked) -> bool:
    """True for the prompt of an agent's request that was never answered; another may have its id since."""
    if sample is not None and sample.trajectory_id is None:
        return False
    if sample is None:
        return again.part == "prompt"
    return not np.array_equal(sample.token_ids[: len(again.token_ids)], again.token_ids)


def _first_version(sample: RolloutSample) -> int:
    versions = sample.weight_versions[sample.weight_versions >= 0]
    return int(versions[0]) if len(versions) else -1


def recheck_failures(record: RecheckRecord) -> list[Failure]:
    """The faults of a comparison that no rounding makes; of its rows none where the noise is not known."""

    def failure(layer: int, what: str, got: int, expected: int) -> Failure:
        what = f"{what}, sample {record.sample_id} on server {record.server},"
        return Failure(AGAIN, ROUTES, record.part, layer, what, got, expected)

    found = []
    if record.held_version != record.weight_version:
        held = record.held_version
        found.append(failure(0, "the server's weight version", held, record.weight_version))
    for name in ("decoded", "prefilled") if record.noise is not None else ():
        rows, at_start = getattr(record, name), getattr(record.noise, name)
        bound, most = math.floor(_MOST_SHARE * at_start.rows), math.floor(_GROSS_SHARE * rows.rows)
        for layer, differ in rows.differ.items():
            noise_rows = at_start.differ.get(layer, 0)
            if noise_rows > bound and at_start.rows >= _GROSS_ROWS:
                what = f"{name} rows with different experts in the baseline of {at_start.rows} rows"
                found.append(failure(layer, what, noise_rows, bound))
            seldom = noise_rows < _GROSS_NOISE * max(at_start.rows, 1)
            if seldom and differ > most and rows.rows >= _GROSS_ROWS:
                what = f"{name} rows with different experts in {rows.rows} rows"
                found.append(failure(layer, what, differ, most))
    return found


def judge_recheck(records: Sequence[RecheckRecord], missed: int, suspicions: Suspicions) -> Recheck:
    """The verdict on a step's comparisons; those without known noise are no evidence.

    suspicions: of the steps before, of this start.
    """
    judged = [record for record in records if record.noise is not None]
    failures = [failure for record in records for failure in recheck_failures(record)]
    statistics = []
    for server in sorted({record.server for record in judged}):
        on_server = [record for record in judged if record.server == server]
        statistics += _see(on_server, suspicions)
    verdict = suspicions.verdict(statistics) if judged else NO_EVIDENCE
    return Recheck(FAILED if failures else verdict, len(judged), missed, failures, statistics)


def _see(records: Sequence[RecheckRecord], suspicions: Suspicions) -> Iterator[Statistic]:
    """Take a step's comparisons on one server, all with noise."""
    server, noise = records[0].server, records[0].noise
    assert noise is not None
    for name in ("decoded", "prefilled"):
        rows = [getattr(record, name) for record in records]
        start, pairs = getattr(noise, name).share, sum(r.pairs for r in rows)
        if pairs:
            yield suspicions.see(
                f"{name} rows",
                server,
                sum(sum(r.differ.values()) for r in rows) / pairs,
                start=max(start, _LEAST_SHARE),
                least=ROWS_OF_NOTHING / pairs,
                highest=_MOST_TIMES * (start + _SHARE_OF_NOTHING),
            )
    if count := sum(record.num_log_probs for record in records):
        yield suspicions.see(
            "log-probs",
            server,
            sum(record.num_log_probs * record.log_prob_off for record in records) / count,
            start=noise.usual_off,
            least=noise.least_off,
            highest=_MOST_TIMES * noise.usual_off,
        )


def _rows_apart(differ: np.ndarray, moe_layers: Sequence[int]) -> RowsApart:
    """Count rows, bool[R, l], by layer."""
    return RowsApart(len(differ), dict(zip(moe_layers, differ.sum(axis=0).tolist(), strict=True)))


def _differing_rows(
    sample: RolloutSample, again: Rechecked, moe_layers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """bool[R, l] of the rows that can be compared, bool[T-1-first_row]: which these are, bool[R]: which were decoded."""
    first, end = again.first_row, len(again.token_ids) - 1
    layers = np.asarray(moe_layers) - 1
    assert sample.routed_experts is not None
    ours, theirs = sample.routed_experts[first:end, layers], again.rows[:, layers]
    missing = missing_marker(theirs.dtype)
    whole = ~((ours == missing) | (theirs == missing)).any(axis=(1, 2))
    decoded = classes_of_tokens(sample)[first:end][whole] == RowClass.DECODED
    ours, theirs = np.sort(ours[whole], axis=-1), np.sort(theirs[whole], axis=-1)
    return (ours != theirs).any(axis=-1), whole, decoded


def _log_probs_off(sample: RolloutSample, again: Rechecked) -> np.ndarray:
    """float64[T-1-first_row], nan for tokens that the model did not generate in this part.

    nan too for those of earlier turns, which are part of the prompt where each turn is a sample.
    """
    first, end = again.first_row + 1, len(again.token_ids)
    off = np.abs(again.log_probs.astype(np.float64) - sample.rollout_log_probs[first:end])
    off[~np.isfinite(off)] = _NOT_FINITE
    return np.where(_generated_in_part(sample, again), off, np.nan)


def _generated_in_part(sample: RolloutSample, again: Rechecked) -> np.ndarray:
    """bool[T-1-first_row]: log-probs of tokens that the model generated in this part."""
    first, end = again.first_row + 1, len(again.token_ids)
    same_version = sample.weight_versions[first:end] == again.weight_version
    return same_version & (np.arange(first, end) >= sample.prompt_len)
