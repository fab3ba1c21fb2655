"""The record of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# steps that mbridge fuses in all configurations but Mixtral's; local layers have them apart
FUSED = {"bias_activation_fusion": True, "bias_dropout_fusion": True}


def as_mbridge_has_it(hf_config: Any) -> dict[str, Any]:
    """Correct nothing."""
    return {}


def as_megatron_has_it(layers: Any, hf_config: Any, first_layer: int, use_te: bool) -> None:
    """Leave the layers' specifications alone."""


@dataclass(frozen=True)
class MegatronFamily:
    """The way to build a family.

    ``bridge``: mbridge's class, which knows the weight names both ways.  ``fields``: of transformers'
    configuration, the TransformerConfig fields that mbridge leaves out or gets wrong.  ``adapt``
    changes the specifications of one chunk's layers (TransformerBlockSubmodules) in place; it gets
    the layer_id of the chunk's first layer too, and whether they are Transformer Engine's.
    """

    bridge: type
    fields: Callable[[Any], dict[str, Any]] = as_mbridge_has_it
    adapt: Callable[[Any, Any, int, bool], None] = as_megatron_has_it
