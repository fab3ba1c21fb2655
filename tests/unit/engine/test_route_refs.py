"""References to routes do what arrays of routes do: the same cuts and seams give the same rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3train.engine.backend import Segment
from r3train.generation import stitch
from r3train.engine.route_relay import RouteLedger
from r3train.types import RouteShape
from r3train.types import Prompt, RouteRef, RouteShape, missing_marker

ROUTES = RouteShape(num_layers=2, topk=3, num_experts=200)
SHAPE = (2, 3)


class Kept:
    """What stores would hold, and the ledger of its keys."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], np.ndarray] = {}
        self.ledger = RouteLedger(3, lambda s, k, a, b: self.rows[s, k][a:b], ROUTES)

    def keep(self, rows: np.ndarray, store: int = 0) -> RouteRef:
        name = self.ledger.new(store)
        self.rows[store, name.key] = rows
        return self.ledger.whole(name, len(rows))


def random_rows(rng: np.random.Generator, count: int) -> np.ndarray:
    rows = rng.integers(0, 200, (count, *SHAPE)).astype(np.uint8)
    rows[rng.random(rows.shape) < 0.1] = missing_marker(np.uint8)
    return rows


def same(reference: RouteRef, rows: np.ndarray) -> bool:
    assert reference.shape == rows.shape and reference.dtype == rows.dtype
    assert len(reference) == len(rows)
    return np.array_equal(reference.read(), rows)


@settings(max_examples=300)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_merging_and_cutting_references_is_merging_and_cutting_rows(data, seed):
    rng, kept = np.random.default_rng(seed), Kept()
    rows = random_rows(rng, 0)
    reference = kept.keep(rows)
    for _ in range(data.draw(st.integers(1, 5))):
        new = random_rows(rng, data.draw(st.integers(0, 6)))
        start = data.draw(st.integers(0, len(rows) + 4))
        total = max(len(rows), start + len(new)) + data.draw(st.integers(0, 3))
        seam = dict(start=start, num_rows=total, sample="7")
        reference = stitch.merge_rows(
            reference, kept.keep(new, data.draw(st.integers(0, 2))), **seam
        )
        rows = stitch.merge_rows(rows, new, **seam)
        assert same(reference, rows)
        end = data.draw(st.integers(-2, len(rows) + 2))
        begin = data.draw(st.integers(0, len(rows) + 2))
        assert same(reference[begin:end], rows[begin:end])


@settings(max_examples=200)
@given(
    prompt_len=st.integers(1, 6),
    turns=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5
    ),
)
def test_a_sample_is_put_together_of_references_as_of_rows(prompt_len, turns):
    """Answers, rows that are asked for again, observations between: ``extend`` and ``finished``."""
    rng, kept = np.random.default_rng(prompt_len), Kept()
    prompt = Prompt("p", 0, "", np.arange(prompt_len, dtype=np.int32), None)
    with_rows = stitch.begin(prompt, sample_id=7, group_id=1)
    with_references = with_rows
    for i, (count, again, observed) in enumerate(turns):
        first = max(0, stitch.rows_known(with_rows) - again)
        rows = random_rows(rng, with_rows.num_tokens + count - 1 - first)
        part = Segment(
            token_ids=np.full(count, i, np.int32),
            log_probs=np.zeros(count, np.float32),
            weight_versions=np.zeros(count, np.int32),
            rows=rows,
            rows_start=first,
            finish_reason="abort",
        )
        with_rows = stitch.extend(with_rows, part)
        with_references = stitch.extend(
            with_references, replace(part, rows=kept.keep(rows, store=i % 3))
        )
        assert stitch.rows_known(with_rows) == stitch.rows_known(with_references)
        with_rows = stitch.observe(with_rows, [9] * observed)
        with_references = stitch.observe(with_references, [9] * observed)
    with_rows, with_references = stitch.finished(with_rows), stitch.finished(with_references)
    found = with_references.routed_experts
    if isinstance(found, np.ndarray):  # no answer had a token
        assert np.array_equal(found, with_rows.routed_experts)
    else:
        assert same(found, with_rows.routed_experts)


def test_another_shape_of_rows_is_refused_in_the_words_for_arrays():
    kept = Kept()
    known, new = kept.keep(random_rows(np.random.default_rng(0), 3)), None
    for start, total in ((3, 4), (-1, 9)):
        with pytest.raises(ValueError, match="sample 7: rows 0..2 and .* expected none past"):
            new = kept.keep(random_rows(np.random.default_rng(0), 2))
            stitch.merge_rows(known, new, start=start, num_rows=total, sample="7")
    with pytest.raises(ValueError, match="sample 7: rows .* after rows"):
        wide = RouteRef(new.segments, (2, 4), new.dtype)
        stitch.merge_rows(known, wide, start=3, num_rows=9, sample="7")


def test_a_reference_is_not_taken_for_its_rows_by_accident():
    reference = Kept().keep(random_rows(np.random.default_rng(0), 3))
    with pytest.raises(TypeError, match="read"):
        list(reference)


def test_a_key_is_released_when_the_last_reference_to_any_of_its_rows_is_gone():
    kept = Kept()
    reference = kept.keep(random_rows(np.random.default_rng(0), 6), store=1)
    cut = reference[2:4]
    del reference
    assert kept.ledger.take_released(1) == []
    joined = cut.followed_by([3])
    del cut
    assert kept.ledger.take_released(1) == []
    del joined
    assert kept.ledger.take_released(1) == [0] and kept.ledger.take_released(1) == []
    kept.ledger.put_back(1, [0])
    assert kept.ledger.take_released(0) == [] and kept.ledger.take_released(1) == [0]
