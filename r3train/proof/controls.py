"""Agreement: the trainer's own choice against chance, and against routes that are misaligned on purpose.

Counted in the rollout's first forwards, before a step changes a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

CONTROLS = {
    "control_token_minus": "with the routes of the token before",
    "control_token_plus": "with the routes of the token after",
    "control_layer_minus": "with the routes of the layer before",
    "control_layer_plus": "with the routes of the layer after",
}
_STANDARD_ERRORS = 10
_MARGIN = 0.1


def beaten_by(values: Mapping[str, int], *, indexer: bool = False) -> tuple[str, str, str] | None:
    """Quantity, got and expected, where a control clearly beats the agreement in the same rows.

    values: counters by name, over one layer.  The worst control is named.
    indexer: a control counts the rows in which it has more tokens in common with the trainer's own choice than the
    replayed choice has.  It wins in nearly all rows if choices are misaligned by as much, and in half of them by chance.

    A row's own choice can equal the replayed routes, the control, both or neither.  If the control
    is no better, the difference of the two counts is a sum of at most ``equal + control`` terms of
    +1 or -1, and its standard error at most the root of that (McNemar's test).  10 standard errors
    are required, not 5, because the samples of a group repeat their prompt's rows.  A tenth of the
    rows is required too: in many rows a small difference is soon sure and means nothing.
    Routes sampled at random are at chance, and so are their controls.
    """
    rows, equal = values["rows_replayed"], values["rows_equal"]
    control = max(CONTROLS, key=lambda name: values[name])
    if indexer:
        equal = rows - values[control]
    excess = values[control] - equal
    if excess <= _MARGIN * rows or excess < _STANDARD_ERRORS * sqrt(equal + values[control]):
        return None
    if indexer:
        return (
            f"rows whose choice is nearer to the trainer's own than a misaligned one ({control}: in"
            f" {values[control]} rows that {CONTROLS[control].replace('routes', 'choices')} is nearer)",
            f"{equal} of {rows}",
            "at least half",
        )
    return (
        f"rows that agree with the replayed routes ({control}: {values[control]} agree "
        f"{CONTROLS[control]})",
        f"{equal} of {rows}",
        "more than agree with any misaligned routes",
    )
