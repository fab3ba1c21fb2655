"""Parts of r3train on a machine with one Hopper GPU, no network and no Transformer Engine; a JSON line each.

    python -m tests.gpu.lent_h100 facts | rates | ipc | fla
    python -m tests.gpu.lent_h100 permute DIRECTORY      # of Transformer Engine's Python package; without: the installed one
    python -m tests.gpu.lent_h100 actor REPORT DTYPE     # CUDA_VISIBLE_DEVICES= for the host's; float32 or bfloat16
    python -m tests.gpu.lent_h100 compare HOST DEVICE    # two reports

``make lent`` fetches the wheels and prints these calls in their order.  The actor's layers are Transformer Engine's
stand-in on the device (PYTHONPATH=tests/rehearsal/stand_ins).  Exit code: 0 go on, 1 stop, or an error that the line has.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
# of a toy with random weights, in nats of the largest log-prob of some 900 tokens
LOG_PROB_GAP = {"float32": 1e-3, "bfloat16": 0.25}
# largest error as a part of the largest value: what the interpreter's float16 keeps, and eight bits of mantissa
FLA_ERROR = {"float32": 5e-3, "bfloat16": 4e-2}
# fields of a record of evidence that depend on no rounding
EXACT = ("fingerprint", "replay_idx_sum", "map_sum", "duplicate_rows", "rows_replayed")
EXACT += ("rows_filled", "rows_recompute_differ")
# (prompt, answer) of the samples
SAMPLES = ((4, 190), (8, 250), (3, 120), (6, 300))
# experts, experts of a token, hidden size: Qwen3, Qwen3.5, Moonlight, gpt-oss
EXPERTS = ((128, 8, 2048), (256, 8, 2048), (64, 6, 2048), (32, 4, 2880))
_ROWS = 10240


def facts() -> Facts:
    import importlib.metadata

    import torch

    card = torch.cuda.get_device_properties(0)
    versions = {name: importlib.metadata.version(name) for name in ("triton", "transformers")}
    libraries = {"nccl": torch.cuda.nccl.version(), "cudnn": torch.backends.cudnn.version()}
    memory = {"gpu_bytes": card.total_memory, "cores": os.cpu_count()}
    return {"card": card.name, "torch": torch.__version__, **versions, **libraries, **memory}


def actor(report: str, dtype: str) -> Facts:
    """Log-probs, one optimizer step, its evidence and weights of a seeded toy; on CUDA also times, launches and turns.

    What is compared goes to the file ``report``.
    """
    from r3train.cpu.device import prepare_device

    device = prepare_device()
    import torch

    from r3train.families.read_facts import read_hf_facts
    from r3train.families.tiny_options import SIZES, TinyOptions
    from r3train.host_group import join_ranks, leave_ranks
    from r3train.verify.tiny import random_model, save
    from tests.oracle.actors import actor_of, configuration, samples, slices_of

    torch.backends.cuda.matmul.allow_tf32 = False
    os.environ.setdefault("LOCAL_RANK", "0")
    options = replace(TinyOptions(), **{**SIZES["gpu"], "dtype": dtype})
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        save(random_model(options), model, options)  # of a seed: the same on both sides
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        backend = "nccl" if device.type == "cuda" else "gloo"
        join_ranks(backend, store, 0, 1, timeout=timedelta(minutes=2))
        config = configuration(
            model,
            bf16=dtype == "bfloat16",
            attention_backend="te",
            use_distributed_optimizer=True,
            use_rollout_routing_replay=True,
            enable_r3_correctness_check=True,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            max_tokens_per_gpu=512,
            # the stand-in has neither
            transformer_overrides={"apply_rope_fusion": False, "moe_permute_fusion": False},
        )
        hf = read_hf_facts(model)
        with actor_of(config, device=str(device)) as trained:
            slices, _ = slices_of(trained, config, hf, samples(hf, SAMPLES))
            found, said = _one_step(trained, slices)
            if device.type == "cuda":
                said |= _on_the_device(trained, slices)
        leave_ranks()
    torch.save({"dtype": dtype, **found}, report)
    return {"device": str(device), **said}


def _one_step(trained: Any, slices: list) -> tuple[Facts, Facts]:
    """Return what two machines are compared by, and what is printed."""
    old = trained.compute_log_probs(slices, "old_log_prob", weight_version=0)
    evidence = trained.collect_evidence(0)
    metrics = trained.train_step(slices, old, None, 0)
    evidence += trained.collect_evidence(0)
    found = {
        "log_probs": {name: value.float().cpu() for name, value in old.items()},
        "evidence": [{name: _plain(record)[name] for name in EXACT} for record in evidence],
        "weights": {name: t.detach().float().cpu() for name, t in trained.hf_weights()},
        "grad_norm": float(metrics["grad_norm"]),
    }
    return found, {"loss": float(metrics["loss"]), "records": len(evidence)}


def _plain(record: Any) -> Mapping[str, Any]:
    if is_dataclass(record):
        return asdict(record)
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _on_the_device(trained: Any, slices: list) -> Facts:
    """Seconds of a step, its launches and waits, and a turn to the host and back."""
    import torch

    def step() -> None:
        trained.train_step(slices, None, None, 0)
        trained.collect_evidence(0)

    steps = [_seconds(step) for _ in range(4)]
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CUDA, activities.CPU]) as profile:
        step()
    counts = {event.key: event.count for event in profile.key_averages()}
    before = torch.cuda.mem_get_info()[0]
    away = _seconds(trained.memory.hold)
    freed = torch.cuda.mem_get_info()[0] - before
    back = _seconds(lambda: trained.memory.hold("weights", "gradients", "optimizer"))
    return {
        "steps_s": steps,
        "launches": sum(n for name, n in counts.items() if name.startswith("cudaLaunchKernel")),
        "waits": {name: n for name, n in counts.items() if "Synchronize" in name},
        "turn": {"away_s": away, "back_s": back, "freed_bytes": freed},
    }


def _seconds(call: Callable[[], Any]) -> float:
    """Seconds of a call, until the device has done its work."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def compare(host: str, device: str) -> Facts:
    """Compare two reports of ``actor``: evidence to the bit, log-probs within ``LOG_PROB_GAP``."""
    import torch

    a, b = (torch.load(report, weights_only=False) for report in (host, device))
    gap = max(float((a["log_probs"][n] - b["log_probs"][n]).abs().max()) for n in a["log_probs"])
    off = {
        name: float((weight - b["weights"][name]).abs().max() / weight.abs().max().clamp_min(1e-9))
        for name, weight in a["weights"].items()
    }
    is_equal = a["evidence"] == b["evidence"] and len(a["evidence"]) > 0
    return {
        "go_on": is_equal and gap <= LOG_PROB_GAP[a["dtype"]],
        "log_prob_gap": gap,
        "evidence_is_equal": is_equal,
        "worst_weight": max(off.items(), key=lambda pair: pair[1]),
        "grad_norms": (a["grad_norm"], b["grad_norm"]),
    }


