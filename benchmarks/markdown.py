"""Figures and tables of the pages that the benchmarks write: pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

INTERNALS = Path(__file__).resolve().parents[1] / "docs" / "internals"

Result = Mapping[str, Any]


def number(value: float) -> str:
    """Three digits that count: 1,234 or 12.3 or 0.0123 or 1.2e-05."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def figure(spread: Result) -> str:
    """Median, and the range that the rounds took."""
    return f"{number(spread['median'])} ({number(spread['low'])} to {number(spread['high'])})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a Markdown table, an empty line after it."""
    head = list(head)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def range_of(values: Sequence[float]) -> str:
    """The figure of values that were measured."""
    return figure(dict(median=median(values), low=min(values), high=max(values)))
