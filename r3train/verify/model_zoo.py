"""Small Hugging Face checkpoints to verify on: random weights, one variant a kind of router."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from r3train.families.read_facts import read_hf_facts
from r3train.families import TINY_MODELS, tensor_shapes
from r3train.families.tiny_options import TinyOptions, shared
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
ROUTED_SCALING_FACTOR = 1.5  # both as the tiny GLM has them
GLM_ROTARY_FRACTION = 0.5


def hf_config(v: ModelVariant) -> dict[str, Any]:
    """The variant's config.json: the tiny model's of its family, with dense layers where they are wanted."""
    options = TinyOptions(
        num_layers=v.num_layers,
        num_experts=v.num_experts,
        topk=v.topk,
        moe_intermediate_size=v.expert_intermediate,
        vocab_size=VOCAB_SIZE,
    )
    family = TINY_MODELS[v.family]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if v.family == "qwen3_moe":
        family_keys = {"mlp_only_layers": list(v.dense_layers), "router_aux_loss_coef": 0.0}
    else:
        assert v.dense_layers == tuple(range(len(v.dense_layers))), "GLM's dense layers come first"
        family_keys = {"first_k_dense_replace": len(v.dense_layers), "n_group": 1, "topk_group": 1}
        rope |= {"partial_rotary_factor": GLM_ROTARY_FRACTION}
    return {
        **shared(options),
        **family.sizes(options),
        **family_keys,
        "model_type": v.family,
        "architectures": [f"{family.kind}ForCausalLM"],
        "intermediate_size": DENSE_INTERMEDIATE,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "tie_word_embeddings": v.tied,
        "eos_token_id": 1,
        "dtype": "float32",
    }


def write_checkpoint(v: ModelVariant, directory: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors (float32, per-expert names); returns ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(hf_config(v), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(read_hf_facts(directory)).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith("embed_tokens.weight") and not v.tied:
            weights[name] = noise
        else:
            weights[name] = INIT_STD * noise
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
