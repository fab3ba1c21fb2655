"""Nemotron-H with experts, as Nemotron 3 Nano: a layer is a Mamba-2 mixer, attention without positions, or experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from r3train.families.family import Config, Family
from r3train.families.weight_rows import ATTENTION, column, expert_bias, router, row, vector
from r3train.families.tiny_options import TinyModel, TinyOptions, with_experts
from r3train.families.transformer import Fields, Keys, sigmoid_and_shared
from r3train.families.weights import DiskTensor, Table, Weight
from r3train.patches import patch

_MAMBA, _FULL, _SPARSE = ("mamba",), ("full",), ("sparse",)
_INNER, _STATES = "mamba_heads*mamba_head", "mamba_groups*mamba_state"
_CONVOLVED = {"x": _INNER, "B": _STATES, "C": _STATES}


def _norm(name: str, layers: tuple[str, ...], te_name: str = "") -> Weight:
    return vector(name, "norm.weight", "hidden", te_name=te_name, layers=layers)


def _per_head(name: str) -> Weight:
    more = dict(sharded="rows", layers=_MAMBA, float32=name == "A_log")
    return vector(f"{ATTENTION}{name}", f"mixer.{name}", "mamba_heads", **more)


def _convolution(kind: str, columns: tuple[str | int, ...]) -> Weight:
    tensors = (DiskTensor(f"mixer.conv1d.{kind}"),)
    name = f"{ATTENTION}conv1d_{kind}"
    return Weight(name, tensors, _CONVOLVED, columns, "rows", layers=_MAMBA)


_MIXER = (
    _norm("input_layernorm.weight", _MAMBA, f"{ATTENTION}in_proj.layer_norm_weight"),
    Weight(
        f"{ATTENTION}in_proj.weight",
        (DiskTensor("mixer.in_proj.weight"),),
        {"z": _INNER, **_CONVOLVED, "dt": "mamba_heads"},
        ("hidden",),
        "rows",
        layers=_MAMBA,
        lora=True,
    ),
    _convolution("weight", (1, "mamba_kernel")),
    _convolution("bias", ()),
    *(_per_head(name) for name in ("A_log", "D", "dt_bias")),
    vector(f"{ATTENTION}norm.weight", "mixer.norm.weight", _INNER, sharded="rows", layers=_MAMBA),
    row(f"{ATTENTION}out_proj.weight", "mixer.out_proj.weight", _INNER, layers=_MAMBA),
)
_ATTENTION = (
    _norm("input_layernorm.weight", _FULL, f"{ATTENTION}linear_qkv.layer_norm_weight"),
    Weight(
        f"{ATTENTION}linear_qkv.weight",
        tuple(DiskTensor(f"mixer.{part}_proj.weight", (part,)) for part in "qkv"),
        {"q": "heads*head", "k": "kv_heads*head", "v": "kv_heads*head"},
        ("hidden",),
        "rows",
        "kv_heads",
        layers=_FULL,
        lora=True,
    ),
    row(f"{ATTENTION}linear_proj.weight", "mixer.o_proj.weight", "heads*head", layers=_FULL),
)


def _up_and_down(name: str, disk: str, width: str) -> tuple[Weight, ...]:
    """An MLP without a gate."""
    up, down = (f"mixer.{disk}.{linear}_proj.weight" for linear in ("up", "down"))
    return (
        column(f"mlp.{name}.linear_fc1.weight", up, width, layers=_SPARSE),
        row(f"mlp.{name}.linear_fc2.weight", down, width, layers=_SPARSE),
    )


_EXPERTS = (
    _norm("pre_mlp_layernorm.weight", _SPARSE),
    router("mixer.gate.weight"),
    expert_bias("mixer.gate.e_score_correction_bias"),
    *_up_and_down("experts", "experts.{e}", "expert"),
    *_up_and_down("shared_experts", "shared_experts", "wide_shared_expert"),
)


def _conflicts(config: Config) -> Iterator[str]:
    mixers = config.get("hybrid_override_pattern")
    if mixers is None:
        yield "key hybrid_override_pattern is missing, by which SGLang builds the layers"
    elif "-" in mixers:
        yield "hybrid_override_pattern has a '-': a layer of an MLP without experts was not verified"
    for served, key in (("mamba_n_groups", "n_groups"), ("mamba_d_conv", "conv_kernel")):
        default = _DEFAULTS[key]
        if config.get(served, default) != config.get(key, default):
            yield (
                f"{key} is {config.get(key, default)}, and SGLang takes {config.get(served, default)}:"
                f" write it as {served} too"
            )


def _transformer(keys: Keys) -> Fields:
    return sigmoid_and_shared(keys, 1) | {
        "activation_func": "squared_relu",
        "gated_linear_unit": False,
        "bias_dropout_fusion": True,
        "persist_layer_norm": True,
        "layernorm_epsilon": keys["layer_norm_epsilon"],
        "moe_shared_expert_intermediate_size": keys.integer("moe_shared_expert_intermediate_size"),
        "mamba_num_heads": keys.integer("mamba_num_heads"),
        "mamba_head_dim": keys.integer("mamba_head_dim"),
        "mamba_num_groups": keys.integer("n_groups"),
        "mamba_state_dim": keys.integer("ssm_state_size"),
    }


def _no_positions(keys: Keys) -> Fields:
    return {"position_embedding_type": "none"}


def _tiny(o: TinyOptions) -> dict[str, Any]:
    return with_experts(
        o,
        "n_routed_experts",
        layers_block_type=[_TYPES[letter] for letter in _mixers(o)],
        head_dim=o.head_dim,
        mamba_num_heads=2 * o.num_kv_heads,
        mamba_head_dim=o.head_dim,
        n_groups=o.num_kv_heads,
        ssm_state_size=o.head_dim,
        moe_shared_expert_intermediate_size=2 * o.moe_intermediate_size,
        routed_scaling_factor=2.5,
        # transformers takes no shorter steps, the engines do
        time_step_min=1e-9,
    )


_TYPES = {"M": "linear_attention", "E": "moe", "*": "full_attention"}


def _mixers(o: TinyOptions) -> str:
    return "".join("ME*E"[i % 4] for i in range(o.num_layers))


def _published(o: TinyOptions) -> dict[str, Any]:
    return {
        "hybrid_override_pattern": _mixers(o),
        "num_hidden_layers": o.num_layers,
        "mamba_n_groups": o.num_kv_heads,
        "layers_block_type": None,
    }


_DEFAULTS = {
    "n_groups": 8,
    "conv_kernel": 4,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "routed_scaling_factor": 1.0,
}

NEMOTRON_H = Family(
    Table(
        (*_MIXER, *_ATTENTION, *_EXPERTS), prefix="backbone", embedding="embeddings", norm="norm_f"
    ),
    _transformer,
    {
        "mlp_hidden_act": ("relu2", "relu2"),
        "mamba_hidden_act": ("silu", "silu"),
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), (False, False)),
        "use_conv_bias": (True, True),
        "mamba_conv_bias": (True, True),
        # fixed in Megatron's mixer
        "conv_kernel": (4, 4),
        "layer_norm_epsilon": (1e-5, 1e-5),
        "norm_topk_prob": (True, True),
        "n_group": (1, 1),
        "topk_group": (1, 1),
        "n_shared_experts": (1, 1),
        "moe_latent_size": (None, None),
        "sliding_window": (None, None),
        "residual_in_fp32": (False, False),
        # SGLang and transformers have other words for its layers
        "layers_block_type": (None, None),
    },
    alone={"context_parallel_size": "its Mamba mixers were not verified with a part of a sequence"},
    whole_heads={"n_groups": "its Mamba mixers are cut between groups of heads"},
    conflicts=_conflicts,
    defaults=_DEFAULTS,
    rotary=_no_positions,
    layers="mamba",
    lora=True,
    unread_by_peft={"out_proj": "PEFT refuses that of a Mamba mixer"},
    tiny={"nemotron_h": TinyModel("NemotronH", _tiny, option_keys=_published)},
)


def serve_on_cpu() -> None:
    """Compute Mamba-2 mixers token by token, experts without gates, and router logits in float32."""
    import torch
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.models.nemotron_h import NemotronHMoE

    gated_experts = fused_moe_native.moe_forward_native

    def forward_experts(layer, x, topk_output, moe_runner_config):
        if moe_runner_config.is_gated:
            return gated_experts(layer, x, topk_output, moe_runner_config)
        assert moe_runner_config.activation == "relu2", moe_runner_config.activation
        gates = topk_output.topk_weights * moe_runner_config.routed_scaling_factor
        out = torch.zeros(x.shape, dtype=gates.dtype)
        for e in topk_output.topk_ids.unique().tolist():
            rows, places = (topk_output.topk_ids == e).nonzero(as_tuple=True)
            inner = torch.relu(x[rows] @ layer.w13_weight[e].T).square()
            out.index_add_(0, rows, gates[rows, places, None] * (inner @ layer.w2_weight[e].T))
        return out.to(x.dtype)

    def forward_core(self, hidden_states):
        logits = hidden_states.float() @ self.gate.weight.float().T
        chosen = self.topk(hidden_states, logits)
        return self.experts(hidden_states, chosen), self.shared_experts(hidden_states)

    arguments = "output=None, layer_cache, metadata, mup_vector=None, use_triton_causal_conv=False"
    for owner, name, replacement, expects, why in (
        (
            fused_moe_native,
            "moe_forward_native",
            forward_experts,
            "(layer, x, topk_output, moe_runner_config)",
            "it knows gated experts only",
        ),
        (
            NemotronHMoE,
            "_forward_core_normal",
            forward_core,
            "(self, hidden_states)",
            "torch has no product of another dtype on a CPU",
        ),
        (
            MambaMixer2,
            "forward",
            mix,
            f"(self, *, hidden_states, {arguments})",
            "its convolution and its scan are triton kernels",
        ),
    ):
        patch(owner, name, replacement, expects=expects, why=why)


def mix(self: Any, *, hidden_states: Any, layer_cache: Any, metadata: Any, **_: Any) -> Any:
    """Return the output of the batch's sequences [n, hidden]; moves their states in the cache."""
    import torch
    import torch.nn.functional as F

    windows, states = layer_cache.conv[0], layer_cache.temporal
    gate, mixed, steps = self.in_proj(hidden_states)[0].split(
        [self.intermediate_size, self.conv_dim, self.num_heads], -1
    )
    lengths, fresh = [1] * metadata.num_decodes, [False] * metadata.num_decodes
    if (extended := metadata.mixed_metadata) is not None:
        lengths = [*extended.extend_seq_lens_cpu, *lengths]
        fresh = [not has for has in extended.has_initial_states.tolist()] + fresh
    steps = F.softplus(steps.float() + self.dt_bias.float())
    decays = (steps * self.A).exp()
    out, start = [], 0
    for slot, n, is_fresh in zip(metadata.mamba_cache_indices.tolist(), lengths, fresh):
        rows = slice(start, start + n)
        start += n
        if is_fresh:
            windows[slot], states[slot] = 0, 0
        x = torch.cat([windows[slot].to(mixed.dtype), mixed[rows].T], -1)
        windows[slot] = x[:, -windows.shape[-1] :]
        x = F.silu(F.conv1d(x[None], self.conv1d.weight, self.conv1d.bias, groups=len(x))[0])
        x, b, c = x.T.float().split(
            [self.intermediate_size, self.groups_ssm_state_size, self.groups_ssm_state_size], -1
        )
        x = x.view(n, self.num_heads, -1)
        b, c = (
            y.view(n, self.n_groups, -1).repeat_interleave(self.num_heads // self.n_groups, 1)
            for y in (b, c)
        )
        state = states[slot].float()  # [heads, head_dim, state]
        for t in range(n):
            step, decay = (y[start - n + t, :, None, None] for y in (steps, decays))
            state = state * decay + step * x[t][..., None] * b[t][:, None]
            out.append((state * c[t][:, None]).sum(-1) + self.D.float()[:, None] * x[t])
        states[slot] = state.to(states.dtype)
    mixed = torch.stack(out).flatten(1).to(hidden_states.dtype)
    return self.out_proj(self.norm(mixed, gate))[0], None, None
