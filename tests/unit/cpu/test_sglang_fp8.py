"""Plain twins of SGLang's fp8 kernels; tests/e2e/test_fp8_servers.py holds them in a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from r3train.cpu.sglang_fp8 import serve_fp8_blocks
from r3train.fp8_blocks import quantised

HIDDEN, WIDTH, EXPERTS, ROWS, TOPK = 256, 128, 6, 9, 2


@pytest.fixture(scope="module", autouse=True)
def fp8():
    from sglang.srt.layers.quantization import fp8

    serve_fp8_blocks()
    return fp8


def expressible(*shape: int, seed: int) -> torch.Tensor:
    """Numbers that fp8 expresses by scales of 1: each block's largest is 448."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 16
    numbers = numbers.to(torch.float8_e4m3fn).to(torch.bfloat16)
    numbers[..., :: 128 if len(shape) > 1 and shape[-2] % 128 == 0 else 1, ::128] = 448
    return numbers


def test_a_linear_multiplies_by_the_numbers_that_values_and_scales_stand_for(fp8):
    x, weight = expressible(ROWS, HIDDEN, seed=0), expressible(3 * WIDTH, HIDDEN, seed=1)
    weight = weight * torch.exp2(torch.arange(3.0)).repeat_interleave(WIDTH)[:, None]
    values, scales = quantised(weight)
    bias = torch.randn(3 * WIDTH).bfloat16()
    linear = fp8.dispatch_w8a8_block_fp8_linear(weight_block_size=[128, 128])
    settings = dict(weight=values, block_size=[128, 128], weight_scale=scales, input_scale=None)
    expected = (x.double() @ weight.double().T).bfloat16()
    torch.testing.assert_close(linear(input=x, bias=None, **settings), expected, atol=0, rtol=2e-2)
    with_bias = linear(input=x, bias=bias, **settings)
    torch.testing.assert_close(with_bias, expected + bias, atol=0, rtol=2e-2)


def test_each_row_passes_its_own_experts_and_is_weighted_by_its_gates(fp8):
    x = expressible(ROWS, HIDDEN, seed=2)
    first = expressible(EXPERTS, 2 * WIDTH, HIDDEN, seed=3) / 2**9
    second = expressible(EXPERTS, HIDDEN, WIDTH, seed=4) / 2**9
    ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(ROWS)])
    gates = torch.rand(ROWS, TOPK)
    pairs = {name: [quantised(w) for w in of] for name, of in (("w13", first), ("w2", second))}
    layer = SimpleNamespace()
    for name, parts in pairs.items():
        setattr(layer, f"{name}_weight", torch.stack([values for values, _ in parts]))
        setattr(layer, f"{name}_weight_scale_inv", torch.stack([scales for _, scales in parts]))
    given = SimpleNamespace(hidden_states=x, topk_output=(gates, ids, None))
    out = fp8.Fp8MoEMethod.apply(None, layer, given).hidden_states
    expected = torch.zeros(ROWS, HIDDEN)
    for row, slot in ((row, slot) for row in range(ROWS) for slot in range(TOPK)):
        e = ids[row, slot]
        gate, up = (first[e].float() @ x[row].float()).chunk(2)
        expected[row] += gates[row, slot] * (second[e].float() @ (F.silu(gate) * up))
    # what is between the two linears is rounded to fp8, and the result to bfloat16
    off = (out.float() - expected).norm() / expected.norm()
    assert out.dtype == torch.bfloat16 and off < 0.05
