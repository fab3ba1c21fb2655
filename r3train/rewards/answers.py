"""The final answer of a response, and comparisons that need no mathematics library."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

# an answer stands at the end; what comes before may be as long as a context
TAIL = 4000
_MOST_CHARACTERS = 200  # of a number with its unit
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?")
_PLAIN = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?(?:[eE][-+]?\d{1,3})?")
_SIGNS = str.maketrans(dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-") | {"\uff0b": "+"})
# between thousands: \, and its kin, ~, and the narrow spaces of Unicode
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;:! ]|~|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_POWER = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|\u00d7)\s*10\s*\^\s*\{?([-+]?\d{1,3})\}?$")
_IN_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# a number with a currency before it, and words of two letters, % or degrees behind it
_QUANTITY = re.compile(
    r"[^\w.+-]*([-+]?[^\w\s.+-]?[\d.,]+(?:[eE][-+]?\d{1,3})?)"
    r"(?:\s*(?:\\?%|\u00b0|\^\{?\\circ\}?)|\s*[^\W\d_]{2}[^\d\\]*|\s+[^\W\d_]\b[^\d\\]*)?\W*"
)
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
    return rest.strip().split("\n")[0].strip(" *") if mark else None


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
    tail = _with_plain_signs(text[-TAIL:])
    for find in (last_box, after_mark, last_number):
        answer = find(tail)
        if answer is not None:
            return answer
    return None


def number_of(text: str) -> Decimal | None:
    """The value of a text that is one number (1,234.50, $12, 70\\,000, 1e-05); None of any other."""
    written = _with_plain_signs(text).strip().rstrip(".").replace("\\$", "").replace("$", "")
    written = _POWER.sub(r"e\1", written.replace("{,}", ",").replace("\\!", "").strip())
    if not _PLAIN.fullmatch(written):
        return None
    try:
        return Decimal(written.replace(",", ""))
    except InvalidOperation:  # a sign or a point only
        return None


def quantity_of(text: str) -> Decimal | None:
    """The number of a text that is one number with a unit (5 hours, 20\\%, x = 20); None of any other."""
    if len(text) > _MOST_CHARACTERS:  # no number, and the pattern takes its time
        return None
    plain = _IN_WORDS.sub(r" \1 ", _with_plain_signs(text)).replace("\\$", "").replace("$", "")
    found = _QUANTITY.fullmatch(plain.rpartition("=")[2].strip())
    return number_of(text) if found is None else number_of(found[1])


def written(label: Any) -> str | None:
    """A label of text or a number as a model writes it, without exponent or ``.0``; None for any other.

    >>> written(36.0), written(1e-05), written(True)
    ('36', '0.00001', None)
    """
    if isinstance(label, float) and math.isfinite(label):
        return str(int(label)) if label.is_integer() else f"{Decimal(repr(label)):f}"
    return str(label) if isinstance(label, (str, int)) and not isinstance(label, bool) else None


def _with_plain_signs(text: str) -> str:
    """A text with ASCII's signs before numbers, and without space between thousands."""
    return _THIN_SPACE.sub("", text.translate(_SIGNS))
