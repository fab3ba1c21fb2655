"""The order of the prompts: a function of the seed and the cursor only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Endless epochs over ``num_prompts`` prompts, each shuffled anew from (seed, epoch).

    It holds no state but the last permutation.  The cursor, a count of prompts sampled since the start, is
    the caller's: so a resumed run goes on where it stopped.
    """

    num_prompts: int
    seed: int
    shuffle: bool = True
    _last: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def index(self, cursor: int) -> int:
        """The prompt of draw number ``cursor``, from 0 on."""
        epoch, place = divmod(cursor, self.num_prompts)
        if not self.shuffle:
            return place
        if (
            epoch not in self._last
        ):  # draws come one by one, and a million rows take 30 ms to shuffle
            indices = np.random.default_rng((self.seed, epoch)).permutation(self.num_prompts)
            self._last.clear()
            self._last[epoch] = indices
        return int(self._last[epoch][place])


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

    def index(self, cursor: int) -> int:
        """The prompt of draw number ``cursor``, from 0 on."""
        block, place = divmod(cursor, _BLOCK)
        files = self._files(block)
        file = int(files[place])
        before = block * self._counts[file] + int((files[:place] == file).sum())
        return int(self._first[file]) + self._orders[file].index(int(before))

    def _files(self, block: int) -> np.ndarray:
        """The file of each draw of a block, int64[1000]."""
        files = np.repeat(np.arange(len(self._counts)), self._counts)
        if self._shuffle:
            return np.random.default_rng((self._seed, block, 1)).permutation(files)
        # spread evenly: draw i of a file with n draws belongs at (i + 0.5) / n of the block
        at = np.concatenate([(np.arange(n) + 0.5) / n for n in self._counts])
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
