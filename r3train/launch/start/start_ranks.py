"""``r3train train``: start the ranks of this machine, wait for them, and end as they do.

The ranks are those of ``torchrun train_async.py``: torch's own launcher starts them, with a static rendezvous,
from which nothing is unpickled.  What a rank has said is the last thing on the screen: of its own the launcher
adds one line, and only where no rank could speak.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click
import psutil

from r3train.config import RunConfig
from r3train.config.options import train_options, usage_errors
from r3train.cuda_environment import visible_gpus
from r3train.engine.server import free_port
from r3train.launch.gpus import server_gpus
from r3train.launch.start.train import ignore_signals
from r3train.torchrun_start import silence_failures, unspoken
from r3train.user_code import find_modules_here

PROGRAM = "r3train.launch.start.train"
_MEETING_PORT = 29500  # of several machines, as torchrun's
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
OPTIONS = (
    click.Option(
        ["--nproc-per-node"],
        type=click.IntRange(1),
        metavar="N",
        help="Ranks on this machine.  Unset: one per GPU that no server takes; on a CPU as few as the"
        " parallel sizes allow.",
    ),
    click.Option(
        ["--nnodes"], type=click.IntRange(1), metavar="N", default=1, help="Machines.  [default: 1]"
    ),
    click.Option(
        ["--node-rank"],
        type=click.IntRange(0),
        metavar="N",
        default=0,
        help="Number of this machine, from 0.  [default: 0]",
    ),
    click.Option(
        ["--rdzv-endpoint", "--master-addr"],
        metavar="HOST[:PORT]",
        help="Where the machines meet: machine 0, as all of them reach it, in a network that you trust.",
    ),
)


def _start(
    config: RunConfig,
    nproc_per_node: int | None,
    nnodes: int,
    node_rank: int,
    rdzv_endpoint: str | None,
) -> None:
    """Train with rollouts from SGLang and a Megatron actor: starts the ranks of this machine.

    Exit codes: 0; 2 for a wrong setting; 1 where the run failed; 128 and the signal's number where one has
    stopped it and nothing was saved.
    """
    find_modules_here()
    with usage_errors():
        num_ranks = ranks_here(config, nproc_per_node, nnodes)
        if config.run.dry_run:
            from r3train.launch.job.dry_run import show_dry_run  # all that a start reads

            show_dry_run(config, num_ranks * nnodes, num_ranks)
            return
        host, port = meeting(nnodes, node_rank, rdzv_endpoint)
    flags = without(OPTIONS, click.get_current_context().meta["words"])
    code = start_ranks(flags, num_ranks, nnodes, node_rank, host, port)
    ignore_signals()
    sys.exit(code)


train_command = train_options(_start, OPTIONS)


def train(
    config: RunConfig,
    *,
    nproc_per_node: int | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
) -> int:
    """Train as ``r3train train`` does with these settings; returns its exit code.

    Raises ValueError for ranks that do not fit the settings.  Relative paths are of the working directory.
    """
    num_ranks = ranks_here(config, nproc_per_node, nnodes)
    host, port = meeting(nnodes, node_rank, rdzv_endpoint)
    with tempfile.TemporaryDirectory(prefix="r3train-") as directory:
        file = Path(directory) / "config.toml"
        file.write_text(config.to_toml(), encoding="utf-8")
        return start_ranks(["--config", str(file)], num_ranks, nnodes, node_rank, host, port)


def ranks_here(config: RunConfig, given: int | None, nnodes: int) -> int:
    """Return the ranks on this machine: those asked for, or as many as the settings need.

    That is run.world_size over the machines; else with GPUs one for each that no server of this machine takes;
    else the fewest that the parallel sizes allow.  Raises ValueError if none fit.
    """
    total = config.run.world_size
    if given is not None:
        if total is not None and total != given * nnodes:
            raise ValueError(
                f"--nproc-per-node {given} on {nnodes} machines: run.world_size is {total}"
            )
        return given
    if total is not None:
        if total % nnodes:
            raise ValueError(f"run.world_size {total} is not a multiple of --nnodes {nnodes}")
        return total // nnodes
    unit = config.parallel.fewest_ranks
    here = unit // math.gcd(unit, nnodes)  # so that all machines together have a multiple of unit
    gpus = visible_gpus()
    if not gpus:
        return here
    taken = 0
    if not config.rollout.colocate:
        taken = sum(map(len, server_gpus(config, num_ranks=0, num_visible=gpus)))
    if (gpus - taken) < here:
        raise ValueError(
            f"{gpus} GPUs are visible, and the run's servers take {taken}: the parallel sizes need {here} ranks"
            " on this machine (--nproc-per-node)"
        )
    return (gpus - taken) // here * here


def meeting(nnodes: int, node_rank: int, endpoint: str | None) -> tuple[str, int]:
    """Return the host and port of the rendezvous; raises ValueError for machines that could not meet."""
    if nnodes == 1 and endpoint is None:
        return "127.0.0.1", free_port("127.0.0.1")
    if endpoint is None:
        raise ValueError(f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT of machine 0")
    if node_rank >= nnodes:
        raise ValueError(f"--node-rank {node_rank} is none of --nnodes {nnodes}, counted from 0")
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):  # an IPv6 address has colons of its own
        host, port = endpoint, str(_MEETING_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--rdzv-endpoint {endpoint}: expected HOST or HOST:PORT")
    return host, int(port)


def start_ranks(
    flags: Sequence[str], num_ranks: int, nnodes: int, node_rank: int, host: str, port: int
) -> int:
    """Start this machine's ranks with ``flags``, wait for their end, and return the run's exit code."""
    if num_ranks > 1:  # as torchrun; a rank on a CPU takes its share anew
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    logs = tempfile.TemporaryDirectory(prefix="r3train-ranks-", ignore_cleanup_errors=True)
    stop = _Forwarder(Path(logs.name))
    with logs, stop.installed():
        gc.disable()  # while torch is imported, of which it would be a third
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch, LaunchConfig

        gc.enable()
        silence_failures()
        launch = LaunchConfig(
            min_nodes=nnodes,
            max_nodes=nnodes,
            nproc_per_node=num_ranks,
            run_id="r3train",
            rdzv_backend="static",
            rdzv_endpoint=f"{host}:{port}",
            rdzv_configs={"rank": node_rank},
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(logs.name),
            signals_to_handle="SIGQUIT",  # the others are forwarded, and the ranks end in their time
        )
        # $$: torch's launcher puts the rank's number for $local_rank in every word, and $ for $$
        # -P: no file of the working directory stands for a module of the program
        command = ("-P", "-u", "-m", PROGRAM, *(word.replace("$", "$$") for word in flags))
        try:
            elastic_launch(launch, sys.executable)(*command)
        except ChildFailedError as error:
            code = next(iter(error.failures.values())).exitcode
            if stop.received and code == -stop.received:  # from the first step on a rank handles it
                click.echo(f"stopped by {stop.name} before the first step", err=True)
                return 128 + stop.received
            if (code < 0 or not stop.received) and (line := unspoken(error)):
                click.echo(line, err=True)
            return max(code, 1)
        except DistError as error:
            first = " ".join(str(error).split())
            click.echo(f"Error: the ranks cannot meet at {host}:{port}: {first}", err=True)
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


class _Forwarder:
    """Passes signals to the ranks, which save and end; before there are any, a signal ends the process.

    logs: the launcher's directory for the ranks, in which it makes one before it starts them.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.received: int | None = None

    @property
    def name(self) -> str:
        return signal.Signals(self.received).name

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals in the block, but a SIGHUP that is ignored (nohup)."""
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [n for n in _FORWARDED if not (n == signal.SIGHUP and ignored)]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
        ranks = psutil.Process().children()
        for rank in ranks:
            try:
                rank.send_signal(number)
            except psutil.NoSuchProcess:
                pass
        if not ranks and not any(self._logs.iterdir()):  # else they have ended
            self._logs.rmdir()
            click.echo(f"stopped by {self.name} before the first step", err=True)
            os._exit(128 + number)


def without(options: Sequence[click.Option], words: Sequence[str]) -> list[str]:
    """Return the words of a command line without these options and their values."""
    ours = {name for option in options for name in option.opts}
    rest, left = [], list(words)
    while left:
        word = left.pop(0)
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") not in ours:
            rest.append(word)
        elif not equals:
            left.pop(0)
    return rest
