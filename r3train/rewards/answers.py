"""The final answer of a response, and comparisons that need no mathematics library."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

# an answer stands at the end; what comes before may be as long as a context
TAIL = 4000
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_PLAIN = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARK = "####"


def last_box(text: str) -> str | None:
    """The content of the last ``\\boxed{...}``; None without one, "" if it is not closed."""
    opened = None
    for opened in _BOX.finditer(text):
        pass
    if opened is None:
        return None
    depth, start = 1, opened.end()
    for place in range(start, len(text)):
        character = text[place]
        # \{ and \} are letters of a formula
        if character in "{}" and text[place - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start:place].strip()
    return ""


def after_mark(text: str) -> str | None:
    """The rest of the line after the last ``####``, GSM8K's mark; None without one."""
    _, mark, rest = text.rpartition(_MARK)
    return rest.strip().split("\n")[0].strip() if mark else None


def last_number(text: str) -> str | None:
    """The last number of a text, or the whole formula ($...$) that it stands in; None without one."""
    found = None
    for found in _NUMBER.finditer(text):
        pass
    if found is None:
        return None
    for formula in _FORMULA.finditer(text):
        if formula.start() < found.start() < formula.end():
            return next(part for part in formula.groups() if part is not None).strip()
    return found.group().rstrip(",")


def final_answer(text: str) -> str | None:
    """The last box, else the text after the last ``####``, else the last number; None without one.

    Reads the last 4,000 characters.
    """
    tail = text[-TAIL:]
    for find in (last_box, after_mark, last_number):
        answer = find(tail)
        if answer is not None:
            return answer
    return None


def number_of(text: str) -> Decimal | None:
    """The value of a text that is one number (1,234.50, $12); None of any other."""
    written = text.strip().rstrip(".").replace("\\$", "").replace("$", "")
    written = written.replace("{,}", ",").replace("\\!", "").strip()
    if not _PLAIN.fullmatch(written):
        return None
    try:
        return Decimal(written.replace(",", ""))
    except InvalidOperation:  # a sign or a point only
        return None
