"""Bins exactly: how many there are, and which samples share one."""

from __future__ import annotations

import numpy as np
import pytest

from r3train.layout.microbatch import assign_microbatches, pack_bins


@pytest.mark.parametrize(
    "lengths, budget, multiple, bins",
    [
        # the longest first, each into the first bin with room
        ([3, 7, 5, 4], 10, 1, [[0, 1], [2, 3]]),
        ([6, 4], 10, 1, [[0, 1]]),  # full to the last token
        ([6, 5], 10, 1, [[0], [1]]),
        ([10, 10, 10], 10, 1, [[0], [1], [2]]),
        # the fullest that can be split is, into halves of near-equal tokens
        ([1, 2, 3, 4], 10, 2, [[0, 3], [1, 2]]),
        ([9, 1, 1, 1, 1], 9, 3, [[0], [1, 3], [2, 4]]),
        ([9, 2, 2, 2], 9, 4, [[0], [1], [2], [3]]),
        ([5], 9, 3, [[0], [], []]),
        ([], 9, 2, [[], []]),
        ([], 9, 1, [[]]),
        ([5, 5, 5], 5, 2, [[0], [1], [2], []]),
        ([5, 5, 5, 5], 5, 2, [[0], [1], [2], [3]]),
    ],
)
def test_samples_are_packed_first_fit_and_the_fullest_bins_are_split(
    lengths, budget, multiple, bins
):
    found = pack_bins(lengths, budget, num_bins_multiple=multiple)
    assert sorted(found) == sorted(bins)


def test_of_bins_that_can_be_split_the_fullest_is():
    # bins of 9 (one sample), 9 (5 and 4) and 5 tokens (3 and 2)
    found = pack_bins([9, 5, 3, 4, 2], 9, num_bins_multiple=4)
    assert sorted(found) == [[0], [1], [2, 4], [3]]


@pytest.mark.parametrize("seed", range(20))
def test_bins_are_as_many_as_first_fit_needs_rounded_up_to_the_multiple(seed):
    random = np.random.default_rng(seed)
    lengths, budget = random.integers(1, 30, random.integers(1, 40)).tolist(), 40
    plain = pack_bins(lengths, budget)
    assert sum(lengths) / budget <= len(plain) <= 2 * sum(lengths) / budget + 1
    for multiple in (2, 3, 8):
        found = pack_bins(lengths, budget, num_bins_multiple=multiple)
        assert len(found) == -(-len(plain) // multiple) * multiple
        assert sorted(i for group in found for i in group) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in group) <= budget for group in found)
        assert all(group == sorted(group) for group in found)
        # none is empty while another holds two
        assert all(found) or max(map(len, found)) == 1


def test_a_sample_above_the_budget_is_refused_and_one_of_the_budget_is_not():
    assert pack_bins([10], 10) == [[0]]
    with pytest.raises(ValueError, match=r"sample 1 of the batch has 11 tokens, .*\(10 = "):
        pack_bins([1, 11], 10)


def test_neighbours_weigh_alike_and_every_other_turn_runs_backwards():
    lengths = [8, 7, 6, 5, 4, 3]
    bins = [[i] for i in range(6)]
    assert assign_microbatches(bins, lengths, 2) == [[[0], [3], [4]], [[1], [2], [5]]]
    assert assign_microbatches(bins[::-1], lengths, 3) == [[[0], [5]], [[1], [4]], [[2], [3]]]
    assert assign_microbatches([[0, 5], [1]], lengths, 1) == [[[0, 5], [1]]]
    with pytest.raises(AssertionError):
        assign_microbatches(bins, lengths, 4)
