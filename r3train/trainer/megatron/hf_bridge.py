"""Hugging Face checkpoints into Megatron by mbridge, behind a thin adapter.

mbridge knows the weight names and the tensor-parallel split of each model family.  It speaks the
parameter names of Transformer Engine's layer spec; ``_TENames`` renames those of the local spec.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from r3train.hf_checkpoint import MARKER, export_checksums, read_transformers_config
from r3train.torchvision_stub import declare_torchvision_ops
from r3train.trainer.megatron.checked_files import check_together


def build_bridge(hf_checkpoint: Path, dtype: torch.dtype, overrides: dict[str, Any]) -> Any:
    """An mbridge Bridge for the checkpoint's model family.

    overrides: TransformerConfig fields that replace those of the checkpoint.
    Raises ValueError for a model family that nobody verified.
    """
    declare_torchvision_ops()
    from r3train.trainer.megatron.families import FAMILIES

    hf_config = read_transformers_config(hf_checkpoint)
    if hf_config.model_type not in FAMILIES:
        raise ValueError(
            f"{hf_checkpoint}/config.json: model_type {hf_config.model_type!r} was not verified;"
            f" known: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[hf_config.model_type]
    hf_config = hf_config.get_text_config()  # its own, but for a model of text and images
    _fill_in(hf_config)
    bridge = family.bridge
    fields = family.fields(hf_config) | overrides

    class Adapted(bridge):
        """The family's bridge with our overrides and the names of its dense layers."""

        adapt_layers = staticmethod(family.adapt)

        _MLP_MAPPING = {**_DENSE_MLP, **getattr(bridge, "_MLP_MAPPING", {})}
        # The last of several pipeline stages has its own output layer, a copy of the embedding.
        if hf_config.tie_word_embeddings:
            _DIRECT_MAPPING = bridge._DIRECT_MAPPING | {
                OUTPUT_LAYER: bridge._DIRECT_MAPPING["embedding.word_embeddings.weight"]
            }

        def _build_base_config(self, **kwargs: Any) -> Any:
            return super()._build_base_config(**{**kwargs, **fields})

        @cache  # it reads the name alone, and every weight update asks for all of them
        def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
            return super()._weight_name_mapping_mcore_to_hf(name)

        # mbridge splits experts over TP instead of ETP: wrong if only one of them is 1.
        def _weight_merge_across_tp(self, name: str, shards: list, param: Any) -> torch.Tensor:
            if EXPERT in name:
                return merge_expert_shards(name, shards)
            return super()._weight_merge_across_tp(name, shards, param)

        def _weight_split_across_tp(self, name: str, weight: Any, param: Any, size: int) -> list:
            if EXPERT in name:
                return split_expert(name, weight, size)
            return super()._weight_split_across_tp(name, weight, param, size)

    return Adapted(hf_config, dtype=dtype)


EXPERT = ".mlp.experts.linear_fc"
OUTPUT_LAYER = "output_layer.weight"
ADAPTER = ".lora."  # in the name of a parameter of an adapter, which no checkpoint of a model has


def merge_expert_shards(name: str, shards: list[torch.Tensor]) -> torch.Tensor:
    """Join ETP shards of an expert matrix: fc1 is [gate; up] in each shard, fc2 splits columns."""
    if ".linear_fc2." in name:
        return torch.cat(shards, dim=1)
    gates, ups = zip(*(shard.chunk(2) for shard in shards))
    return torch.cat([*gates, *ups])


def split_expert(name: str, weight: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Split a whole expert matrix; the inverse of ``merge_expert_shards``."""
    if ".linear_fc2." in name:
        return list(weight.chunk(size, dim=1))
    gate, up = weight.chunk(2)
    return [torch.cat(pair) for pair in zip(gate.chunk(size), up.chunk(size))]


# mbridge's MoE families lack the names of dense layers in the same model.
_DENSE_MLP = {
    "mlp.linear_fc1.weight": [
        "model.layers.{layer_number}.mlp.gate_proj.weight",
        "model.layers.{layer_number}.mlp.up_proj.weight",
    ],
    "mlp.linear_fc1.layer_norm_weight": [
        "model.layers.{layer_number}.post_attention_layernorm.weight"
    ],
    "mlp.linear_fc2.weight": ["model.layers.{layer_number}.mlp.down_proj.weight"],
    # the same norm in the local spec, which mbridge's dense families lack
    "pre_mlp_layernorm": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
}


def _fill_in(hf_config: Any) -> None:
    """Put values where mbridge reads them.

    transformers 5 moved rope_theta into rope_parameters, and takes the part of a head that rotates from
    there; Mixtral's published head_dim is null.
    """
    if "partial_rotary_factor" in hf_config.rope_parameters:
        hf_config.partial_rotary_factor = hf_config.rope_parameters["partial_rotary_factor"]
    if not hasattr(hf_config, "rope_theta"):
        hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
    if getattr(hf_config, "head_dim", None) is None:
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads


class _TENames:
    """A chunk whose parameters have the names of Transformer Engine's spec, without adapters."""

    def __init__(self, chunk: torch.nn.Module):
        self._chunk = chunk
        self.decoder = chunk.decoder
        self.config = chunk.config

    def _rename(self, name: str) -> str:
        # Transformer Engine fuses a norm into the projection behind it
        if getattr(self.config, "multi_latent_attention", False):  # its input norm stays apart
            for norm, behind in (("q_layernorm", "q_up"), ("kv_layernorm", "kv_up")):
                name = name.replace(f".{norm}.", f".linear_{behind}_proj.layer_norm_")
        else:
            name = name.replace(
                ".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"
            )
        # an expert's bias as a weight: mbridge and the export split names at ".weight"
        name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d)\.bias", r".\2_bias.weight\1", name)
        name = re.sub(r"\.experts\.(linear_fc\d)\.bias(\d+)$", r".experts.\1_bias.weight\2", name)
        return re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d)\.weight", r".\2.weight\1", name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = self._chunk.state_dict().items()
        return {self._rename(n): t for n, t in state if t is not None and ADAPTER not in n}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        parameters = self._chunk.named_parameters()
        return ((self._rename(n), p) for n, p in parameters if ADAPTER not in n)


