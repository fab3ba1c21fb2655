"""The trainer's kernels, each alone, against float32 in plain torch, without a server or a job.

    python -m benchmarks.gpu_kernels [--size tiny] [--output FILE.json]

Attention of packed sequences at the shapes of every recipe's ranks, grouped linears that add to main gradients,
FusedAdam, and on CUDA permutation and linear attention.  ``--size tiny`` takes short sequences and few columns: with
Transformer Engine's stand-in a CPU runs it.  A line for each kernel; exit code 1 where an error is above its bound.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.measure import flags, write_result
from r3train.cpu.device import prepare_device

DEVICE = prepare_device()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.extensions.transformer_engine import (  # noqa: E402
    TEColumnParallelGroupedLinear,
    TEDotProductAttention,
)
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

from r3train.config import RunConfig  # noqa: E402
from r3train.families.read_facts import read_hf_facts  # noqa: E402
from r3train.doctor.kernels import attention_shapes  # noqa: E402
from r3train.families.published import PUBLISHED  # noqa: E402
from r3train.host_group import join_ranks, leave_ranks  # noqa: E402
from tests.gpu import lent_h100  # noqa: E402
from tests.published import RECIPES  # noqa: E402

Tensors = dict[str, torch.Tensor]
Found = tuple[dict[str, float], float]  # errors by name, and their bound
# largest error as a part of the largest value: eight bits of mantissa, and sums in another order
BOUND = {"bfloat16": 3e-2, "float32": 1e-4}
# sequences of a pack, experts' rows
PACKS = {"tiny": (1, 9, 200, 4), "gpu": (1, 1000, 24, 1500)}
ROWS = {"tiny": [5, 0, 3, 8], "gpu": [700, 0, 33, 2048, 1, 128, 512, 64]}
COLUMNS = {"tiny": (32, 48), "gpu": (2048, 1536)}


def main() -> int:
    given = flags(__doc__, size="gpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    os.environ.setdefault("LOCAL_RANK", "0")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        join_ranks(backend, store, 0, 1, timeout=timedelta(minutes=2))
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)
        for name, run in kernels(given.size).items():
            found[name] = said(run)
            error = found[name].get("error") or f"{found[name]['worst']:.1e}"
            print(f"{'ok' if found[name]['passed'] else 'FAILED':>6}  {name}: {error}", flush=True)
        parallel_state.destroy_model_parallel()
        leave_ranks()
    write_result(given.output, {"size": given.size, "device": str(DEVICE), "kernels": found})
    failed = [name for name, kernel in found.items() if not kernel["passed"]]
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def said(run: Callable[[], Found]) -> dict[str, Any]:
    """The errors of a kernel, the worst against its bound, or the exception by which it ended."""
    try:
        found, bound = run()
    except Exception as error:  # lacking, or refused by CUDA: the next one is tried
        return {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
    worst = max(found.values())
    return {"passed": worst <= bound, "worst": worst, "bound": bound, "errors": found}


def kernels(size: str) -> dict[str, Callable[[], Found]]:
    """Return what compares each kernel, by its name; size: tiny or gpu.  The last two are CUDA's alone."""
    found: dict[str, Callable[[], Found]] = {}
    for shape in shapes_of_recipes():
        found[name_of(shape)] = partial(attention, shape, PACKS[size])
    for dtype in ("bfloat16", "float32"):
        experts = partial(grouped_linear, dtype, ROWS[size], COLUMNS[size])
        found[f"grouped linear, {dtype}"] = experts
        found[f"FusedAdam, moments in {dtype}"] = partial(adam, dtype, COLUMNS[size])
    if DEVICE.type == "cuda":
        found["permutation"] = partial(of_the_lent_machine, lent_h100.permute)
        found["linear attention"] = partial(of_the_lent_machine, lent_h100.fla)
    return found


