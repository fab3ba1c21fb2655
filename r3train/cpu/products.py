"""Large products of float32 matrices on a CPU, by oneDNN where torch's own choice leaves half of a core idle.

torch multiplies float32 through MKL, which takes AVX2 on a processor of AMD's.  oneDNN takes AVX-512.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from r3train.patches import patch

LEAST = 2**26  # multiply-adds of a product that gains
# oneDNN makes a kernel for each shape, which costs half of what it saves; the rest of the rows go to MKL
ROWS = 128


@functools.cache
def gains() -> bool:
    """Tell whether oneDNN is the faster here and computes in float32 all the same.

    torch's switch to oneDNN also permits bfloat16, which oneDNN may take where AMX is: one product tells.
    """
    found = torch.cpu.get_capabilities()
    if "AMD" not in found.get("cpu_name", "") or not found.get("avx512_f"):
        return False
    value = 1 + 2**-12  # bfloat16 has no such number
    with _by_onednn():
        product = torch.full((ROWS, 64), value) @ torch.ones(64, ROWS)
    return bool((product == 64 * value).all())


def is_large(a: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tell whether the product of [..., k] and a weight is one for the functions below."""
    multiply_adds = a[..., 0].numel() * weight.numel()
    return multiply_adds >= LEAST and a.dtype == weight.dtype == torch.float32 and gains()


@contextlib.contextmanager
def _by_onednn() -> Iterator[None]:
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def rows_times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply [..., k] by [k, n]: [..., n]."""
    flat = a.reshape(-1, a.shape[-1])
    out, whole = flat.new_empty(len(flat), b.shape[1]), len(flat) // ROWS * ROWS
    with _by_onednn():
        torch.mm(flat[:whole], b, out=out[:whole])
    torch.mm(flat[whole:], b, out=out[whole:])
    return out.view(*a.shape[:-1], -1)


def summed_over_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply [..., m] and [..., n] and sum over all but the last: [m, n]."""
    a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    whole = len(a) // ROWS * ROWS
    with _by_onednn():
        out = a[:whole].t() @ b[:whole]
    return out.addmm_(a[whole:].t(), b[whole:])


def install() -> None:
    """Give large products of linear layers on one rank, forward and backward, to the faster library."""
    from megatron.core.tensor_parallel import layers

    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    forward, backward = linear.forward, linear.backward

    def faster_forward(ctx, input, weight, bias, fusion, allreduce, sequence, buffer, *others):
        alone = not (fusion or allreduce or sequence) and buffer is None
        ctx.faster = alone and is_large(input, weight)
        if not ctx.faster:
            given = input, weight, bias, fusion, allreduce, sequence, buffer
            return forward(ctx, *given, *others)
        ctx.save_for_backward(input, weight)
        ctx.use_bias = bias is not None
        out = rows_times(input, weight.t())
        return out if bias is None else out + bias

    def faster_backward(ctx, grad_output):
        if not ctx.faster:
            return backward(ctx, grad_output)
        input, weight = ctx.saved_tensors
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        grad_weight = summed_over_rows(grad_output, input)
        return rows_times(grad_output, weight), grad_weight, grad_bias, *[None] * 7

    why = "oneDNN's products of float32 take half of the time of MKL's"
    patch(
        linear,
        "forward",
        staticmethod(faster_forward),
        expects="(ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,"
        " grad_output_buffer, wgrad_deferral_limit, tp_group, gtp_remat_size)",
        why=why,
    )
    patch(linear, "backward", staticmethod(faster_backward), expects="(ctx, grad_output)", why=why)
