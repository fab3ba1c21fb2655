"""SGLang's linears and experts in blocks of fp8 without an accelerator: plain twins of its kernels.

As those do, the twins round the activations too, 128 numbers of a token by one scale, and multiply in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization import fp8

from r3train.fp8_blocks import dequantised, rounded_activations
from r3train.patches import patch


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply as SGLang's ``triton_w8a8_block_fp8_linear``."""
    out = F.linear(rounded_activations(input), dequantised(weight, weight_scale)).to(input.dtype)
    return out if bias is None else out + bias


def _experts(self: Any, layer: Any, dispatch_output: Any) -> StandardCombineInput:
    """Run each expert that a row has chosen, and add up by the rows' gates."""
    x, (gates, ids, _) = dispatch_output.hidden_states, dispatch_output.topk_output
    out, inputs = torch.zeros(x.shape, dtype=torch.float32), rounded_activations(x)
    for e in ids.unique().tolist():
        rows, slots = (ids == e).nonzero(as_tuple=True)
        first = dequantised(layer.w13_weight[e], layer.w13_weight_scale_inv[e])
        second = dequantised(layer.w2_weight[e], layer.w2_weight_scale_inv[e])
        gate, up = F.linear(inputs[rows], first).to(x.dtype).chunk(2, -1)
        result = F.linear(rounded_activations(F.silu(gate) * up), second).to(x.dtype)
        out.index_add_(0, rows, gates[rows, slots, None].float() * result.float())
    return StandardCombineInput(hidden_states=out.to(x.dtype))


def serve_fp8_blocks() -> None:
    """Let SGLang's methods of fp8 run here."""
    why = "its kernels are triton's, or for AMX"
    patch(
        fp8,
        "dispatch_w8a8_block_fp8_linear",
        lambda **_: _linear,
        expects="(weight_block_size=None, act_scale_ue8m0=False)",
        why=why,
    )
    for method in (fp8.Fp8LinearMethod, fp8.Fp8MoEMethod):
        patch(
            method,
            "process_weights_after_loading_block_quant",
            lambda self, layer: None,
            expects="(self, layer)",
            why=why,
        )
    patch(
        fp8.Fp8MoEMethod,
        "create_moe_runner",
        lambda self, layer, config: None,
        expects="(self, layer, moe_runner_config)",
        why=why,
    )
    patch(fp8.Fp8MoEMethod, "apply", _experts, expects="(self, layer, dispatch_output)", why=why)
