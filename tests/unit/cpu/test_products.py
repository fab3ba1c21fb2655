"""Large products on a CPU: float32 by another library, and the linear layers' gradients."""

from __future__ import annotations

import pytest
import torch

from r3train.cpu.device import prepare_device

prepare_device()

from megatron.core.tensor_parallel.layers import (  # noqa: E402
    linear_with_grad_accumulation_and_async_allreduce as linear,
)

from r3train.cpu import products as cpu_products  # noqa: E402

BEFORE = torch.backends.mkldnn.matmul.fp32_precision
pytestmark = pytest.mark.skipif(
    torch.cpu.get_capabilities().get("amx_tile", False), reason="not used with AMX"
)


def float32_holds(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether a @ b is within the rounding of sums in float32, of which bfloat16's is 2**16 times."""
    bound = a.shape[1] * torch.finfo(torch.float32).eps * (a.abs().double() @ b.abs().double())
    return bool(((found.double() - a.double() @ b.double()).abs() <= bound).all())


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 700])
def test_a_product_is_float32s_and_bfloat16_would_be_seen(rows):
    torch.manual_seed(rows)
    a, b = torch.randn(rows, 96), torch.randn(96, 160)
    assert float32_holds(cpu_products.rows_times(a, b), a, b)
    row_values = torch.randn(rows, 64)
    assert float32_holds(cpu_products.summed_over_rows(row_values, a), row_values.t(), a)
    assert not float32_holds((a.bfloat16() @ b.bfloat16()).float(), a, b)


def test_the_switch_is_as_before_even_after_an_error():
    cpu_products.rows_times(torch.randn(256, 8), torch.randn(8, 8))
    assert torch.backends.mkldnn.matmul.fp32_precision == BEFORE
    with pytest.raises(RuntimeError):
        cpu_products.rows_times(torch.randn(256, 8), torch.randn(9, 8))
    assert torch.backends.mkldnn.matmul.fp32_precision == BEFORE


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_has_the_gradients_of_torchs_own(monkeypatch, with_bias):
    monkeypatch.setattr(cpu_products, "LEAST", 1)
    monkeypatch.setattr(cpu_products, "gains", lambda: True)
    torch.manual_seed(0)
    given = [torch.randn(150, 2, 32), torch.randn(48, 32)] + [torch.randn(48)] * with_bias
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    out = linear(ours[0], ours[1], ours[2] if with_bias else None, False, False, False)
    expected = torch.nn.functional.linear(*theirs)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-4)


def test_a_library_that_rounds_to_bfloat16_is_not_taken(monkeypatch):
    capabilities = {"cpu_name": "AMD EPYC", "avx512_f": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert cpu_products.gains.__wrapped__()
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *given: full(*given).bfloat16().float())
    assert not cpu_products.gains.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities | {"avx512_f": False})
    assert not cpu_products.gains.__wrapped__()


def test_products_of_small_models_stay_where_they_were():
    assert not cpu_products.is_large(torch.randn(512, 64), torch.randn(128, 64))
    assert not cpu_products.is_large(
        torch.zeros(8192, 256).double(), torch.zeros(256, 256).double()
    )
