"""Every metric of a run, read from metrics.toml: key, unit and meaning.  docs/reference/metrics.md is written from it.

>>> row_of("rollout/pass_at_4").key
'rollout/pass_at_N'
>>> row_of("rollout/unheard_of") is None
True
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Metric(NamedTuple):
    """One row; ``unit`` is "" for a number without one, such as a mean reward."""

    key: str
    unit: str
    meaning: str


# heading of docs/reference/metrics.md -> its rows
METRICS: dict[str, tuple[Metric, ...]] = {
    heading: tuple(Metric(key, *row) for key, row in rows.items())
    for heading, rows in tomllib.loads(
        files("r3train.observe").joinpath("metrics.toml").read_text(encoding="utf-8")
    ).items()
}


def row_of(key: str) -> Metric | None:
    """Return the row of a metric's key; None where there is none."""
    return next((metric for metric, form in _forms() if form.fullmatch(key)), None)


@cache
def _forms() -> list[tuple[Metric, re.Pattern[str]]]:
    rows = [metric for section in METRICS.values() for metric in section]
    rows.sort(key=lambda metric: -len(re.sub("[A-Z]+", "", metric.key)))  # the most exact first
    # numbers are digits, so that pass_at_N is not taken for a name
    part = {"N": r"\d+"}
    return [
        (m, re.compile(re.sub("[A-Z]+", lambda word: part.get(word[0], r"[^/]+"), m.key)))
        for m in rows
    ]
