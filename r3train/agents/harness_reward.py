"""Rewards that a harness gives by file or by request."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from r3train.user_code import quoted

# A number, or one for each of --reward-keys.
Reward = float | dict[str, float]

_MOST_BYTES = 65536


def read_reward(content: bytes) -> Reward:
    """Read a JSON number, or a table of numbers by name.

    Raises ValueError for what is another value, not finite, empty or of more than 64 KiB.

    >>> read_reward(b"1"), read_reward(b'{"correct": 1, "short": 0.5}')
    (1.0, {'correct': 1.0, 'short': 0.5})
    """
    if len(content) > _MOST_BYTES:
        raise ValueError(f"a reward of {len(content)} bytes, expected at most {_MOST_BYTES}")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the reward {quoted(content)}: expected a number or a JSON table of numbers ({error})"
        ) from None
    if not isinstance(value, dict):
        return _finite(value)
    if not value:
        raise ValueError("the reward {}: expected at least one number")
    return {name: _finite(number, f" of {quoted(name)}") for name, number in value.items()}


def read_reward_file(path: Path) -> Reward | None:
    """Read the reward that a harness wrote; None without a file.  Raises ValueError naming the file.

    A harness may have put anything there: links, pipes and directories are refused, not followed.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path}: the reward cannot be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError(f"{path}: the reward is no regular file")
        with os.fdopen(file, "rb", closefd=False) as reader:
            content = reader.read(_MOST_BYTES + 1)
    finally:
        os.close(file)
    try:
        return read_reward(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _finite(value: Any, name: str = "") -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"the reward{name} {quoted(value)}: expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"the reward{name} {quoted(value)}: expected a finite number")
    return number
