"""Filling the slots that the rollout did not report."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3train.routing.padding import fill_missing, padding_routes


@st.composite
def rows_with_holes(draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    topk = draw(st.integers(1, 6))
    num_experts = draw(st.integers(topk, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    rows = draw(st.integers(1, 8))
    scores = torch.rand(rows, num_experts, generator=generator)
    experts = torch.rand(rows, num_experts, generator=generator).argsort(1)[:, :topk]
    missing = torch.rand(rows, topk, generator=generator) < 0.5
    return scores, experts, missing


def has_duplicates(experts: torch.Tensor) -> bool:
    return any(len(set(row)) < len(row) for row in experts.tolist())


@settings(max_examples=200)
@given(rows_with_holes())
def test_filled_rows_are_distinct_and_recorded_slots_stay(case):
    scores, experts, missing = case
    filled = fill_missing(scores, experts.masked_fill(missing, 255), missing)
    assert not has_duplicates(filled)
    assert torch.equal(filled[~missing], experts[~missing])


@settings(max_examples=200)
@given(rows_with_holes())
def test_the_kth_hole_takes_the_kth_best_expert_that_the_row_does_not_use(case):
    scores, experts, missing = case
    filled = fill_missing(scores, experts, missing).tolist()
    for row, kept, holes, score in zip(filled, experts.tolist(), missing.tolist(), scores):
        used = {e for e, hole in zip(kept, holes) if not hole}
        best = [e for e in score.argsort(descending=True).tolist() if e not in used]
        assert [e for e, hole in zip(row, holes) if hole] == best[: sum(holes)]


def test_a_cyclic_filler_would_make_duplicates_here():
    # the check above can fail: this is the filler that ignores what the row holds
    missing = torch.tensor([[False, True]])
    cyclic = torch.where(missing, torch.tensor([[0, 1]]), torch.tensor([[1, 255]]))
    assert has_duplicates(cyclic)


def test_an_excluded_expert_is_taken_last():
    scores = torch.tensor([[0.1, float("-inf"), 0.3]])
    filled = fill_missing(scores, torch.tensor([[2, 0]]), torch.tensor([[False, True]]))
    assert filled.tolist() == [[2, 0]]


@given(st.integers(0, 50), st.integers(1, 8), st.integers(8, 40))
def test_padding_rows_are_distinct_and_spread_over_all_experts(num_rows, topk, num_experts):
    routes = padding_routes(num_rows, topk, num_experts)
    assert all(len(set(row)) == topk for row in routes.tolist())
    load = np.bincount(routes.flatten(), minlength=num_experts)
    assert load.max() - load.min() <= 1
