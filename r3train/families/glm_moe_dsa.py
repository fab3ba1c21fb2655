"""GLM-5: DeepSeek-V3.2's layers, an indexer that rotates pairs of neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from r3train.families.deepseek_v3 import DEEPSEEK_V3, ONE_GROUP, SIGMOID, tiny_latent
from r3train.families.deepseek_v32 import DEEPSEEK_V32, tiny_indexer
from r3train.families.family import Config
from r3train.families.tiny_options import TinyModel, TinyOptions


def _conflicts(config: Config) -> Iterator[str]:
    yield from DEEPSEEK_V3.conflicts(config)
    kinds, pattern = config.get("indexer_types") or (), config.get("index_topk_pattern") or ()
    if "shared" in kinds or "S" in pattern or "shared" in pattern:
        yield "layers without an indexer, which attend to the tokens of the layer before, were not verified"


def _tiny(o: TinyOptions) -> dict[str, Any]:
    sizes = tiny_latent(o, routed_scaling_factor=2.5, **ONE_GROUP) | tiny_indexer(o)
    del sizes["num_mtp_layers"]
    # transformers normalises compressed queries and keys with 1e-6 whatever is set here
    return sizes | {"rms_norm_eps": 1e-6}


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    needs=DEEPSEEK_V3.needs | {"indexer_rope_interleave": (True, None), "index_topk_freq": (1, 1)},
    conflicts=_conflicts,
    defaults={
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    tiny={
        "glm_moe_dsa": TinyModel("GlmMoeDsa", _tiny, SIGMOID | {"indexer_rope_interleave": True})
    },
)
