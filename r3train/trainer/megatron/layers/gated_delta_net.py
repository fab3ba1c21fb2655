"""Linear attention by the gated delta rule, and the norms of its models."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.jit import jit_fuser
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm import gated_delta_net as gdn
from megatron.core.transformer.spec_utils import ModuleSpec

from r3train.cpu import linear_attention
from r3train.families.weights import ModelWeights
from r3train.patches import overrides


class PackedGatedDeltaNet(gdn.GatedDeltaNet):
    """Megatron's gated delta net of packed sequences, without waits for the device and with float32 decays."""

    def _resolve_cu_seqlens(
        self,
        cu_seqlens_padded: None,
        cu_seqlens_actual: torch.Tensor,
        total_seq_len: int,
        name: str,
        cp_size: int = 1,
    ) -> torch.Tensor:
        # a pack ends with its last sequence, and context-parallel ranks divide each (layout.rows.pack_layout)
        return cu_seqlens_actual

    @jit_fuser
    def _compute_g_and_beta(
        self, A_log: torch.Tensor, dt_bias: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay = -A_log.float().exp() * F.softplus(alpha.float() + dt_bias)
        return decay, beta.sigmoid()


overrides(
    gdn.GatedDeltaNet,
    "_resolve_cu_seqlens",
    expects="(self, cu_seqlens_padded, cu_seqlens_actual, total_seq_len, name, cp_size=1)",
    why="it waits for the device four times a layer",
)
overrides(
    gdn.GatedDeltaNet,
    "_compute_g_and_beta",
    expects="(self, A_log_local_cp, dt_bias_local_cp, alpha, beta)",
    why="with --bf16 its decay is rounded, unlike that of transformers and SGLang",
)


class PlainNorm:
    """The norm of a delta net's output, whose weight is no difference from 1 as those of its model's other norms."""

    def __new__(cls, config: Any, hidden_size: int, eps: float, norm: Any) -> torch.nn.Module:
        config = copy.copy(config)
        config.layernorm_zero_centered_gamma = False
        return norm(config=config, hidden_size=hidden_size, eps=eps)


def adapt_gated_delta_net(
    layers: Any, weights: ModelWeights, first_layer: int, use_te: bool
) -> None:
    """Put in the delta nets; raises ValueError where their kernels are not installed."""
    if not torch.cuda.is_available():
        linear_attention.install()
    elif not gdn.HAVE_FLA:
        raise ValueError(
            "a model with linear attention needs fla-core on a CUDA device, which is not installed;"
            " r3train docs installation says how to install it"
        )
    backend = TESpecProvider() if use_te else LocalSpecProvider()
    in_proj = backend.column_parallel_layer_norm_linear() or backend.column_parallel_linear()
    delta_net = ModuleSpec(
        module=PackedGatedDeltaNet,
        submodules=gdn.GatedDeltaNetSubmodules(
            in_proj=in_proj,
            out_norm=ModuleSpec(PlainNorm, {"norm": backend.layer_norm(rms_norm=True)}),
            out_proj=backend.row_parallel_linear(),
        ),
    )
    for i, spec in enumerate(layers.layer_specs):
        if "linear" in weights.traits[first_layer + i]:
            # layers share one specification
            layer = layers.layer_specs[i] = copy.deepcopy(spec)
            parts = layer.submodules
            parts.self_attention = copy.deepcopy(delta_net)
            parts.sharded_state_dict_keys_map["self_attention.in_proj.layer_norm_"] = (
                "self_attention.linear_qkv.layer_norm_"
            )
