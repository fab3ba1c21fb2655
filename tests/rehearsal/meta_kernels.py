"""Kernels and a dispatcher for tensors without content: what each keeps for the backward pass, and makes in passing.

Kernels that are fused on CUDA are one step here too: they make no copies in between.  Experts get equally many rows.
"""

from __future__ import annotations

from typing import Any

from tests.rehearsal.real_size import META  # first: it adapts Megatron to a CPU

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import experts
from transformer_engine import pytorch as te

from r3train.cpu import linear_attention


class Kernel(torch.autograd.Function):
    """A kernel of one output; for the backward pass it keeps some inputs, and tensors of its own."""

    @staticmethod
    def forward(ctx: Any, shape: Any, dtype: Any, kept: tuple, scratch: tuple, *inputs: Any) -> Any:
        made = [torch.empty(s, dtype=d, device=META) for s, d in kept]
        given = [x for x in inputs if x is not None]
        ctx.save_for_backward(*given, *made)
        ctx.given, ctx.scratch, ctx.present = len(given), scratch, [x is not None for x in inputs]
        for size in scratch:
            torch.empty(size, dtype=dtype, device=META)
        return torch.empty(shape, dtype=dtype, device=META)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        for size in ctx.scratch:
            torch.empty(size, dtype=gradient.dtype, device=META)
        given = iter(ctx.saved_tensors[: ctx.given])
        found = [torch.empty_like(next(given)) if there else None for there in ctx.present]
        return None, None, None, None, *found


def linear(self: Any, x: torch.Tensor, *_: Any, norm: torch.Tensor | None = None, **__: Any) -> Any:
    """Transformer Engine's linear: a fused norm keeps its output, a gathered input is gathered again."""
    rows, whole = x.shape[0], x.shape[0]
    if self.sequence_parallel and self.parallel_mode == "column":
        whole = rows * self.tp_size
    out_rows = (
        whole // self.tp_size if self.parallel_mode == "row" and self.sequence_parallel else whole
    )
    gathered = ((whole, *x.shape[1:]),) if whole != rows else ()
    kept = ((x.shape, x.dtype),) if norm is not None else ()
    shape = (out_rows, *x.shape[1:-1], self.out_features)
    out = Kernel.apply(shape, x.dtype, kept, gathered, x, self.weight, norm)
    bias = getattr(self, "bias", None) if self.use_bias else None
    if self.return_bias:
        return out, bias
    return out if bias is None else out + bias


def grouped(self: Any, x: torch.Tensor, splits: list[int], *_: Any, **__: Any) -> Any:
    weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
    out = Kernel.apply((x.shape[0], self.out_features), x.dtype, (), (), x, *weights)
    biases = [getattr(self, f"bias{i}", None) for i in range(self.num_gemms)]
    return (out, biases) if self.return_bias else out


def attention(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Flash attention: it keeps its output and a number per row and head."""
    shape = (*query.shape[:-2], query.shape[-2] * value.shape[-1])
    kept = ((shape, query.dtype), (query.shape[:-1], torch.float32))
    return Kernel.apply(shape, query.dtype, kept[1:], (), query, key, value)


def convolved(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return Kernel.apply(x.shape, x.dtype, (), (), x, weight), None


def of_length_one(x: torch.Tensor) -> torch.Tensor:
    return Kernel.apply(x.shape, x.dtype, (), (), x)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The delta rule by chunks of 64: it keeps their triangular matrices, and makes their states and these' gradients."""
    rows = (*v.shape[:-1], 64)
    states = (*v.shape[:-1], 2 * q.shape[-1] * v.shape[-1] // 64)
    kept = ((rows, v.dtype), (g.shape, torch.float32))
    return Kernel.apply(v.shape, v.dtype, kept, (states,), q, k, v, g, beta), None


def gated_norm(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The norm, and what torch compiles to one kernel after it."""
    y = self.out_norm(x.reshape(-1, x.shape[-1]))
    return Kernel.apply(y.shape, x.dtype, (), (), y, gate.reshape(y.shape))


def activated(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The gated activation, with the weights of the rows where it is an expert's."""
    probs = rest[1] if len(rest) > 1 and torch.is_tensor(rest[1]) else None
    return Kernel.apply((*x.shape[:-1], x.shape[-1] // 2), x.dtype, (), (), x, probs)


def normed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return Kernel.apply(x.shape, x.dtype, (), (), x, self.weight)


def moved(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows that a permutation or an exchange moved: nothing of them is kept."""
    return _Moved.apply(x, rows)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.shape = x.shape
        return torch.empty(rows, *x.shape[1:], dtype=x.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.empty(ctx.shape, dtype=gradient.dtype, device=META), None


class Dispatcher:
    """The all-to-all dispatcher with equally many rows for each expert, and fused permutations.

    Ranks that split an expert gather each other's rows, and reduce what they computed of them.
    """

    def __init__(self, config: Any, num_local: int):
        self.config, self.num_local = config, num_local
        self.shared_experts, self.etp = None, config.expert_tensor_parallel_size

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        return None, None

    def dispatch_preprocess(self, hidden: torch.Tensor, routing_map: Any, probs: Any) -> Any:
        self.shape = hidden.shape
        hidden = hidden.view(-1, hidden.shape[-1])
        self.rows = hidden.shape[0] * self.config.moe_router_topk
        return moved(hidden, self.rows), moved(probs.sum(-1), self.rows)

    def token_dispatch(self, hidden: torch.Tensor, probs: torch.Tensor) -> Any:
        return moved(hidden, self.rows), moved(probs, self.rows)

    def dispatch_postprocess(self, hidden: torch.Tensor, probs: torch.Tensor) -> Any:
        rows = self.rows * self.etp
        sizes = [rows // self.num_local] * self.num_local
        sizes[0] += rows - sum(sizes)
        if self.etp > 1:
            hidden, probs = moved(hidden, rows), moved(probs, rows)
        return moved(hidden, rows), torch.tensor(sizes), moved(probs, rows)

    def combine_preprocess(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = moved(hidden, self.rows * self.etp)
        return moved(hidden, self.rows) if self.etp > 1 else hidden

    def token_combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return moved(hidden, self.rows)

    def combine_postprocess(self, hidden: torch.Tensor) -> torch.Tensor:
        return moved(hidden, self.shape[:-1].numel()).view(self.shape)


def install() -> None:
    te.Linear.forward = linear
    te.LayerNormLinear.forward = lambda self, x, *_, **__: linear(
        self, x, norm=self.layer_norm_weight
    )
    te.GroupedLinear.forward, te.RMSNorm.forward = grouped, normed
    te.DotProductAttention.forward = attention
    experts.weighted_bias_swiglu_impl = experts.weighted_bias_quick_geglu_impl = activated
    mlp.bias_swiglu_impl = activated
    linear_attention.l2norm, linear_attention.causal_conv1d = of_length_one, convolved
    linear_attention.chunk_gated_delta_rule = delta_rule
    GatedDeltaNet._apply_gated_norm = gated_norm
