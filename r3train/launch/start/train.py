"""One rank of a training run: parse, check, build, run, close.

``r3train train`` and ``torchrun train_async.py`` start as many of them as a run needs.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import click

from r3train.config import RunConfig
from r3train.config.options import train_options, usage_errors
from r3train.launch.gpus import server_gpus_here, torchruns_number
from r3train.launch.start.local_servers import start_servers
from r3train.launch.job.run_dir import claim_directories, raise_file_limit
from r3train.cpu.torchvision_stub import declare_ops_for_imports
from r3train.patches import patch
from r3train.user_code import find_modules_here

PARENT = os.getppid()  # torchrun may be gone by the time that a rank asks to be told of its end


@train_options
def main(config: RunConfig) -> None:
    """Train with rollouts from SGLang and a Megatron actor; see README.md."""
    declare_ops_for_imports()
    with usage_errors():
        rank = torchruns_number("RANK", 0)
        for_node = torchruns_number("LOCAL_RANK", 0) == 0
        torchruns_number("WORLD_SIZE", 0)  # another text is refused
        if not config.run.dry_run and "RANK" not in os.environ:
            raise ValueError(
                "this program is one rank of a run: r3train train starts the ranks of a machine,"
                " and so does torchrun"
            )
    if rank == 0:  # before torch is imported, which takes long
        click.echo("checking the settings, the checkpoint and the data ...", err=True)
    with usage_errors():
        world_size = config.run.ranks(os.environ)
        if config.run.dry_run:
            if rank == 0:
                from r3train.launch.job.dry_run import show_dry_run  # all that a start reads

                show_dry_run(config, world_size)
            return
    with ExitStack() as claims:
        run_dir, servers = None, []
        with usage_errors():
            from r3train.launch.job.preflight import By, preflight  # all that a start reads

            by = By.JOB if rank == 0 else By.NODE if for_node else By.RANK
            job = preflight(config, world_size, by)
            if rank == 0:
                raise_file_limit()
                server_gpus_here(config)
                run_dir = claim_directories(config, claims)
                if not config.rollout.colocate:
                    servers = start_servers(job, run_dir)
                    for server in servers:
                        claims.callback(server.stop)
        # from here on there is a display to close
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from r3train.launch.start.rank import run  # it imports torch

        sys.exit(run(job, rank, run_dir, servers, PARENT))


def as_rank(program: Callable[[], object]) -> None:
    """Run the program in a process that torchrun or ``r3train train`` has started."""
    from r3train.observe.console import UntilGone  # it imports rich

    # where a stream was closed, the next file would have its number, and what C++ prints
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        patch(sys, name, UntilGone(getattr(sys, name)), expects=None, why="no line ends a run")
    find_modules_here()
    # until there is something to close, Ctrl-C ends a rank without a word: who started it says one
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # while all is imported: searching torch and megatron-core took a fifth of that
    try:
        program()
    finally:
        ignore_signals()


def ignore_signals() -> None:
    """Let no signal end a process that is done: the interpreter takes handlers away before it has ended."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":  # writers of torch_dist checkpoints import this file again
    as_rank(partial(main, prog_name="r3train train"))
