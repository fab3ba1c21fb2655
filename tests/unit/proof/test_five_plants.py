"""Every check of what servers serve against five kinds of fault, which its author did not think of.

The kinds: a value that is not a number, a fault of the second server alone, a fault that keeps the counts and the means, a
member that is missing, and a setting off its default.  Integers are never not a number, a layout has no second session, and WEIGHTS has
no setting: those places of the table are empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from r3train.proof.recheck_verdict import judge_recheck
from r3train.proof.served_verdict import Difference, judge_served, ServedRecord
from r3train.proof.suspicion import Suspicions
from r3train.proof.weights_verdict import WeightsHistory
from tests.unit.proof import test_recheck_verdict as recheck
from tests.unit.proof import test_served_verdict as served
from tests.unit.proof import test_weights_verdict as weights

SIGNS = np.where(np.arange(served.TOKENS + served.DRAWN) % 2, 1, -1)


def found(records: Iterable[ServedRecord]) -> list[str]:
    """The tests that the records fail, each with its server: "BOUND 1"."""
    texts = judge_served(list(records)).failures
    return [" ".join(text.replace(":", "").replace(",", "").split()[:3:2]) for text in texts]


def whole(seed: int = 7, first=0, **changes) -> list:
    """Readings in which one text's whole answer is another."""
    scores = served.canary_scores(seed)
    scores[first] = replace(scores[first], whole=replace(scores[first].whole, **changes))
    return scores


def actor(off) -> list[np.ndarray]:
    return [r.whole.log_probs + np.float32(off) for r in served.canary_scores(7)]


def given(off):
    return np.where(np.arange(len(SIGNS)) < served.TOKENS, off, 0)


def sampled(off):
    return np.where(np.arange(len(SIGNS)) < served.TOKENS, 0, off)


def on(server: int, off) -> ServedRecord:
    return served.record(served.read(server=server, actor=actor(off)))


def limited(limit: float, off) -> list[ServedRecord]:
    """The record of the first update that fails, and nothing where that is not the update that the limit says."""
    suspicions = Suspicions(limit)
    for update in range(1, 9):
        record = served.record(served.read(actor=actor(off)), suspicions=suspicions)
        if judge_served([record]).failures:
            return [record] * (update == limit)
    return []


def nan_in(position: int) -> np.ndarray:
    log_probs = served.canary_scores(7)[0].whole.log_probs.copy()
    log_probs[position] = np.nan
    return log_probs


def warm(**changes) -> list:
    return served.changed("warm", **changes)


def swapped_rows(rows: np.ndarray) -> np.ndarray:
    """Two rows of the cached half in each other's place: every expert is chosen as often."""
    rows = rows.copy()
    rows[[3, 4]] = rows[[4, 3]]
    return rows


def moved(server: int, off=1e-3, earlier=None, **noise) -> ServedRecord:
    """A server that gives the scores of version 6, while the actor moved."""
    still = served.read(6, server=server, of=earlier or served.canary_scores(7), actor=actor(off))
    wide = replace(served.EXACT, **{"gap_mean": 0.05, "gap_max": 0.5, **noise})
    return served.record(served.read(server=server), earlier=[still], noise=wide)


