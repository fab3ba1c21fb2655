"""The trainer's Triton kernels, compiled for a card that is not there.

    python -m tests.rehearsal.compiled_kernels REPORT CARD [planted]

CARD is H100, H200 or B200.  Transformer Engine's permutation at the shapes of every recipe's experts, and
flash-linear-attention's convolution, norm and gated delta rule at Qwen3.5's, forward and backward; or with ``planted``
two kernels that some card refuses.  Writes to REPORT {"triton": version, "builds": {kernel: [bytes of shared memory
of each build]}, "failures": {kernel: error}, "shared": what a block may have}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode

from r3train.config import RunConfig
from r3train.families.published import PUBLISHED
from tests.published import MOE_RECIPES
from tests.rehearsal.absent_card import SHARED_BYTES, put_in

# sequences of a pack
PACK = (300, 1024, 724)


class OnTheHost(TorchFunctionMode):
    """Make tensors on the host that are asked for on CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def experts_of_recipes() -> list[tuple[int, int, int, int]]:
    """Experts, experts of a token, hidden size and rows of a rank, of every recipe, each once."""
    found = set()
    for recipe in MOE_RECIPES:
        config = RunConfig.from_toml(recipe.path)
        keys = json.loads((PUBLISHED / recipe.model / "config.json").read_text())
        keys = keys.get("text_config", keys)
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        experts = next(keys[name] for name in names if keys.get(name))
        rows = config.trainer.max_tokens_per_gpu // config.parallel.tensor_model_parallel_size
        found.add((experts, keys["num_experts_per_tok"], keys["hidden_size"], rows))
    return sorted(found)


def permutation() -> None:
    """Compile what Megatron's dispatchers call: to experts and back, both ways, and sorting by chunks."""
    (folder,) = find_spec("transformer_engine").submodule_search_locations
    for name in ("", ".common", ".common.triton", ".pytorch", ".pytorch.triton"):
        module = ModuleType(f"transformer_engine{name}")  # its own needs the compiled part
        module.__path__ = [folder + name.replace(".", "/")]
        sys.modules[module.__name__] = module
    from transformer_engine.pytorch.triton import permutation as te

    for experts, topk, hidden, rows in experts_of_recipes():
        out = rows * topk
        x = torch.zeros(rows, hidden, dtype=torch.bfloat16)
        probs, mask = torch.zeros(rows, experts), torch.zeros(rows, experts, dtype=torch.bool)
        rows_of = te.make_row_id_map(mask, rows, experts)
        sizes = rows, experts
        for given in (probs, None):
            to, _, moved = te.permute_with_mask_map(
                x, rows_of, given, None, None, *sizes, out, hidden, 0
            )
            te.unpermute_with_mask_map(to, rows_of, None, moved, None, *sizes, hidden)
        te.unpermute_with_mask_map(to, rows_of, probs, None, None, *sizes, hidden)
        te.unpermute_with_mask_map_bwd_with_merging_probs(
            x, rows_of, to, probs, None, *sizes, out, hidden
        )
        chunks = torch.zeros(experts, dtype=torch.int64)
        order = te.make_chunk_sort_map(chunks, chunks, out, experts)
        for given in (torch.zeros(out), None):
            for is_forward in (True, False):
                te.sort_chunks_by_map(to, order, given, out, hidden, is_forward)


def linear_attention() -> None:
    """Compile the kernels of Qwen3.5-35B-A3B's delta nets at two tensor ranks, forward and backward."""
    from fla.modules.convolution import causal_conv1d
    from fla.modules.l2norm import l2norm
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    tokens, no_state = sum(PACK), {"initial_state": None, "output_final_state": False}
    ends = torch.tensor([0, *PACK], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):

        def given(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(1, tokens, *shape, dtype=dtype, requires_grad=True)

        def run(kernel: Callable, **arguments: Any) -> None:
            out = kernel(**arguments)
            (out[0] if isinstance(out, tuple) else out).float().sum().backward()

        window = torch.zeros(4096, 4, dtype=dtype, requires_grad=True)
        conv = dict(bias=None, activation="silu", cu_seqlens=ends, **no_state)
        run(causal_conv1d, x=given(4096), weight=window, **conv)
        run(l2norm, x=given(16, 128))
        q, k, v = (given(16, 128) for _ in "qkv")
        gates = {"g": given(16, dtype=torch.float32), "beta": given(16)}
        rule = dict(use_qk_l2norm_in_kernel=False, cu_seqlens=ends, **no_state)
        run(chunk_gated_delta_rule, q=q, k=k, v=v, **gates, **rule)


@triton.jit
def too_much_shared_memory(out):
    rows, columns = tl.arange(0, 128), tl.arange(0, 1024)
    left = tl.load(out + rows[:, None] * 1024 + columns[None, :])
    right = tl.load(out + columns[:, None] * 128 + rows[None, :])
    tl.store(out + rows[:, None] * 128 + rows[None, :], tl.dot(left, right))


@triton.jit
def an_instruction_of_blackwell(out):
    places = tl.arange(0, 128)
    found = tl.inline_asm_elementwise(
        "{ .reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, $1, $1; cvt.u32.u8 $0, b; }",
        "=r,r",
        [tl.load(out + places)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    tl.store(out + places, found.to(tl.float32))


def planted() -> None:
    for kernel in (too_much_shared_memory, an_instruction_of_blackwell):
        kernel[(1,)](torch.zeros(1))


def main(report: str, card: str, *what: str) -> None:
    absent = put_in(card)
    with OnTheHost():
        for compile_all in (planted,) if what else (permutation, linear_attention):
            compile_all()
    found = {"builds": absent.builds, "failures": absent.failures, "shared": SHARED_BYTES}
    Path(report).write_text(json.dumps({"triton": triton.__version__, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
