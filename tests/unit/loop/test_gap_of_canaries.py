"""The budget's log-probs as the canaries have them: which log-prob of a server belongs to which of the actor's."""

from __future__ import annotations

import numpy as np
import pytest

from r3train.algo.gap_budget import gap_budget
from r3train.loop.step_proof import canary_log_probs
from r3train.proof.served_verdict import ServerScores
from r3train.types import CanaryScores, Scores

ROWS = np.zeros((7, 2, 2), np.uint8)


def scores(log_probs: list[float], cached: int = 0) -> Scores:
    return Scores(np.array(log_probs, np.float32), ROWS, cached)


def read(server: int, off: float, cold: float) -> tuple[ServerScores, list[np.ndarray]]:
    """A text of 8 tokens: the actor is ``off`` above the server, twice that without replay, the cache ``cold`` below."""
    whole = [0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
    half = [0.0, *whole[5:]]
    both = CanaryScores(
        early=scores(half),
        warm=scores([0.0, *(x - cold for x in half[1:])], cached=4),
        whole=scores(whole),
    )
    actor = np.array([0.0, *(x + off for x in whole[1:])], np.float32)
    live = np.array([0.0, *(x + 2 * off for x in whole[1:])], np.float32)
    return ServerScores(3, server, [both, both], [actor, actor]), [live, live]


def test_kernels_and_cache_are_read_off_the_same_tokens_of_all_servers():
    found = canary_log_probs([read(0, 0.25, 0.0), read(1, 0.75, 0.5)])
    assert len(found.server) == len(found.actor) == 2 * 2 * 7
    assert len(found.early) == len(found.warm) == 2 * 2 * 3
    np.testing.assert_allclose(np.unique(found.actor - found.server), [0.25, 0.75])
    np.testing.assert_allclose(np.unique(found.early - found.warm), [0.0, 0.5])
    metrics = {"train/num_loss_tokens": 8, "train/loss_tokens_rows_cached": 2}
    metrics |= dict.fromkeys([f"train/log_prob_gap_{stat}" for stat in ("k1", "k3")], 1.0)
    budget = gap_budget(metrics, canaries=found, replayed=True, flushed=True)
    assert budget["gap/kernels_mean"] == pytest.approx(0.5)
    assert budget["gap/routing_mean"] == pytest.approx(0.5)  # R3 took it out of the gap
    assert budget["gap/cache_mean"] == pytest.approx(0.25)
    assert budget["gap/cache_k1"] == pytest.approx(-0.25 * 2 / 8)
    assert budget["gap/rest_k1"] == pytest.approx(1 + 0.5 + 0.0625)  # the actor is above the server


def test_the_actors_own_routers_count_only_where_they_were_asked_for_every_server():
    """A server that was lost keeps its last scores, and the pass without replay is of those in use."""
    lost = read(1, 0.75, 0.5)[0], None
    found = canary_log_probs([read(0, 0.25, 0.0), lost])
    assert found.live is None and len(found.server) == 2 * 2 * 7
