"""served: after an update a server computes the function that the actor computes.

A canary is a fixed text that every server scores, and goes on with eight tokens greedily; the actor scores both.  Six tests
judge the scores:

    EARLY   the first request that could use a cached half of the text found nothing in the cache
    WARM    the same request, on the cached half, has the experts that were cached, and log-probs as near as usual
    MOVED   a server's scores are not those of an earlier version, but for rounding, although the actor moved by more
    BOUND   server and actor, which replays the server's experts, are as near as usual
    DECODED the same on the tokens that the server drew: a decode of other weights than the prefill is found by this alone
    ROUTER  the actor's own routers choose the server's experts, as often as usual

EARLY, MOVED and the cached rows of WARM are exact: rounding cannot fail them.  BOUND, DECODED, ROUTER and the log-probs
of WARM are statistics, which are suspect first (see ``suspicion``).  What is usual is measured at the start (``CanaryNoise``): by texts
that each server scores alone, four and eight at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from r3train.proof.step_verdict import Served
from r3train.proof.suspicion import (
    bounded_mean,
    ROWS_OF_NOTHING,
    Statistic,
    suspicion_texts,
    Suspicions,
    verdict_of,
)
from r3train.proof.verdicts import FAILED, PASSED, SUSPECT
from r3train.types import Amount, CanaryScores, Scores

TESTS = ("EARLY", "WARM", "MOVED", "BOUND", "DECODED", "ROUTER")
Nats = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

# The largest move of a log-prob that is none, in times of the largest difference of two scores of a text at the start.
_LARGEST = 4.0
# A family's floor is of the largest difference; the mean of rounding was a fifteenth of its largest.
_MEAN_OF_FLOOR = 1 / 16
# In nats: more than this on average is seldom rounding, of bfloat16 and of fp8 on the servers, and is said at the start.
MOST_MEAN, MOST_MEAN_OF_FP8 = 0.1, 0.3
# The actor must have moved on so many tokens before a server that has not is a failure.
_ACTOR_MOVED = 0.5
# So many times the difference of two scores of a text at the start are none.
_STILL = 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two scores of the same texts.

    log_prob_off: the largest, in nats, and mean_off their mean; after a text's first row with other experts nothing is
    compared, because these change all that follows.  rows_differ: of ``rows``, which count each layer's on its own.
    """

    log_prob_off: Nats
    mean_off: Nats
    rows_differ: Amount
    rows: Amount

    @property
    def is_none(self) -> bool:
        return not self.log_prob_off and not self.rows_differ

    @property
    def share_of_rows(self) -> float:
        return self.rows_differ / max(self.rows, 1)


@dataclass(frozen=True, slots=True)
class CanaryNoise:
    """The differences of sound scores, measured on 8 texts at the start of the run."""

    repeat: Difference  # the largest between two scores by a server: alone, four and eight at once
    servers: Difference  # the largest between servers
    gap_mean: Nats  # server against actor
    decoded_mean: Nats  # the same on tokens that the server drew
    gap_max: Nats
    gap_floor: Nats  # the largest gap where servers store less than the actor, else 0
    least_mean: Nats  # a mean that cannot be told from none
    actor_repeat: Nats  # the actor against itself
    rows: Amount  # router rows of the actor
    rows_left: Amount  # those whose own choice was another

    @property
    def still(self) -> float:
        """The largest move of a log-prob of the actor that is none."""
        return max(_LARGEST * self.repeat.log_prob_off, self.actor_repeat)

    @property
    def usual_gap(self) -> float:
        """The mean of |actor - server| that is usual at the start."""
        means = (d.mean_off for d in (self.repeat, self.servers))
        return max(self.gap_mean, *means, _MEAN_OF_FLOOR * self.gap_floor, self.least_mean)

    @property
    def usual_decoded(self) -> float:
        """The mean of |actor - server| on drawn tokens that is usual at the start."""
        return max(self.decoded_mean, self.usual_gap)

    @property
    def usual_left(self) -> float:
        """The share of router rows that usually leave the server's experts at the start."""
        shares = [d.share_of_rows for d in (self.repeat, self.servers)]
        return max(self.rows_left / max(self.rows, 1), *shares)


