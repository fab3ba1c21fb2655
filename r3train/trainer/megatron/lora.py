"""LoRA on Megatron's parallel linears: adapters, their gradients, and the merged weights.

An adapter is a child (``.lora``) of the linear that it adapts, and a forward hook calls it, so that no
parameter of the base has another name.  ``y = W x + scale * B A x``, one A and one B for each of the
linear's projections on disk (query, key, value; gate, up).  The A's are stacked in one parameter.  A B of several
parts (a query with its gate, a Mamba mixer's input) has a parameter for each, for each is cut by itself:

=============  ===========================  =========================  ===============================
linear         A [projections * r, in]      B [out of a part, r]       not whole after backward
=============  ===========================  =========================  ===============================
column, TP+SP  replicated, on the SP shard  sharded (rows)             A: tokens of a shard, sum over TP
row, TP+SP     sharded (columns)            replicated, on the shard   B: tokens of a shard, sum over TP
column, ETP    replicated, all tokens       sharded (rows)             A: output shards, sum over ETP
row, ETP       sharded (columns)            replicated, partial sums   B: input shards, sum over ETP
whole, TP+SP   replicated, on the SP shard  replicated, on the shard   both: a shard's tokens, sum over TP
=============  ===========================  =========================  ===============================

A whole linear is one that every tensor rank has: latent attention's down projections.  Only the rank-r
result crosses tensor ranks, never the hidden state.  An expert's adapter communicates nothing: the
dispatcher sums outputs and input gradients over expert-tensor ranks, and that is linear.

A linear of Transformer Engine's is adapted as Megatron's own is.  One that holds the experts of a rank has an
adapter for each.  One that holds the norm before it has none: ``norms_apart`` builds the two apart, for
the adapter's input is normed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.extensions import transformer_engine as te
from megatron.core.post_training.modelopt.layers import Linear as WholeLinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from r3train.config import RunConfig
from r3train.config.lora_settings import LoraSection
from r3train.families.weights import ModelWeights, expert_path
from r3train.peft_files import AdapterFile
from r3train.trainer.megatron.export import gather, is_leader, to_rank_0
from r3train.trainer.megatron.freezing import let_gradients_pass
from r3train.trainer.megatron.hf_weights import chunk_weights
from r3train.trainer.megatron.weight_layout import HfTensors, put_together, take_apart

_COLUMN: tuple[type, ...] = (ColumnParallelLinear,)
_ROW: tuple[type, ...] = (RowParallelLinear,)
_WHOLE: tuple[type, ...] = (WholeLinear,)
if te.HAVE_TE:
    _COLUMN += (te.TEColumnParallelLinear, te.TEColumnParallelGroupedLinear)
    _ROW += (te.TERowParallelLinear, te.TERowParallelGroupedLinear)
    _WHOLE += (te.TELinear,)  # the base of the two above, too
# (name of a whole factor, as PEFT has it on disk; its shape) -> its values
Factors = Callable[[str, tuple[int, int]], torch.Tensor]
_EXPERT_ID = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear on disk, one of those that Megatron holds in one matrix.

    rows: this rank's, of each of its parts.  groups: slices of whole parts alternate so often on disk.
    """

    path: str
    rows: Mapping[str, int]
    groups: int | None


