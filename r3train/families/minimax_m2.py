"""MiniMax-M2: norms over all heads, expert biases, a part of a head rotated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from r3train.families.family import SILU, Config, Family
from r3train.families.weight_rows import (
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    W123,
    WIDE_NORMS,
    expert_bias,
    router,
)
from r3train.families.tiny_options import HALF_ROTATED, TinyModel, TinyOptions, with_local_experts
from r3train.families.transformer import (
    FUSED,
    Fields,
    Keys,
    experts as experts_of,
    part_of_heads_rotates,
)
from r3train.families.weights import Table
from r3train.patches import patch


def _conflicts(config: Config) -> Iterator[str]:
    """SGLang rotates ``rotary_dim`` numbers of a head, transformers a part of it."""
    rope, size = config.get("rope_parameters") or {}, config.get("head_dim")
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotated = config.get("rotary_dim", size)
    if part is not None and size is not None and rotated != int(size * part):
        yield (
            f"rotary_dim is {rotated}, expected {int(size * part)}: head_dim {size} times"
            f" partial_rotary_factor {part}"
        )


def _transformer(keys: Keys) -> Fields:
    return FUSED | experts_of(
        keys,
        "intermediate_size",
        moe_router_pre_softmax=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )


def _tiny(o: TinyOptions) -> dict[str, Any]:
    rotary = {"rotary_dim": o.head_dim // 2, "rope_parameters": dict(HALF_ROTATED)}
    return with_local_experts(o, head_dim=o.head_dim, **rotary)


MINIMAX_M2 = Family(
    Table(
        (
            INPUT_NORM,
            *HEADS,
            *WIDE_NORMS,
            MLP_NORM,
            router("block_sparse_moe.gate.weight"),
            expert_bias("block_sparse_moe.e_score_correction_bias"),
            *W123,
        ),
        expert_width="intermediate_size",
    ),
    _transformer,
    SILU
    | {
        # what SGLang takes for a key that is missing is another model
        "scoring_func": ("sigmoid", None),
        "use_routing_bias": (True, None),
        "use_qk_norm": (True, None),
        "qk_norm_type": ("per_layer", "per_layer"),
        "router_jitter_noise": (0.0, 0.0),
    },
    whole_heads={"num_key_value_heads": "the norm over all its keys is cut between heads"},
    conflicts=_conflicts,
    defaults={"head_dim": 128, "rope_theta": 5e6},
    rotary=part_of_heads_rotates,
    layers="whole_width_norm",
    lora=True,
    adapters_served=True,
    fp8_served=True,
    tiny={
        "minimax_m2": TinyModel(
            "MiniMaxM2",
            _tiny,
            {
                "scoring_func": "sigmoid",
                "use_routing_bias": True,
                "use_qk_norm": True,
                "qk_norm_type": "per_layer",
                "rope_theta": 10000.0,
            },
        )
    },
)


def serve_on_cpu() -> None:
    """Normalise queries and keys over all heads of one rank, which SGLang does in a triton kernel."""
    import torch.nn.functional as F
    from sglang.srt.models.minimax_m2 import MiniMaxM2QKRMSNorm

    def forward(self, q, k):
        assert self._world_size == 1, "a CPU server has no tensor parallelism"
        return tuple(
            F.rms_norm(x.float(), x.shape[-1:], eps=self._eps).to(x.dtype) * norm.weight
            for x, norm in ((q, self._q_norm), (k, self._k_norm))
        )

    why = "it is a triton kernel"
    patch(MiniMaxM2QKRMSNorm, "forward", forward, expects="(self, q, k)", why=why)