def as_te_names(chunk: torch.nn.Module) -> Any:
    """Return a chunk as mbridge needs it: unwrapped, with names of Transformer Engine's spec."""
    return _TENames(unwrap(chunk))


def hf_names(
    bridge: Any, chunk: torch.nn.Module
) -> Iterator[tuple[str, list[str], torch.nn.Parameter]]:
    """Yield the chunk's parameters: global TE name, names of the tensors in it as on disk, itself."""
    adapted = as_te_names(chunk)
    global_names = bridge._weight_name_mapping_mcore_local_to_global(adapted)
    for name, parameter in adapted.named_parameters():
        name = global_names[name]
        yield name, bridge._weight_name_mapping_mcore_to_hf(name), parameter


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the GPTModel inside DDP and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


@torch.no_grad()
def load_hf_weights(bridge: Any, chunks: Sequence[torch.nn.Module], path: Path) -> None:
    """Load the chunks' parameters from a checkpoint's safetensors; a collective.

    The first data-parallel rank of a parameter reads it and sends it to the others.  Of an export of ours
    each rank checks its share of the files before: raises ValueError for one of another content.
    """
    if sums := export_checksums(path):
        check_together(path, sums, path / MARKER)
    adapted = [as_te_names(c) for c in chunks]
    bridge.load_weights([_OneState(a, _reads) for a in adapted], str(path))
    for one in adapted:
        for name, tensor in _OneState(one).state_dict().items():
            group = _replicas(name)
            if group.size() > 1:
                dist.broadcast(tensor, group=group, group_src=0)


def _replicas(name: str) -> dist.ProcessGroup:
    """Return the ranks that hold the same part of a parameter."""
    if EXPERT in name:
        return ps.get_expert_data_parallel_group()
    return ps.get_data_parallel_group(with_context_parallel=True)


def _reads(name: str) -> bool:
    return _replicas(name).rank() == 0


class _OneState:
    """A chunk as ``as_te_names`` gives it, whose state is read once: mbridge asks once a parameter.

    It holds the ``wanted`` parameters alone, without the state of Transformer Engine that no checkpoint has.
    """

    def __init__(self, adapted: Any, wanted: Callable[[str], bool] = lambda name: True):
        self.decoder, self.config = adapted.decoder, adapted.config
        state = adapted.state_dict().items()
        self._state = {n: t for n, t in state if "_extra_state" not in n and wanted(n)}

    def state_dict(self) -> dict[str, Any]:
        return self._state


class _Held(torch.Tensor):
    """A parameter that loading leaves alone: ``copy_`` notes if the loaded bytes are others."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_equal: bool | None = None

    def copy_(self, loaded: torch.Tensor) -> _Held:
        ours, theirs = (t.contiguous().view(-1).view(torch.uint8) for t in (self, loaded))
        self.is_equal = torch.equal(ours, theirs)
        return self


class _Compared(_OneState):
    """A chunk whose parameters are compared instead of loaded."""

    def __init__(self, adapted: Any, value_of: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(adapted)
        values = {name: value_of(p) for name, p in adapted.named_parameters()}
        self._state = {
            name: tensor.detach().as_subclass(_Held) if torch.is_tensor(tensor) else tensor
            for name, tensor in {**self._state, **values}.items()
        }

    def other(self) -> list[str]:
        """Names of the parameters that were compared and are not equal, or were not compared."""
        return [n for n, t in self._state.items() if isinstance(t, _Held) and not t.is_equal]


@torch.no_grad()
def parameters_unlike(
    bridge: Any,
    chunks: Sequence[torch.nn.Module],
    path: Path,
    value_of: Callable[[torch.Tensor], torch.Tensor] = lambda p: p,
) -> list[str]:
    """This rank's parameters that differ from those that a checkpoint would load, bit for bit.

    value_of: what was exported for a parameter.  A collective like ``load_hf_weights``, and the same
    code: it shows that an export is what the actor holds, without the code that exported it.
    """
    compared = [_Compared(as_te_names(c), value_of) for c in chunks]
    bridge.load_weights(compared, str(path))
    return [name for chunk in compared for name in chunk.other()]