class Lora(torch.nn.Module):
    """The adapter of one linear.

    linear: one of this rank's.  weight: its matrix, or an expert's.  projections: in Megatron's order of rows.
    query_groups: those of this rank, of a linear that joins query, key and value; else 0.
    """

    def __init__(
        self,
        linear: torch.nn.Module,
        weight: torch.nn.Parameter,
        projections: Sequence[Projection],
        settings: LoraSection,
        *,
        is_expert: bool,
        query_groups: int,
    ):
        super().__init__()
        self.adapted = (weight,)  # in a tuple: it is no parameter of the adapter
        self.projections = tuple(projections)
        self.rank, self.scale = settings.lora_rank, settings.scale
        self.is_expert, self.query_groups = is_expert, query_groups
        self._experts_per_rank = 0
        if is_expert:
            ranks = ps.get_expert_model_parallel_world_size()
            self._experts_per_rank = linear.config.num_moe_experts // ranks
        self.is_column = isinstance(linear, _COLUMN)
        self.is_whole = not self.is_column and not isinstance(linear, _ROW)
        self.group = ps.get_tensor_model_parallel_group()
        if is_expert:
            self.group = ps.get_expert_tensor_parallel_group()
        self.enabled = True
        self.sequence_parallel = linear.config.sequence_parallel and not is_expert
        is_row = not (self.is_column or self.is_whole)
        shape = len(projections) * self.rank, weight.shape[1]
        self.a = self._parameter(weight, shape, sharded_dim=1 if is_row else None)
        for i, projection in enumerate(projections):
            for part, rows in projection.rows.items():
                # not in a ParameterList: Megatron's overlap_param_gather waits for the parameters that a
                # module itself holds when it is called, and nobody calls a list
                b = self._parameter(weight, (rows, self.rank), 0 if self.is_column else None)
                self.register_parameter(f"b{i}_{part}", b)

    def _parameter(
        self, weight: torch.Tensor, shape: tuple[int, int], sharded_dim: int | None
    ) -> torch.nn.Parameter:
        """Make a factor with Megatron's attributes: who sums the gradient, and who counts it in the norm."""
        p = torch.nn.Parameter(weight.new_empty(shape))
        p.sharded_dim = sharded_dim
        p.sum_over_expert_tp = False
        # Megatron's mark of a parameter that is reduced over the dense data-parallel group
        p.allreduce = getattr(weight, "allreduce", True)
        p.partition_dim = -1 if sharded_dim is None else sharded_dim
        p.partition_stride = 1
        p.tensor_model_parallel = sharded_dim is not None
        if sharded_dim is None and self.group.size() > 1:
            p.sum_over_expert_tp = self.is_expert
            p.sequence_parallel = self.sequence_parallel  # finalize_model_grads sums it over TP
        return p

    @property
    def copy(self) -> int:
        """This rank's place among those that hold the same shards."""
        if self.is_expert:
            return ps.get_expert_data_parallel_rank()
        return ps.get_data_parallel_rank(with_context_parallel=True)

    @property
    def b(self) -> list[list[torch.nn.Parameter]]:
        """B of each projection, part by part."""
        return [
            [getattr(self, f"b{i}_{part}") for part in projection.rows]
            for i, projection in enumerate(self.projections)
        ]

    def factors(self) -> Iterator[tuple[str, list[tuple[torch.nn.Parameter, slice]], int | None]]:
        """Yield every factor: its name on disk, its parts as rows of parameters, their groups on disk."""
        for i, (projection, b) in enumerate(zip(self.projections, self.b)):
            rows = slice(i * self.rank, (i + 1) * self.rank)
            yield f"{projection.path}.lora_A", [(self.a, rows)], None
            parts = [(parameter, slice(None)) for parameter in b]
            yield f"{projection.path}.lora_B", parts, projection.groups

    def saved(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters, each by its name in a training checkpoint."""
        paths = [projection.path for projection in self.projections]
        head = paths[0].rpartition(".")[0]
        leaves = "+".join(path.rpartition(".")[2] for path in paths)
        yield f"{head}.{leaves}.lora_A", self.a
        for projection, b in zip(self.projections, self.b):
            name = f"{projection.path}.lora_B"
            names = [name] if len(b) == 1 else [f"{name}.{part}" for part in projection.rows]
            yield from zip(names, b)

    def named_by_expert(
        self, name: str, experts: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one factor of this local expert of every expert-parallel rank, by its own name.

        name: that of the first rank's.
        """
        first = int(_EXPERT_ID.search(name)[1])
        for ep_rank, factor in enumerate(experts):
            expert = first + ep_rank * self._experts_per_rank
            yield _EXPERT_ID.sub(f".experts.{expert}.", name), factor

    @torch.no_grad()
    def fill(self, whole: Factors) -> None:
        """Take this rank's shards of whole factors."""
        for name, parts, groups in self.factors():
            shards = [parameter[rows] for parameter, rows in parts]
            dim, ranks = parts[0][0].sharded_dim, self.group.size()
            rows = [len(shard) * (ranks if dim == 0 else 1) for shard in shards]
            columns = shards[0].shape[1] * (ranks if dim == 1 else 1)
            values = take_apart(whole(name, (sum(rows), columns)), groups, rows)
            for shard, part in zip(shards, values):
                shard.copy_(part if dim is None else part.chunk(ranks, dim)[self.group.rank()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what to add to the linear's output; x is the linear's input."""
        low = F.linear(x, self.a)
        if self.group.size() > 1 and not self.is_expert and not self.is_whole:
            low = self._across_ranks(low)
        pairs = zip(low.split(self.rank, -1), self.b)
        parts = [F.linear(low, part) for low, b in pairs for part in b]
        return self.scale * self._joined(parts, -1)

    def _across_ranks(self, low: torch.Tensor) -> torch.Tensor:
        if self.is_column and self.sequence_parallel:
            return gather_from_sequence_parallel_region(low, True, group=self.group)
        if self.is_column:
            return copy_to_tensor_model_parallel_region(low, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return reduce_from_tensor_model_parallel_region(low, group=self.group)

    def _joined(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        """Join parts in the order of Megatron's rows: query, key, value per group; gate, up."""
        if not self.query_groups:
            return torch.cat(parts, dim)
        grouped = [part.unflatten(dim, (self.query_groups, -1)) for part in parts]
        at = dim - 1 if dim < 0 else dim
        return torch.cat(grouped, at + 1).flatten(at, at + 1)

    @torch.no_grad()
    def delta(self) -> torch.Tensor:
        """Return what merging adds to this rank's shard of the weight, float32; no communication."""
        pairs = zip(self.a.split(self.rank), self.b)
        parts = [part.float() @ a.float() for a, b in pairs for part in b]
        return self.scale * self._joined(parts, 0)


# -- installation --------------------------------------------------------------------------------


def install(config: RunConfig, weights: ModelWeights, chunks: Sequence[torch.nn.Module]) -> None:
    """Freeze this rank's chunks and hang adapters on them; call it before DDP wraps them.

    They are those of --lora-adapter-path, or else A is random and B is zero.  Raises ValueError where
    a rank would have no adapter, and where a target is no linear that takes one.
    """
    settings = config.lora
    factors = random_factors(config.trainer.seed)
    if settings.lora_adapter_path is not None:
        factors = AdapterFile(settings.lora_adapter_path).whole
    for chunk in chunks:
        linears = {
            id(p): (m, name.removeprefix("weight"))
            for m in chunk.modules()
            if isinstance(m, _COLUMN + _ROW + _WHOLE)
            for name, p in m.named_parameters(recurse=False)
            if name.startswith("weight")
        }
        chunk.requires_grad_(False)
        let_gradients_pass(chunk)
        for one in chunk_weights(weights, chunk):
            names, parameter = one.hf.names, one.tensor
            targets = settings.targets(names) if one.hf.layout.weight.lora else ()
            if not targets:
                continue
            if id(parameter) not in linears or len(targets) < len(names):
                raise ValueError(f"no adapter can be put on {', '.join(names)}")
            linear, number = linears[id(parameter)]
            adapter = _adapter(linear, parameter, one.hf, settings)
            adapter.fill(factors)
            _attach(linear, adapter, number)
    if not any(True for _ in adapters(chunks)):
        raise ValueError("--target-modules and --exclude-modules leave a rank without an adapter")


def _paths(hf: HfTensors) -> list[str]:
    """The linears' paths on disk; of experts that are one tensor there, each has its number put in."""
    if hf.layout.all_experts:
        return [expert_path(name, hf.expert) for name in hf.names]
    return [name.removesuffix(".weight") for name in hf.names]


def _adapter(linear: Any, weight: torch.nn.Parameter, hf: HfTensors, settings: LoraSection) -> Lora:
    layout, query_groups = hf.layout, 0
    ranks = sum(layout.rows.values()) // weight.shape[0]
    projections = [
        Projection(
            path,
            {part: rows // ranks for part, rows in zip(on_disk.parts, on_disk.rows)},
            # an expert's adapter has gate before up, however the experts' tensor has them
            None if layout.all_experts else on_disk.groups,
        )
        for path, on_disk in zip(_paths(hf), layout.disk, strict=True)
    ]
    parts = [part for projection in projections for part in projection.rows]
    assert parts == list(layout.rows), f"{layout.weight.name}: parts are in another order on disk"
    if layout.groups is not None:
        query_groups = layout.groups // ps.get_tensor_model_parallel_world_size()
        assert query_groups, "tensor ranks beyond the number of key-value heads"
    return Lora(
        linear,
        weight,
        projections,
        settings,
        is_expert=layout.weight.is_expert,
        query_groups=query_groups,
    )


def _attach(linear: torch.nn.Module, adapter: Lora, number: str) -> None:
    """Hang an adapter on a linear; number: its place among the linear's experts, "" of one matrix."""
    if not number:
        linear.lora = adapter
        linear.register_forward_hook(_add_delta)
        return
    if not hasattr(linear, "lora"):
        linear.lora = torch.nn.ModuleDict()
        linear.register_forward_hook(_add_deltas)
    linear.lora[number] = adapter


def _add_delta(linear: Any, args: tuple, output: tuple) -> tuple | None:
    if not linear.lora.enabled:
        return None
    out, bias = output
    return out + linear.lora(args[0]), bias


def _add_deltas(linear: Any, args: tuple, output: tuple) -> tuple | None:
    """Add each expert's delta to its rows."""
    if not all(adapter.enabled for adapter in linear.lora.values()):
        return None
    (x, rows), (out, bias) = args, output
    deltas = [
        (
            linear.lora[str(i)](x_i)
            if str(i) in linear.lora
            else x_i.new_zeros(len(x_i), out.shape[1])
        )
        for i, x_i in enumerate(x.split(rows))
    ]
    return out + torch.cat(deltas), bias


def norms_apart(layers: Any) -> None:
    """Change Transformer Engine's specification of a chunk's layers: no linear holds the norm before it."""
    for layer in layers.layer_specs:
        block = layer.submodules
        # a layer of one mixer has one of the two
        attention = getattr(block.self_attention, "submodules", None)
        mlp = getattr(block.mlp, "keywords", {}).get("submodules")
        for linears, linear, norms, norm in (
            (attention, "linear_qkv", block, "input_layernorm"),
            (attention, "in_proj", block, "input_layernorm"),
            (attention, "linear_q_up_proj", attention, "q_layernorm"),
            (attention, "linear_kv_up_proj", attention, "kv_layernorm"),
            (mlp, "linear_fc1", block, "pre_mlp_layernorm"),
        ):
            if getattr(linears, linear, None) is te.TELayerNormColumnParallelLinear:
                setattr(linears, linear, te.TEColumnParallelLinear)
                setattr(norms, norm, te.TENorm)


def random_factors(seed: int) -> Factors:
    """Return random A's and zero B's, from seed and name only: equal in every topology."""

    def draw(name: str, shape: tuple[int, int]) -> torch.Tensor:
        if name.endswith(".lora_B"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(shape[1])  # PEFT's: kaiming_uniform with a of sqrt 5
        return (torch.rand(shape, generator=generator) * 2 - 1) * bound

    return draw


def adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[Lora]:
    """Yield this rank's adapters."""
    return (m for chunk in chunks for m in chunk.modules() if isinstance(m, Lora))


@contextmanager
def switched_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Compute with the base only."""
    every = list(adapters(chunks))
    for adapter in every:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in every:
            adapter.enabled = True


# -- gradients -----------------------------------------------------------------------------------


def sum_over_expert_tp(chunks: Sequence[torch.nn.Module]) -> None:
    """Sum gradients of replicated expert factors over expert-tensor ranks; a collective.

    Megatron has no attribute for it.  Call it after ``finalize_model_grads``, when no overlapped
    reduction runs in the buffers any more.
    """
    group = ps.get_expert_tensor_parallel_group()
    if group.size() == 1:
        return
    grads = [
        p.main_grad
        for adapter in adapters(chunks)
        for p in adapter.parameters()
        if p.sum_over_expert_tp
    ]
    if not grads:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=group)
    for g, summed in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(summed.view_as(g))


# -- out of the trainer --------------------------------------------------------------------------


def merged_weights(
    chunks: Sequence[torch.nn.Module],
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], bool]]:
    """Return (value of a parameter with its adapter merged, is there one), for ``export_hf_weights``.

    A shard of W needs the replicated factor and its own shard of the other: nothing is sent.
    """
    owner = {id(weight): adapter for adapter in adapters(chunks) for weight in adapter.adapted}

    def value_of(p: torch.Tensor) -> torch.Tensor:
        adapter = owner.get(id(p))
        return p if adapter is None else (p.detach().float() + adapter.delta()).to(p.dtype)

    return value_of, lambda p: id(p) in owner


@torch.no_grad()
def export_adapters(
    chunks: Sequence[torch.nn.Module],
    value_of: Callable[[torch.Tensor], torch.Tensor] = lambda p: p,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (PATH.lora_A or PATH.lora_B, whole factor) on rank 0, nothing elsewhere; a collective.

    PATH is the linear's on disk, each expert's its own.  value_of: the parameter itself, or its
    gradient.
    """
    return to_rank_0(_whole_factors(chunks, value_of))


def _whole_factors(
    chunks: Sequence[torch.nn.Module], value_of: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this stage's factors, whole, on its leader."""
    for adapter in adapters(chunks):
        if adapter.copy > 0:
            continue
        for name, parts, groups in adapter.factors():
            dim = parts[0][0].sharded_dim
            group = None if dim is None else adapter.group
            shards = [gather(value_of(parameter)[rows], group) for parameter, rows in parts]
            whole = None
            if shards[0] is not None:
                whole = [torch.cat(rank_shards, dim or 0) for rank_shards in shards]
                whole = put_together(whole, groups).contiguous()
            if not adapter.is_expert:
                if is_leader():
                    yield name, whole
            elif adapter.group.rank() == 0:
                experts = gather(whole, ps.get_expert_model_parallel_group())
                if is_leader():
                    yield from adapter.named_by_expert(name, experts)


def sharded_state(chunks: Sequence[torch.nn.Module]) -> dict[str, ShardedTensor]:
    """Return the adapters as ShardedTensors of global names, which any topology can load.

    Not the chunks' own ``sharded_state_dict``: parallel linears save what they do not know as replicas,
    and of a sharded factor rank 0's shard alone would be left, without a word.
    """
    state = {}
    for adapter in adapters(chunks):
        rank, size = adapter.group.rank(), adapter.group.size()
        for key, p in adapter.saved():
            offsets = [] if p.sharded_dim is None else [(p.sharded_dim, rank, size)]
            replica = (0, rank if p.sharded_dim is None else 0, adapter.copy)
            state[key] = ShardedTensor.from_rank_offsets(key, p, *offsets, replica_id=replica)
    return state


@torch.no_grad()
def load_state(chunks: Sequence[torch.nn.Module], loaded: dict[str, torch.Tensor]) -> None:
    """Take what was loaded for ``sharded_state``."""
    for adapter in adapters(chunks):
        for key, p in adapter.saved():
            p.copy_(loaded[key])