@dataclass(frozen=True, slots=True)
class Earlier:
    """A server's scores against those that it gave under an earlier version."""

    version: Amount
    difference: Difference
    actor_moved: Share  # of the tokens, between the two versions


@dataclass(frozen=True, slots=True)
class Coverage:
    """The parts of a model that canaries use: a fault in the others cannot be seen."""

    experts_used: Amount  # pairs of a layer and one of its experts
    experts: Amount
    tokens_used: Amount  # different ids
    vocabulary: Amount


@dataclass(frozen=True, slots=True)
class ServedRecord:
    """All canaries on one server after one update; a line of ``evidence/served.jsonl``."""

    step: Amount  # the weight version, which is the rollout that these weights train
    server: Amount
    num_texts: Amount
    num_tokens: Amount  # log-probs of given tokens compared with the actor's
    num_decoded: Amount  # and of drawn ones
    early_cached: Amount  # most tokens of a text that were cached before it was asked for
    # texts whose second scores used less of the cache than at the start: other requests evicted it, and it shows nothing
    warm_evicted: Amount
    warm_cached_rows: Amount  # rows of the cached half that are not those that were cached
    warm: Difference
    not_finite: Amount  # tokens of which server or actor gave no finite log-prob
    earlier: list[Earlier]
    gap_mean: Nats  # of given tokens
    gap_max: Nats
    rows: Amount  # router rows of the actor
    rows_left: Amount
    coverage: Coverage
    noise: CanaryNoise
    statistics: list[Statistic]  # BOUND, DECODED, ROUTER and WARM
    limit: Nats  # of their sums, 0: none fails


def difference(pairs: Iterable[tuple[Scores, Scores]], moe_layers: Sequence[int]) -> Difference:
    """Compare scores of the same texts from the same token on; moe_layers: 1-based numbers.

    Drawn tokens are not compared: a batch of another size decodes them with other kernels.
    """
    off, differ, count = [np.zeros(0)], 0, 0
    for one, other in pairs:
        rows = _other_experts(one, other, moe_layers)
        differ, count = differ + int(rows.sum()), count + rows.size
        first = len(one.rows) + 1 - len(one.log_probs)
        end = int(rows.any(axis=1).argmax()) if rows.any() else len(rows)
        count_compared = max(end + 1 - first, 0)
        these, those = (scores.log_probs[:count_compared] for scores in (one, other))
        off.append(np.abs(these.astype(np.float64) - those))
    apart = np.concatenate(off)
    return Difference(
        float(apart.max(initial=0.0)), float(apart.mean()) if len(apart) else 0.0, differ, count
    )


def _other_experts(one: Scores, other: Scores, moe_layers: Sequence[int]) -> np.ndarray:
    """bool[T-1, l]: rows of given tokens whose sets of experts are not the same."""
    rows = len(one.rows) - len(one.sampled)
    layers = np.asarray(moe_layers, dtype=np.int64) - 1
    a, b = (np.sort(scores.rows[:rows, layers], axis=-1) for scores in (one, other))
    return (a != b).any(axis=-1)


@dataclass(frozen=True, slots=True)
class ServerScores:
    """Scores of all canaries by one server under one version, and by the actor with that server's experts.

    scores: of each text; actor: float32[T] of each text with the tokens that the server drew, entry 0 is 0.
    """

    version: int
    server: int
    scores: list[CanaryScores]
    actor: list[np.ndarray]

    @property
    def halved(self) -> list[CanaryScores]:
        """The scores of texts that were also scored from the middle on."""
        return [scores for scores in self.scores if scores.early is not None]

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """|actor - server| of all given tokens but each text's first, and of all drawn ones: float64[N], float64[D]."""
        given, drawn = [], []
        for scores, actor_log_probs in zip(self.scores, self.actor, strict=True):
            whole = scores.whole
            off = np.abs(whole.log_probs.astype(np.float64) - actor_log_probs)
            num_given = len(off) - len(whole.sampled)
            given.append(off[1:num_given])
            drawn.append(off[num_given:])
        return np.concatenate(given), np.concatenate(drawn)


