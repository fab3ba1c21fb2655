"""A reward that fills a disk: for the sample whose metadata says which, once a checkpoint is on it."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from pathlib import Path

from r3train.loop.run_state import BUFFER_FILE
from r3train.types import Prompt
from tests.e2e.live_jobs import pointer

WAIT_S = 60.0
_first = threading.Lock()


def reward(prompt: Prompt, response_text: str, response_ids: list[int]) -> float:
    """0, but for the first sample of a prompt with ``metadata["checkpoints"]``.

    That one waits for ``metadata["num_rollouts"]`` to be saved there, copies the buffer to
    ``metadata["copy"]``, fills the disk, and fails.
    """
    place = prompt.metadata
    if "checkpoints" not in place or not _first.acquire(blocking=False):
        return 0.0
    directory, number = Path(place["checkpoints"]), place["num_rollouts"]
    deadline = time.monotonic() + WAIT_S
    while pointer(directory) != number:
        assert time.monotonic() < deadline, "the checkpoint was not saved"
        time.sleep(0.02)
    shutil.copy(directory / f"iter_{number:07d}" / BUFFER_FILE, place["copy"])
    try:
        with (directory / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
        raise RuntimeError("the disk is full now") from error
