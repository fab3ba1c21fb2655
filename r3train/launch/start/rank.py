"""Rank of a run: join the others, train, close everything, say how it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from r3train.config import RunConfig
from r3train.cpu.device import prepare_device
from r3train.engine.server import SGLangServer
from r3train.launch.job.checked_job import Job
from r3train.launch.job.run_dir import open_run_dir
from r3train.launch.start.last_words import LastWords
from r3train.loop.stop import StopSignal
from r3train.observe.console import RunDisplay
from r3train.observe.logging_setup import setup_logging
from r3train.observe.starts import StartParts


def run(
    job: Job, rank: int, run_dir: Path | None, servers: Sequence[SGLangServer], parent: int
) -> int:
    """Join the ranks, train, close everything; returns the exit code.

    run_dir: the run's directory, on rank 0.  servers: those that it has started.  parent: the
    process that has started the rank.
    """
    began = time.monotonic()
    parts = None if run_dir is None else StartParts(run_dir, parent)
    config = job.config
    live = None if config.run.progress else False
    with RunDisplay(config.rollout.num_rollout, rank == 0, live=live, parts=parts) as display:
        words = LastWords(rank, display, (config.checkpoint.save, config.checkpoint.save_hf))
        announce = (
            (lambda name: display.note(stopping(config, name), "yellow")) if rank == 0 else None
        )
        stop = StopSignal(config.faults.signal_grace_s, parent, announce)
        try:
            with ExitStack() as opened:
                try:
                    with display.phase("joining the ranks"):
                        uses_deep_ep = config.model.moe_token_dispatcher_type == "flex"
                        device = prepare_device(uses_deep_ep=uses_deep_ep)
                        # megatron-core is imported once prepare_device() has adapted it
                        from r3train.launch.start.run_rank import finish, RankOfRun
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
                    RankOfRun(
                        job, rank, words.run_dir, display, stop, parent, opened, servers
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
