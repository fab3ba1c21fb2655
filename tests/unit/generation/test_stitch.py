"""Samples from several answers: first write wins, a gap is marked, nothing is guessed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3train.generation import stitch
from r3train.engine.backend import Segment
from r3train.generation.stitch import (
    begin,
    extend,
    finished,
    joined,
    observe,
    rows_known,
)
from r3train.types import Prompt, RouteShape

SHAPE = RouteShape(num_layers=2, topk=3, num_experts=8)


def prompt_of(length: int) -> Prompt:
    return Prompt("p", 0, "", np.arange(length, dtype=np.int32), None)


def rows_of(positions, source: int) -> np.ndarray:
    """Rows that say which position and which computation they came from."""
    rows = np.zeros((len(positions), *SHAPE.row), np.uint8)
    rows[:, 0, 0] = positions
    rows[:, 0, 1] = source
    return rows


def start(length: int, routes: bool = True):
    sample = begin(prompt_of(length), sample_id=7, group_id=1)
    return (
        replace(sample, routed_experts=np.zeros((0, *SHAPE.row), SHAPE.dtype)) if routes else sample
    )


def segment(before, count: int, source: int, finish_reason: str = "abort", start_len=None):
    """The engine's answer: all rows from ``start_len`` on, all computed by this answer."""
    first = rows_known(before) if start_len is None else start_len
    last = before.num_tokens + count - 1
    return Segment(
        token_ids=np.full(count, 50 + source, np.int32),
        log_probs=np.full(count, -float(source), np.float32),
        weight_versions=np.full(count, source, np.int32),
        rows=rows_of(range(first, last if count else first), source),
        rows_start=first,
        finish_reason=finish_reason,
    )


@settings(max_examples=200)
@given(
    prompt_len=st.integers(1, 6),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    overlap=st.lists(st.integers(0, 4), min_size=5, max_size=5),
)
def test_every_row_is_of_the_forward_that_made_its_log_prob(prompt_len, counts, overlap):
    """The row of token t is the one that predicted token t+1, whichever rows came twice."""
    sample = start(prompt_len)
    for source, (count, again) in enumerate(zip(counts, overlap, strict=False)):
        first = max(0, rows_known(sample) - again)
        sample = extend(sample, segment(sample, count, source, start_len=first))
    sample = finished(sample)
    assert sample.routed_experts.shape == (sample.num_tokens - 1, *SHAPE.row)
    if not sample.loss_mask.any():
        assert (sample.routed_experts == 255).all()
        return
    rows = sample.routed_experts
    assert rows[:, 0, 0].tolist() == list(range(sample.num_tokens - 1)), "in their places"
    for t in range(prompt_len - 1, sample.num_tokens - 1):
        assert rows[t, 0, 1] == sample.weight_versions[t + 1]
    assert (
        sample.token_ids[prompt_len:].tolist()
        == (50 + sample.weight_versions[prompt_len:]).tolist()
    )
    assert sample.rollout_log_probs.tolist() == [
        0.0 if v < 0 else -float(v) for v in sample.weight_versions
    ]
    assert sample.num_tokens == prompt_len + sum(counts), "no prefix is there twice"


INDEX_TOPK = 3


def with_choices(answer: Segment) -> Segment:
    """The answer with bits that say which row and which computation they came from, one word a row."""
    last = answer.rows_start + len(answer.rows)
    first = max(answer.rows_start, INDEX_TOPK)
    source = int(answer.weight_versions[0]) if len(answer.token_ids) else 0
    bits = [[[row << 8 | source]] * SHAPE.num_layers for row in range(first, last)]
    bits = np.array(bits, np.uint64).reshape(-1, SHAPE.num_layers, 1)
    return replace(answer, indexer_topk=bits, indexer_start=first)


@settings(max_examples=200)
@given(
    prompt_len=st.integers(1, 6),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    overlap=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    observed=st.integers(0, 3),
    end=st.integers(2, 30),
)
def test_choices_of_an_indexer_stand_at_their_rows(prompt_len, counts, overlap, observed, end):
    sample = start(prompt_len)
    for source, (count, again) in enumerate(zip(counts, overlap, strict=False)):
        first = max(0, rows_known(sample) - again)
        sample = extend(sample, with_choices(segment(sample, count, source, start_len=first)))
    if not sample.loss_mask.any():
        assert sample.decoded_indexer == () and finished(sample).indexer_topk is not None
        return
    computed = sample.num_tokens - 1
    longer = observe(sample, [9] * observed)
    end = min(end, longer.num_tokens)
    for whole in (longer, stitch.cut(longer, end)):
        bits, length = finished(whole).indexer_topk, whole.num_tokens
        assert bits.shape == (max(0, length - 1 - INDEX_TOPK), SHAPE.num_layers, 1)
        for row in range(INDEX_TOPK, length - 1):
            expected = row << 8 | int(longer.weight_versions[row + 1]) if row < computed else 0
            if longer.loss_mask[row + 1] or row >= computed:
                assert (bits[row - INDEX_TOPK] == expected).all(), row
            else:  # of the prompt: of the first answer with a token
                assert (bits[row - INDEX_TOPK] >> np.uint64(8) == row).all()