@dataclass(frozen=True, eq=False)
class CanaryStart:
    """Canaries as a start measured them: texts (int32[T] each), what it measured of them, and the model's sizes.

    cached: cached tokens of each text's second scores.  moe_layers: those whose routes are compared.
    """

    texts: Sequence[np.ndarray]
    cached: Sequence[int]
    noise: CanaryNoise
    moe_layers: Sequence[int]
    num_experts: int
    vocab_size: int


def compare_servers(
    now: ServerScores,
    earlier: Sequence[ServerScores],
    start: CanaryStart,
    router: tuple[int, int],
    suspicions: Suspicions,
) -> ServedRecord:
    """Compare a server's scores with all that is known of the texts.

    earlier: its scores under earlier versions.  router: rows of the actor, and those whose own choice was another.
    suspicions: of the updates before, of this start.
    """
    texts, noise, moe_layers = start.texts, start.noise, start.moe_layers
    gaps, drawn_gaps = now.gaps()
    finite, drawn = (values[np.isfinite(values)] for values in (gaps, drawn_gaps))
    warm = difference(((r.early, r.warm) for r in now.halved), moe_layers)

    def against(other: ServerScores) -> Difference:
        pairs = zip(now.scores, other.scores, strict=True)
        return difference(((a.whole, b.whole) for a, b in pairs), moe_layers)

    def moves(other: ServerScores) -> np.ndarray:
        pairs = zip(texts, now.actor, other.actor, strict=True)
        return np.concatenate(
            [np.abs(a[1 : len(t)].astype(np.float64) - b[1 : len(t)]) for t, a, b in pairs]
        )

    return ServedRecord(
        step=now.version,
        server=now.server,
        num_texts=len(texts),
        num_tokens=len(gaps),
        num_decoded=len(drawn_gaps),
        early_cached=max(r.early.cached_tokens for r in now.halved),
        warm_evicted=sum(
            r.warm.cached_tokens < c for r, c in zip(now.halved, start.cached, strict=True)
        ),
        warm_cached_rows=sum(
            int(_other_experts(r.early, r.warm, moe_layers)[: r.warm.cached_tokens].sum())
            for r in now.halved
        ),
        warm=warm,
        not_finite=len(gaps) - len(finite) + len(drawn_gaps) - len(drawn),
        earlier=[
            Earlier(
                other.version,
                against(other),
                float((moves(other) > noise.still).mean()),
            )
            for other in earlier
        ],
        gap_mean=float(finite.mean()) if len(finite) else 0.0,
        gap_max=float(finite.max(initial=0.0)),
        rows=router[0],
        rows_left=router[1],
        coverage=_coverage(start, now.scores),
        noise=noise,
        statistics=see_served(
            suspicions,
            now.server,
            noise,
            bounded_mean(finite, noise.usual_gap),
            bounded_mean(drawn, noise.usual_decoded),
            router,
            warm.mean_off,
        ),
        limit=suspicions.limit,
    )


def see_served(
    suspicions: Suspicions,
    server: int,
    noise: CanaryNoise,
    gap: float,
    decoded: float,
    router: tuple[int, int],
    warm: float,
) -> list[Statistic]:
    """Take what an update showed of a server.

    gap, decoded, warm: means in nats; router: as ``compare_servers`` has it.
    """
    rows, left = router
    nats = {"start": noise.usual_gap, "least": noise.least_mean}
    decoded_nats = {**nats, "start": noise.usual_decoded}
    statistics = [
        suspicions.see("BOUND", server, gap, **nats),
        suspicions.see("DECODED", server, decoded, **decoded_nats),
        suspicions.see("WARM", server, warm, **nats),
    ]
    if rows:
        share = {"start": noise.usual_left, "least": ROWS_OF_NOTHING / rows}
        statistics.append(suspicions.see("ROUTER", server, left / rows, **share))
    return statistics


