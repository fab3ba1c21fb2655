"""The order in which prompts are drawn: a function of the seed and the cursor alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Endless epochs over ``num_prompts`` prompts, each shuffled anew from (seed, epoch).

    It holds no state: the cursor, a count of prompts drawn since the start, is the caller's, so a
    resumed run goes on where it stopped.
    """

    num_prompts: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {self.num_prompts}")

    def epoch(self, number: int) -> np.ndarray:
        """The indices of one epoch.  Returns int64[num_prompts], a permutation."""
        if not self.shuffle:
            return np.arange(self.num_prompts)
        return np.random.default_rng((self.seed, number)).permutation(self.num_prompts)

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