EARLY = served.canary_scores(7)[0].early
SERVED = {
    ("EARLY", "second server"): lambda: [
        served.record(),
        served.record(served.read(server=1, of=served.changed("early", cached_tokens=1))),
    ],
    ("EARLY", "same count"): lambda: [
        # the scores have as many cached tokens as they should in all
        served.record(served.read(of=served.changed("early", cached_tokens=served.HALF)))
    ],
    ("WARM", "not a number"): lambda: [
        served.record(served.read(of=warm(log_probs=np.full_like(EARLY.log_probs, np.nan))))
    ],
    ("WARM", "second server"): lambda: [
        served.record(),
        served.record(served.read(server=1, of=warm(log_probs=EARLY.log_probs + np.float32(1e-3)))),
    ],
    ("WARM", "same count"): lambda: [
        served.record(served.read(of=warm(rows=swapped_rows(EARLY.rows))))
    ],
    ("MOVED", "second server"): lambda: [served.record(), moved(1)],
    ("MOVED", "same count"): lambda: [moved(0, 1e-3 * SIGNS)],  # the actor's mean stays
    ("MOVED", "off its default"): lambda: [
        moved(0, repeat=Difference(2e-5, 1e-6, 1, 952), actor_repeat=1e-5)
    ],
    ("BOUND", "not a number"): lambda: [served.record(served.read(of=whole(log_probs=nan_in(9))))],
    ("BOUND", "second server"): lambda: [on(0, 0), on(1, given(1e-3))],
    ("BOUND", "same count"): lambda: [on(0, given(1e-3) * SIGNS)],
    ("BOUND", "off its default"): lambda: limited(2.0, given(1e-3)),
    ("DECODED", "second server"): lambda: [on(0, 0), on(1, sampled(1e-3))],
    ("DECODED", "same count"): lambda: [on(0, sampled(1e-3) * SIGNS)],
    ("DECODED", "off its default"): lambda: limited(3.0, sampled(1e-3)),
    ("ROUTER", "second server"): lambda: [
        served.record(),
        served.record(served.read(server=1), router=(4096, 400)),
    ],
    ("ROUTER", "missing member"): lambda: [served.record(router=(0, 0))],
    ("ROUTER", "off its default"): lambda: [
        served.record(router=(4096, 480), noise=replace(served.EXACT, rows_left=72))
    ],
}
# a member that is missing has no scores, and is refused before it is judged
REFUSED = {
    ("EARLY", "missing member"): lambda: served.record(served.read(of=served.canary_scores(7)[:3])),
    ("WARM", "missing member"): lambda: served.record(
        served.read(of=[replace(r, early=None, warm=None) for r in served.canary_scores(7)[:1]])
    ),
    ("MOVED", "missing member"): lambda: moved(0, earlier=served.canary_scores(7)[1:]),
    ("BOUND", "missing member"): lambda: served.record(served.read(actor=actor(0)[:3])),
    ("DECODED", "missing member"): lambda: served.record(
        served.read(
            of=whole(log_probs=served.canary_scores(7)[0].whole.log_probs[: served.TOKENS]),
            actor=actor(0),
        )
    ),
}


def judged(*updates) -> list[str]:
    """The faults of updates of two servers, each with its server."""
    history = weights.WeightsHistory()
    lines = [line for update in updates for line in history.judge(update)]
    return [" ".join(line.replace(":", "").replace(",", "").split()[:3:2]) for line in lines]


def sent(others: list[list[str]]) -> list:
    """An update of two servers, compared with a second export."""
    return weights.update(1, {0: HELD(1), 1: HELD(1)}, compared=5, others=others)


HELD = weights.held
SWAPPED = {**HELD(1), weights.NAMES[0]: HELD(1)[weights.NAMES[1]]}
SWAPPED[weights.NAMES[1]] = HELD(1)[weights.NAMES[0]]
BEGIN = weights.update(0, {0: HELD(0), 1: HELD(0)}, "", 0)
FIRST = weights.update(1, {0: HELD(1), 1: HELD(1)})
WEIGHTS = {
    ("SAME", "second server"): lambda: judged(FIRST, weights.update(2, {0: HELD(2), 1: HELD(1)})),
    ("SAME", "same count"): lambda: judged(  # as many tensors were sent, and others
        FIRST, weights.update(2, {0: HELD(1), 1: HELD(1)}, sent=f"{99:016x}")
    ),
    ("SAME", "missing member"): lambda: judged(FIRST, weights.update(2, {1: HELD(1)})),
    ("UNLIKE", "second server"): lambda: judged(weights.update(1, {0: HELD(1), 1: HELD(1, t3=0)})),
    ("UNLIKE", "same count"): lambda: judged(weights.update(1, {0: HELD(1), 1: SWAPPED})),
    ("UNLIKE", "missing member"): lambda: judged(
        weights.update(1, {0: HELD(1), 1: dict([*HELD(1).items()][:-1])})
    ),
    ("SENT", "second server"): lambda: judged(sent([[], weights.NAMES[:1]])),
    ("SENT", "same count"): lambda: judged(sent([weights.NAMES[1:2], []])),
    ("SENT", "missing member"): lambda: judged(
        sent([[], []]), weights.update(2, {0: HELD(2), 1: HELD(2)})
    ),
    ("RESTART", "second server"): lambda: judged(
        BEGIN, FIRST, weights.update(2, {0: HELD(2), 1: HELD(0)})
    ),
    ("RESTART", "missing member"): lambda: judged(BEGIN, FIRST, weights.update(2, {1: HELD(0)})),
}


