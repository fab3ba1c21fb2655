"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, of the tokens that an indexer chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3train.families.deepseek_v3 import (
    DEEPSEEK_V3,
    SIGMOID,
    deepseek_v3,
    tiny_deepseek_v3,
)
from r3train.families.weight_rows import ATTENTION, vector, whole
from r3train.families.tiny_options import TinyModel, TinyOptions
from r3train.families.transformer import Fields, Keys
from r3train.families.weights import DiskTensor, Table, Weight

_INDEXER = f"{ATTENTION}core_attention.indexer."
_DISK = "self_attn.indexer."
# SGLang on CUDA loads these two of a layer as one tensor, and forgets one that comes alone
_OWN = ("indexer",)
_TOGETHER = dict(bundle="indexer", layers=_OWN)

# has no gradient: the choice of tokens is discrete, and no score of the indexer is left in the attention
INDEXER = (
    Weight(
        f"{_INDEXER}linear_wq_b.weight",
        (DiskTensor(f"{_DISK}wq_b.weight"),),
        {"rows": "index_heads*index_head"},
        ("q_rank",),
        layers=_OWN,
    ),
    whole(f"{_INDEXER}linear_wk.weight", f"{_DISK}wk.weight", "index_head", **_TOGETHER),
    vector(f"{_INDEXER}k_norm.weight", f"{_DISK}k_norm.weight", "index_head", layers=_OWN),
    vector(f"{_INDEXER}k_norm.bias", f"{_DISK}k_norm.bias", "index_head", layers=_OWN),
    whole(
        f"{_INDEXER}linear_weights_proj.weight",
        f"{_DISK}weights_proj.weight",
        "index_heads",
        **_TOGETHER,
    ),
)


def sparse_table() -> Table:
    """Return DeepSeek-V3's weights and the indexer's; its norm of queries is apart, which the indexer reads."""
    rows = (
        replace(row, te_name="") if row.name.endswith("q_layernorm.weight") else row
        for row in DEEPSEEK_V3.weights.layer_weights
    )
    return Table((*rows, *INDEXER))


def sparse(keys: Keys) -> Fields:
    """Return DeepSeek-V3's fields and the indexer's."""
    return deepseek_v3(keys) | {
        "dsa_indexer_n_heads": keys.integer("index_n_heads"),
        "dsa_indexer_head_dim": keys.integer("index_head_dim"),
        "dsa_indexer_topk": keys.integer("index_topk"),
        "dsa_indexer_rope_interleaved": keys["indexer_rope_interleave"],
        # a rotation of queries and keys alike, for fp8
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
    }


def tiny_indexer(o: TinyOptions) -> dict[str, Any]:
    """Return the keys of an indexer that chooses all tokens of the tests."""
    topk = o.max_position_embeddings
    return {"index_n_heads": 8, "index_head_dim": o.head_dim, "index_topk": topk}


def _tiny(o: TinyOptions) -> dict[str, Any]:
    sizes = tiny_deepseek_v3(o) | tiny_indexer(o)
    del sizes["num_mtp_layers"]
    return sizes


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    weights=sparse_table(),
    transformer=sparse,
    needs=DEEPSEEK_V3.needs
    | {"indexer_rope_interleave": (False, False), "index_topk_freq": (1, 1)},
    defaults={"indexer_rope_interleave": False},
    layers="sparse_latent_attention",
    fp8_served=False,
    tiny={"deepseek_v32": TinyModel("DeepseekV32", _tiny, SIGMOID)},
)
