"""Process groups that rank 0 of a large job makes, of stand-ins that connect nothing.

    python -m tests.rehearsal.groups REPORT

Counted twice: as they are made, and *gloo everywhere*.  There the default group has a gloo half, so that all
groups have one, and Megatron makes gloo groups of its own as it does by default: a job that did not keep the
host's messages apart.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from r3train.cpu.device import prepare_device

prepare_device()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from r3train.config.parallel_settings import ParallelSection  # noqa: E402
from r3train.host_group import join_ranks  # noqa: E402
from r3train.trainer.megatron.topology import init_model_parallel, shutdown  # noqa: E402

NUM_RANKS = 512
PARALLEL = ParallelSection(
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=4,
    context_parallel_size=2,
    expert_model_parallel_size=16,
    sequence_parallel=True,
)


def made(gloo_everywhere: bool) -> dict[str, int]:
    """Calls of new_group, rank 0's groups of several ranks, and its sockets of gloo: one a peer and group."""
    calls: list[tuple[int, str | None]] = []
    new_group = dist.new_group

    def counted(ranks: list[int] | None = None, backend: str | None = None, **facts: Any) -> Any:
        members = range(NUM_RANKS) if ranks is None else ranks
        calls.append((len(members) if 0 in members else 0, backend))
        return new_group(ranks, backend="fake", **facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        if gloo_everywhere:
            make = parallel_state.initialize_model_parallel
            patch.setattr(
                parallel_state,
                "initialize_model_parallel",
                lambda **facts: make(**{**facts, "create_gloo_process_groups": True}),
            )
        join_ranks("fake", FakeStore(), 0, NUM_RANKS, timeout=timedelta(minutes=1))
        init_model_parallel(PARALLEL, seed=1)
        shutdown()
    own = [(NUM_RANKS, None)] + [(size, backend) for size, backend in calls if size > 1]
    return {
        "calls": len(calls),
        "of rank 0": len(own),
        "sockets": sum(size - 1 for size, backend in own if backend == "gloo" or gloo_everywhere),
    }


if __name__ == "__main__":
    found = {"as made": made(False), "gloo everywhere": made(True)}
    Path(sys.argv[1]).write_text(json.dumps(found))
