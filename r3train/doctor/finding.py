"""What a check says: fine, worth knowing, worrying or wrong, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

OK, FACT, WARNING, PROBLEM = "ok", "fact", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; ``remedy`` is empty for what needs none."""

    level: str
    subject: str
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(OK, subject, text)


def fact(subject: str, text: str) -> Finding:
    return Finding(FACT, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    return Finding(WARNING, subject, text, remedy)


def problem(subject: str, text: str, remedy: str) -> Finding:
    return Finding(PROBLEM, subject, text, remedy)


def amount(num_bytes: float) -> str:
    """Bytes for a reader: "512 B", "3.4 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
