"""Layouts of weights: numbers moved between tensors on disk and Megatron's parameters, by the table's rows.

``Layout`` is a row of ``r3train.families.weights`` with a checkpoint's sizes.  ``TensorNames`` finds the row of a
parameter by its name, of either of Megatron's layer specs.  Nothing here communicates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from r3train.families.weights import OUTPUT_LAYER, ModelWeights, Weight, number


def take_apart(
    tensor: torch.Tensor, groups: int | None, rows: Sequence[int]
) -> Sequence[torch.Tensor]:
    """Return the parts of [sum(rows), ...]: one after another, or slices of all of them in each group."""
    if len(rows) == 1:
        return (tensor,)
    if groups is None:
        return tensor.split(list(rows))
    slices = tensor.unflatten(0, (groups, -1)).split([n // groups for n in rows], 1)
    return [part.flatten(0, 1) for part in slices]


def put_together(parts: Sequence[torch.Tensor], groups: int | None) -> torch.Tensor:
    """Undo ``take_apart``."""
    if len(parts) == 1:
        return parts[0]
    if groups is None:
        return torch.cat(list(parts))
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


@dataclass(frozen=True)
class OnDisk:
    """A ``DiskTensor`` with numbers: the rows of its parts, before they are transposed."""

    parts: tuple[str, ...]
    rows: list[int]
    groups: int | None
    transposed: bool
    unsqueezed: bool


class Layout:
    """A ``Weight`` with numbers.

    weight: the row.  rows: those of each part, in Megatron's order.  groups: the row's, as a number.
    disk: its tensors on disk.
    """

    def __init__(self, weight: Weight, weights: ModelWeights):
        sizes = weights.sizes
        self.weight = weight
        self.rows = {part: number(rows, sizes) for part, rows in weight.parts.items()}
        self.groups = None if weight.groups is None else number(weight.groups, sizes)
        self.disk = [
            OnDisk(
                tensor.parts,
                [self.rows[part] for part in tensor.parts],
                None if tensor.groups is None else number(tensor.groups, sizes),
                tensor.transposed,
                tensor.unsqueezed,
            )
            for tensor in weight.disk
        ]
        self.all_experts = weight.disk[0].all_experts
        # of the tensors on disk, or of one expert in them
        self.disk_shapes = [
            found[1:] if self.all_experts else found for found in weights.shapes_of(weight)
        ]

    @cached_property
    def _is_as_on_disk(self) -> bool:
        tensor = self.disk[0]
        moved = tensor.transposed or tensor.unsqueezed
        return len(self.disk) == 1 and not moved and tensor.groups == self.groups

    @cached_property
    def _split_rows(self) -> list[int] | None:
        """Rows of the tensors on disk where each is one part and nothing alternates (gate, up); else None."""
        moved = any(tensor.transposed or tensor.unsqueezed for tensor in self.disk)
        plain = self.groups is None and not moved
        each = [tensor.parts for tensor in self.disk] == [(part,) for part in self.rows]
        return list(self.rows.values()) if plain and each else None

    def from_disk(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make the whole parameter.  Of a tensor of all experts, its one expert is in ``tensors``."""
        if self._is_as_on_disk:
            return tensors[0]
        parts: dict[str, torch.Tensor] = {}
        for on_disk, tensor in zip(self.disk, tensors, strict=True):
            tensor = tensor[0] if on_disk.unsqueezed else tensor
            tensor = tensor.T if on_disk.transposed else tensor
            parts |= zip(on_disk.parts, take_apart(tensor, on_disk.groups, on_disk.rows))
        return put_together([parts[part] for part in self.rows], self.groups)

    def to_disk(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Undo ``from_disk``; views of ``whole`` where nothing alternates."""
        if self._is_as_on_disk:
            return (whole,)
        if self._split_rows is not None:
            return whole.split(self._split_rows)
        parts = dict(zip(self.rows, take_apart(whole, self.groups, list(self.rows.values()))))
        tensors = (put_together([parts[p] for p in t.parts], t.groups) for t in self.disk)
        return [
            (tensor.T if d.transposed else tensor[None] if d.unsqueezed else tensor).contiguous()
            for d, tensor in zip(self.disk, tensors)
        ]

    def _sections(self, ranks: int) -> list[int] | None:
        """Rows of what is cut part by part; None where one cut goes through all rows."""
        if self.weight.sharded != "rows" or self.groups is not None or len(self.rows) == 1:
            return None
        return [rows // ranks for rows in self.rows.values()]

    @property
    def _axis(self) -> int:
        return int(self.weight.sharded == "columns")

    def shards(self, whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """Return every tensor rank's shard of a whole parameter."""
        if ranks == 1 or not self.weight.sharded:
            return [whole] * ranks
        sections = self._sections(1)
        if sections is None:
            return list(whole.chunk(ranks, self._axis))
        cut = (part.chunk(ranks) for part in whole.split(sections))
        return [torch.cat(shard) for shard in zip(*cut)]

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Undo ``shards``."""
        if len(shards) == 1 or not self.weight.sharded:
            return shards[0]
        sections = self._sections(len(shards))
        if sections is None:
            return torch.cat(list(shards), self._axis)
        cut = (shard.split(sections) for shard in shards)
        return torch.cat([torch.cat(part) for part in zip(*cut)])


@dataclass(frozen=True, slots=True)
class HfTensors:
    """The tensors of a checkpoint that make a parameter.

    ``prefix``: what their names begin with.  ``expert``: the number of the expert that it is of, else None.
    ``layer_id``: None for what is in no layer.
    """

    layout: Layout
    prefix: str
    expert: int | None
    layer_id: int | None = None

    @property
    def names(self) -> list[str]:
        """Their names."""
        return self.names_of_expert(self.expert)

    def names_of_expert(self, expert: int | None) -> list[str]:
        """Return the names that they have of another expert of the layer."""
        number = "" if expert is None else str(expert)
        return [
            self.prefix + tensor.name.replace("{e}", number) for tensor in self.layout.weight.disk
        ]


_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# an expert's in the local spec, and in Transformer Engine's: its number, its linear and kind
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
_GROUPED_EXPERT = re.compile(r"(mlp\.experts\.linear_fc\d\.[a-z]+)(\d+)")


class TensorNames:
    """The tensors that make the parameters of a rank's chunk, by the parameters' names.

    layer_ids: of each of the chunk's layers.  first_expert: the number of this rank's first expert of a layer.
    """

    def __init__(self, weights: ModelWeights, layer_ids: Sequence[int], first_expert: int = 0):
        self._weights, self._layer_ids, self._first_expert = weights, layer_ids, first_expert
        self._layouts: dict[int, Layout] = {}  # by the id of a row, which the table keeps
        self._model_weights = {weight.name: weight for weight in weights.table.model_weights}
        self._layer_weights: dict[int, dict[str, Weight]] = {}

    def find(self, name: str) -> HfTensors | None:
        """Return the tensors of the parameter ``name``; None for what no checkpoint holds."""
        in_layer = _IN_LAYER.fullmatch(name)
        if in_layer is None:
            if name not in self._model_weights:
                return None
            weight = self._model_weights[name]
            if self._weights.tied and name == OUTPUT_LAYER:
                # the last of several pipeline stages has its own, a copy of the embedding
                weight = self._weights.table.model_weights[0]
            return HfTensors(self._layout(weight), "", None)
        layer_id, rest, expert = self._layer_ids[int(in_layer[1])], in_layer[2], None
        if local := _LOCAL_EXPERT.fullmatch(rest):
            expert, rest = int(local[1]), f"mlp.experts.{local[2]}"
        elif grouped := _GROUPED_EXPERT.fullmatch(rest):
            rest, expert = grouped[1], int(grouped[2])
        weight = self._rows(layer_id).get(rest)
        if weight is None:
            return None
        expert = None if expert is None else self._first_expert + expert
        return HfTensors(
            self._layout(weight), self._weights.layer_prefix(layer_id), expert, layer_id
        )

    def _rows(self, layer_id: int) -> dict[str, Weight]:
        """Return a layer's rows by their names in both specs."""
        if layer_id not in self._layer_weights:
            weights = self._weights.layer_weights(layer_id)
            by_name = {weight.te_name: weight for weight in weights if weight.te_name}
            self._layer_weights[layer_id] = by_name | {weight.name: weight for weight in weights}
        return self._layer_weights[layer_id]

    def _layout(self, weight: Weight) -> Layout:
        if id(weight) not in self._layouts:
            self._layouts[id(weight)] = Layout(weight, self._weights)
        return self._layouts[id(weight)]
