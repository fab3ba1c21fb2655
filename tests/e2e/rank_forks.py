"""Ranks of a whole job as forks of a process that has imported what they need, which takes torchrun's ranks seconds.

What torchrun does besides is here: the store at which ranks meet, and the end of the others when one has failed.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ENDS_S = 30.0  # after SIGTERM, as torchrun's


def run_ranks(
    program: Sequence[str], ranks: int, environment: Mapping[str, str], timeout: float
) -> tuple[int, str]:
    """Run a program in each rank; returns 1 if one has failed, else 0, and what all have printed.

    program: a file or ``-m`` and a module, then its arguments.
    """
    from torch.distributed import TCPStore

    from tests.oracle.actors import rank_context

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    context, left, failed = rank_context(), [], False
    end = time.monotonic() + timeout
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        try:
            for rank in range(ranks):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                arguments = list(program), {**shared, **numbers}, output.name
                left.append(context.Process(target=_rank, args=arguments))
                left[-1].start()
            while left and not failed:
                wait([process.sentinel for process in left], timeout=end - time.monotonic())
                assert time.monotonic() < end, output.read()
                failed = any(process.exitcode for process in left)
                left = [process for process in left if process.exitcode is None]
        finally:
            for process in left:
                process.terminate()
            for process in left:
                process.join(_ENDS_S)
                process.kill()
                process.join()
        return int(failed), output.read()


def _rank(program: list[str], environment: dict[str, str], output: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    to = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(to, 1)
    os.dup2(to, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")