def of_the_lent_machine(part: Callable[[], dict[str, Any]]) -> Found:
    """A part of ``lent_h100``, whose own bounds count; raises ValueError with what it found where it says stop."""
    facts = part()
    if not facts["go_on"]:
        raise ValueError(json.dumps(facts, default=str))
    return {"its own": 0.0}, 0.0


def name_of(shape: Mapping[str, Any]) -> str:
    window, has_sinks = shape["window_size"][0], shape["softmax_type"] == "learnable"
    heads = f"{shape['num_heads']}/{shape['num_gqa_groups']} heads of {shape['head_dim_qk']}"
    return f"attention {heads}" + f", window {window}" * (window >= 0) + ", sinks" * has_sinks


def shapes_of_recipes() -> list[dict[str, Any]]:
    """Transformer Engine's parameters of every recipe's attention, each kind once."""
    found = {}
    for recipe in RECIPES:
        config = RunConfig.from_toml(recipe.path)
        for _, shape in attention_shapes(config, read_hf_facts(PUBLISHED / recipe.model)):
            named = ("num_heads", "num_gqa_groups", "head_dim_qk", "window_size", "softmax_type")
            found[tuple(shape[name] for name in named)] = shape
    return list(found.values())


def errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """By name, the largest error as a part of the largest value; raises ValueError for one that is not finite."""
    out = {}
    for name, value in expected.items():
        if not bool(torch.isfinite(found[name]).all()):
            raise ValueError(f"{name}: not finite")
        off = (found[name].float() - value.float()).abs().max()
        out[name] = float(off / value.float().abs().max().clamp_min(1e-9))
    return out


def attention(shape: Mapping[str, Any], pack: tuple[int, ...]) -> Found:
    """A recipe's attention of a pack, forward and backward, in bfloat16."""
    heads, groups, size = shape["num_heads"], shape["num_gqa_groups"], shape["head_dim_qk"]
    window, sinks = shape["window_size"], shape["softmax_type"] == "learnable"
    has_window = window[0] >= 0
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * size,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=size,
        window_size=window if has_window else None,
        softmax_type=shape["softmax_type"],
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    kernel = TEDotProductAttention(config, 1, AttnMaskType.padding_causal, "self").to(DEVICE)
    ends = torch.tensor([0, *pack], device=DEVICE).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(pack),
        max_seqlen_kv=max(pack),
    )
    given = {
        name: torch.randn(sum(pack), count, size, device=DEVICE).bfloat16()
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    }
    if sinks:
        given["sinks"] = torch.randn(heads, device=DEVICE)
        with torch.no_grad():
            kernel.softmax_offset.copy_(given["sinks"].view_as(kernel.softmax_offset))
    weights = torch.randn(sum(pack), heads * size, device=DEVICE)

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any = None) -> torch.Tensor:
        return kernel(q, k, v, None, AttnMaskType.padding_causal, packed_seq_params=packed)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any = None) -> torch.Tensor:
        return plain_attention(q, k, v, ends.tolist(), window[0], sinks)

    expected = passes(plain, given, weights, torch.float32)
    found = passes(fused, given, weights, torch.bfloat16)
    if sinks:
        found["sinks"] = kernel.softmax_offset.grad.flatten()
    return errors(found, expected), BOUND["bfloat16"]


