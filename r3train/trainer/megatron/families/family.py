"""The record of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def as_mbridge_has_it(hf_config: Any) -> dict[str, Any]:
    """Correct nothing."""
    return {}


@dataclass(frozen=True)
class MegatronFamily:
    """The way to build a family.

    ``bridge``: mbridge's class, which knows the weight names both ways.  ``fields``: of transformers'
    configuration, the TransformerConfig fields that mbridge leaves out or gets wrong.
    """

    bridge: type
    fields: Callable[[Any], dict[str, Any]] = as_mbridge_has_it
