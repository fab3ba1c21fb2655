"""The order in which prompts are drawn: a function of the seed and the cursor alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Endless epochs over ``num_prompts`` prompts, each shuffled anew from (seed, epoch).

    It holds no state but the last permutation.  The cursor, a count of prompts drawn since the start, is
    the caller's: so a resumed run goes on where it stopped.
    """

    num_prompts: int
    seed: int
    shuffle: bool = True
    _last: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {self.num_prompts}")

    def epoch(self, number: int) -> np.ndarray:
        """The indices of one epoch.  Returns int64[num_prompts], a permutation."""
        if not self.shuffle:
            return np.arange(self.num_prompts)
        indices = self._last.get(number)
        if indices is None:  # draws come one by one, and a million rows take 30 ms to shuffle
            indices = np.random.default_rng((self.seed, number)).permutation(self.num_prompts)
            self._last.clear()
            self._last[number] = indices
        return indices

    def indices(self, start: int, count: int) -> list[int]:
        """The ``count`` prompt indices from cursor ``start`` on, across epochs."""
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative, got {start} and {count}")
        return list(self._draw(start, count))

    def _draw(self, start: int, count: int) -> Iterator[int]:
        number, place = divmod(start, self.num_prompts)
        while count > 0:
            share = self.epoch(number)[place : place + count]
            yield from share.tolist()
            count -= len(share)
            number, place = number + 1, 0


class MixedOrder:
    """Endless draws from several files of prompts, each in a ``PromptOrder`` of its own.

    Of every 1,000 draws each file has its share by weight, at least one.  Prompts are numbered file
    after file.  It holds no state either.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool = True
    ) -> None:
        self._orders = [PromptOrder(size, seed, shuffle) for size in sizes]
        self._first = np.cumsum([0, *sizes[:-1]])
        self._counts = _shares(weights)
        self._seed, self._shuffle = seed, shuffle

    def indices(self, start: int, count: int) -> list[int]:
        """The ``count`` prompt indices from cursor ``start`` on."""
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative, got {start} and {count}")
        return [self._index(cursor) for cursor in range(start, start + count)]

    def _index(self, cursor: int) -> int:
        block, place = divmod(cursor, _BLOCK)
        files = self._files(block)
        file = int(files[place])
        before = block * self._counts[file] + int((files[:place] == file).sum())
        return int(self._first[file]) + self._orders[file].indices(int(before), 1)[0]

    def _files(self, block: int) -> np.ndarray:
        """The file of each draw of a block, int64[1000]."""
        if self._shuffle:
            files = np.repeat(np.arange(len(self._counts)), self._counts)
            return np.random.default_rng((self._seed, block, 1)).permutation(files)
        # spread evenly: draw i of a file with n draws belongs at (i + 0.5) / n of the block
        at = np.concatenate([(np.arange(n) + 0.5) / n for n in self._counts])
        files = np.repeat(np.arange(len(self._counts)), self._counts)
        return files[np.argsort(at, kind="stable")]


# draws among which weights hold exactly
_BLOCK = 1000


def _shares(weights: Sequence[float]) -> np.ndarray:
    """Draws of each file in a block, int64: they add up to its length, the largest remainders rounded up."""
    exact = np.array(weights, float) / sum(weights) * _BLOCK
    counts = np.maximum(np.floor(exact), 1).astype(int)
    for file in np.argsort(counts - exact, kind="stable")[: max(0, _BLOCK - counts.sum())]:
        counts[file] += 1
    counts[counts.argmax()] -= counts.sum() - _BLOCK  # files of hardly any weight got one each
    return counts
