"""Samples keep the facts of each of their answers, and the next request tells those of the sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.generation.test_stitch import segment, start

from r3train.engine.backend import SamplingParams
from r3train.generation.stitch import (
    extend,
    finished,
    is_cut,
    next_request,
    observe,
    oldest_version,
)
from r3train.types import missing_marker


def test_retractions_of_all_answers_add_up():
    sample = start(2)
    for source, retractions in ((1, 1), (2, 0), (3, 2)):
        answer = replace(segment(sample, 2, source), num_retractions=retractions)
        sample = extend(sample, answer)
    assert sample.num_retractions == 3


@pytest.mark.parametrize("exact", [True, False])
def test_the_next_request_says_what_is_known_and_what_the_model_generated(exact):
    sample = observe(extend(start(2), segment(start(2), 3, 1)), [60, 61])
    request = next_request(
        sample, SamplingParams(20), limit=4, weight_version=5, exact_version=exact
    )
    assert (request.sample_id, request.group_id, request.prompt_id) == (7, 1, "p")
    assert request.token_ids.tolist() == [0, 1, 51, 51, 51, 60, 61]
    # three tokens are the model's; rows end before the last of them, and the budget is of all five
    assert (request.num_generated, request.rows_start) == (3, 4)
    assert request.max_new_tokens == 4 and request.weight_version == 5
    assert (request.exact_version, request.wants_routes, request.fresh_prefix) == (
        exact,
        True,
        False,
    )
    assert next_request(sample, SamplingParams(20)).max_new_tokens == 15
    assert next_request(sample, SamplingParams(7), limit=4).max_new_tokens == 2
    assert not next_request(sample, SamplingParams(20), wants_routes=False).wants_routes


@pytest.mark.parametrize("reason", ["abort", "stop", "length"])
def test_an_answer_without_a_token_ends_the_sample_for_its_own_reason(reason):
    sample = extend(start(2), segment(start(2), 3, 1, "abort"))
    ended = extend(sample, segment(sample, 0, 2, reason))
    assert ended.finish_reason == reason and ended.num_tokens == sample.num_tokens


@pytest.mark.parametrize(
    "reason, count, limit, left, cut",
    [
        ("length", 4, 4, 1, True),
        ("length", 4, 4, 0, False),
        ("length", 3, 4, 1, False),
        ("length", 4, None, 1, False),
        ("stop", 4, 4, 1, False),
    ],
)
def test_an_answer_was_cut_where_its_own_limit_ended_it(reason, count, limit, left, cut):
    answer = segment(start(2), count, 1, reason)
    assert is_cut(answer, limit, left) is cut


def test_the_rows_of_what_an_environment_said_last_are_missing():
    sample = observe(extend(start(2), segment(start(2), 3, 1)), [60, 61])
    rows = finished(sample).routed_experts
    assert len(rows) == sample.num_tokens - 1
    marked = (rows == missing_marker(np.uint8)).all(axis=(1, 2))
    assert marked.tolist() == [False] * 4 + [True] * 2


def test_a_sample_of_one_turn_is_as_old_as_its_own_tokens():
    """Its prompt holds the turns before, with the versions that generated them."""
    sample = extend(start(2), segment(start(2), 2, 1))
    later = extend(observe(sample, [60]), segment(observe(sample, [60]), 2, 3))
    assert oldest_version(later) == 1
    in_last_answer = np.arange(later.num_tokens) >= later.num_tokens - 2
    assert oldest_version(replace(later, loss_mask=in_last_answer, prompt_len=5)) == 3


def test_rows_that_come_twice_are_recorded_as_they_came_first():
    """The evidence counts each row once, of the forward whose log-prob is trained."""
    sample = extend(start(2), segment(start(2), 3, 1))
    again = segment(sample, 2, 2, start_len=1)  # rows 1 to 3 are known already
    whole = extend(sample, again)
    assert [(first, len(rows)) for first, rows in whole.decoded] == [(0, 4), (4, 2)]
    recorded = np.concatenate([rows for _, rows in whole.decoded])
    np.testing.assert_array_equal(recorded, finished(whole).routed_experts)
    assert recorded[:, 0, 1].tolist() == [1] * 4 + [2] * 2
