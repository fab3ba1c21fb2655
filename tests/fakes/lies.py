"""Lies in one place of a JSON value: nonsense, the truth in another form, and nothing at all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Spot = tuple[str | int, ...]
# what a server can say for anything
NONSENSE = (None, True, -1, 1 << 70, 1.5, "x", "", [], [None], {}, {"x": 1}, [[1]], "9" * 5000)


def places(value: Any, path: Spot = ()) -> Iterator[Spot]:
    """Every place in a JSON value, the value itself first."""
    yield path
    entries = value.items() if isinstance(value, dict) else ()
    entries = enumerate(value) if isinstance(value, list) else entries
    for key, inner in entries:
        yield from places(inner, (*path, key))


def changed(value: Any, path: Spot, lie: Any) -> Any:
    """The value with a lie in one place; with KeyError, without that place."""
    if not path:
        return None if lie is KeyError else lie
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    if lie is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = lie
    return value


def lies(value: Any) -> Iterator[tuple[Spot, Any]]:
    """Every lie in every place: nonsense, a number as text or as a fraction, and no such place."""
    for path in places(value):
        held = value
        for key in path:
            held = held[key]
        is_number = isinstance(held, (int, float)) and not isinstance(held, bool)
        forms = (str(held), *((float(held),) if isinstance(held, int) else ())) if is_number else ()
        for lie in (*NONSENSE, KeyError, *forms):
            if (lie, type(lie)) != (held, type(held)):
                yield path, lie
