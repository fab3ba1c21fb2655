"""Waits for rank 0 that take longer than the time-out of a collective, a stop, and a rank that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.e2e import jobs
from tests.e2e.conftest import tiny  # noqa: F401
from tests.e2e.test_sft import talk  # noqa: F401
from tests.oracle.actors import in_ranks
from tests.rehearsal.slow_rank_zero import TIMEOUT_S

pytestmark = pytest.mark.ranks


@pytest.mark.slow
def test_a_long_rollout_evaluation_or_save_of_rank_0_is_no_lost_rank(talk, tmp_path):  # noqa: F811
    job = jobs.run(
        tmp_path / "run",
        "--hf-checkpoint",
        str(talk / "model"),
        "--prompt-data",
        str(talk / "talk.jsonl"),
        *"--rollout-batch-size 4 --num-rollout 2 --no-plot --no-tensorboard".split(),
        "--save",
        str(tmp_path / "saved"),
        recipe="configs/tiny_sft.toml",
        program=("-m", "tests.rehearsal.slow_rank_zero"),
    )
    assert job.code == 0, job.output
    for name in ("next_batch", "end", "write_state"):
        assert f"slow: {name}" in job.output, job.output
    assert [m["step"] for m in job.metrics()] == [0, 1]


def told_and_frozen(scratch: str) -> None:
    """Rank 1 is told to stop while rank 0 waits, and later the last rank freezes.

    Leaves each rank's error of the second wait, its seconds, and what ended rank 0's first wait.
    """
    from r3train import host_group
    from r3train.loop.run_state import WatchedSource
    from r3train.loop.stop import StopRequested, StopSignal

    rank, found, stopped_by = dist.get_rank(), "", ""
    _set_pg_timeout(timedelta(seconds=TIMEOUT_S), host_group.host_group())
    host_group.beat_s = TIMEOUT_S / 4
    StopSignal(60).begin()
    with host_group.rank_zero_alone():
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if rank == 0:
            time.sleep(2 * TIMEOUT_S)  # of a rollout
            try:
                WatchedSource(NeverReady(), StopSignal(1), None).next_batch(0)
            except StopRequested as stop:
                stopped_by = str(stop)
    host_group.stop_here = host_group.stop_anywhere = False
    host_group.host_barrier()
    began = time.monotonic()
    if rank == 2:
        subprocess.Popen(["sh", "-c", f"sleep {4 * TIMEOUT_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with host_group.rank_zero_alone():
            if rank == 0:
                WatchedSource(NeverReady(), StopSignal(1), None).next_batch(0)
    except RuntimeError as error:
        found = str(error)
    torch.save((found, time.monotonic() - began, stopped_by), f"{scratch}/rank{rank}.pt")
    os._exit(0)  # the group is broken


class NeverReady:
    """A source that waits as the producer does."""

    def next_batch(self, rollout_id, on_wait):
        for _ in range(600):
            time.sleep(0.1)
            on_wait({})


def test_rank_0_may_wait_long_and_notices_a_rank_that_is_told_to_stop_or_freezes(tmp_path):
    ranks = in_ranks(3, tmp_path, told_and_frozen, str(tmp_path))
    (waiting, first_s, stopped_by), (silent, second_s, _), _ = ranks
    assert stopped_by == "a signal to another rank"
    assert "another rank does not answer rank 0" in waiting
    assert "Timed out" in silent or "closed" in silent
    assert max(first_s, second_s) < 3 * TIMEOUT_S
