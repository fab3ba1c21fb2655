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


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    y, scale = x.float(), weight.float()
    scale = 1.0 + scale if zero_centered else scale
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


class _FusedProduct(torch.autograd.Function):
    """A product whose backward adds the weight's gradient to ``main_grad``: what autograd gets for it is never read.

    Over a first microbatch it writes instead, as Transformer Engine does.
    """

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, weight: torch.Tensor, is_first: bool | None) -> Any:
        ctx.save_for_backward(inp)
        ctx.weight, ctx.is_first = weight, is_first
        return F.linear(inp, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inp,), weight = ctx.saved_tensors, ctx.weight
        if not weight.requires_grad:
            return grad @ weight, None, None
        rows = grad.flatten(0, -2), inp.flatten(0, -2)
        grad_weight = (rows[0].T @ rows[1]).to(weight.main_grad.dtype)
        if ctx.is_first:
            weight.main_grad.zero_()
        weight.main_grad.add_(grad_weight)
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan), None


def _product(
    module: Any,
    inp: torch.Tensor,
    weight: torch.Tensor,
    is_first: bool | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if not module.fuse_wgrad_accumulation:
        return F.linear(inp, weight, bias)
    out = _FusedProduct.apply(inp, weight, is_first)
    return out if bias is None else out + bias


class RMSNorm(_Module):
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
    ):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        ones = torch.ones(normalized_shape, device=device, dtype=params_dtype)
        self.weight = torch.nn.Parameter(ones)
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normed(x, self.weight, self.eps, self.zero_centered_gamma)


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
        assert parallel_mode in (None, "column", "row")
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
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
        out = _product(self, inp, self.weight, is_first_microbatch)
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
        assert normalization == "RMSNorm" and not return_layernorm_output
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        ones = torch.ones(in_features, device=linear["device"], dtype=linear["params_dtype"])
        self.layer_norm_weight = torch.nn.Parameter(ones)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
    ) -> Any:
        norm = self.layer_norm_weight, self.eps, self.zero_centered_gamma
        return super().forward(_normed(inp, *norm), is_first_microbatch)


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
        assert tp_size == 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
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
        out = torch.cat(
            [
                _product(self, rows, weight, is_first_microbatch, bias)
                for rows, weight, bias in zip(inp.split(m_splits), weights, added)
            ]
        )
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
        from r3train.cpu.packed_attention import PackedCoreAttention

        groups = SimpleNamespace(cp=cp_group)
        channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels,) * 2
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = channels
        self.heads = num_attention_heads // tp_size, num_gqa_groups // tp_size
        self.cp_size = 1 if cp_group is None else cp_group.size()
        self.softmax_type, self.cp_comm_type = softmax_type, cp_comm_type
        self.softmax_offset = None
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size))
        # not a child: its parameters are of other names
        kernel = PackedCoreAttention(
            self.config,
            layer_number,
            attn_mask_type,
            attention_type,
            softmax_scale,
            pg_collection=groups,
        )
        object.__setattr__(self, "kernel", kernel)

    def _backends(self, dtype: torch.dtype) -> set[str]:
        """Kernels that Transformer Engine has for packed sequences of this dtype on an H100.

        Source: its ``get_attention_backend`` of 2.11 and 2.12, with a cuDNN of 9.18 or later.
        """
        found = {"flash", "fused", "unfused"}
        if dtype not in (torch.bfloat16, torch.float16):
            found -= {"flash", "fused"}
        if self.cp_size > 1:
            found -= {"unfused"}
        if self.softmax_type != "vanilla":
            found -= {"flash"}
            if tuple(map(int, __version__.split(".")[:2])) < (2, 12):
                found.clear()
            if self.cp_size > 1 and self.cp_comm_type != "a2a":
                found -= {"fused"}
        return found

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
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor:
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal"), attn_mask_type
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert isinstance(max_seqlen_q, int) and max_seqlen_q == max_seqlen_kv
        assert self._backends(query.dtype), "no attention backend is available"
        heads, groups = self.heads
        assert query.shape[1:] == (heads, self.hidden_size_per_attention_head_k), query.shape
        assert key.shape[1:] == (groups, self.hidden_size_per_attention_head_k), key.shape
        assert value.shape[1:] == (groups, self.hidden_size_per_attention_head_v), value.shape
        self.kernel.softmax_offset = self.softmax_offset
        lengths = SimpleNamespace(cu_seqlens_q=cu_seqlens_q)
        return self.kernel(query, key, value, packed_seq_params=lengths)


