"""gpt-oss: sinks, sliding windows, biases everywhere, all experts of a layer in one tensor on disk."""

from __future__ import annotations

from typing import Any

import torch
from mbridge.models.mixtral import MixtralBridge
from megatron.core.activations import quick_gelu
from megatron.core.tensor_parallel import RowParallelLinear

from r3train.trainer.megatron.families.family import MegatronFamily


class GptOssBridge(MixtralBridge):
    """Positions by yarn."""

    def _build_base_config(self, **kwargs: Any) -> Any:
        config = super()._build_base_config(**kwargs)
        rope = self.hf_config.rope_parameters
        # the model asks for these by name; they are no fields
        config.yarn_rotary_scaling_factor = rope["factor"]
        config.yarn_beta_fast, config.yarn_beta_slow = rope["beta_fast"], rope["beta_slow"]
        config.yarn_original_max_position_embeddings = rope["original_max_position_embeddings"]
        config.yarn_correction_range_round_to_int = rope.get("truncate", True)
        config.yarn_mscale = config.yarn_mscale_all_dim = None
        return config

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return super()._get_gptmodel_args() | {"position_embedding_type": "yarn"}


def _fields(hf_config: Any) -> dict[str, Any]:
    return {
        "moe_router_pre_softmax": False,
        "moe_router_bias_update_rate": 0.0,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": hf_config.swiglu_limit,
        "bias_activation_fusion": False,
        "softmax_type": "learnable",
        # a window of n tokens holds the token and n - 1 before it
        "window_size": (hf_config.sliding_window - 1, 0),
        "window_attn_skip_freq": [
            int(kind == "sliding_attention") for kind in hf_config.layer_types
        ],
    }


class _OwnOutput(RowParallelLinear):
    """An expert's projection whose output is no view: Megatron adds its bias in place.

    Its bias is not one of a sequence-parallel layer: the gradient would be summed over the tensor
    ranks once more.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(x)
        return output.clone(), bias


def _adapt(layers: Any, hf_config: Any, first_layer: int, use_te: bool) -> None:
    if use_te:
        return
    for layer in layers.layer_specs:
        layer.submodules.mlp.submodules.experts.submodules.linear_fc2 = _OwnOutput


GPT_OSS = MegatronFamily(GptOssBridge, _fields, _adapt)
