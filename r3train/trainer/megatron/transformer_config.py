"""Megatron's configuration of a checkpoint's model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from r3train.families.hf_facts import HfModelFacts
from r3train.config.parallel_settings import ParallelSection
from r3train.families import FAMILIES
from r3train.families.family import keys_of, transformer_fields

_ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}


def build_transformer_config(
    hf: HfModelFacts, parallel: ParallelSection, dtype: torch.dtype, fields: dict[str, Any]
) -> TransformerConfig:
    """Return the configuration of a verified family's model.

    dtype: of the parameters.  fields: those of the run, which replace the checkpoint's.  Raises ValueError
    naming a key that config.json lacks.
    """
    family = FAMILIES[hf.model_type]
    model_fields = transformer_fields(family, hf)
    model_fields["activation_func"] = _ACTIVATIONS[model_fields["activation_func"]]
    run_fields = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }
    is_latent = family.layers.endswith("latent_attention")
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        **model_fields | run_fields | fields
    )
    for name, value in family.attributes(keys_of(family, hf)).items():
        setattr(config, name, value)
    return config
