"""Linear attention by the gated delta rule on packed sequences, in plain torch, and its model's norms."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm import gated_delta_net as gdn
from megatron.core.ssm.gated_delta_net import common as gdn_common
from megatron.core.transformer.spec_utils import ModuleSpec

from r3train.families.weights import ModelWeights
from r3train.patches import patch


class ZeroCenteredNorm(torch.nn.Module):
    """RMSNorm times (1 + weight).

    Shifted weights in another norm would not be exported bit for bit.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class PackedGatedDeltaNet(gdn.GatedDeltaNet):
    """Megatron's gated delta net, one packed sequence after another.

    Megatron's own takes packed sequences through a library of triton kernels only.
    """

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = gdn.torch_chunk_gated_delta_rule

    def forward(self, hidden_states, attention_mask=None, *, packed_seq_params=None, **_):
        """Attend.  hidden_states: [s, 1, hidden], or a sequence-parallel share of it."""
        mixed, _ = self.in_proj(hidden_states)
        # a list: the lengths of sequences are loop bounds
        ends = packed_seq_params.cu_seqlens_q.tolist()
        out = torch.cat([self._attend(mixed[a:b, 0]) for a, b in zip(ends, ends[1:]) if b > a])
        return self.out_proj(out[:, None])

    def _attend(self, mixed: torch.Tensor) -> torch.Tensor:
        """One sequence from an empty state: [n, in_proj_dim / tp] -> [n, v_dim / tp]."""
        n, tp = len(mixed), self.tp_size
        qkv, gate, beta, alpha = mixed.split(
            [self.conv_dim_local_tp, self.v_dim // tp, *[self.num_v_heads_local_tp] * 2], -1
        )
        qkv = self.act_fn(self.conv1d(qkv.T[None])[0, :, :n]).T
        q, k, v = qkv.split([self.qk_dim // tp, self.qk_dim // tp, self.v_dim // tp], -1)
        q, k = (x.reshape(1, n, -1, self.key_head_dim) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        times = self.num_value_heads // self.num_key_heads
        q, k = (x.repeat_interleave(times, 2) for x in (q, k))
        v = v.reshape(1, n, -1, self.value_head_dim)
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        out, _ = self.gated_delta_rule(q, k, v, g=decay[None], beta=beta.sigmoid()[None])
        out = self.out_norm(out.reshape(-1, self.value_head_dim))
        out = out * self.act_fn(gate.reshape(-1, self.value_head_dim).float())
        return out.to(mixed.dtype).view(n, -1)


def adapt_gated_delta_net(
    layers: Any, weights: ModelWeights, first_layer: int, use_te: bool
) -> None:
    """Put in the delta nets and the norms; refuse layers that nobody verified."""
    if use_te:
        raise ValueError(
            "a model with linear attention was verified with --attention-backend local only, on a CPU"
        )
    why = "the constructor wants a library of triton kernels, which its plain torch does without"
    patch(gdn_common, "HAVE_FLA", True, expects="bool", why=why)
    backend = LocalSpecProvider()
    delta_net = ModuleSpec(
        module=PackedGatedDeltaNet,
        submodules=gdn.GatedDeltaNetSubmodules(
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
        if "linear" in weights.traits[first_layer + i]:
            parts.self_attention = delta_net
        else:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = ZeroCenteredNorm
    layers.layer_norm = ZeroCenteredNorm