def test_choices_on_one_side_of_a_seam_alone_are_refused():
    sample = extend(start(5), with_choices(segment(start(5), 3, 0)))
    with pytest.raises(ValueError, match="sample 7: .* only one has choices of its indexer"):
        extend(sample, segment(sample, 2, 1))


def test_rows_stand_at_their_places_and_a_gap_is_marked():
    parts = [(0, rows_of(range(2), 1)), (3, rows_of(range(3, 5), 2))]
    rows = joined(parts[0][1][:0], parts, 6)
    assert rows[[0, 1, 3, 4], 0, :2].tolist() == [[0, 1], [1, 1], [3, 2], [4, 2]]
    assert (rows[[2, 5]] == 255).all()


def test_the_rows_of_a_single_answer_are_not_copied():
    rows = rows_of(range(4), 1)
    assert joined(rows[:0], [(0, rows)], 4) is rows


def test_a_row_that_was_marked_missing_is_not_filled_by_a_later_computation():
    answer = segment(start(2), 2, source=0)
    answer.rows[1] = 255  # the engine sent -1
    sample = extend(start(2), answer)
    resumed = finished(extend(sample, segment(sample, 2, source=1, start_len=0)))
    assert (resumed.routed_experts[1] == 255).all()


def test_observed_tokens_carry_no_loss_and_get_their_rows_with_the_next_turn():
    first = extend(start(2), segment(start(2), 3, source=0, finish_reason="stop"))
    asked = observe(first, [90, 91])
    assert (asked.num_tokens, rows_known(asked)) == (7, 4)
    done = extend(asked, segment(asked, 2, source=0, finish_reason="stop"))
    assert done.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    assert done.weight_versions.tolist() == [-1, -1, 0, 0, 0, -1, -1, 0, 0]
    assert finished(done).routed_experts[:, 0, 0].tolist() == list(range(8))


def test_rows_that_do_not_fit_are_refused_with_the_sample():
    sample = extend(start(2), segment(start(2), 2, 0))
    right = segment(sample, 2, 1)
    for rows, first in ((right.rows, 2), (right.rows, 4), (right.rows[:-1], 3), (right.rows, -1)):
        with pytest.raises(ValueError, match="sample 7: an answer brings rows .* to 4"):
            extend(sample, replace(right, rows=rows, rows_start=first))
    with pytest.raises(ValueError, match="sample 7: rows .* uint16 after rows .* uint8"):
        extend(sample, replace(right, rows=right.rows.astype(np.uint16)))


def test_routes_on_one_side_of_a_seam_alone_are_refused():
    with pytest.raises(ValueError, match="sample 7: .*only one has routes"):
        extend(start(2), replace(segment(start(2), 1, 0), rows=None))
    without = extend(start(2, routes=False), replace(segment(start(2), 1, 0), rows=None))
    with pytest.raises(ValueError, match="sample 7: .*only one has routes"):
        extend(without, segment(without, 1, 0))


def test_the_oldest_version_is_of_generated_tokens_alone():
    sample = start(2)
    assert stitch.oldest_version(sample) is None
    sample = extend(sample, segment(sample, 1, source=3))
    sample = extend(observe(sample, [9]), segment(observe(sample, [9]), 2, source=5))
    assert stitch.oldest_version(sample) == 3


def with_kept(answer: Segment, *rows: list[int]) -> Segment:
    return replace(
        answer,
        mask_counts=np.array([len(row) for row in rows], np.int32),
        mask_ids=np.array([i for row in rows for i in row], np.int32),
    )


def test_sampling_mask_of_segments_turns_and_observations_stand_at_their_tokens():
    sample = start(2)
    sample = extend(sample, with_kept(segment(sample, 2, 1), [51, 3], [51]))
    sample = observe(sample, [8, 9])
    sample = extend(sample, with_kept(segment(sample, 0, 2)))
    sample = extend(sample, with_kept(segment(sample, 1, 2), [4, 52, 6]))
    assert sample.mask_counts.tolist() == [0, 0, 2, 1, 0, 0, 3]
    assert sample.mask_ids.tolist() == [51, 3, 51, 4, 52, 6]
    # as they were decoded, at the index of their first token
    parts = [(at, counts.tolist(), ids.tolist()) for at, counts, ids in sample.decoded_masks]
    assert parts == [(2, [2, 1], [51, 3, 51]), (6, [3], [4, 52, 6])]
    with pytest.raises(ValueError, match="sample 7: .* only one has sampling masks"):
        extend(sample, segment(sample, 1, 3))
