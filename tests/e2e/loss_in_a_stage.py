"""``train_async.py`` whose server stops and dies in the broadcast of a later pipeline stage.

    torchrun -m tests.e2e.loss_in_a_stage [flags of train_async.py]
"""

from __future__ import annotations

import os
import signal
import threading

import psutil

from r3train.cpu.device import prepare_device
from tests.e2e.live_jobs import scheduler
from train_async import main

BUCKET = 4  # of the leader's; the second update's


def lose_the_server() -> None:
    """Stop the server that the weights go to, and kill it when the broadcast waits for it."""
    pid = scheduler(psutil.Process()).pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1, os.kill, (pid, signal.SIGKILL)).start()


if __name__ == "__main__":
    prepare_device()
    from r3train.loop.stage_weight_sync import PerStagePublisher

    made, calls = PerStagePublisher._made, []

    def spoiled(self, leader, name, arguments):
        calls.append(name)
        if name == "update_weights_from_distributed" and calls.count(name) == BUCKET:
            lose_the_server()
        return made(self, leader, name, arguments)

    PerStagePublisher._made = spoiled
    main()
