"""GLM-4.7-Flash: DeepSeek-V3's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3train.families.deepseek_v3 import DEEPSEEK_V3, ONE_GROUP, SIGMOID, tiny_latent
from r3train.families.tiny_options import TinyModel, TinyOptions


def _tiny(o: TinyOptions) -> dict[str, Any]:
    kinds = ["dense"] + ["sparse"] * (o.num_layers - 1)
    sizes = tiny_latent(o, routed_scaling_factor=1.8, mlp_layer_types=kinds, **ONE_GROUP)
    del sizes["num_mtp_layers"], sizes["first_k_dense_replace"]
    # transformers normalises compressed queries and keys with 1e-6 whatever is set here
    return sizes | {"rms_norm_eps": 1e-6}


_PUBLISHED = SIGMOID | {"first_k_dense_replace": 1}

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    defaults={"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1},
    tiny={"glm4_moe_lite": TinyModel("Glm4MoeLite", _tiny, _PUBLISHED)},
)
