"""Values of a row that rewards and checkpoints keep: JSON, or refused by row and key."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any


def json_value(where: str, key: str, value: Any) -> Any:
    """The value with null for NaN, as tables have it for what is missing.

    where: the row, for errors.  Raises ValueError naming row, key and kind for what JSON has no form for.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = (
                f"character {error.start + 1} is {value[error.start]!r}, half of a surrogate pair"
            )
            raise ValueError(f"{where}: key {key}: {half}: it is no text") from None
        return value
    if isinstance(value, list):
        return [json_value(where, f"{key}[{n}]", part) for n, part in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: json_value(where, f"{key}.{name}", part) for name, part in value.items()}
    if isinstance(value, float) and math.isnan(value):
        return None
    if value is None or isinstance(value, int) or isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(
        f"{where}: key {key} is {value!r} ({type(value).__name__}), which JSON has no form for: write it"
        " as text or as a number"
    )


def label_value(where: str, key: str, value: Any) -> Any:
    """A label as JSON: whole numbers as integers, NaN (a number that is missing) as None.

    A column of integers with a hole is one of floats in pandas and Arrow, and its label 36.0 means 36.  Raises
    ValueError as ``json_value``.
    """
    if isinstance(value, list):
        return [label_value(where, f"{key}[{n}]", part) for n, part in enumerate(value)]
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        value = int(value) if is_whole else float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return json_value(where, key, value)
