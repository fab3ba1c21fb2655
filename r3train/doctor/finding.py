"""A finding: fine, worth knowing, worrying or wrong, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

OK, FACT, WARNING, PROBLEM = "ok", "fact", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; ``remedy`` is empty where none is needed."""

    level: str
    subject: str
    text: str
    remedy: str = ""


# a check is a function that yields these
Findings = Iterator[Finding]
# ok(subject, text), fact(subject, text), warning(subject, text, remedy), problem(subject, ...)
ok, fact = partial(Finding, OK), partial(Finding, FACT)
warning, problem = partial(Finding, WARNING), partial(Finding, PROBLEM)


def amount(num_bytes: float) -> str:
    """Bytes for a reader: "512 B", "3.4 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def room(
    subject: str,
    has: float,
    needs: float,
    remedy: str,
    *,
    text: str = "{has} available, about {needs} needed",
    margin: float = 0.0,
    near: str = "",
) -> Finding:
    """Compare bytes that are there with bytes that are needed.

    A problem where they do not suffice.  A warning with the remedy ``near`` where they suffice with
    less than ``margin`` to spare.  ``text`` is formatted with both amounts.
    """
    text = text.format(has=amount(has), needs=amount(needs))
    if has < needs:
        return problem(subject, text, remedy)
    if has < needs + margin:
        return warning(subject, f"{text}: less than {amount(margin)} to spare", near)
    return ok(subject, text)
