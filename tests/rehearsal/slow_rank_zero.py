"""``train_async.py`` whose rank 0 takes longer than the time-out wherever the others wait for it.

    torchrun -m tests.rehearsal.slow_rank_zero [flags of train_async.py]

The time-out is one of seconds, of the host's group, and counts from the loop's beginning: before it
the ranks of a busy machine differ by seconds themselves.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import _set_pg_timeout

from r3train import host_group
from r3train.cpu.device import prepare_device
from r3train.loop.async_loop import AsyncLoop
from r3train.loop.replay_source import Conversations
from r3train.loop.run_evaluations import Evaluations

prepare_device()

from r3train.trainer.megatron import checkpoint  # noqa: E402
from train_async import main  # noqa: E402

TIMEOUT_S = 4.0
SLOW_S = 6.0


def slow(owner: Any, name: str) -> None:
    """Let the first call of a function take long; rank 0 alone makes it."""
    function, calls = getattr(owner, name), []

    def slowly(*arguments: Any, **named: Any) -> Any:
        if not calls:
            calls.append(name)
            print(f"slow: {name}", flush=True)
            time.sleep(SLOW_S)
        return function(*arguments, **named)

    setattr(owner, name, slowly)


def with_a_short_time_out(run: Any) -> Any:
    def shortly(loop: AsyncLoop, start_rollout_id: int) -> None:
        host_group.beat_s = TIMEOUT_S / 4
        _set_pg_timeout(timedelta(seconds=TIMEOUT_S), host_group.host_group())
        run(loop, start_rollout_id)

    return shortly


if __name__ == "__main__":
    AsyncLoop.run = with_a_short_time_out(AsyncLoop.run)
    slow(Conversations, "next_batch")
    slow(Evaluations, "end")
    slow(checkpoint, "write_state")
    main()
