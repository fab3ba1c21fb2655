"""served: after an update a server computes the function that the actor computes.

A canary is a fixed text that every server and the actor score after every update.  Six tests judge what they say:

    EARLY   the first request that could use a cached half of the text found nothing in the cache
    WARM    the same request, on the cached half, has the same log-probs and experts, but for what rounding may do to them
    MOVED   a server no longer says what it said under an earlier version, although the actor does not either
    TWINS   servers of one version say the same, and a server that was restarted says what it said before
    BOUND   server and actor, which replays the server's experts, are as near as before the update or at the start
    ROUTER  the actor's own routers choose the server's experts, as often as before the update or at the start

Three of them need no comparison of two programs, and have no noise where a server repeats itself bit by bit.  How far
its readings are apart otherwise is measured at the start (``CanaryNoise``).  WARM compares a server with itself too, but a
cached half is computed in other pieces: it allows what BOUND and ROUTER allow two programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from r3train.proof.judge import Served
from r3train.proof.recheck_verdict import limit
from r3train.proof.verdicts import FAILED, PASSED
from r3train.types import Amount, CanaryScores, Scores

TESTS = ("EARLY", "WARM", "MOVED", "TWINS", "BOUND", "ROUTER")
Nats = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

# Of sound updates the worst mean was 1.61 times that of the version before, after a step of adapters with a large learning rate.
_MEAN, _LARGEST = 3.0, 4.0
# The largest difference of all tokens has a long tail in bfloat16: once in some 1,200 sound updates it was 5.3 times that
# of the version before.
_LARGEST_GAP = 10.0
# A family's floor is of the largest difference; the mean of rounding was a fifteenth of its largest.
_MEAN_OF_FLOOR = 1 / 16
# More than this, in nats on average, is no rounding: a fault at the start must not excuse itself.
_MOST_MEAN = 0.1
# The actor must have moved on so many tokens before a server that has not is a failure.
_ACTOR_MOVED = 0.5
# The actor's router may disagree with the server in twice as many rows as at the start ...
_ROUTER_SLACK = 2.0
# ... or in this share of the rows: a smaller one cannot be told from 0 on a few thousand rows.
_LEAST_LEFT = 1e-4


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two readings of the same texts.

    log_prob_off: the largest, in nats; after a text's first row with other experts nothing is compared, because these
    change all that follows.  rows_differ: of ``rows``, which count each layer's on its own.
    """

    log_prob_off: Nats
    rows_differ: Amount
    rows: Amount

    @property
    def is_none(self) -> bool:
        return not self.log_prob_off and not self.rows_differ


@dataclass(frozen=True, slots=True)
class CanaryNoise:
    """The differences of sound readings, measured on 8 texts at the start of the run."""

    repeat: Difference  # the same reading again, as updates will ask for it
    gap_mean: Nats  # server against actor
    gap_max: Nats
    gap_floor: Nats  # the largest gap where servers store less than the actor, else 0
    actor_repeat: Nats  # the actor against itself
    rows: Amount  # router rows of the actor
    rows_left: Amount  # those whose own choice was another

    @property
    def still(self) -> float:
        """The largest move of a log-prob that is none, on servers and in the actor."""
        return max(_LARGEST * self.repeat.log_prob_off, self.actor_repeat)


@dataclass(frozen=True, slots=True)
class Before:
    """The difference of servers and actor under the version before, or at the start where that was more.

    Rounding grows with the weights of a model that learns, slowly; a fault comes with one update.
    """

    gap_mean: Nats
    gap_max: Nats
    rows: Amount
    rows_left: Amount

    def most_mean(self, floor: float) -> float:
        """The largest mean of |actor - server| that rounding explains."""
        return max(_MEAN * self.gap_mean, _MEAN_OF_FLOOR * floor)

    def most(self, floor: float) -> float:
        """The largest single |actor - server| that rounding explains."""
        return max(_LARGEST_GAP * self.gap_max, floor)

    def most_left(self, rows: int) -> int:
        """The most of these router rows that may disagree with the server's."""
        mean = _ROUTER_SLACK * rows * max(self.rows_left / max(self.rows, 1), _LEAST_LEFT)
        return min(rows, int(mean + 5 * mean**0.5 + 2))

    @classmethod
    def from_records(cls, noise: CanaryNoise, records: Sequence[ServedRecord] = ()) -> Before:
        """Return the most of the start and of a version's records."""
        shares = [(r.rows_left / max(r.rows, 1), r.rows, r.rows_left) for r in (noise, *records)]
        return cls(
            max(r.gap_mean for r in (noise, *records)),
            max(r.gap_max for r in (noise, *records)),
            *max(shares)[1:],
        )


