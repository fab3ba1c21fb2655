"""Bin packing: the number of microbatches, and the samples of each."""

from __future__ import annotations

from collections.abc import Sequence


def pack_bins(
    lengths: Sequence[int], budget: int, *, num_bins_multiple: int = 1
) -> list[list[int]]:
    """Group samples so that no group holds more than ``budget`` tokens.

    First-fit decreasing, then the fullest groups are split until the number of groups is a
    multiple of ``num_bins_multiple`` (data-parallel size, times pipeline size under an interleaved
    schedule): every rank then runs the same number of microbatches.  Groups may be empty when
    there are fewer samples than groups.  Returns lists of indices into ``lengths``, each ascending.

    Raises ValueError when a single sample is longer than the budget.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > budget:
            raise ValueError(
                f"sample {i} of the batch has {lengths[i]} tokens, more than a microbatch may hold "
                f"({budget} = max_tokens_per_gpu x context_parallel_size)"
            )
        for b, free in enumerate(room):
            if lengths[i] <= free:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    target = max(1, -(-len(bins) // num_bins_multiple)) * num_bins_multiple
    while len(bins) < target:
        fullest = max(range(len(bins)), key=lambda b: (len(bins[b]) > 1, -room[b]), default=None)
        if fullest is None or len(bins[fullest]) < 2:
            bins.append([])
            room.append(budget)
            continue
        kept, moved = _halve(bins[fullest], lengths)
        bins[fullest], room[fullest] = kept, budget - sum(lengths[i] for i in kept)
        bins.append(moved)
        room.append(budget - sum(lengths[i] for i in moved))
    return [sorted(b) for b in bins]


def _halve(samples: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split one group into two of near-equal token counts."""
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for i in sorted(samples, key=lambda i: -lengths[i]):
        lighter = int(totals[1] < totals[0])
        halves[lighter].append(i)
        totals[lighter] += lengths[i]
    return halves


def assign_microbatches(
    bins: list[list[int]], lengths: Sequence[int], dp_size: int
) -> list[list[list[int]]]:
    """Deal groups to data-parallel ranks so that the j-th groups of all ranks weigh alike.

    Returns [dp_size][microbatches][samples].  Ranks wait for one another in every microbatch (the
    experts' all-to-all), so equal neighbours matter more than equal sums.
    """
    assert len(bins) % dp_size == 0, (len(bins), dp_size)
    ordered = sorted(bins, key=lambda b: -sum(lengths[i] for i in b))
    dealt: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for start in range(0, len(ordered), dp_size):
        turn = ordered[start : start + dp_size]
        # every other turn runs backwards, so that no rank always gets the heaviest
        for rank, group in enumerate(turn if (start // dp_size) % 2 == 0 else turn[::-1]):
            dealt[rank].append(group)
    return dealt