def statistics_again(record: ServedRecord, suspicions: Suspicions) -> list[Statistic]:
    """The statistics of a record, whose sums are added up again; suspicions: of the records before, of its start."""
    values = {s.name: s.value for s in record.statistics}
    means = (values.get(name, 0.0) for name in ("BOUND", "DECODED"))
    router, warm = (record.rows, record.rows_left), record.warm.mean_off
    return see_served(suspicions, record.server, record.noise, *means, router, warm)


def _coverage(start: CanaryStart, scores: Iterable[CanaryScores]) -> Coverage:
    used = np.zeros((len(start.moe_layers), start.num_experts), dtype=bool)
    for rows in (r.whole.rows for r in scores):
        for i, layer in enumerate(start.moe_layers):
            used[i, rows[:, layer - 1]] = True
    ids = len(np.unique(np.concatenate(start.texts)))
    return Coverage(int(used.sum()), used.size, ids, start.vocab_size)


def served_failures(record: ServedRecord) -> list[tuple[str, str]]:
    """The exact tests that a server failed, in the order of ``TESTS``, each with a line."""
    noise, found = record.noise, []

    def fail(test: str, text: str) -> None:
        found.append(
            (test, f"{test}: server {record.server}, weight version {record.step}: {text}")
        )

    if record.early_cached:
        fail(
            "EARLY",
            f"{record.early_cached} tokens of a text were in its cache before it was asked for,"
            " computed by older weights",
        )
    if record.warm_cached_rows:
        fail("WARM", f"{record.warm_cached_rows} of its cached rows are not those that were cached")
    for earlier in record.earlier:
        if _stands_still(earlier, noise) and earlier.actor_moved >= _ACTOR_MOVED:
            fail(
                "MOVED",
                f"its scores are those of version {earlier.version}, and the actor moved on"
                f" {earlier.actor_moved:.0%} of the tokens since",
            )
    if record.coverage.experts_used and not record.rows:
        fail("ROUTER", "no row of the actor was compared with what its routers chose")
    if record.not_finite:
        fail("BOUND", f"{record.not_finite} tokens have no finite log-prob")
    return found


def _stands_still(earlier: Earlier, noise: CanaryNoise) -> bool:
    """True if a server's scores differ from an earlier version's by no more than scores of one version do."""
    apart, usual = earlier.difference, noise.repeat
    return (
        apart.mean_off <= _STILL * usual.mean_off
        and apart.share_of_rows <= _STILL * usual.share_of_rows
    )


def inconclusive(record: ServedRecord) -> int:
    """Count the earlier versions whose scores a server gave again while the actor hardly moved either."""
    return sum(
        _stands_still(earlier, record.noise) and earlier.actor_moved < _ACTOR_MOVED
        for earlier in record.earlier
    )


def judge_served(records: Sequence[ServedRecord]) -> Served | None:
    """The verdict on all servers of a weight version; None without canaries."""
    if not records:
        return None
    found, suspects = [], []
    for record in records:
        found += served_failures(record)
        for statistic in record.statistics:
            where = f"weight version {record.step}"
            texts = suspicion_texts([statistic], record.limit, where)
            if verdict_of([statistic], record.limit) == FAILED:
                found += [(statistic.name, text) for text in texts]
            else:
                suspects += texts
    found.sort(key=lambda failure: TESTS.index(failure[0]))
    return Served(
        FAILED if found else SUSPECT if suspects else PASSED,
        len(records),
        sum(map(inconclusive, records)),
        found[0][0] if found else "",
        [text for _, text in found],
        suspects,
    )