@dataclass(frozen=True, slots=True)
class Earlier:
    """A server's reading against the one that it gave under an earlier version."""

    version: Amount
    difference: Difference
    actor_moved: Share  # of the tokens, between the two versions


@dataclass(frozen=True, slots=True)
class Twin:
    """A server's three readings against another's of the same version, or its own before it was restarted."""

    server: Amount
    early: Difference
    warm: Difference
    whole: Difference


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
    num_tokens: Amount  # log-probs compared with the actor's
    early_cached: Amount  # most tokens of a text that were cached before it was asked for
    # texts whose second reading used less of the cache than at the start: other requests evicted it, and it shows nothing
    warm_evicted: Amount
    warm_cached_rows: Amount  # rows of the cached half that are not those that were cached
    warm: Difference
    earlier: list[Earlier]
    twins: list[Twin]
    gap_mean: Nats
    gap_max: Nats
    rows: Amount  # router rows of the actor
    rows_left: Amount
    coverage: Coverage
    noise: CanaryNoise
    before: Before


def difference(pairs: Iterable[tuple[Scores, Scores]], moe_layers: Sequence[int]) -> Difference:
    """Compare readings of the same texts from the same token on; moe_layers: 1-based numbers."""
    off, differ, count = 0.0, 0, 0
    for one, other in pairs:
        rows = _other_experts(one, other, moe_layers)
        differ, count = differ + int(rows.sum()), count + rows.size
        first = len(one.rows) + 1 - len(one.log_probs)
        end = int(rows.any(axis=1).argmax()) if rows.any() else len(rows)
        apart = np.abs(one.log_probs.astype(np.float64) - other.log_probs)
        off = max(off, float(apart[: max(end + 1 - first, 0)].max(initial=0.0)))
    return Difference(off, differ, count)


def _other_experts(one: Scores, other: Scores, moe_layers: Sequence[int]) -> np.ndarray:
    """bool[T-1, l]: rows whose sets of experts are not the same."""
    layers = np.asarray(moe_layers, dtype=np.int64) - 1
    a, b = (np.sort(scores.rows[:, layers], axis=-1) for scores in (one, other))
    return (a != b).any(axis=-1)


@dataclass(frozen=True, slots=True)
class ServerRead:
    """Scores of all canaries by one server under one version, and by the actor with that server's experts.

    scores: of each text; actor: float32[T] of each text, entry 0 is 0.
    """

    version: int
    server: int
    scores: list[CanaryScores]
    actor: list[np.ndarray]

    @property
    def halved(self) -> list[CanaryScores]:
        """The scores of texts that were also read from the middle on."""
        return [scores for scores in self.scores if scores.early is not None]

    def gaps(self) -> np.ndarray:
        """float64[all tokens but each text's first]: |actor - server|."""
        pairs = zip(self.scores, self.actor, strict=True)
        off = [
            np.abs(r.whole.log_probs[1:].astype(np.float64) - actor_log_probs[1:])
            for r, actor_log_probs in pairs
        ]
        return np.concatenate(off)


def compare_servers(
    now: ServerRead,
    earlier: Sequence[ServerRead],
    twins: Sequence[ServerRead],
    *,
    texts: Sequence[np.ndarray],
    cached: Sequence[int],
    router: tuple[int, int],
    noise: CanaryNoise,
    before: Before,
    moe_layers: Sequence[int],
    num_experts: int,
    vocab_size: int,
) -> ServedRecord:
    """Compare what a server says with all that is known of the texts (int32[T] each).

    earlier: its readings under earlier versions; twins: other readings of this version.  cached: cached tokens of
    each second reading at the start.  router: rows of the actor, and those whose own choice was another.
    """
    gaps = now.gaps()

    def against(other: ServerRead, which: str) -> Difference:
        whole = which == "whole"
        pairs = zip(*(r.scores if whole else r.halved for r in (now, other)), strict=True)
        return difference(((getattr(a, which), getattr(b, which)) for a, b in pairs), moe_layers)

    moved = [
        np.abs(np.concatenate(now.actor).astype(np.float64) - np.concatenate(other.actor))
        for other in earlier
    ]
    first_tokens = np.cumsum([0, *map(len, now.actor[:-1])])
    return ServedRecord(
        step=now.version,
        server=now.server,
        num_texts=len(texts),
        num_tokens=len(gaps),
        early_cached=max(r.early.cached_tokens for r in now.halved),
        warm_evicted=sum(r.warm.cached_tokens < c for r, c in zip(now.halved, cached, strict=True)),
        warm_cached_rows=sum(
            int(_other_experts(r.early, r.warm, moe_layers)[: r.warm.cached_tokens].sum())
            for r in now.halved
        ),
        warm=difference(((r.early, r.warm) for r in now.halved), moe_layers),
        earlier=[
            Earlier(
                other.version,
                against(other, "whole"),
                float((np.delete(apart, first_tokens) > noise.still).mean()),
            )
            for other, apart in zip(earlier, moved)
        ],
        twins=[
            Twin(other.server, *(against(other, which) for which in ("early", "warm", "whole")))
            for other in twins
        ],
        gap_mean=float(gaps.mean()),
        gap_max=float(gaps.max()),
        rows=router[0],
        rows_left=router[1],
        coverage=_coverage(texts, now.scores, moe_layers, num_experts, vocab_size),
        noise=noise,
        before=before,
    )


