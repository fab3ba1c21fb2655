"""Prompts by their difficulty: the pass rate of each is kept, and solved ones rest (--prompt-sampling difficulty).

An epoch has every prompt that is not solved once, those that are solved in part, which teach most, twice, and every
fourth of the solved ones, by lot: without these the demo's model forgot them within twenty steps.  It is
fixed when its first prompt is drawn, by the rollouts that were trained before any server could be asked for that
prompt: so it does not depend on when answers come.  Of an epoch without an unsolved prompt all are drawn again.

``pass_rates.jsonl`` has a line for each group and each epoch, with a checksum of its own; a checkpoint has a copy.
Everything follows from it.
"""

from __future__ import annotations

import json
import logging
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from r3train.data.json_lines import append_lines, read_lines

PASS_RATES_FILE = "pass_rates.jsonl"
SOLVED = 0.95  # a pass rate from which a prompt rests
_SHARE_OF_SOLVED = 0.25  # that an epoch has

logger = logging.getLogger(__name__)


class DifficultyOrder:
    """Endless epochs over the prompts that are not solved, in the order of their file or shuffled.

    prompt_ids: all prompts.  A prompt of rollout r, of ``draws_per_rollout``, is drawn once r - ``max_staleness``
    rollouts were trained, or later.  path: the file, whose lines are read; ValueError names the first that is damaged,
    or of other prompts.
    """

    def __init__(
        self,
        prompt_ids: Sequence[str],
        seed: int,
        shuffle: bool,
        *,
        draws_per_rollout: int,
        max_staleness: int,
        path: Path,
    ) -> None:
        self._number = {prompt_id: number for number, prompt_id in enumerate(prompt_ids)}
        self._seed, self._shuffle, self._path = seed, shuffle, path
        self._draws_per_rollout, self._max_staleness = draws_per_rollout, max_staleness
        self._rates: dict[int, tuple[int, int, float]] = {}  # group -> step, its prompt, pass rate
        self._trained = 0  # steps
        self._firsts, self._epochs = [0], [np.zeros(0, np.int32)]  # draws of each epoch
        for number, line in enumerate(read_lines(path) if path.exists() else (), start=1):
            self._read(line, f"{path}:{number}")

    def index(self, cursor: int) -> int:
        """The prompt of draw number ``cursor``, from 0 on."""
        while cursor >= (first := self._firsts[-1] + len(self._epochs[-1])):
            steps = max(0, first // self._draws_per_rollout - self._max_staleness)
            steps = min(
                steps, self._trained
            )  # groups that were dropped take draws of rollouts to come
            self._begin_epoch(first, steps)
            self._write({"step": steps - 1, "group_id": first, "draws": len(self._epochs[-1])})
        epoch = bisect_right(self._firsts, cursor) - 1
        return int(self._epochs[epoch][cursor - self._firsts[epoch]])

    def note(self, step: int, group_id: int, prompt_id: str, rate: float | None) -> None:
        """Keep the pass rate of a group that was trained in a step, or dropped before it; None forgets the group's."""
        self._keep(step, group_id, prompt_id, rate)
        self._write({"step": step, "group_id": group_id, "prompt_id": prompt_id, "rate": rate})

    def _keep(self, step: int, group_id: int, prompt_id: str, rate: float | None) -> None:
        if rate is None:
            self._rates.pop(group_id, None)
            return
        self._rates[group_id] = step, self._number[prompt_id], rate
        self._trained = max(self._trained, step + 1)

    def _begin_epoch(self, first: int, steps: int) -> None:
        """Fix the draws from number ``first`` on by the rates of the first ``steps`` steps."""
        rates = np.full(len(self._number), np.nan)
        for _, (step, prompt, rate) in sorted(self._rates.items()):
            if step < steps:
                rates[prompt] = rate
        open_ones = np.flatnonzero(~(rates >= SOLVED))
        if not len(open_ones):
            open_ones = np.arange(len(rates))
        random = np.random.default_rng((self._seed, first, 2))
        again = (rates > 0) & (rates < SOLVED)
        if len(open_ones) < len(rates):
            again |= (rates >= SOLVED) & (random.random(len(rates)) < _SHARE_OF_SOLVED)
        draws = np.concatenate([open_ones, np.flatnonzero(again)])
        draws = random.permutation(draws) if self._shuffle else draws
        logger.info(
            "epoch of %d draws: %d of %d prompts are open", len(draws), len(open_ones), len(rates)
        )
        self._firsts.append(first)
        self._epochs.append(draws.astype(np.int32))

    def _write(self, record: dict[str, Any]) -> None:
        append_lines(self._path, [{**record, "crc32": _checksum(record)}])

    def _read(self, line: dict[str, Any], where: str) -> None:
        found, record = line.pop("crc32", None), line
        name = f"{where}: prompt {record.get('prompt_id', 'none')}"
        if found != _checksum(record):
            raise ValueError(
                f"{name}: its checksum is {found}, expected {_checksum(record)}: it was altered"
            )
        if "draws" in record:
            self._begin_epoch(record["group_id"], record["step"] + 1)
            if len(self._epochs[-1]) != record["draws"]:
                got = (
                    f"{record['draws']} draws, and the lines before it give {len(self._epochs[-1])}"
                )
                raise ValueError(f"{where}: an epoch of {got}: lines are missing")
        elif record["prompt_id"] not in self._number:
            raise ValueError(f"{name} is none of the run's {len(self._number)} prompts")
        else:
            self._keep(**record)


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def pass_rate(rewards: Sequence[float]) -> float:
    """The mean of a group's rewards, each held to 0..1."""
    return float(np.clip(np.array(rewards, float), 0.0, 1.0).mean())
