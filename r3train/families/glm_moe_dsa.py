"""GLM-5: DeepSeek-V3.2's layers, an indexer that rotates pairs of neighbours.  GLM-5.2: layers that share an indexer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3train.families.deepseek_v3 import DEEPSEEK_V3, ONE_GROUP, SIGMOID, tiny_latent
from r3train.families.deepseek_v32 import DEEPSEEK_V32, sparse, tiny_indexer
from r3train.families.family import indexer_layers
from r3train.families.tiny_options import TinyModel, TinyOptions
from r3train.families.transformer import Fields, Keys


def _transformer(keys: Keys) -> Fields:
    """Return DeepSeek-V3.2's fields, and which layers have an indexer: the first ones, then every n-th.

    Source: megatron-core 0.19.2, ``dsa.is_dsa_skip_topk_layer``.
    """
    has_indexer = indexer_layers(keys)
    if all(has_indexer):
        return sparse(keys)
    first = has_indexer.index(False)
    after = [*has_indexer[first:], True]
    every = after.index(True) + 1
    numbers = range(1, len(has_indexer) + 1)
    if has_indexer != [max(n - max(first, 1), 0) % every == 0 for n in numbers]:
        letters = "".join("FS"[not has_one] for has_one in has_indexer)
        raise ValueError(
            f"{keys.file}: layers with an indexer of their own (F) and without (S) are {letters}; Megatron"
            " has the first ones, then every n-th"
        )
    return sparse(keys) | {
        "dsa_indexer_topk_freq": every,
        "dsa_indexer_skip_topk_offset": first,
    }


def _tiny(o: TinyOptions) -> dict[str, Any]:
    sizes = tiny_latent(o, routed_scaling_factor=2.5, **ONE_GROUP) | tiny_indexer(o)
    del sizes["num_mtp_layers"]
    # transformers normalises compressed queries and keys with 1e-6 whatever is set here
    return sizes | {"rms_norm_eps": 1e-6}


def _tiny_shared(o: TinyOptions) -> dict[str, Any]:
    kinds = ["shared" if i > 1 and i % 2 == 0 else "full" for i in range(o.num_layers)]
    return _tiny(o) | {"indexer_types": kinds}


_PUBLISHED = SIGMOID | {"indexer_rope_interleave": True}

GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    transformer=_transformer,
    needs=DEEPSEEK_V3.needs | {"indexer_rope_interleave": (True, None)},
    defaults={
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    tiny={
        "glm_moe_dsa": TinyModel("GlmMoeDsa", _tiny, _PUBLISHED),
        "glm_5_2": TinyModel("GlmMoeDsa", _tiny_shared, _PUBLISHED),
    },
)
