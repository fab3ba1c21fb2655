"""Transformer Engine's layers on plain torch: a stand-in under the package's name, for CPU ranks.

Megatron finds it on PYTHONPATH and builds its own Transformer Engine specification of it.  Classes, names of
parameters, their attributes, arguments and results are those of transformer_engine 2.12, as far as
``megatron.core.extensions.transformer_engine`` asks for them; its own kernels are all that is replaced.
What is not here cannot be imported, as with a version that lacks it.  The package itself is no help on a
CPU: without its compiled library its import raises an error that Megatron does not catch.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

__version__ = "2.12.0"


class _Module(torch.nn.Module):
    """The base of Transformer Engine's modules, without eight bits."""

    fp8 = fp8_calibration = False
    fp8_meta = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None: ...

    def _matrix(self, name: str, init_method: Any, device: Any, dtype: Any) -> None:
        weight = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype)
        weight = torch.nn.Parameter(weight)
        if init_method is not None:
            init_method(weight)
        _mark_sharded(weight, 1 if self.parallel_mode == "row" else 0)
        self.register_parameter(name, weight)


def _mark_sharded(p: torch.nn.Parameter, dim: int) -> None:
    p.tensor_model_parallel, p.partition_dim, p.partition_stride = True, dim, 1


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


class RMSNorm(_Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
    ):
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normed(x, self.weight, self.eps)


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
    ):
        super().__init__()
        assert not fuse_wgrad_accumulation and parallel_mode in (None, "column", "row")
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.parallel_mode = parallel_mode
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        self._matrix("weight", init_method, device, params_dtype)
        if bias:
            zeros = torch.zeros(self.out_features, device=device, dtype=params_dtype)
            self.bias = torch.nn.Parameter(zeros)
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel
            elif parallel_mode == "column":
                _mark_sharded(self.bias, 0)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        from megatron.core.tensor_parallel import mappings as ranks

        own = {"group": self.tp_group}
        if self.parallel_mode == "column" and self.tp_size > 1:
            if self.sequence_parallel:
                inp = ranks.gather_from_sequence_parallel_region(inp, True, **own)
            else:
                inp = ranks.copy_to_tensor_model_parallel_region(inp, **own)
        out = F.linear(inp, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            if self.sequence_parallel:
                out = ranks.reduce_scatter_to_sequence_parallel_region(out, **own)
            else:
                out = ranks.reduce_from_tensor_model_parallel_region(out, **own)
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **linear: Any,
    ):
        super().__init__(in_features, out_features, **linear)
        assert normalization == "RMSNorm" and not (return_layernorm_output or zero_centered_gamma)
        self.eps = eps
        ones = torch.ones(in_features, device=linear["device"], dtype=linear["params_dtype"])
        self.layer_norm_weight = torch.nn.Parameter(ones)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
    ) -> Any:
        return super().forward(_normed(inp, self.layer_norm_weight, self.eps))


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
    ):
        super().__init__()
        # tokens cross ranks in Megatron's dispatcher, never here
        assert not fuse_wgrad_accumulation and tp_size == 1
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.parallel_mode = parallel_mode
        self.in_features, self.out_features = in_features, out_features
        for i in range(num_gemms):
            self._matrix(f"weight{i}", init_method, device, params_dtype)
            if bias:
                zeros = torch.zeros(out_features, device=device, dtype=params_dtype)
                self.register_parameter(f"bias{i}", torch.nn.Parameter(zeros))

    def forward(
        self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        assert isinstance(m_splits, list) and len(m_splits) == self.num_gemms, m_splits
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}", None) for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.return_bias else biases
        out = torch.cat([F.linear(*own) for own in zip(inp.split(m_splits), weights, added)])
        return (out, biases) if self.return_bias else out


class DotProductAttention(torch.nn.Module):
    """Attention over packed sequences, by the kernel that our CPU layers have."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
    ):
        super().__init__()
        from r3train.trainer.megatron.cpu_attention import PackedCoreAttention

        groups = SimpleNamespace(cp=cp_group)
        self.channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels,) * 2
        self.heads = num_attention_heads // tp_size, num_gqa_groups // tp_size
        self.softmax_offset = None
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size))
        # not a child: its parameters are of other names
        kernel = PackedCoreAttention(
            self.config,
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout,
            softmax_scale,
            pg_collection=groups,
        )
        object.__setattr__(self, "kernel", kernel)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        qkv_format: str,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        cu_seqlens_q_padded: torch.Tensor | None,
        cu_seqlens_kv_padded: torch.Tensor | None,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        attn_mask_type: str,
    ) -> torch.Tensor:
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal"), attn_mask_type
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert isinstance(max_seqlen_q, int) and max_seqlen_q == max_seqlen_kv
        heads, groups = self.heads
        assert query.shape[1:] == (heads, self.channels[0]), query.shape
        assert key.shape[1:] == (groups, self.channels[0]), key.shape
        assert value.shape[1:] == (groups, self.channels[1]), value.shape
        self.kernel.softmax_offset = self.softmax_offset
        lengths = SimpleNamespace(cu_seqlens_q=cu_seqlens_q)
        return self.kernel(query, key, value, packed_seq_params=lengths)


class _Absent:
    """Something that Megatron imports and no run of ours may use."""

    def __init__(self, *_: Any, **__: Any):
        raise AssertionError("of Transformer Engine, and not rehearsed")


class FP8GlobalStateManager:
    """The state of eight-bit arithmetic: off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _module(name: str, *classes: type, **absent: type) -> ModuleType:
    """Make a submodule importable: classes under their own names, and others."""
    path = f"{__name__}.{name}"
    module = sys.modules[path] = ModuleType(path)
    vars(module).update({c.__name__: c for c in classes} | absent)
    parent, _, leaf = path.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
    return module


def _unused(*names: str) -> dict[str, type]:
    return {name: type(name, (_Absent,), {}) for name in names}


_module("common")
_module("common.recipe", **_unused("DelayedScaling"))
_module("pytorch", RMSNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention)
_module("pytorch.fp8", FP8GlobalStateManager, **_unused("fp8_autocast"))
_module("pytorch.tensor", **_unused("QuantizedTensor"))
_module(
    "pytorch.distributed",
    **_unused("CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint"),
)
_module("pytorch.ops", **_unused("Sequential", "FusibleOperation"))
_module(
    "pytorch.router",
    **_unused(
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
        "fused_topk_with_score_function",
    ),
)
