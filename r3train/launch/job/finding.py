"""A finding: fine, worth knowing, worrying or wrong, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from r3train.config.sources import plain
from r3train.launch.estimate.memory_use import amount

OK, FACT, WARNING, PROBLEM = "ok", "fact", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """Result of a check; ``remedy`` is empty where none is needed."""

    level: str
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return the line of a start: a warning says that it is one."""
        line = f"{self.text}: {self.remedy}" if self.remedy else self.text
        return plain(f"warning: {line}") if self.level == WARNING else line


# a check is a function that yields these
Findings = Iterator[Finding]
# ok(subject, text), fact(subject, text), warning(subject, text, remedy), problem(subject, ...)
ok, fact = partial(Finding, OK), partial(Finding, FACT)
warning, problem = partial(Finding, WARNING), partial(Finding, PROBLEM)


def room(
    subject: str,
    place: str,
    has: float,
    parts: Mapping[str, float],
    remedy: str,
    *,
    margin: float = 0.0,
) -> Finding:
    """Compare the bytes of a place with those that are needed there, by what needs them.

    A problem where they do not suffice, a warning where less than ``margin`` is left.
    """
    needs = sum(parts.values())
    held = ", ".join(f"{amount(part)} of {what}" for what, part in parts.items() if part)
    text = f"{place}: {amount(has)} available, about {amount(needs)} needed: {held}"
    if has < needs:
        return problem(subject, text, remedy)
    if has < needs + margin:
        return warning(subject, f"{text}; less than {amount(margin)} to spare", remedy)
    return ok(subject, text)
