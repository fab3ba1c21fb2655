"""Reads of tensors by the host, in a log-prob pass and a train pass of the actor on Transformer Engine's shape.

    PYTHONPATH=tests/rehearsal/stand_ins python -m tests.rehearsal.host_reads REPORT MODEL

MODEL is a checkpoint.  On a device each read waits for all work before it.  Those of the adaptations to a CPU are
not counted: they are not there on CUDA.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from r3train.trainer.megatron.cpu_device import prepare_device

prepare_device()

import torch  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402

from r3train.config.hf_facts import read_hf_facts  # noqa: E402
from r3train.host_group import join_ranks  # noqa: E402
from tests.oracle.actors import actor_of, configuration, samples, slices_of  # noqa: E402

READS = ("tolist", "item", "__bool__", "cpu", "numpy", "__int__", "__float__", "nonzero")
WATCHED = ("/megatron/core/", "/r3train/")
CPU_ALONE = ("cpu_device.py", "cpu_attention.py")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the reads in the block by the file that asks."""
    found: Counter[str] = Counter()
    real = {name: getattr(torch.Tensor, name) for name in READS}

    def noting(name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **named: Any) -> Any:
            files = [f.filename for f in traceback.extract_stack()[:-1]]
            asking = [f for f in files if any(part in f for part in WATCHED)]
            if asking and not asking[-1].endswith(CPU_ALONE):
                found[Path(asking[-1]).name] += 1
            return real[name](self, *args, **named)

        return read

    for name in READS:
        setattr(torch.Tensor, name, noting(name))
    try:
        yield found
    finally:
        for name in READS:
            setattr(torch.Tensor, name, real[name])


def reads(checkpoint: Path) -> dict[str, Any]:
    hf = read_hf_facts(checkpoint)
    config = configuration(
        checkpoint,
        attention_backend="te",
        use_rollout_routing_replay=True,
        enable_r3_correctness_check=True,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    found: dict[str, Any] = {"layers": hf.num_hidden_layers}
    rope_utils.fused_apply_rotary_pos_emb_thd = lambda t, *_, **__: t  # the kernel reads nothing
    with actor_of(config) as actor:
        slices, _ = slices_of(actor, config, hf, samples(hf, [(4, 19), (4, 13)]))
        for fused in (False, True):
            actor.model.config.apply_rope_fusion = fused
            kind = "fused" if fused else "unfused"
            with counted() as found[f"{kind} forward"]:
                old = actor.compute_log_probs(slices, None)
            with counted() as found[f"{kind} train"]:
                actor.train_step(slices, old, None)
    return found


if __name__ == "__main__":
    store = torch.distributed.HashStore()
    join_ranks("gloo", store, 0, 1, timeout=timedelta(minutes=1))
    Path(sys.argv[1]).write_text(json.dumps(reads(Path(sys.argv[2]))))
