"""Rows of weight tables that several families share.

A row in one line each: ``vector`` (norms, biases), ``column`` and ``row`` (matrices whose rows or columns tensor
ranks share), ``whole`` (a matrix that each has), ``qkv``, ``gate_up``.  A layer has the trait "dense" or "sparse",
"full" or "linear" attention, "q_rank" or "no_q_rank", "indexer" where it has one of its own, and "qk_norm" where
config.json asks for it (``family.traits``).  A layer of one mixer has one trait: "mamba", "full", "sparse" or "dense".
"""

from __future__ import annotations

from typing import Any

from r3train.families.weights import DiskTensor, Size, Weight

ATTENTION = "self_attention."
_DENSE, _SPARSE = ("dense",), ("sparse",)


def vector(name: str, disk: str, rows: Size, **more: Any) -> Weight:
    """A vector: a norm's weight, or a bias."""
    return Weight(name, (DiskTensor(disk),), {"rows": rows}, **more)


def column(name: str, disk: str, rows: Size, columns: Size = "hidden", **more: Any) -> Weight:
    """A linear whose outputs tensor ranks share: [rows, columns]."""
    return Weight(
        name, (DiskTensor(disk),), {"rows": rows}, (columns,), "rows", **{"lora": True, **more}
    )


def row(name: str, disk: str, columns: Size, **more: Any) -> Weight:
    """A linear whose inputs tensor ranks share: [hidden, columns]."""
    more = {"lora": True, **more}
    return Weight(name, (DiskTensor(disk),), {"rows": "hidden"}, (columns,), "columns", **more)


def whole(name: str, disk: str, rows: Size, **more: Any) -> Weight:
    """A matrix that every tensor rank has: [rows, hidden]."""
    return Weight(name, (DiskTensor(disk),), {"rows": rows}, ("hidden",), **more)


def gate_up(name: str, gate: str, up: str, rows: Size, **more: Any) -> Weight:
    """The two first linears of an MLP, [2 * rows, hidden] in Megatron: gate, then up."""
    return Weight(
        name,
        (DiskTensor(gate, ("gate",)), DiskTensor(up, ("up",))),
        {"gate": rows, "up": rows},
        ("hidden",),
        "rows",
        lora=True,
        **more,
    )


def qkv(kind: str = "weight") -> Weight:
    """Query, key and value, in Megatron for each key head its queries, its key, its value; or their biases."""
    return Weight(
        f"{ATTENTION}linear_qkv.{kind}",
        tuple(DiskTensor(f"self_attn.{part}_proj.{kind}", (part,)) for part in "qkv"),
        {"q": "heads*head", "k": "kv_heads*head", "v": "kv_heads*head"},
        ("hidden",) if kind == "weight" else (),
        "rows",
        "kv_heads",
        lora=kind == "weight",
    )


def qk_norms(q: Size = "head", k: Size = "head", **more: Any) -> tuple[Weight, ...]:
    """The norms of queries and keys, of a head by default."""
    return tuple(
        vector(f"{ATTENTION}{part}_layernorm.weight", f"self_attn.{part}_norm.weight", size, **more)
        for part, size in (("q", q), ("k", k))
    )


INPUT_NORM = vector(
    "input_layernorm.weight",
    "input_layernorm.weight",
    "hidden",
    te_name=f"{ATTENTION}linear_qkv.layer_norm_weight",
)
# before experts Transformer Engine's layers have it under the local name
MLP_NORM = vector(
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    "hidden",
    te_name="mlp.linear_fc1.layer_norm_weight",
)
HEADS = (qkv(), row(f"{ATTENTION}linear_proj.weight", "self_attn.o_proj.weight", "heads*head"))
# over all heads, cut with them
WIDE_NORMS = qk_norms("heads*head", "kv_heads*head", sharded="rows")

DENSE_MLP = (
    gate_up(
        "mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp", layers=_DENSE
    ),
    row("mlp.linear_fc2.weight", "mlp.down_proj.weight", "mlp", layers=_DENSE),
)


def router(disk: str = "mlp.gate.weight") -> Weight:
    """The router of a layer with experts: [experts, hidden]."""
    return whole("mlp.router.weight", disk, "experts", layers=_SPARSE)


def expert_bias(disk: str, **more: Any) -> Weight:
    """The bias of every expert's score: [experts], a buffer in float32."""
    tensor = DiskTensor(disk, **more)
    rows = {"rows": "experts"}
    return Weight("mlp.router.expert_bias", (tensor,), rows, layers=_SPARSE, float32=True)


def experts(
    at: str = "mlp.experts", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Weight, ...]:
    """Experts of one tensor for each of their linears."""
    at += ".{e}."
    return (
        gate_up(
            "mlp.experts.linear_fc1.weight",
            f"{at}{gate}.weight",
            f"{at}{up}.weight",
            "expert",
            layers=_SPARSE,
        ),
        row("mlp.experts.linear_fc2.weight", f"{at}{down}.weight", "expert", layers=_SPARSE),
    )


W123 = experts("block_sparse_moe.experts", "w1", "w3", "w2")


def fused_experts(kind: str = "weight", *, alternate: bool, transposed: bool) -> tuple[Weight, ...]:
    """Experts of which all of a layer are one tensor on disk, or their biases (``kind`` "bias").

    alternate: a row of gate follows each row of up there.  transposed: inputs are the first axis.
    """
    is_weight = kind == "weight"
    suffix = "" if is_weight else "_bias"
    both, down = (f"mlp.experts.{name}{suffix}" for name in ("gate_up_proj", "down_proj"))
    flags = dict(transposed=transposed and is_weight, all_experts=True)
    more = dict(layers=_SPARSE, lora=is_weight)
    return (
        Weight(
            f"mlp.experts.linear_fc1.{kind}",
            (DiskTensor(both, groups="expert" if alternate else None, **flags),),
            {"gate": "expert", "up": "expert"},
            ("hidden",) if is_weight else (),
            "rows",
            **more,
        ),
        Weight(
            f"mlp.experts.linear_fc2.{kind}",
            (DiskTensor(down, **flags),),
            {"rows": "hidden"},
            ("expert",) if is_weight else (),
            "columns" if is_weight else "",
            **more,
        ),
    )


def shared_experts(at: str, rows: Size) -> tuple[Weight, ...]:
    """The experts that every token has, as one MLP of so many rows."""
    return (
        gate_up(
            "mlp.shared_experts.linear_fc1.weight",
            f"{at}.gate_proj.weight",
            f"{at}.up_proj.weight",
            rows,
            layers=_SPARSE,
        ),
        row("mlp.shared_experts.linear_fc2.weight", f"{at}.down_proj.weight", rows, layers=_SPARSE),
    )


SHARED_EXPERTS = shared_experts("mlp.shared_experts", "shared*expert")
GATED_SHARED_EXPERT = (
    *shared_experts("mlp.shared_expert", "shared_expert"),
    whole("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", 1, layers=_SPARSE),
)