def _coverage(
    texts: Sequence[np.ndarray],
    scores: Iterable[CanaryScores],
    moe_layers: Sequence[int],
    num_experts: int,
    vocab_size: int,
) -> Coverage:
    used = np.zeros((len(moe_layers), num_experts), dtype=bool)
    for rows in (r.whole.rows for r in scores):
        for i, layer in enumerate(moe_layers):
            used[i, rows[:, layer - 1]] = True
    ids = len(np.unique(np.concatenate(texts)))
    return Coverage(int(used.sum()), used.size, ids, vocab_size)


def within(got: Difference, noise: Difference) -> bool:
    """True if two readings differ by no more than noise; by nothing where there is none."""
    if noise.is_none:
        return got.is_none
    most = limit(got.rows, noise.rows_differ / max(noise.rows, 1))
    return got.log_prob_off <= _LARGEST * noise.log_prob_off and got.rows_differ <= most


def _is_still(record: Earlier, noise: CanaryNoise) -> bool:
    return within(record.difference, noise.repeat)


def served_failures(record: ServedRecord) -> list[tuple[str, str]]:
    """The tests that a server failed, in the order of ``TESTS``, each with a line."""
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
    warm = record.warm
    before = record.before
    rounded = warm.log_prob_off <= before.most(0) and warm.rows_differ <= before.most_left(
        warm.rows
    )
    if record.warm_cached_rows or not (rounded or within(warm, noise.repeat)):
        fail(
            "WARM",
            f"on the cached half {_apart(warm)}, and {record.warm_cached_rows} of its cached rows are others",
        )
    for earlier in record.earlier:
        if _is_still(earlier, noise) and earlier.actor_moved >= _ACTOR_MOVED:
            fail(
                "MOVED",
                f"it says what it said under version {earlier.version}, and the actor moved on"
                f" {earlier.actor_moved:.0%} of the tokens since",
            )
    for twin in record.twins:
        apart = {"first": twin.early, "second": twin.warm, "whole": twin.whole}
        for name in [name for name in apart if not within(apart[name], noise.repeat)][:1]:
            other = f"from server {twin.server}"
            if twin.server == record.server:
                other = "from what it said before its restart"
            fail("TWINS", f"its {name} reading is {_apart(apart[name])} {other}")
    if noise.gap_mean > _MOST_MEAN:
        fail(
            "BOUND",
            f"at the start it was {noise.gap_mean:.2g} nats from the actor on average, expected at most"
            f" {_MOST_MEAN:g}: this is no rounding",
        )
    most_mean, most = (f(noise.gap_floor) for f in (before.most_mean, before.most))
    if record.gap_mean > most_mean or record.gap_max > most:
        fail(
            "BOUND",
            f"with its experts replayed the actor is {record.gap_mean:.3g} nats away on average and at most"
            f" {record.gap_max:.3g}, expected at most {most_mean:.3g} and {most:.3g}",
        )
    if record.rows_left > (most_left := before.most_left(record.rows)):
        fail(
            "ROUTER",
            f"in {record.rows_left} of {record.rows} rows the actor's routers choose other experts, expected at"
            f" most {most_left}",
        )
    return found


def _apart(apart: Difference) -> str:
    return f"{apart.log_prob_off:.3g} nats and {apart.rows_differ} of {apart.rows} rows apart"


def inconclusive(record: ServedRecord) -> int:
    """Count the earlier versions of which a server said the same while the actor hardly moved either."""
    return sum(
        _is_still(earlier, record.noise) and earlier.actor_moved < _ACTOR_MOVED
        for earlier in record.earlier
    )


def judge_served(records: Sequence[ServedRecord]) -> Served | None:
    """The verdict on all servers of a weight version; None without canaries."""
    if not records:
        return None
    found = [failure for record in records for failure in served_failures(record)]
    found.sort(key=lambda failure: TESTS.index(failure[0]))
    return Served(
        FAILED if found else PASSED,
        len(records),
        sum(map(inconclusive, records)),
        found[0][0] if found else "",
        [text for _, text in found],
    )
