"""Layers of one mixer each: a Mamba-2 mixer, attention or experts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from r3train.cpu import mamba_twin
from r3train.families.weights import ModelWeights
from r3train.patches import overrides

_MIXER_PARTS = ("input_layernorm", "self_attention", "self_attn_bda")
_EXPERT_PARTS = ("pre_mlp_layernorm", "mlp", "mlp_bda")


class PackedMambaMixer(mamba_mixer.MambaMixer):
    """Megatron's Mamba-2 mixer of packed sequences, in the place of a layer's attention."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int, pg_collection: Any, **named: Any
    ):
        super().__init__(
            config,
            submodules,
            config.hidden_size,
            layer_number=layer_number,
            pg_collection=pg_collection,
            **named,
        )

    def forward(
        self, hidden_states: torch.Tensor, packed_seq_params: PackedSeqParams, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix [n, 1, hidden], the rank's rows of a pack; what else attention gets is unused."""
        return super().forward(hidden_states, packed_seq_params=packed_seq_params)

    def _ssm_training(
        self, zxBCdt: torch.Tensor, packed_seq_params: PackedSeqParams
    ) -> torch.Tensor:
        ends = packed_seq_params.cu_seqlens_q[1:]
        rows = torch.arange(len(zxBCdt), dtype=ends.dtype, device=ends.device)
        sequences = torch.searchsorted(ends, rows, right=True, out_int32=True)[None]
        return super()._ssm_training(zxBCdt, replace(packed_seq_params, seq_idx=sequences))


overrides(
    mamba_mixer.MambaMixer,
    "_ssm_training",
    expects="(self, zxBCdt, packed_seq_params=None)",
    why="its caller numbers a pack's sequences, which waits for the device",
)


def adapt_mamba(layers: Any, weights: ModelWeights, first_layer: int, use_te: bool) -> None:
    """Leave one mixer in each layer; raises ValueError where a Mamba mixer's kernels are not installed."""
    if not torch.cuda.is_available():
        mamba_twin.install()
    elif not mamba_mixer.HAVE_MAMBA_SSM or mamba_mixer.causal_conv1d_fn is None:
        raise ValueError(
            "a model with Mamba mixers needs mamba-ssm and causal-conv1d on a CUDA device, which are not installed"
        )
    backend = TESpecProvider() if use_te else LocalSpecProvider()
    mixer = ModuleSpec(
        module=PackedMambaMixer,
        submodules=mamba_mixer.MambaMixerSubmodules(
            in_proj=backend.column_parallel_layer_norm_linear() or backend.column_parallel_linear(),
            out_proj=backend.row_parallel_linear(),
        ),
    )
    for i, spec in enumerate(layers.layer_specs):
        traits = weights.traits[first_layer + i]
        # layers share one specification
        layer = layers.layer_specs[i] = copy.deepcopy(spec)
        whole, kept = layer.submodules, _EXPERT_PARTS if "sparse" in traits else _MIXER_PARTS
        names = whole.sharded_state_dict_keys_map
        parts = TransformerLayerSubmodules(
            **{name: getattr(whole, name) for name in kept}, sharded_state_dict_keys_map=names
        )
        if "mamba" in traits:
            parts.self_attention = copy.deepcopy(mixer)
            names["self_attention.in_proj.layer_norm_"] = "self_attention.linear_qkv.layer_norm_"
        layer.submodules = parts
