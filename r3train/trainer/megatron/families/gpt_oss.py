"""gpt-oss: sinks, sliding windows, biases everywhere, all experts of a layer in one tensor on disk."""

from __future__ import annotations

from typing import Any

import torch
from mbridge.models.mixtral import MixtralBridge
from megatron.core.activations import quick_gelu
from megatron.core.tensor_parallel import RowParallelLinear

from r3train.trainer.megatron.families.family import MegatronFamily
from r3train.trainer.megatron.families.fused_experts import FusedExperts

_LAYER = "model.layers.{layer_number}."
_EXPERTS = _LAYER + "mlp.experts."


class GptOssBridge(FusedExperts, MixtralBridge):
    """Names and layouts of unquantised weights."""

    _MLP_MAPPING = {
        "pre_mlp_layernorm": [_LAYER + "post_attention_layernorm.weight"],
        "mlp.router.weight": [_LAYER + "mlp.router.weight"],
        "mlp.router.bias": [_LAYER + "mlp.router.bias"],
        "mlp.experts.linear_fc1.weight": [_EXPERTS + "gate_up_proj"],
        "mlp.experts.linear_fc1_bias.weight": [_EXPERTS + "gate_up_proj_bias"],
        "mlp.experts.linear_fc2.weight": [_EXPERTS + "down_proj"],
        "mlp.experts.linear_fc2_bias.weight": [_EXPERTS + "down_proj_bias"],
    }
    _ATTENTION_MAPPING = MixtralBridge._ATTENTION_MAPPING | {
        "self_attention.linear_proj.bias": [_LAYER + "self_attn.o_proj.bias"],
        "self_attention.core_attention.softmax_offset": [_LAYER + "self_attn.sinks"],
    }

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

    def _weight_name_mapping_mlp(self, name: str) -> list[str]:
        layer_number = name.split(".")[2]
        for keyword, names in self._MLP_MAPPING.items():
            if keyword in name:
                return [n.format(layer_number=layer_number) for n in names]
        raise NotImplementedError(f"Unsupported parameter name: {name}")

    def _expert_from_disk(self, name: str, row: torch.Tensor) -> torch.Tensor:
        """On disk weights are transposed, gate and up alternate."""
        row = row if "_bias." in name else row.T
        return torch.cat([row[0::2], row[1::2]]) if ".linear_fc1" in name else row

    def _expert_to_disk(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if ".linear_fc1" in name:
            tensor = torch.stack(tensor.chunk(2), 1).flatten(0, 1)
        return tensor if "_bias." in name else tensor.T


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