def permute(folder: str | None = None) -> Facts:
    """Transformer Engine's Triton permutation against indices, exact, and its GB/s.

    folder: of its Python package alone, without the compiled part; None for the installed one.
    """
    from types import ModuleType

    import torch

    names = ("", ".common", ".common.triton", ".pytorch", ".pytorch.triton")
    for name in names if folder is not None else ():
        module = ModuleType(f"transformer_engine{name}")
        module.__path__ = [f"{folder}/transformer_engine{name.replace('.', '/')}"]
        sys.modules[module.__name__] = module
    from transformer_engine.pytorch.triton import permutation as te

    found: Facts = {"go_on": True}
    for experts, topk, hidden in EXPERTS:
        out, sizes = _ROWS * topk, (_ROWS, experts)
        x = torch.randn(_ROWS, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(*sizes, device="cuda").topk(topk, 1).indices
        probs = torch.zeros(*sizes, device="cuda")
        probs.scatter_(1, ids, torch.rand(_ROWS, topk, device="cuda") + 0.1)
        mask = probs > 0
        rows_of = te.make_row_id_map(mask, *sizes)

        def to_experts() -> tuple[Any, Any, Any]:
            return te.permute_with_mask_map(x, rows_of, probs, None, None, *sizes, out, hidden, 0)

        to, _, moved = to_experts()
        back, probs_back = te.unpermute_with_mask_map(
            to, rows_of, None, moved, None, *sizes, hidden
        )
        rows = mask.T.nonzero()[:, 1]
        expected = torch.zeros(_ROWS, hidden, device="cuda").index_add_(0, rows, to.float())
        is_exact = torch.equal(to, x[rows]) and torch.equal(moved, probs.T[mask.T])
        is_exact &= torch.equal(torch.where(mask, probs_back, 0), probs)
        off = float((back.float() - expected).abs().max() / expected.abs().max())
        seconds = min(_seconds(to_experts) for _ in range(20))
        found["go_on"] &= is_exact and off < 0.01
        rate = 2 * out * hidden * x.element_size() / seconds / 1e9
        found[f"{experts} experts"] = {"is_exact": is_exact, "sum_off": off, "GB/s": rate}
    return found


def fla() -> Facts:
    """The gated delta rule as compiled against its twin in float32, outputs and gradients, at Qwen3.5's heads."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from r3train.cpu import linear_attention as twins

    found: Facts = {"go_on": True}
    for pack in ((1, 70, 64, 130, 3), (2048, 1500, 548)):
        ends = torch.tensor([0, *pack], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        random = torch.Generator().manual_seed(0)
        q, k, v, weights = torch.randn(4, 1, sum(pack), 8, 128, generator=random)
        g, beta = torch.randn(2, 1, sum(pack), 8, generator=random)
        given = {"q": twins.l2norm(q), "k": twins.l2norm(k), "v": v}
        given |= {"g": -g.exp() * 0.1, "beta": beta.sigmoid()}

        def run(rule: Callable[..., Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
            own = {
                name: t.to(device, torch.float32 if name == "g" else dtype).requires_grad_()
                for name, t in given.items()
            }
            out, _ = rule(
                **own,
                initial_state=None,
                output_final_state=False,
                use_qk_l2norm_in_kernel=False,
                cu_seqlens=ends.to(device),
            )
            (out.float() * weights.to(device)).sum().backward()
            return {"output": out.detach().float().cpu()} | {
                name: t.grad.float().cpu() for name, t in own.items()
            }

        expected = run(twins.chunk_gated_delta_rule, "cpu", torch.float32)
        for dtype_name, bound in FLA_ERROR.items():
            got = run(chunk_gated_delta_rule, "cuda", getattr(torch, dtype_name))
            errors = {
                name: float((got[name] - value).abs().max() / value.abs().max())
                for name, value in expected.items()
            }
            found["go_on"] &= max(errors.values()) < bound
            found[f"{len(pack)} sequences, {dtype_name}"] = errors
    return found


def rates() -> Facts:
    """GB/s between host and device by the kind of memory, and 10^9 parameters a second of Adam on the host."""
    import mmap

    import torch

    size, found = 4 << 30, {}
    device = torch.empty(size, dtype=torch.uint8, device="cuda")

    def rate(name: str, copy: Callable[[], Any], *, again: bool = True) -> None:
        if again:  # the first one touches the pages
            copy()
        found[name] = size / _seconds(copy) / 1e9

    def tensors_of_3_mb() -> None:
        for to, source in zip(shared.split(3 << 20), device.split(3 << 20)):
            to.copy_(source)

    rate("pinning", lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True), again=False)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    rate("to pinned", lambda: pinned.copy_(device))
    rate("from pinned", lambda: device.copy_(pinned))
    del pinned
    pageable = torch.empty(size, dtype=torch.uint8)
    rate("to pageable", lambda: pageable.copy_(device))
    del pageable
    file = os.memfd_create("lent")
    os.ftruncate(file, size)
    shared = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    rate("to memfd", lambda: shared.copy_(device))
    rate("to memfd, tensors of 3 MB", tensors_of_3_mb)
    cuda = torch.cuda.cudart()
    rate("registering", lambda: cuda.cudaHostRegister(shared.data_ptr(), size, 0), again=False)
    rate("to registered memfd", lambda: shared.copy_(device))
    rate("from registered memfd", lambda: device.copy_(shared))
    cuda.cudaHostUnregister(shared.data_ptr())
    parameters = [torch.nn.Parameter(torch.randn(1 << 24)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    for threads in (1, 4, 16):
        torch.set_num_threads(threads)
        adam = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        adam.step()
        found[f"Adam, {threads} threads"] = (8 << 24) / _seconds(adam.step) / 1e9
    return found


_CHILD = """
import base64, sys, time, cupy
from cupy.cuda import runtime
began = time.perf_counter()
place = runtime.ipcOpenMemHandle(base64.b64decode(sys.argv[1]))
opened, size = time.perf_counter() - began, int(sys.argv[2])
memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(place, size, None), 0)
found = cupy.ndarray(size, dtype=cupy.uint8, memptr=memory)
print(bool((found == cupy.arange(size, dtype=cupy.uint8)).all()), opened)
runtime.ipcCloseMemHandle(place)
"""


def ipc() -> Facts:
    """A handle of 64 bytes opened by another process on the same GPU: its bytes, and the seconds of opening it."""
    import base64
    import subprocess

    import cupy
    from cupy.cuda import runtime

    size = 1 << 28
    bytes_ = cupy.arange(size, dtype=cupy.uint8)
    place = runtime.malloc(size)
    runtime.memcpy(place, bytes_.data.ptr, size, runtime.memcpyDeviceToDevice)
    runtime.deviceSynchronize()
    handle = base64.b64encode(runtime.ipcGetMemHandle(place)).decode()
    command = [sys.executable, "-c", _CHILD, handle, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    is_equal, _, seconds = done.stdout.strip().partition(" ")
    return {"go_on": is_equal == "True", "open_s": seconds, "errors": done.stderr[-500:]}


PARTS = {part.__name__: part for part in (facts, actor, compare, permute, fla, rates, ipc)}


def main(name: str, *arguments: str) -> int:
    """Run a part and print its line."""
    began = time.monotonic()
    try:
        found = PARTS[name](*arguments)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:500]
        found = {"go_on": False, "error": text, "trace": traceback.format_exc()[-1500:]}
    took = round(time.monotonic() - began, 1)
    print(json.dumps({"part": " ".join((name, *arguments)), "seconds": took, **found}, default=str))
    return 0 if found.get("go_on", True) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
