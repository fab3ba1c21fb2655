"""gpt-oss: sinks, sliding windows, biases everywhere, all experts of a layer in one tensor on disk."""

from __future__ import annotations

from typing import Any

import torch
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models.mixtral import MixtralBridge
from megatron.core.activations import quick_gelu
from megatron.core.tensor_parallel import RowParallelLinear

from r3train.trainer.megatron.families.family import MegatronFamily

_LAYER = "model.layers.{layer_number}."
_EXPERTS = _LAYER + "mlp.experts."


class _OncePerTensor(SafeTensorIO):
    """Reads a tensor that several experts ask for once; mbridge counts every request."""

    def load_some_hf_weight(self, names: list[str]) -> dict[str, torch.Tensor]:
        return super().load_some_hf_weight(list(dict.fromkeys(names)))


class GptOssBridge(MixtralBridge):
    """Names and layouts of unquantised weights.

    An expert's bias has the name of a weight here: mbridge and the export split names at ".weight".
    """

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

    def __init__(self, hf_config: Any, **kwargs: Any):
        self._experts: dict[str, dict[int, torch.Tensor]] = {}  # of a tensor that is not whole yet
        super().__init__(hf_config, **kwargs)

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

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        return _OncePerTensor(self._get_actual_hf_path(weights_path))

    def _weight_name_mapping_mlp(self, name: str) -> list[str]:
        layer_number = name.split(".")[2]
        for keyword, names in self._MLP_MAPPING.items():
            if keyword in name:
                return [n.format(layer_number=layer_number) for n in names]
        raise NotImplementedError(f"Unsupported parameter name: {name}")

    def _weight_to_mcore_format(self, name: str, hf_weights: list[torch.Tensor]) -> torch.Tensor:
        """Take one expert out; on disk weights are transposed, gate and up alternate."""
        if ".mlp.experts." not in name:
            return super()._weight_to_mcore_format(name, hf_weights)
        per_rank = self.config.num_moe_experts // self.mpu.ep_size
        index = self.mpu.ep_rank * per_rank + int(name.rsplit(".weight", 1)[1])
        tensor = hf_weights[0][index].to(self.dtype)
        tensor = tensor if "_bias." in name else tensor.T
        return (
            torch.cat([tensor[0::2], tensor[1::2]]) if ".linear_fc1" in name else tensor
        ).contiguous()

    def _weight_to_hf_format(
        self, name: str, tensor: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        """Put one expert back; the tensor comes with the layer's last."""
        if ".mlp.experts." not in name:
            return super()._weight_to_hf_format(name, tensor)
        if ".linear_fc1" in name:
            tensor = torch.stack(tensor.chunk(2), 1).flatten(0, 1)
        (hf_name,) = self._weight_name_mapping_mcore_to_hf(name)
        experts = self._experts.setdefault(hf_name, {})
        # a copy: the parameter may move before the last expert is here
        whole = tensor.clone() if "_bias." in name else tensor.T.contiguous()
        experts[int(name.rsplit(".weight", 1)[1])] = whole
        if len(experts) < self.config.num_moe_experts:
            return [], []
        del self._experts[hf_name]
        return [hf_name], [torch.stack([experts[i] for i in range(len(experts))])]


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
