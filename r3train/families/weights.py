"""The words of a weight table: a family's parameters in Megatron, and its tensors on disk.

One ``Weight`` is one kind of parameter of Megatron.  Its rows are ``parts``, each of a number of rows that
follows from config.json; a ``DiskTensor`` holds some of the parts.  On both sides the rows stand part after part,
or (``groups``) for each of so many groups a slice of every part.  That one rule is qkv, gate and up, gpt-oss'
alternating rows, a query with its gate, and the fused projections of a delta net.

Qwen3's qkv with 4 query heads and 2 key heads of 8 numbers, as Megatron has it and on disk:

>>> qkv = Weight(
...     "self_attention.linear_qkv.weight",
...     tuple(DiskTensor(f"self_attn.{p}_proj.weight", (p,)) for p in "qkv"),
...     parts={"q": "heads*head", "k": "kv_heads*head", "v": "kv_heads*head"},
...     columns=("hidden",),
...     sharded="rows",
...     groups="kv_heads",
... )
>>> sizes = {"heads": 4, "kv_heads": 2, "head": 8, "hidden": 16}
>>> [shape(qkv, tensor, sizes) for tensor in qkv.disk]
[(32, 16), (16, 16), (16, 16)]

In Megatron it is [64, 16]: 16 rows of q, 8 of k, 8 of v of the first key head, then those of the second.
This room imports no torch: the trainer's ``weight_layout`` moves the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

# a number of rows or columns: itself, or products and sums of sizes ("2*heads*head+rope")
Size = str | int
# sizes of config.json by their names in a table
Sizes = Mapping[str, int]
Shape = tuple[int, ...]
_EXPERT_PREFIX = "mlp.experts."


def number(size: Size, sizes: Sizes) -> int:
    """Return the number of a size.

    >>> number("2*heads*head+rope", {"heads": 4, "head": 8, "rope": 3})
    67
    """
    if isinstance(size, int):
        return size
    total = 0
    for term in size.split("+"):
        total += prod(int(f) if f.isdigit() else sizes[f] for f in term.split("*"))
    return total


@dataclass(frozen=True)
class DiskTensor:
    """A tensor of the checkpoint, named from its layer on; "{e}" is the number of an expert.

    ``parts``: those of the parameter that it holds, in order; all by default.  ``groups``: slices of the parts
    alternate so often.  ``transposed``: its two axes are exchanged.  ``all_experts``: it holds the layer's
    experts, along a first axis of its own.  ``unsqueezed``: it has a first axis of 1 more.
    """

    name: str
    parts: tuple[str, ...] = ()
    groups: Size | None = None
    transposed: bool = False
    all_experts: bool = False
    unsqueezed: bool = False


# what the layers of a model may have in common (``family.traits``)
TRAITS = {"dense", "sparse", "full", "linear", "mamba", "q_rank", "no_q_rank", "qk_norm", "indexer"}


@dataclass(frozen=True)
class Weight:
    """A kind of parameter, or of buffer.

    ``name``: in Megatron's local layers, from the layer on.  ``te_name``: in Transformer Engine's, if another.
    An expert's is "mlp.experts.linear_fc1.weight"; both specs' names follow (``weight_layout.TensorNames``).
    ``parts``: part -> rows, in Megatron's order.  ``columns``: the other axes; () is a vector.
    ``sharded``: the axis that tensor ranks share ("" where each rank has all); an expert's are the expert-tensor
    ranks.  ``groups``: the rows alternate so often, and are cut through all parts at once, also of one group; rows without
    groups are cut part by part.
    ``layers``: traits that a layer must have to hold it.  ``lora``: an adapter can be put on it.  ``bundle``: tensors
    of a layer with the same word must be published in one call.  ``float32``: it keeps float32
    in an actor of bfloat16, as in SGLang.
    """

    name: str
    disk: tuple[DiskTensor, ...]
    parts: Mapping[str, Size]
    columns: tuple[Size, ...] = ()
    sharded: Literal["rows", "columns", ""] = ""
    groups: Size | None = None
    te_name: str = ""
    layers: tuple[str, ...] = ()
    lora: bool = False
    bundle: str = ""
    float32: bool = False

    def __post_init__(self) -> None:
        every = tuple(self.parts)
        filled = (t if t.parts else replace(t, parts=every) for t in self.disk)
        object.__setattr__(self, "disk", tuple(filled))
        on_disk = sorted(part for t in self.disk for part in t.parts)
        assert on_disk == sorted(every), f"{self.name}: parts {on_disk} on disk, {every} here"
        unknown = set(self.layers) - TRAITS
        assert not unknown, f"{self.name}: layers {unknown}, there are {sorted(TRAITS)}"

    @property
    def is_expert(self) -> bool:
        """True where each expert has its own."""
        return self.name.startswith(_EXPERT_PREFIX)


def shape(weight: Weight, tensor: DiskTensor, sizes: Sizes) -> Shape:
    """Return the shape of one of a weight's tensors on disk."""
    rows = sum(number(weight.parts[part], sizes) for part in tensor.parts)
    found = (rows, *(number(columns, sizes) for columns in weight.columns))
    found = found[::-1] if tensor.transposed else found
    found = (sizes["experts"], *found) if tensor.all_experts else found
    return (1, *found) if tensor.unsqueezed else found


