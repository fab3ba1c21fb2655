"""JSON of a server as a type: what does not fit is refused by its place, the value got and the value expected."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

# steps of a place as msgspec says it: "$.ranks[1].checksums[...]"; it does not say keys of a mapping
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def typed(value: Any, kind: type[T], about: str) -> T:
    """Convert parsed JSON to a type; raises ValueError that begins with ``about``.

    >>> typed({"ids": [1, True]}, msgspec.defstruct("Kind", [("ids", list[int])]), "the answer")
    Traceback (most recent call last):
    ValueError: the answer: ids[1] is True, expected `int`, got `bool`
    """
    try:
        return msgspec.convert(value, kind)
    except (ValueError, OverflowError) as error:
        words, _, place = str(error).partition(" - at ")
        for name, index in _STEP.findall(place):
            value = value[name] if name else value[int(index)]
        where, expected = place.strip("`$").removeprefix("."), words[:1].lower() + words[1:]
        got = repr(value)[:200]
        raise ValueError(f"{about}: {where or 'the answer'} is {got}, {expected}") from None