def rechecked(*pairs, limit: float = 1.0, calibrating: int = 0, steps: int = 1) -> list[str]:
    records = [recheck.judged(*pair)[0] for pair in pairs]
    suspicions = Suspicions(limit, calibrating=calibrating)
    for _ in range(steps):
        verdict = judge_recheck(records, 0, suspicions)
    gross = [f"gross {f.layer_number}" for f in verdict.failures]
    summed = [s.name for s in verdict.statistics if s.sum >= limit]
    return (gross + summed) if verdict.verdict == "failed" else []


SAMPLE = recheck.sample_of()
LOG_PROBS = SAMPLE.rollout_log_probs[1:]


def again(**changes):
    return recheck.again_of(SAMPLE, **changes)


def shifted(by: int) -> np.ndarray:
    """Rows of the same sample at other tokens: every expert is chosen as often."""
    return np.roll(SAMPLE.routed_experts, by, axis=0)


def third_of_rows() -> np.ndarray:
    rows = SAMPLE.routed_experts.copy()
    rows[recheck.PROMPT :: 3] = recheck.routes(9)[recheck.PROMPT :: 3]
    return rows


RECHECK = {
    ("gross", "second server"): lambda: rechecked(
        (SAMPLE, again()), (SAMPLE, again(server=1, rows=recheck.routes(1)))
    ),
    ("gross", "same count"): lambda: rechecked((SAMPLE, again(rows=shifted(1)))),
    ("decoded rows", "second server"): lambda: rechecked(
        (SAMPLE, again()), (SAMPLE, again(server=1, rows=third_of_rows()))
    ),
    ("decoded rows", "same count"): lambda: rechecked((SAMPLE, again(rows=shifted(1)))),
    ("decoded rows", "off its default"): lambda: rechecked(
        (SAMPLE, again(rows=third_of_rows())), limit=3.0, steps=3
    ),
    ("log-probs", "not a number"): lambda: rechecked(
        (SAMPLE, again(log_probs=np.full_like(LOG_PROBS, np.nan)))
    ),
    ("log-probs", "second server"): lambda: rechecked(
        (SAMPLE, again()), (SAMPLE, again(server=1, log_probs=LOG_PROBS + np.float32(0.01)))
    ),
    ("log-probs", "same count"): lambda: rechecked(
        (SAMPLE, again(log_probs=LOG_PROBS + np.float32(0.01) * SIGNS[: len(LOG_PROBS)]))
    ),
    ("log-probs", "off its default"): lambda: rechecked(
        (SAMPLE, again(log_probs=LOG_PROBS + np.float32(0.01))), limit=3.0, steps=3
    ),
}


@pytest.mark.parametrize("check, kind", SERVED, ids=lambda name: name.replace(" ", "_"))
def test_what_a_server_serves_is_found(check, kind):
    assert f"{check} {int(kind == 'second server')}" in found(SERVED[check, kind]())


@pytest.mark.parametrize("check, kind", REFUSED, ids=lambda name: name.replace(" ", "_"))
def test_a_reading_with_a_hole_is_never_judged(check, kind):
    with pytest.raises(ValueError):
        REFUSED[check, kind]()


@pytest.mark.parametrize("check, kind", WEIGHTS, ids=lambda name: name.replace(" ", "_"))
def test_what_a_server_holds_is_found(check, kind):
    lines = WEIGHTS[check, kind]()
    assert any(line.startswith(check) for line in lines)
    if kind == "second server":
        assert f"{check} 1" in lines


@pytest.mark.parametrize("check, kind", RECHECK, ids=lambda name: name.replace(" ", "_"))
def test_what_a_server_answered_is_found(check, kind):
    assert any(name.startswith(check) for name in RECHECK[check, kind]())