def expert_path(name: str, expert: int) -> str:
    """Return the path of an expert's linear that is in the tensor ``name`` of all experts."""
    return name.replace(".experts.", f".experts.{expert}.")


@dataclass(frozen=True)
class Table:
    """All weights of a family.

    ``layer_weights``: those of its layers.  Embedding, last norm and output layer are the same in all families.
    ``prefix``: what all names but the output layer's begin with.  ``output``: the output layer's name.
    ``embedding``, ``norm``: the names of the embedding and of the last norm behind the prefix.  ``expert_width``: the key of config.json that is an expert's width.
    """

    layer_weights: tuple[Weight, ...]
    prefix: str = "model"
    output: str = "lm_head.weight"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    expert_width: str = "moe_intermediate_size"

    @cached_property
    def model_weights(self) -> tuple[Weight, ...]:
        """The weights outside the layers: embedding, last norm, output layer."""
        tensors = (f"{self.prefix}.{name}.weight" for name in (self.embedding, self.norm))
        embedding, norm, output = map(DiskTensor, (*tensors, self.output))
        matrix = dict(parts={"rows": "vocab"}, columns=("hidden",), sharded="rows")
        return (
            Weight("embedding.word_embeddings.weight", (embedding,), **matrix),
            Weight("decoder.final_layernorm.weight", (norm,), {"rows": "hidden"}),
            Weight(OUTPUT_LAYER, (output,), **matrix),
        )

    @property
    def has_fused_experts(self) -> bool:
        """True where all experts of a layer are one tensor on disk."""
        return any(t.all_experts for weight in self.layer_weights for t in weight.disk)


OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True)
class ModelWeights:
    """A family's table with the numbers of one checkpoint.

    ``sizes``: of its config.json.  ``traits``: of each of its layers.  ``tied``: the output layer is the embedding.
    """

    table: Table
    sizes: Sizes
    traits: tuple[frozenset[str], ...]
    tied: bool

    def layer_weights(self, layer_id: int) -> list[Weight]:
        """Return the weights that a layer has."""
        layer_traits = self.traits[layer_id]
        return [
            weight for weight in self.table.layer_weights if layer_traits.issuperset(weight.layers)
        ]

    def layer_prefix(self, layer_id: int) -> str:
        """Return what the names of a layer's tensors begin with."""
        return f"{self.table.prefix}.layers.{layer_id}."

    def rows(self) -> Iterator[tuple[Weight, str]]:
        """Yield every weight of the model with the beginning of its tensors' names."""
        for weight in self.table.model_weights:
            if not (self.tied and weight.name == OUTPUT_LAYER):
                yield weight, ""
        yield from self.layer_rows(range(len(self.traits)))

    def layer_rows(self, layer_ids: Iterable[int]) -> Iterator[tuple[Weight, str]]:
        """Yield every weight of some layers with the beginning of its tensors' names."""
        for layer_id in layer_ids:
            prefix = self.layer_prefix(layer_id)
            yield from ((weight, prefix) for weight in self.layer_weights(layer_id))

    def names(self, prefix: str, tensor: DiskTensor) -> list[str]:
        """Return the names of one kind of tensor in a layer: one, or one for each expert."""
        name = prefix + tensor.name
        if "{e}" not in name:
            return [name]
        head, tail = name.split("{e}")
        return [f"{head}{e}{tail}" for e in range(self.sizes["experts"])]

    def linears(self) -> Iterator[tuple[str, str, Shape]]:
        """Yield every linear that an adapter can be put on: its tensor's name, its path, its (rows, columns).

        All experts of a layer may be one tensor: each has its own path.
        """
        for weight, prefix in (row for row in self.rows() if row[0].lora):
            for tensor, (*_, rows, columns) in zip(weight.disk, self.shapes_of(weight)):
                linear = (columns, rows) if tensor.transposed else (rows, columns)
                for name in self.names(prefix, tensor):
                    paths = [name.removesuffix(".weight")]
                    if tensor.all_experts:
                        paths = [expert_path(name, e) for e in range(self.sizes["experts"])]
                    yield from ((name, path, linear) for path in paths)

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor that the actor loads and exports, by its name on disk."""
        found: dict[str, Shape] = {}
        for weight, prefix in self.rows():
            for tensor, tensor_shape in zip(weight.disk, self.shapes_of(weight)):
                found.update(dict.fromkeys(self.names(prefix, tensor), tensor_shape))
        return found

    def shapes_of(self, weight: Weight) -> list[Shape]:
        """Return the shapes of a weight's tensors on disk; raises ValueError naming the row of a size that is unknown."""
        try:
            return [shape(weight, tensor, self.sizes) for tensor in weight.disk]
        except ValueError as error:
            raise ValueError(f"{error}, a size of {weight.name}") from None

    def bundles(self) -> list[tuple[str, ...]]:
        """Return the tensors that one call of a weight update must bring, two and more."""
        found: dict[tuple[str, str], list[str]] = {}
        for weight, prefix in self.rows():
            if weight.bundle:
                names = found.setdefault((prefix, weight.bundle), [])
                names.extend(name for tensor in weight.disk for name in self.names(prefix, tensor))
        return [tuple(names) for names in found.values() if len(names) > 1]
