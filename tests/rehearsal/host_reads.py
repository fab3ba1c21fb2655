"""Waits of the host for the device, in a log-prob pass and a train pass of the actor on Transformer Engine's shape.

    PYTHONPATH=tests/rehearsal/stand_ins torchrun -m tests.rehearsal.host_reads REPORT MODEL

MODEL is a checkpoint; experts are spread over the ranks, and with linear attention sequences are, in bfloat16.  The device is that of ``device_alone``.  A read of one of
its tensors waits for all work before it, and so does a copy to the host that is not asked to go on next to it; what
such a copy gave is read without waiting, after the event that is waited for.  Those of the adaptations to a CPU are
not counted: they are not there on CUDA.  Writes REPORT.RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.rehearsal.device_alone import DEVICE, DeviceAlone, install

DEVICE_ALONE = DeviceAlone()
install(DEVICE_ALONE)

import torch  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.ssm.gated_delta_net import GatedDeltaNet  # noqa: E402
from megatron.core.transformer.moe import moe_layer  # noqa: E402

from r3train.families.read_facts import read_hf_facts  # noqa: E402
from r3train.cpu import device as cpu_device  # noqa: E402
from r3train.host_group import join_ranks  # noqa: E402
from r3train.families import has_linear_attention  # noqa: E402
from r3train.patches import torch_without_cuda  # noqa: E402
from r3train.trainer.megatron.layers.gated_delta_net import PackedGatedDeltaNet  # noqa: E402
from tests.oracle.actors import actor_of, configuration, samples, slices_of  # noqa: E402

# of a tensor of the device; the first two are copies
READS = ("to", "cpu", "tolist", "item", "__bool__", "numpy", "__int__", "__float__", "nonzero")
# not "/r3train/": a checkout of that name has the tests in it
WATCHED = ("/megatron/core/", f"{Path(cpu_device.__file__).parents[1]}/")
CPU_ALONE = tuple(f"{Path(m.__file__).parent}/" for m in (cpu_device, torch_without_cuda))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the waits in the block by the file that asks."""
    found: Counter[str] = Counter()
    event = torch_without_cuda.Event
    real = {name: (torch.Tensor, getattr(torch.Tensor, name)) for name in READS}
    real |= {"synchronize": (event, event.synchronize), "equal": (torch, torch.equal)}

    def waits(
        name: str, tensor: Any, out: Any, args: tuple, non_blocking: bool = False, **_: Any
    ) -> bool:
        if name == "synchronize":
            return True
        if name == "equal":  # a tensor is known to equal itself
            return DEVICE_ALONE.holds(tensor) and args[0] is not tensor
        copied = name in READS[:2]
        return DEVICE_ALONE.holds(tensor) and not (
            copied and (non_blocking or DEVICE_ALONE.holds(out))
        )

    def noting(name: str) -> Any:
        def read(self: Any, *args: Any, **named: Any) -> Any:
            out = real[name][1](self, *args, **named)
            files = [f.filename for f in traceback.extract_stack()[:-1]]
            asking = [f for f in files if any(part in f for part in WATCHED)]
            if (
                asking
                and not asking[-1].startswith(CPU_ALONE)
                and waits(name, self, out, args, **named)
            ):
                found[Path(asking[-1]).name] += 1
            return out

        return read

    for name, (kind, _) in real.items():
        setattr(kind, name, noting(name))
    try:
        yield found
    finally:
        for name, (kind, function) in real.items():
            setattr(kind, name, function)


def reads(checkpoint: Path) -> dict[str, Any]:
    hf, ranks = read_hf_facts(checkpoint), torch.distributed.get_world_size()
    is_hybrid = has_linear_attention(hf.model_type)
    config = configuration(
        checkpoint,
        expert_model_parallel_size=ranks,
        context_parallel_size=ranks if is_hybrid else 1,
        bf16=is_hybrid,
        attention_backend="te",
        use_rollout_routing_replay=True,
        enable_r3_correctness_check=True,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    found: dict[str, Any] = {"layers": hf.num_hidden_layers}
    megatrons_rotation = rope_utils._apply_rotary_pos_emb_thd
    rope_utils.fused_apply_rotary_pos_emb_thd = lambda t, *_, **__: t  # the kernel reads nothing
    with actor_of(config, device=str(DEVICE)) as actor:
        slices, _ = slices_of(actor, config, hf, samples(hf, [(4, 19), (4, 13)]))
        for fused in (False, True):
            actor.model.config.apply_rope_fusion = fused
            kind = "fused" if fused else "unfused"
            with counted() as found[f"{kind} forward"]:
                old = actor.compute_log_probs(slices, None)
            with counted() as found[f"{kind} train"]:
                actor.train_step(slices, old, None)
        with second_read(), counted() as found["planted"]:
            actor.compute_log_probs(slices, None)
        if is_hybrid:
            PackedGatedDeltaNet._resolve_cu_seqlens = GatedDeltaNet._resolve_cu_seqlens
            with counted() as found["megatron's delta net"]:
                actor.compute_log_probs(slices, None)
        actor.model.config.apply_rope_fusion = False
        rope_utils._apply_rotary_pos_emb_thd = megatrons_rotation
        with counted() as found["megatron's rotation"]:
            actor.compute_log_probs(slices, None)
    return found


@contextmanager
def second_read() -> Iterator[None]:
    """Let every layer of experts copy a number to the host."""
    real = moe_layer.MoELayer.route

    def route(self: Any, *args: Any) -> Any:
        probs, routing_map = real(self, *args)
        probs.sum().to("cpu")
        return probs, routing_map

    moe_layer.MoELayer.route = route
    try:
        yield
    finally:
        moe_layer.MoELayer.route = real


if __name__ == "__main__":
    report, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(str(report.with_suffix(".store")), ranks)
    with DEVICE_ALONE:
        join_ranks("nccl", store, rank, ranks, timeout=timedelta(minutes=1))
        found = reads(Path(sys.argv[2]))
    report.with_suffix(f".{rank}.json").write_text(json.dumps(found))
