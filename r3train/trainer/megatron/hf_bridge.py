"""Megatron's configuration of a checkpoint's model, by mbridge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from r3train.hf_checkpoint import read_transformers_config
from r3train.torchvision_stub import declare_torchvision_ops


def build_bridge(hf_checkpoint: Path, dtype: torch.dtype, overrides: dict[str, Any]) -> Any:
    """An mbridge Bridge for the checkpoint's model family.

    overrides: TransformerConfig fields that replace those of the checkpoint.
    Raises ValueError for a model family that nobody verified.
    """
    declare_torchvision_ops()
    from r3train.trainer.megatron.families import FAMILIES

    hf_config = read_transformers_config(hf_checkpoint)
    if hf_config.model_type not in FAMILIES:
        raise ValueError(
            f"{hf_checkpoint}/config.json: model_type {hf_config.model_type!r} was not verified;"
            f" known: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[hf_config.model_type]
    hf_config = hf_config.get_text_config()  # its own, but for a model of text and images
    _fill_in(hf_config)
    bridge = family.bridge
    fields = family.fields(hf_config) | overrides

    class Adapted(bridge):
        """The family's bridge with our overrides."""

        adapt_layers = staticmethod(family.adapt)

        def _build_base_config(self, **kwargs: Any) -> Any:
            return super()._build_base_config(**{**kwargs, **fields})

    return Adapted(hf_config, dtype=dtype)


def _fill_in(hf_config: Any) -> None:
    """Put values where mbridge reads them.

    transformers 5 moved rope_theta into rope_parameters, and takes the part of a head that rotates from
    there; Mixtral's published head_dim is null.
    """
    if "partial_rotary_factor" in hf_config.rope_parameters:
        hf_config.partial_rotary_factor = hf_config.rope_parameters["partial_rotary_factor"]
    if not hasattr(hf_config, "rope_theta"):
        hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
    if getattr(hf_config, "head_dim", None) is None:
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
