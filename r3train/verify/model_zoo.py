"""Small Hugging Face checkpoints to verify on: random weights, one variant a kind of router."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from r3train.types import RouteShape

VOCAB_SIZE = 512
HIDDEN = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
DENSE_INTERMEDIATE, EXPERT_INTERMEDIATE = 96, 32
# large enough that one wrong expert moves everything after it
INIT_STD = 0.15


@dataclass(frozen=True)
class ModelVariant:
    """One checkpoint and the TransformerConfig overrides that it is trained under.

    ``dense_layers`` are 0-based.  ``score`` is softmax (after the top-k), pre_softmax or sigmoid.
    """

    name: str
    num_layers: int = 4
    num_experts: int = 8
    topk: int = 2
    dense_layers: tuple[int, ...] = ()
    family: str = "qwen3_moe"
    score: str = "softmax"
    expert_intermediate: int = EXPERT_INTERMEDIATE
    tied: bool = False  # the output layer is the embedding
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def moe_layer_numbers(self) -> tuple[int, ...]:
        """1-based numbers of the layers with experts."""
        return tuple(i + 1 for i in range(self.num_layers) if i not in self.dense_layers)

    @property
    def route_shape(self) -> RouteShape:
        """The size of one token's routes."""
        return RouteShape(self.num_layers, self.topk, self.num_experts)


VARIANTS = {
    v.name: v
    for v in (
        ModelVariant("moe4"),
        ModelVariant("dense6", num_layers=6, dense_layers=(0, 3)),
        ModelVariant("moe8", num_layers=8, dense_layers=(0,)),
        ModelVariant("tied", tied=True),
        # one MoE layer: mbridge's loading time grows with the square of the number of tensors
        ModelVariant(
            "wide300", num_layers=2, num_experts=300, dense_layers=(0,), expert_intermediate=8
        ),
        ModelVariant(
            "pre_softmax",
            num_layers=3,
            score="pre_softmax",
            overrides={"moe_router_pre_softmax": True},
        ),
        ModelVariant(
            "sigmoid",
            num_layers=3,
            score="sigmoid",
            overrides={"moe_router_score_function": "sigmoid"},
        ),
        ModelVariant(
            "grouped",
            num_layers=3,
            overrides={"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        ),
        # sigmoid with expert bias, a scaling factor, shared experts, the first layer dense
        ModelVariant(
            "glm",
            num_layers=4,
            dense_layers=(0,),
            family="glm4_moe",
            score="sigmoid",
            overrides={"moe_router_bias_update_rate": 0.01},
        ),
    )
}
ROUTED_SCALING_FACTOR = 1.5
GLM_ROTARY_FRACTION = 0.5


def hf_config(v: ModelVariant) -> dict[str, Any]:
    """The variant's config.json."""
    common = dict(
        model_type=v.family,
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        num_hidden_layers=v.num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=DENSE_INTERMEDIATE,
        moe_intermediate_size=v.expert_intermediate,
        num_experts_per_tok=v.topk,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        hidden_act="silu",
        attention_dropout=0.0,
        tie_word_embeddings=v.tied,
        eos_token_id=1,
        dtype="float32",
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if v.family == "qwen3_moe":
        return common | dict(
            architectures=["Qwen3MoeForCausalLM"],
            num_experts=v.num_experts,
            decoder_sparse_step=1,
            mlp_only_layers=list(v.dense_layers),
            attention_bias=False,
            rope_parameters=rope,
            router_aux_loss_coef=0.0,
        )
    assert v.dense_layers == tuple(range(len(v.dense_layers))), "GLM's dense layers come first"
    return common | dict(
        architectures=["Glm4MoeForCausalLM"],
        n_routed_experts=v.num_experts,
        n_shared_experts=1,
        first_k_dense_replace=len(v.dense_layers),
        routed_scaling_factor=ROUTED_SCALING_FACTOR,
        n_group=1,
        topk_group=1,
        use_qk_norm=True,
        attention_bias=True,
        rope_parameters=rope | {"partial_rotary_factor": GLM_ROTARY_FRACTION},
    )


def _weight_shapes(v: ModelVariant) -> dict[str, tuple[int, ...]]:
    glm = v.family == "glm4_moe"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not v.tied:
        shapes["lm_head.weight"] = (VOCAB_SIZE, HIDDEN)

    def mlp(prefix: str, width: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (width, HIDDEN)
        shapes[f"{prefix}.up_proj.weight"] = (width, HIDDEN)
        shapes[f"{prefix}.down_proj.weight"] = (HIDDEN, width)

    for i in range(v.num_layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (HIDDEN,)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
            if glm:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (heads * HEAD_DIM,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[f"{layer}.self_attn.q_norm.weight"] = (HEAD_DIM,)
        shapes[f"{layer}.self_attn.k_norm.weight"] = (HEAD_DIM,)
        if i in v.dense_layers:
            mlp(f"{layer}.mlp", DENSE_INTERMEDIATE)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (v.num_experts, HIDDEN)
        for expert in range(v.num_experts):
            mlp(f"{layer}.mlp.experts.{expert}", v.expert_intermediate)
        if glm:
            shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (v.num_experts,)
            mlp(f"{layer}.mlp.shared_experts", v.expert_intermediate)
    return shapes


def write_checkpoint(v: ModelVariant, directory: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors (float32, per-expert names); returns ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _weight_shapes(v).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith("embed_tokens.weight") and not v.tied:
            weights[name] = noise
        else:
            weights[name] = INIT_STD * noise
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf_config(v), indent=2) + "\n")
    return directory