class FusedAdam(torch.optim.Optimizer):
    """AdamW with moments and main weights of given dtypes: its states, its checks and what it holds during a step.

    Of a bfloat16 weight it may keep the half of a float32 next to it, as Transformer Engine does: the bits of the
    two add up.  Moments of other dtypes are float32 for the time of a group's step, all of them at once.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ):
        assert bias_correction and adam_w_mode and not capturable
        given = dict(lr=lr, bias_correction=True, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, given)
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        assert set(self.name_to_dtype_map.values()) <= {torch.float32, torch.bfloat16}
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )

    def _is_remainder(self, p: torch.Tensor, name: str) -> bool:
        return self.store_param_remainders and name == "master_param" and p.dtype == torch.bfloat16

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        state = self.state[param][state_name]
        if self._is_remainder(param, state_name):
            assert state.dtype == torch.int16
            return state
        assert state.dtype == self.name_to_dtype_map[state_name]
        return state.float()

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        is_half = self._is_remainder(param, state_name)
        assert unscaled_state.dtype == (torch.int16 if is_half else torch.float32)
        if state_name not in self.state[param]:
            self._make(param, state_name, is_half)
        self.state[param][state_name].copy_(unscaled_state)

    def _make(self, param: torch.Tensor, name: str, is_half: bool = False) -> None:
        dtype = torch.int16 if is_half else self.name_to_dtype_map[name]
        self.state[param][name] = torch.zeros_like(param, dtype=dtype)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        self._make(param, "exp_avg")
        self._make(param, "exp_avg_sq")
        if self.master_weights:
            self._make(param, "master_param", store_param_remainders)
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", param.clone().detach().float())

    def _numbered(self, saved: dict[str, Any]) -> Any:
        """Parameters of a saved state, each with its own."""
        ours = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in saved["param_groups"] for n in group["params"]]
        return [(n, p) for n, p in zip(numbers, ours, strict=True) if n in saved["state"]]

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for n, p in self._numbered(saved):
            states = {name: self.get_unscaled_state(p, name) for name in saved["state"][n]}
            saved["state"][n] = states
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for n, p in self._numbered(state_dict):
            self.state[p] = {}
            for name, value in state_dict["state"][n].items():
                is_half = self._is_remainder(p, name)
                self.set_scaled_state(p, name, value if is_half else value.float())

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in (group for group in self.param_groups if group["params"]):
            group["step"] = group.get("step", 0) + 1
            at_once = []
            for p in group["params"]:
                if not self.state[p]:
                    self.initialize_state(p, self._is_remainder(p, "master_param"))
                grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                if grad is not None:
                    moments = [self.get_unscaled_state(p, n) for n in ("exp_avg", "exp_avg_sq")]
                    at_once.append((p, grad, *moments))
            for p, grad, *moments in at_once:
                self._update(group, p, grad.float(), *moments)

    def _update(
        self, group: dict, p: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor
    ) -> None:
        (beta1, beta2), steps = group["betas"], group["step"]
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        self.set_scaled_state(p, "exp_avg", m)
        self.set_scaled_state(p, "exp_avg_sq", v)
        is_half, main = self._is_remainder(p, "master_param"), p
        if self.master_weights:
            main = self.get_unscaled_state(p, "master_param")
        if is_half:
            main = ((p.view(torch.int16).int() << 16) + main).view(torch.float32)
        denominator = (v / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        main.mul_(1 - group["lr"] * group["weight_decay"])
        main.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**steps))
        if is_half:
            bits = main.view(torch.int32)
            rounded = (bits + (1 << 15)) >> 16
            self.set_scaled_state(p, "master_param", (bits - (rounded << 16)).to(torch.int16))
            p.view(torch.int16).copy_(rounded)
        elif self.master_weights:
            self.set_scaled_state(p, "master_param", main)
            p.copy_(main)


def multi_tensor_applier(op: Any, noop_flag: torch.Tensor, lists: list, *args: Any) -> Any:
    return op(1 << 16, noop_flag, lists, *args)


def multi_tensor_l2norm(chunk_size: int, noop_flag: Any, lists: list, per_tensor: bool) -> Any:
    assert not per_tensor
    (tensors,) = lists
    return torch.stack([t.float().norm() for t in tensors]).norm().view(1), None


def multi_tensor_scale(chunk_size: int, noop_flag: Any, lists: list, scale: float) -> None:
    for given, out in zip(*lists, strict=True):
        out.copy_(given * scale)


class _Absent:
    """Something that Megatron imports and no run of ours may use."""

    def __init__(self, *_: Any, **__: Any):
        raise AssertionError("of Transformer Engine, and not rehearsed")


class FP8GlobalStateManager:
    """The state of eight-bit arithmetic: off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _module(name: str, *there: Any, **absent: type) -> ModuleType:
    """Make a submodule importable: classes and functions under their own names, and others."""
    path = f"{__name__}.{name}"
    module = sys.modules[path] = ModuleType(path)
    vars(module).update({each.__name__: each for each in there} | absent)
    parent, _, leaf = path.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
    return module


def _unused(*names: str) -> dict[str, type]:
    return {name: type(name, (_Absent,), {}) for name in names}


_module("common")
_module("common.recipe", **_unused("DelayedScaling"))
_module("pytorch", RMSNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention)
_module("pytorch.fp8", FP8GlobalStateManager, **_unused("fp8_autocast", "fp8_model_init"))
_module("pytorch.tensor", **_unused("QuantizedTensor"))
_module(
    "pytorch.distributed",
    **_unused("CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint"),
)
_module(
    "pytorch.optimizers",
    FusedAdam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    FusedSGD=torch.optim.SGD,
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
