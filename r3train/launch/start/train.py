"""One rank of a training run: parse, check, build, run, close.

``r3train train`` and ``torchrun train_async.py`` start as many of them as a run needs.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r3train.config import RunConfig
from r3train.config.options import train_options, usage_errors
from r3train.launch.gpus import server_gpus_here, torchruns_number
from r3train.launch.start.local_servers import prepare_servers, start_servers
from r3train.launch.job.run_dir import (
    claim_directories,
    open_run_dir,
    raise_file_limit,
)
from r3train.cpu.torchvision_stub import declare_ops_for_imports
from r3train.patches import patch
from r3train.user_code import find_modules_here

if TYPE_CHECKING:
    from r3train.engine.server import SGLangServer
    from r3train.launch.job.checked_job import Job

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
                show_dry_run(config, world_size)
            return
    with ExitStack() as claims, ExitStack() as held:
        run_dir, servers = None, prepare_servers(config) if rank == 0 else []
        for server in servers:
            held.callback(server.stop)
        with usage_errors():
            from r3train.launch.job.preflight import By, preflight

            by = By.JOB if rank == 0 else By.NODE if for_node else By.RANK
            job = preflight(config, world_size, by)
            if rank == 0:
                raise_file_limit()
                server_gpus_here(config)
                run_dir = claim_directories(config, claims)
                if not config.rollout.colocate:
                    servers = start_servers(job, run_dir, prepared=servers)
        sys.exit(run(job, rank, run_dir, servers))


def show_dry_run(config: RunConfig, world_size: int, num_ranks: int | None = None) -> None:
    """Check the settings, and print them and what a run of ``world_size`` ranks would do.

    num_ranks: of this machine, where it is known.
    With --estimate what is not there (weights, data, a server) is a line of the output.
    Raises PreflightError with every fault.
    """
    from r3train.launch.estimate.estimate_lines import dry_run_lines
    from r3train.launch.gpus import gpus_here
    from r3train.launch.job.checked_job import would_run
    from r3train.launch.job.preflight import By, PreflightError, preflight

    job, missing, longest, warnings = None, [], None, ()
    try:
        job = preflight(config, world_size, By.JOB, num_ranks)
    except PreflightError as error:
        missing = error.outside_settings if config.run.estimate else []
        if not missing:
            raise
    lines = [f"a run is refused here: {line}" for line in missing]
    if job is not None:
        warnings = job.warnings
        lines = [*would_run(job, world_size), *job.first_prompt, *job.other_prompts]
        longest = job.longest_prompt
        if config.agent.named is not None:
            from r3train.launch.job.agent_session import try_session

            found, failed = try_session(config, job.prompts[0])
            lines, warnings = [*lines, *found], (*warnings, *failed)
        job.close()
    if config.run.estimate:
        lines += dry_run_lines(config, world_size, gpus_here()[1], longest)
    click.echo(config.given_toml())
    click.echo("\n".join(f"# {line}" for line in lines))
    for warning in warnings:  # last: the configuration fills more than a screen
        click.secho(str(warning), fg="yellow", err=True)


def run(job: Job, rank: int, run_dir: Path | None, servers: Sequence[SGLangServer] = ()) -> int:
    """Join the ranks, train, close everything; returns the exit code.

    run_dir: the run's directory, on rank 0.  servers: those that it has started.
    """
    began = time.monotonic()
    # from here on there is a display to close
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from r3train.observe.starts import StartParts

    parts = None if run_dir is None else StartParts(run_dir, PARENT)
    from r3train.launch.start.last_words import LastWords
    from r3train.loop.stop import StopSignal
    from r3train.observe.console import RunDisplay
    from r3train.observe.logging_setup import setup_logging
    from r3train.cpu.device import prepare_device

    config = job.config
    live = None if config.run.progress else False
    with RunDisplay(config.rollout.num_rollout, rank == 0, live=live, parts=parts) as display:
        words = LastWords(rank, display, (config.checkpoint.save, config.checkpoint.save_hf))
        announce = (
            (lambda name: display.note(stopping(config, name), "yellow")) if rank == 0 else None
        )
        stop = StopSignal(config.faults.signal_grace_s, PARENT, announce)
        try:
            with ExitStack() as opened:
                try:
                    with display.phase("joining the ranks"):
                        uses_deep_ep = config.model.moe_token_dispatcher_type == "flex"
                        device = prepare_device(uses_deep_ep=uses_deep_ep)
                        from r3train.loop.distribute import broadcast_json
                        from r3train.trainer.megatron import topology

                        words.store = topology.init_distributed(
                            config.parallel.distributed_backend,
                            config.parallel.distributed_timeout_minutes,
                        )
                        opened.callback(topology.shutdown)
                        words.run_dir = open_run_dir(config, run_dir, broadcast_json)
                        words.log = setup_logging(
                            words.run_dir, rank, config.run.log_level, in_parts=config.sums_evidence
                        )
                    # they import megatron-core, which prepare_device() adapts
                    from r3train.launch.start.run_rank import finish, RankOfRun

                    RankOfRun(
                        job, rank, words.run_dir, display, stop, PARENT, opened, servers
                    ).train(device)
                except (Exception, SystemExit) as error:  # the user's code may call sys.exit(0)
                    words.say(error)  # before all is closed
                    raise
            if rank == 0:
                display.summary(finish(config, words.run_dir, began, stop.received))
                words.shown()
        except KeyboardInterrupt:
            display.note(
                "stopped by SIGINT before the first step: there is nothing to save", "yellow"
            )
            return 128 + signal.SIGINT
        except (Exception, SystemExit) as error:
            words.say(error)
            words.stay()
            return 1
        code = stop.exit_code(saved=config.checkpoint.save is not None)
        if code:  # torchrun ends all ranks when one has ended so
            words.stay()
        return code


def stopping(config: RunConfig, name: str) -> str:
    """The line that says what follows a signal to stop."""
    save = config.checkpoint.save
    then = "nothing is saved without --save" if save is None else f"then saving to {save}"
    again = "; Ctrl-C again ends now" if name == "SIGINT" else ""
    return f"{name}: stopping after this rollout, {then}{again}"


def as_rank(program: Callable[[], object]) -> None:
    """Run the program in a process that torchrun or ``r3train train`` has started."""
    from r3train.observe.console import UntilGone

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
