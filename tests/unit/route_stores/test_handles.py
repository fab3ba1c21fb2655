"""Handles go through cuts and seams as the rows that they stand for; keys end with their group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3train.engine.backend import Segment
from r3train.generation import stitch
from r3train.route_stores import handles
from r3train.route_stores.relay import Keys
from r3train.route_stores.handles import HANDLES, Run
from r3train.types import Prompt, RouteShape

ROUTES = RouteShape(num_layers=2, topk=3, num_experts=200)


class Kept:
    """The rows of stores by key, without the stores."""

    def __init__(self) -> None:
        self.rows: dict[int, np.ndarray] = {}

    def keep(self, rows: np.ndarray) -> np.ndarray:
        key = 3 + len(self.rows)
        self.rows[key] = rows
        return handles.issue(key, len(rows))

    def read(self, numbers: np.ndarray) -> np.ndarray:
        out = np.full((len(numbers), *ROUTES.row), ROUTES.missing, ROUTES.dtype)
        for first, key, start, stop in handles.runs(numbers):
            if key is not None:
                out[first : first + stop - start] = self.rows[key][start:stop]
        return out


def random_rows(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 256, (count, *ROUTES.row)).astype(ROUTES.dtype)


def test_the_worked_example_and_runs_of_rows_and_of_missing_ones():
    numbers = handles.issue(7, 6)
    assert numbers.shape == (6, 1, 1) and numbers[5, 0, 0] == 7 << 24 | 5
    gap = np.full((2, 1, 1), HANDLES.missing, HANDLES.dtype)
    joined = np.concatenate([gap, numbers[1:3], numbers[3:5], handles.issue(1, 1), gap[:1]])
    assert list(handles.runs(joined)) == [
        Run(0, None, 0, 2),
        Run(2, 7, 1, 5),
        Run(6, 1, 0, 1),
        Run(7, None, 0, 1),
    ]
    assert list(handles.runs(numbers[:0])) == []


@settings(max_examples=200)
@given(
    prompt_len=st.integers(1, 6),
    turns=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5
    ),
)
def test_a_sample_is_put_together_of_tickets_as_of_rows(prompt_len, turns):
    """Answers, rows that are asked for again, observations between: ``extend`` and ``finished``."""
    rng, kept = np.random.default_rng(prompt_len), Kept()
    prompt = Prompt("p", 0, "", np.arange(prompt_len, dtype=np.int32), None)
    with_rows = with_handles = stitch.begin(prompt, sample_id=7, group_id=1)
    for i, (count, again, observed) in enumerate(turns):
        first = max(0, stitch.rows_known(with_rows) - again)
        rows = random_rows(rng, max(0, with_rows.num_tokens + count - 1 - first))
        part = Segment(
            token_ids=np.full(count, i, np.int32),
            log_probs=np.zeros(count, np.float32),
            weight_versions=np.zeros(count, np.int32),
            rows=rows,
            rows_start=first,
            finish_reason="abort",
        )
        with_rows = stitch.extend(with_rows, part)
        with_handles = stitch.extend(with_handles, replace(part, rows=kept.keep(rows)))
        assert stitch.rows_known(with_rows) == stitch.rows_known(with_handles)
        with_rows = stitch.observe(with_rows, [9] * observed)
        with_handles = stitch.observe(with_handles, [9] * observed)
    found = stitch.finished(with_handles).routed_experts
    assert found.dtype == HANDLES.dtype and found.shape[1:] == HANDLES.row
    np.testing.assert_array_equal(kept.read(found), stitch.finished(with_rows).routed_experts)


def test_rows_are_never_put_beside_tickets():
    prompt = Prompt("p", 0, "", np.arange(3, dtype=np.int32), None)
    sample = stitch.begin(prompt, sample_id=7, group_id=1)
    numbers = np.zeros(1, np.int32)
    for start, rows in ((0, random_rows(np.random.default_rng(0), 3)), (3, handles.issue(1, 1))):
        part = Segment(numbers, numbers.astype(np.float32), numbers, rows, start, "abort")
        if start:
            with pytest.raises(ValueError, match="sample 7: rows .* uint64 after rows .* uint8"):
                stitch.extend(sample, part)
        else:
            sample = stitch.extend(sample, part)


def test_keys_name_their_store_and_are_released_a_rollout_after_their_group_ended():
    keys = Keys(3)
    made = [keys.new(group, store) for group, store in ((5, 0), (5, 0), (6, 1), (7, 2))]
    assert [key % 3 for key in made] == [0, 0, 1, 2] and len(set(made)) == 4 and min(made) > 0
    keys.ended(5)
    keys.ended(5)
    keys.ended(99)  # nothing of it was ever kept
    assert keys.take_released() == [[], [], []]  # trained now: its rows are still needed
    keys.ended(7)
    assert keys.take_released() == [made[:2], [], []]
    assert keys.take_released() == [[], [], [made[3]]]
    assert keys.take_released() == [[], [], []]
