"""Qwen3-Next: three layers of a gated delta net to one of gated attention, and a gated shared expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from r3train.families.family import SILU, Config, Family, linear_layers
from r3train.families.qwen2_moe import qwen2_moe
from r3train.families.qwen3_moe import tiny_qwen3_moe
from r3train.families.weight_rows import (
    ATTENTION,
    DENSE_MLP,
    GATED_SHARED_EXPERT,
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    experts,
    qk_norms,
    router,
    row,
    vector,
)
from r3train.families.tiny_options import HALF_ROTATED, TinyModel, TinyOptions
from r3train.families.transformer import Fields, Keys, part_of_heads_rotates
from r3train.families.weights import DiskTensor, Table, Weight
from r3train.patches import patch

_LINEAR, _FULL = ("linear",), ("full",)
_KEYS, _VALUES = "linear_keys*linear_key", "linear_heads*linear_value"
# rows of a delta net's input: queries, keys, values, output gates z, step sizes b, decays a
_SIX = {
    "q": _KEYS,
    "k": _KEYS,
    "v": _VALUES,
    "z": _VALUES,
    "b": "linear_heads",
    "a": "linear_heads",
}


def delta_net(*inputs: DiskTensor) -> tuple[Weight, ...]:
    """A layer of linear attention, whose input projection is ``inputs`` on disk."""
    here, disk = ATTENTION, "linear_attn."
    conv = {part: _SIX[part] for part in "qkv"}
    by_head = dict(sharded="rows", layers=_LINEAR)
    return (
        Weight(
            f"{here}in_proj.weight", inputs, _SIX, ("hidden",), "rows", layers=_LINEAR, lora=True
        ),
        Weight(
            f"{here}conv1d.weight",
            (DiskTensor(f"{disk}conv1d.weight"),),
            conv,
            (1, "kernel"),
            "rows",
            layers=_LINEAR,
        ),
        vector(f"{here}A_log", f"{disk}A_log", "linear_heads", **by_head, float32=True),
        vector(f"{here}dt_bias", f"{disk}dt_bias", "linear_heads", **by_head),
        vector(f"{here}out_norm.weight", f"{disk}norm.weight", "linear_value", layers=_LINEAR),
        row(f"{here}out_proj.weight", f"{disk}out_proj.weight", _VALUES, layers=_LINEAR),
    )


# a head of q_proj is [query; gate]
GATED_QKV = Weight(
    f"{ATTENTION}linear_qkv.weight",
    (
        DiskTensor("self_attn.q_proj.weight", ("q", "gate"), "heads"),
        DiskTensor("self_attn.k_proj.weight", ("k",)),
        DiskTensor("self_attn.v_proj.weight", ("v",)),
    ),
    {"q": "heads*head", "gate": "heads*head", "k": "kv_heads*head", "v": "kv_heads*head"},
    ("hidden",),
    "rows",
    "kv_heads",
    layers=_FULL,
    lora=True,
)
_INPUT_NORMS = (
    replace(INPUT_NORM, layers=_FULL),
    replace(INPUT_NORM, layers=_LINEAR, te_name=f"{ATTENTION}in_proj.layer_norm_weight"),
)
# of a layer but its delta net and its experts
HYBRID = (
    *_INPUT_NORMS,
    GATED_QKV,
    replace(HEADS[1], layers=_FULL),
    *qk_norms(layers=_FULL),
    MLP_NORM,
    router(),
    *GATED_SHARED_EXPERT,
)


def hybrid_conflicts(config: Config) -> Iterator[str]:
    """SGLang reads full_attention_interval and partial_rotary_factor, transformers other keys."""
    rope = config.get("rope_parameters") or {}
    served = config.get("partial_rotary_factor", 0.25)
    part = rope.get("partial_rotary_factor", served)
    if part != served:
        yield (
            f"partial_rotary_factor is {part} in rope_parameters, and SGLang rotates {served} of a head:"
            f" write it at the top of config.json too"
        )
    kinds = config.get("layer_types")
    if kinds is not None and [kind == "linear_attention" for kind in kinds] != linear_layers(
        config
    ):
        yield (
            f"layer_types {kinds} is not what SGLang takes from full_attention_interval"
            f" {config.get('full_attention_interval')!r}"
        )


_LINEAR_SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def hybrid(keys: Keys) -> Fields:
    """Return the fields of layers of two kinds, with Qwen2-MoE's experts."""
    return (
        qwen2_moe(keys)
        | {
            "add_qkv_bias": False,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
        }
        | {name: keys[name] for name in _LINEAR_SIZES}
    )


# published, and not saved by transformers
FULL_EVERY_FOURTH = {"full_attention_interval": 4, "partial_rotary_factor": 0.5}


