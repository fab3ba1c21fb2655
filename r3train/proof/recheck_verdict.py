"""recheck: answers against what their own server says when it computes them again.

The other claims begin at the bytes that a server sent.  Here some samples are rechecked by a
prefill under the same weights, and rows and log-probs are compared with those that were delivered.
Prefill and decode round differently, so near a tie a router may choose another expert.  How often,
is measured at the start of generation: answers that are rechecked at once.

A row differs if its set of experts does; of n rows in a layer ``limit(n, share)`` may differ, with
the share that was measured in that layer.  Log-probs likewise: one differs if it is off by more than twice the 99th
percentile of what was measured, and by more than one rounding of a logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from r3train.proof.judge import Failure, Sampling
from r3train.proof.verdicts import FAILED, NO_EVIDENCE, PASSED
from r3train.types import (
    Amount,
    LayerNumber,
    missing_marker,
    Rechecked,
    RecheckPart,
    RecheckedRollout,
    ROUTES,
    RolloutSample,
)

# the pass of a failure
AGAIN = "rechecked"

# Noise may have changed by so much since it was measured: another batch size, other weights.
_SLACK = 3.0
# A share is measured on some hundred rows, and cannot be told from 0 below this.
_LEAST_SHARE = 1e-4
# More than this is no rounding: a fault at the start must not excuse itself.
_MOST_SHARE, _MOST_OFF = 0.3, 0.5
# In nats.  A server in half precision rounds a logit between 4 and 8 to 1/32.
_LEAST_OFF, _LEAST_OFF_HALF = 1e-4, 2**-5
# Below this share the 99th percentile says nothing of log-probs behind a row that differs.
_RARE = 0.01


@dataclass(frozen=True, slots=True)
class Noise:
    """The differences that rounding alone makes on a server, as measured at the start.

    num_rows: of a layer; log_prob_tolerance: in nats.
    """

    num_rows: Amount
    rows_differ: dict[LayerNumber, Amount]  # of the layers with experts
    num_log_probs: Amount
    log_probs_differ: Amount  # by more than the tolerance
    log_prob_tolerance: Annotated[float, Meta(ge=0, le=_MOST_OFF)]

    @property
    def rows_seldom_differ(self) -> bool:
        """True if less than one row of a hundred differed, over all layers."""
        return sum(self.rows_differ.values()) < _RARE * max(self.num_rows, 1)


@dataclass(frozen=True, slots=True)
class RecheckRecord:
    """One comparison; a line of ``evidence/rechecked.jsonl``."""

    step: Amount  # the rollout_id
    sample_id: Amount
    part: RecheckPart
    server: Amount
    weight_version: Annotated[int, Meta(ge=-1)]  # of the part's tokens
    held_version: Amount  # that the server said it holds
    first_row: Amount
    num_rows: Amount  # rows of a layer that were compared: those without a missing slot
    rows_differ: dict[LayerNumber, Amount]  # of the layers with experts
    num_log_probs: Amount
    log_probs_differ: Amount
    log_prob_off_max: Annotated[float, Meta(ge=0)]
    noise: Noise | None  # None: not measured, so there is nothing to judge by


def limit(count: int, share: float) -> int:
    """The most of ``count`` rows that may differ where rounding makes a ``share`` of them differ.

    With a mean of mu = 3 * count * share (at least 1e-4 as share), a Poisson number is above
    mu + 5 sqrt(mu) + 2 about once in a million times.
    """
    mean = _SLACK * count * max(share, _LEAST_SHARE)
    return min(count, math.floor(mean + 5 * math.sqrt(mean) + 2))


def measured_noise(
    pairs: Iterable[tuple[RolloutSample, Rechecked]], moe_layers: Sequence[int], dtype: str
) -> dict[int, Noise]:
    """The noise of each server, from samples that it drew and rechecked at once.

    dtype: in which servers compute, as torch spells it.
    """
    least_off = _LEAST_OFF if dtype == "float32" else _LEAST_OFF_HALF
    differences: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for sample, again in pairs:
        differ, _ = _differing_rows(sample, again, moe_layers)
        off = _log_probs_off(sample, again)
        differences.setdefault(again.server, []).append((differ, off))
    noise = {}
    for server, found in differences.items():
        rows = np.concatenate([differ for differ, _ in found])
        differ = dict(zip(moe_layers, rows.sum(axis=0).tolist(), strict=True))
        off = np.concatenate([off[~np.isnan(off)] for _, off in found])
        p99 = float(np.quantile(off, 0.99)) if len(off) else 0.0
        tolerance = min(max(2 * p99, least_off), _MOST_OFF)
        beyond = int((off > tolerance).sum())
        noise[server] = Noise(len(rows), differ, len(off), beyond, tolerance)
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
    differ, whole = _differing_rows(sample, again, moe_layers)
    off = _log_probs_off(sample, again)
    counted = ~np.isnan(off) & log_probs
    if noise is not None and noise.rows_seldom_differ and differ.any():
        # one expert chosen otherwise changes all that follows; so many are the rows' own business
        counted[np.flatnonzero(whole)[differ.any(axis=1)].min() :] = False
    off = off[counted]
    tolerance = noise.log_prob_tolerance if noise is not None else _MOST_OFF
    return RecheckRecord(
        step=step,
        sample_id=sample.sample_id,
        part=again.part,
        server=again.server,
        weight_version=again.weight_version,
        held_version=again.held_version,
        first_row=again.first_row,
        num_rows=len(differ),
        rows_differ=dict(zip(moe_layers, differ.sum(axis=0).tolist(), strict=True)),
        num_log_probs=len(off),
        log_probs_differ=int((off > tolerance).sum()),
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
    """All that a comparison shows; nothing where the noise is not known."""
    noise = record.noise
    if noise is None:
        return []

    def failure(layer: int, what: str, got: int, expected: int) -> Failure:
        what = f"{what}, sample {record.sample_id} on server {record.server},"
        return Failure(AGAIN, ROUTES, record.part, layer, what, got, expected)

    found = []
    if record.held_version != record.weight_version:
        held = record.held_version
        found.append(failure(0, "the server's weight version", held, record.weight_version))
    bound = math.floor(_MOST_SHARE * noise.num_rows)
    for layer, differ in record.rows_differ.items():
        at_start = noise.rows_differ.get(layer, 0)
        if at_start > bound:
            what = f"rows with different experts in the baseline of {noise.num_rows} rows"
            found.append(failure(layer, what, at_start, bound))
        most = limit(record.num_rows, at_start / max(noise.num_rows, 1))
        if differ > most:
            what = f"rows with different experts in {record.num_rows} rows"
            found.append(failure(layer, what, differ, most))
    most = limit(record.num_log_probs, noise.log_probs_differ / max(noise.num_log_probs, 1))
    if record.log_probs_differ > most:
        what = f"of {record.num_log_probs} log-probs those off by more than {noise.log_prob_tolerance:.2g}"
        found.append(failure(0, what, record.log_probs_differ, most))
    return found


def judge_recheck(records: Sequence[RecheckRecord], missed: int) -> Sampling:
    """The verdict on a step's comparisons; those without known noise are no evidence."""
    judged = [record for record in records if record.noise is not None]
    failures = [failure for record in judged for failure in recheck_failures(record)]
    verdict = FAILED if failures else PASSED if judged else NO_EVIDENCE
    return Sampling(verdict, len(judged), missed, failures)


