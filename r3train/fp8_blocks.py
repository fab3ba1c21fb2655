"""Weights in blocks of fp8 with a scale each, as servers of a bfloat16 actor may hold them (--rollout-weights fp8).

A matrix of a linear becomes two tensors: NAME, float8_e4m3fn [rows, columns], and NAME_scale_inv, float32, a number for
each block of 128 x 128 by which its values are multiplied.  Source: the fp8 releases of DeepSeek-V3 and Qwen3.

>>> values, scales = quantised(torch.tensor([[1.0, -3.5, 448.0]]))
>>> values.dtype, scales.tolist(), dequantised(values, scales).tolist()
(torch.float8_e4m3fn, [[1.0]], [[1.0, -3.5, 448.0]])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import torch
import torch.nn.functional as F

from r3train.families import FP8_BLOCK, FP8_SCALE

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to fp8: float8_e4m3fn[rows, columns], and float32[ceil(rows / 128), ceil(columns / 128)] scales.

    The largest number of a block becomes 448, fp8's largest.  The last blocks may be smaller.
    """
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / _LARGEST
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers that fp8 values stand for by their blocks' scales: float32[rows, columns]."""
    rows, columns = values.shape
    whole = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return values.float() * whole[:rows, :columns]


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """Round activations [..., k] as kernels of fp8 do, 128 of a token by one scale; float32.  k: a multiple of 128."""
    groups = x.float().unflatten(-1, (-1, FP8_BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / _LARGEST
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


def as_servers_store(
    named_tensors: Iterable[tuple[str, torch.Tensor]], names: Set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as servers take them; names: of those that become fp8, none where servers hold the actor's own."""
    for name, tensor in named_tensors:
        if name not in names:
            yield name, tensor
            continue
        values, scales = quantised(tensor)
        yield name, values
        yield name + FP8_SCALE, scales