def tiny_hybrid(o: TinyOptions) -> dict[str, Any]:
    """Return the keys of layers of two kinds, with Qwen2-MoE's experts."""
    layers = range(1, o.num_layers + 1)
    return tiny_qwen3_moe(o) | {
        "shared_expert_intermediate_size": o.moe_intermediate_size,
        "linear_num_key_heads": o.num_kv_heads,
        "linear_num_value_heads": 2 * o.num_kv_heads,
        "linear_key_head_dim": o.head_dim,
        "linear_value_head_dim": o.head_dim,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": dict(HALF_ROTATED),
        "layer_types": ["linear_attention" if i % 4 else "full_attention" for i in layers],
    }


QWEN3_NEXT = Family(
    Table(
        (
            *HYBRID,
            *delta_net(
                DiskTensor("linear_attn.in_proj_qkvz.weight", tuple("qkvz"), "linear_keys"),
                DiskTensor("linear_attn.in_proj_ba.weight", tuple("ba"), "linear_keys"),
            ),
            *experts(),
            *DENSE_MLP,
        )
    ),
    hybrid,
    SILU | {"attention_bias": (False, False), "mlp_only_layers": ([], [])},
    whole_heads={
        "num_key_value_heads": "the gate of its attention is cut between key heads",
        "linear_num_key_heads": "its linear attention is cut between heads",
    },
    heads_of_contexts=("linear_num_key_heads",),
    conflicts=hybrid_conflicts,
    defaults={
        "norm_topk_prob": True,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
    },
    rotary=part_of_heads_rotates,
    layers="gated_delta_net",
    lora=True,
    peft_fuses_experts=True,
    tiny={"qwen3_next": TinyModel("Qwen3Next", tiny_hybrid, FULL_EVERY_FOURTH, recipe_version=2)},
)


def serve_on_cpu() -> None:
    """Compute linear attention token by token, also of Qwen3.5: convolution, gates, recurrence, norm."""
    import torch.nn.functional as F
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.models import qwen3_next

    def norm(self, x, z=None, *_, **__):
        y = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (y if z is None else y * F.silu(z.float())).to(x.dtype)

    def extend(self, layer, forward_batch, mixed_qkv, a, b, **_):
        lengths = forward_batch.extend_seq_lens.tolist()
        fresh = (forward_batch.extend_prefix_lens == 0).tolist()
        return _delta_rule(self, layer, mixed_qkv, a, b, lengths, fresh)

    def decode(self, layer, forward_batch, mixed_qkv, a, b, **_):
        n = len(forward_batch.seq_lens)
        return _delta_rule(self, layer, mixed_qkv, a, b, [1] * n, [False] * n)

    why = "its plain way takes in_proj apart, another one is a triton kernel"
    patch(qwen3_next, "_is_cpu", True, expects="bool", why=why)
    residual = "residual=None, prenorm=False, residual_in_fp32=False"
    attention = "(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)"
    for owner, name, replacement, expects in (
        (layernorm_gated.RMSNorm, "forward", norm, "(self, x, z=None)"),
        (fused_norm_gate.FusedRMSNormGated, "forward", norm, f"(self, x, g, {residual})"),
        (GDNAttnBackend, "forward_extend", extend, attention),
        (GDNAttnBackend, "forward_decode", decode, attention),
    ):
        patch(owner, name, replacement, expects=expects, why="it is a triton kernel")


def _delta_rule(
    backend: Any,
    layer: Any,
    mixed_qkv: Any,
    a: Any,
    b: Any,
    lengths: list[int],
    fresh: list[bool],
) -> Any:
    """Return the output of the batch's sequences, [1, n, heads, head_dim]; moves their states in the cache."""
    import torch
    import torch.nn.functional as F

    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    windows, states = cache.conv[0], cache.temporal
    weight = layer.conv_weights.reshape(mixed_qkv.shape[-1], 1, -1)
    slots = backend.forward_metadata.mamba_cache_indices.tolist()
    out = []
    start = 0
    for slot, n, is_fresh in zip(slots, lengths, fresh):
        rows = slice(start, start + n)
        start += n
        if is_fresh:
            windows[slot], states[slot] = 0, 0
        x = torch.cat([windows[slot].to(mixed_qkv.dtype), mixed_qkv[rows].T], -1)
        windows[slot] = x[:, -windows.shape[-1] :]
        x = F.silu(F.conv1d(x[None], weight, layer.bias, groups=len(x))[0]).T.float()
        q, k, v = x.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
        q, k = (y.view(n, -1, layer.head_k_dim) for y in (q, k))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(layer.num_v_heads // layer.num_k_heads, 1) for y in (q, k))
        q, v = q * layer.head_k_dim**-0.5, v.view(n, layer.num_v_heads, -1)
        decay = (-layer.A_log.float().exp() * F.softplus(a[rows].float() + layer.dt_bias)).exp()
        beta = b[rows].float().sigmoid()
        state = states[slot].float()  # [heads, v, k], as SGLang's pool has it
        for t in range(n):
            state = state * decay[t, :, None, None]
            delta = (v[t] - (state * k[t][:, None]).sum(-1)) * beta[t, :, None]
            state = state + delta[..., None] * k[t][:, None]
            out.append((state * q[t][:, None]).sum(-1))
        states[slot] = state.to(states.dtype)
    return torch.stack(out)[None].to(mixed_qkv.dtype)