def _differing_rows(
    sample: RolloutSample, again: Rechecked, moe_layers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """bool[R, l] of the rows that can be compared, and bool[T-1-first_row]: which these are."""
    first, end = again.first_row, len(again.token_ids) - 1
    layers = np.asarray(moe_layers) - 1
    assert sample.routed_experts is not None
    ours, theirs = sample.routed_experts[first:end, layers], again.rows[:, layers]
    missing = missing_marker(theirs.dtype)
    whole = ~((ours == missing) | (theirs == missing)).any(axis=(1, 2))
    ours, theirs = np.sort(ours[whole], axis=-1), np.sort(theirs[whole], axis=-1)
    return (ours != theirs).any(axis=-1), whole


def _log_probs_off(sample: RolloutSample, again: Rechecked) -> np.ndarray:
    """float64[T-1-first_row], nan for tokens that the model did not generate in this part.

    nan too for those of earlier turns, which are part of the prompt where each turn is a sample.
    """
    first, end = again.first_row + 1, len(again.token_ids)
    off = np.abs(again.log_probs.astype(np.float64) - sample.rollout_log_probs[first:end])
    return np.where(_generated_in_part(sample, again), off, np.nan)


def _generated_in_part(sample: RolloutSample, again: Rechecked) -> np.ndarray:
    """bool[T-1-first_row]: log-probs of tokens that the model generated in this part."""
    first, end = again.first_row + 1, len(again.token_ids)
    same_version = sample.weight_versions[first:end] == again.weight_version
    return same_version & (np.arange(first, end) >= sample.prompt_len)