def passes(call: Callable, given: Tensors, weights: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """The output of a call and the gradients of what it is given, in a dtype."""
    own = {name: value.to(dtype).requires_grad_() for name, value in given.items()}
    out = call(**own).flatten(1)
    (out.float() * weights).sum().backward()
    gradients = {name: value.grad for name, value in own.items() if value.grad is not None}
    return {"output": out.detach()} | gradients


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: list[int],
    window: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(QK^T)V of each sequence, [n, heads * size]; window: tokens before its own, -1 for all."""
    out, repeats = [], q.shape[1] // k.shape[1]
    for begin, end in pairwise(ends):
        rows = slice(begin, end)
        keys, values = (x[rows].repeat_interleave(repeats, 1).transpose(0, 1) for x in (k, v))
        scores = q[rows].transpose(0, 1) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        places = torch.arange(end - begin, device=q.device)
        behind = places[:, None] - places[None]
        is_hidden = (behind < 0) | ((behind > window) if window >= 0 else False)
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if sinks is not None:
            column = sinks.view(-1, 1, 1).expand(-1, end - begin, 1)
            scores = torch.cat([scores, column], -1)
        parts = scores.softmax(-1)[..., : end - begin]
        out.append((parts @ values).transpose(0, 1))
    return torch.cat(out).flatten(1)


def grouped_linear(dtype_name: str, rows: list[int], columns: tuple[int, int]) -> Found:
    """Experts' linears, one without rows among them, twice: main gradients add up."""
    dtype, (inputs, outputs) = getattr(torch, dtype_name), columns
    config = TransformerConfig(
        num_layers=1,
        hidden_size=inputs,
        num_attention_heads=1,
        num_moe_experts=len(rows),
        params_dtype=dtype,
        bf16=dtype_name == "bfloat16",
        gradient_accumulation_fusion=DEVICE.type == "cuda",
        use_cpu_initialization=DEVICE.type == "cpu",
        add_bias_linear=False,
    )
    linear = TEColumnParallelGroupedLinear(
        len(rows),
        inputs,
        outputs,
        config=config,
        init_method=torch.nn.init.xavier_normal_,
        bias=False,
        skip_bias_add=False,
        is_expert=True,
    ).to(DEVICE)
    weights = [getattr(linear, f"weight{i}") for i in range(len(rows))]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x = torch.randn(sum(rows), inputs, device=DEVICE).to(dtype).requires_grad_()
    upstream = torch.randn(sum(rows), outputs, device=DEVICE).to(dtype)
    for _ in range(2):
        out, _ = linear(x, rows)
        out.backward(upstream)
    plain_x = x.detach().float().requires_grad_()
    plain_weights = [weight.detach().float().requires_grad_() for weight in weights]
    parts = zip(plain_x.split(rows), plain_weights, strict=True)
    expected = torch.cat([part @ weight.T for part, weight in parts])
    expected.backward(2 * upstream.float())
    found, wanted = {"output": out, "input": x.grad}, {"output": expected, "input": plain_x.grad}
    for i, (weight, plain) in enumerate(zip(weights, plain_weights, strict=True)):
        fused = (
            weight.main_grad
            if weight.grad is None or config.gradient_accumulation_fusion
            else weight.grad
        )
        found[f"weight{i}"], wanted[f"weight{i}"] = fused, plain.grad
    return errors(found, wanted), BOUND[dtype_name]


def adam(moments: str, columns: tuple[int, int]) -> Found:
    """Three steps of FusedAdam with main weights, against torch's AdamW; moments: the dtype of its state."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    dtype = getattr(torch, moments)
    start = torch.randn(*columns, device=DEVICE)
    given = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    weight = torch.nn.Parameter(start.bfloat16())
    plain = torch.nn.Parameter(weight.detach().float())
    fused = FusedAdam(
        [weight],
        **given,
        master_weights=True,
        exp_avg_dtype=dtype,
        exp_avg_sq_dtype=dtype,
        use_decoupled_grad=True,
    )
    adam_w = torch.optim.AdamW([plain], **given)
    for _ in range(3):
        gradient = torch.randn_like(plain)
        weight.decoupled_grad, plain.grad = gradient, gradient.clone()
        fused.step()
        adam_w.step()
    moved = fused.get_unscaled_state(weight, "master_param") - start.bfloat16().float()
    found, wanted = {"moved": moved}, {"moved": plain.detach() - start.bfloat16().float()}
    return errors(found, wanted), BOUND[moments]


if __name__ == "__main__":
    sys.exit(main())
