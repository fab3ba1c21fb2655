"""Qwen3-Next: three layers of a gated delta net to one of gated attention, and a gated shared expert."""

from __future__ import annotations

import copy
from typing import Any

import torch
from mbridge.models.qwen2moe import Qwen2MoEBridge
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from r3train.trainer.megatron.families.family import MegatronFamily
from r3train.trainer.megatron.families.gated_delta_net import PackedGatedDeltaNet, ZeroCenteredNorm

_LAYER = "model.layers.{layer_number}."
_IN, _QKV, _CONV = "in_proj.weight", "linear_qkv.weight", "conv1d.weight"


class Qwen3NextBridge(Qwen2MoEBridge):
    """Names and layouts.

    Megatron's in_proj has the rows of all queries, then keys, values, gates z, b and a, and TP cuts each
    of the six.  The hub's two tensors hold a group of rows for each key head instead.
    """

    _ATTENTION_MAPPING = Qwen2MoEBridge._ATTENTION_MAPPING | {
        f"self_attention.{ours}": [_LAYER + f"linear_attn.{name}" for name in theirs]
        for ours, theirs in {
            _IN: ("in_proj_qkvz.weight", "in_proj_ba.weight"),
            _CONV: (_CONV,),
            "A_log": ("A_log",),
            "dt_bias": ("dt_bias",),
            "out_norm.weight": ("norm.weight",),
            "out_proj.weight": ("out_proj.weight",),
        }.items()
    }

    def _get_gptmodel_args(self) -> dict[str, Any]:
        part = self.hf_config.rope_parameters["partial_rotary_factor"]
        return super()._get_gptmodel_args() | {"rotary_percent": part}

    def _sections(self) -> list[int]:
        """Rows of in_proj: q, k, v, z, b, a."""
        hf = self.hf_config
        keys = hf.linear_num_key_heads * hf.linear_key_head_dim
        values = hf.linear_num_value_heads * hf.linear_value_head_dim
        return [keys, keys, values, values, *[hf.linear_num_value_heads] * 2]

    def _weight_to_mcore_format(self, name: str, hf_weights: list[torch.Tensor]) -> torch.Tensor:
        hf = self.hf_config
        if _IN in name:
            return self._in_from_disk([w.to(self.dtype) for w in hf_weights])
        if _QKV in name:  # a head of q_proj is [query; gate]
            q, k, v = (
                w.to(self.dtype).unflatten(0, (hf.num_key_value_heads, -1, hf.head_dim))
                for w in hf_weights
            )
            return torch.cat([q[:, 0::2], q[:, 1::2], k, v], 1).flatten(0, 2).contiguous()
        return super()._weight_to_mcore_format(name, hf_weights)

    def _weight_to_hf_format(
        self, name: str, tensor: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        hf = self.hf_config
        if _IN in name:
            tensors = self._in_to_disk(*tensor.split(self._sections()))
        elif _QKV in name:
            per_group = hf.num_attention_heads // hf.num_key_value_heads
            groups = tensor.unflatten(0, (hf.num_key_value_heads, -1, hf.head_dim))
            q, gate, k, v = groups.split([per_group, per_group, 1, 1], 1)
            q = torch.stack([q, gate], 2).flatten(1, 2)
            tensors = [w.flatten(0, 2).contiguous() for w in (q, k, v)]
        else:
            return super()._weight_to_hf_format(name, tensor)
        return self._weight_name_mapping_mcore_to_hf(name), tensors

    def _in_from_disk(self, hf_weights: list[torch.Tensor]) -> torch.Tensor:
        groups = [w.unflatten(0, (self.hf_config.linear_num_key_heads, -1)) for w in hf_weights]
        parts = [p for g, sizes in zip(groups, self._of_a_group()) for p in g.split(sizes, 1)]
        return torch.cat([p.flatten(0, 1) for p in parts])

    def _in_to_disk(self, *sections: torch.Tensor) -> list[torch.Tensor]:
        heads = self.hf_config.linear_num_key_heads
        q, k, v, z, b, a = (p.unflatten(0, (heads, -1)) for p in sections)
        return [torch.cat(parts, 1).flatten(0, 1) for parts in ((q, k, v, z), (b, a))]

    def _of_a_group(self) -> tuple[list[int], list[int]]:
        """Rows of one key head in the hub's in_proj_qkvz and in_proj_ba."""
        hf = self.hf_config
        times = hf.linear_num_value_heads // hf.linear_num_key_heads
        values = times * hf.linear_value_head_dim
        return [hf.linear_key_head_dim] * 2 + [values] * 2, [times] * 2

    def _cut(self, name: str) -> list[int] | None:
        """Sections that TP cuts one by one; None for other tensors."""
        if _IN in name:
            return self._sections()
        return self._sections()[:3] if _CONV in name else None

    def _weight_split_across_tp(
        self, name: str, weight: torch.Tensor, param: torch.Tensor, size: int
    ) -> list[torch.Tensor]:
        sections = self._cut(name)
        if sections is None or size == 1:
            return super()._weight_split_across_tp(name, weight, param, size)
        parts = [part.chunk(size) for part in weight.split(sections)]
        return [torch.cat(shard) for shard in zip(*parts)]

    def _weight_merge_across_tp(
        self, name: str, shards: list[torch.Tensor], param: torch.Tensor
    ) -> torch.Tensor:
        sections = self._cut(name)
        if sections is None or len(shards) == 1:
            return super()._weight_merge_across_tp(name, shards, param)
        split = [shard.split([n // len(shards) for n in sections]) for shard in shards]
        return torch.cat([torch.cat(part) for part in zip(*split)])


def fields(hf_config: Any) -> dict[str, Any]:
    """Return TransformerConfig fields of hybrid models."""
    return {
        # Qwen3.5's configuration has no such key: its gates are always normalised
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_gate": True,
        "moe_shared_expert_overlap": False,  # nobody verified a gate with it
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "apply_rope_fusion": False,
        "linear_conv_kernel_dim": hf_config.linear_conv_kernel_dim,
        "linear_key_head_dim": hf_config.linear_key_head_dim,
        "linear_value_head_dim": hf_config.linear_value_head_dim,
        "linear_num_key_heads": hf_config.linear_num_key_heads,
        "linear_num_value_heads": hf_config.linear_num_value_heads,
    }


def adapt(layers: Any, hf_config: Any, first_layer: int, use_te: bool) -> None:
    """Put in the delta nets and the norms; refuse layers that nobody verified."""
    if use_te:
        raise ValueError(
            f"{hf_config.model_type} was verified with --attention-backend local alone, on a CPU"
        )
    backend = LocalSpecProvider()
    delta_net = ModuleSpec(
        module=PackedGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_linear(),
            out_norm=backend.layer_norm(rms_norm=True),
            out_proj=backend.row_parallel_linear(),
        ),
    )
    for i, spec in enumerate(layers.layer_specs):
        # layers share one specification
        layer = layers.layer_specs[i] = copy.deepcopy(spec)
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCenteredNorm
        if hf_config.layer_types[first_layer + i] == "linear_attention":
            parts.self_attention = delta_net
        else:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = ZeroCenteredNorm
    layers.layer_norm = ZeroCenteredNorm


QWEN3_NEXT = MegatronFamily(Qwen3NextBridge, fields, adapt)
