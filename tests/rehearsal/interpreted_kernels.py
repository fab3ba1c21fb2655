"""The triton kernels of flash-linear-attention in Triton's interpreter, against their twins in plain torch.

    TRITON_INTERPRET=1 python -m tests.rehearsal.interpreted_kernels REPORT

On a CPU, without compiling.  Of each kernel that has candidates of block sizes the first is taken, since
choosing one needs a GPU.  Writes to REPORT {case: {output or argument: error}}: of outputs and gradients the largest
difference, as a part of the largest value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton.runtime import autotuner

from r3train.cpu.device import prepare_device

prepare_device()

from r3train.cpu import linear_attention as twins  # noqa: E402

_init = autotuner.Autotuner.__init__


def _init_with_one(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.configs = self.configs[:1]


autotuner.Autotuner.__init__ = _init_with_one

from fla.modules.convolution import causal_conv1d  # noqa: E402
from fla.modules.l2norm import l2norm  # noqa: E402
from fla.ops.common import chunk_delta_h  # noqa: E402
from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: E402


def _range(*ends: Any) -> Iterator[Any]:
    """Count in Triton's numbers, as compiled loops do: the interpreter leaves Python's, which have no dtype."""
    for i in range(*map(int, ends)):
        yield tl.full((), i, tl.int32)


chunk_delta_h.range = _range

# lengths of sequences: in one chunk of 64 tokens, in several, of one token, and those that end with a chunk
PACK = (1, 70, 64, 130, 3)
# name -> keys, values and numbers of a head
HEADS = {"narrow": (2, 32, 16), "as published": (1, 128, 128)}
# not bfloat16: the interpreter multiplies the bits of its matrices as whole numbers
DTYPES = {"float16": torch.float16, "float32": torch.float32}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max().double() / expected.abs().max().double())


def compared(
    kernel: Callable, twin: Callable, given: dict[str, torch.Tensor], **fixed: Any
) -> dict[str, float]:
    """Errors of the output and of the gradient of each tensor that is given."""
    out = []
    for function in (kernel, twin):
        own = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
        result = function(**own, **fixed)
        result = result[0] if isinstance(result, tuple) else result
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
        (result.float() * weights).sum().backward()
        out.append({"output": result.detach()} | {name: t.grad for name, t in own.items()})
    return {name: error(out[0][name].float(), out[1][name].float()) for name in out[0]}


def cases() -> Iterator[tuple[str, dict[str, float]]]:
    generator, tokens = torch.Generator().manual_seed(0), sum(PACK)
    ends = torch.tensor([0, *PACK], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    one = torch.tensor([0, tokens], dtype=torch.int32)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    for dtype_name, dtype in DTYPES.items():
        keys = random(3, 32).to(dtype)
        yield f"l2norm {dtype_name}", compared(l2norm, twins.l2norm, {"x": keys})
        given = {"x": random(48).to(dtype), "weight": random(4)[0, :48].to(dtype)}
        fixed = dict(bias=None, activation="silu", initial_state=None, output_final_state=False)
        both = causal_conv1d, twins.causal_conv1d, given
        yield f"conv {dtype_name}", compared(*both, **fixed, cu_seqlens=ends)
        for heads_name, (heads, key, value) in HEADS.items():
            q, k = (twins.l2norm(random(heads, key)).to(dtype) for _ in "qk")
            given = {"q": q, "k": k, "v": random(heads, value).to(dtype)}
            given |= {"g": -random(heads).exp(), "beta": random(heads).sigmoid().to(dtype)}
            fixed = dict(initial_state=None, output_final_state=False)
            fixed |= dict(use_qk_l2norm_in_kernel=False)
            both = chunk_gated_delta_rule, twins.chunk_gated_delta_rule, given
            yield f"rule {heads_name} {dtype_name}", compared(*both, **fixed, cu_seqlens=ends)

    def twin_of_one(cu_seqlens: torch.Tensor, **named: Any) -> Any:
        return twins.chunk_gated_delta_rule(cu_seqlens=one, **named)

    given["g"] = given["g"] * 0.01  # a state that lasts
    yield "planted", compared(chunk_gated_delta_rule, twin_of_one, given, **fixed, cu_seqlens=ends)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(dict(cases())))
