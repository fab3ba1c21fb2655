"""``r3train serve``: an SGLang server with the flags that a training run would give it.

It runs servers on other nodes; the trainer gets them by --rollout-external-engine-addrs.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import click

from r3train.config.files import write_atomically
from r3train.families.read_facts import read_hf_facts
from r3train.config.options import parse_train_flags, usage_errors
from r3train.config.sources import ConfigError, printable
from r3train.cuda_environment import visible_gpus
from r3train.hf_checkpoint import check_export
from r3train.launch.gpus import is_follower, gpu_flags
from r3train.launch.start.local_servers import build_server
from r3train.engine.backend import EngineError
from r3train.engine.key import ENGINE_KEY_VARIABLE, engine_api_key
from r3train.engine.flags import check_server_flags
from r3train.engine.server import SGLangServer


_READ_S = 6.0  # within them a run has read its addresses twice


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--host", default="127.0.0.1", show_default=True, help="Name or address to bind.")
@click.option("--port", type=int, help="[default: a free one]")
@click.option(
    "--index", default=0, show_default=True, help="Number among all servers; it sets the seed."
)
@click.option(
    "--local-index",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Number among the servers of this node; it takes the GPUs after those of earlier ones.",
)
@click.option(
    "--num-gpus",
    type=click.IntRange(1),
    help="GPUs of this server on this node; sets --sglang-tp-size, or must agree with the given sizes.",
)
@click.option("--log", type=click.Path(path_type=Path), help="[default: standard output]")
@click.option(
    "--address-file",
    type=click.Path(path_type=Path),
    help="File to hold host:port while the server answers requests.",
)
@click.option(
    "--leave-grace-s",
    type=click.FloatRange(0),
    default=20.0,
    show_default=True,
    help="Seconds that requests in flight get to end after a signal; the address file is away by then.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def serve(
    host: str,
    port: int | None,
    index: int,
    local_index: int,
    num_gpus: int | None,
    log: Path | None,
    address_file: Path | None,
    leave_grace_s: float,
    flags: tuple[str, ...],
) -> None:
    """Run one SGLang server until it is stopped; FLAGS are those of train_async.py.

    Its key is the environment variable R3TRAIN_ENGINE_API_KEY, here and for the trainer.  A host
    other than loopback needs a key.  --dry-run checks and prints the configuration and the server's
    command, and starts nothing; the GPUs of --num-gpus need not be on this machine.
    """
    config = parse_train_flags(flags, prog_name="serve")
    if not config.run.dry_run:  # before torch is imported, which takes long
        click.echo(f"starting SGLang for {config.model.hf_checkpoint} ...")
    num_visible = visible_gpus()
    if config.run.dry_run and num_gpus is not None and not num_visible:
        num_visible = num_gpus * (local_index + 1)
    with usage_errors():
        if config.serves_adapters:
            raise ConfigError(
                "--lora-serving adapter: a run that serves adapters starts its servers itself"
            )
        if config.serves_fp8:
            raise ConfigError("--rollout-weights fp8: a run starts its servers of fp8 itself")
        server_args: dict[str, object] = dict(config.rollout.sglang)
        check_server_flags(server_args, replay=config.replay.use_rollout_routing_replay)
        server_args |= gpu_flags(
            server_args,
            num_gpus=num_gpus,
            local_index=local_index,
            num_visible=num_visible,
        )
        check_export(config.model.hf_checkpoint, weights=not config.run.dry_run)
        hf = read_hf_facts(config.model.hf_checkpoint)
        server = build_server(
            config,
            hf,
            log or Path("/dev/stdout"),
            server_args,
            index,
            host=host,
            port=port,
            device="cuda" if num_visible else None,
            api_key=engine_api_key(os.environ),
        )
    if config.run.dry_run:
        click.echo(f"{config.given_toml()}\n# {shlex.join(server.command())}")
        return
    serve_here(server, None if is_follower(server_args) else address_file, leave_grace_s)


def serve_here(server: SGLangServer, address_file: Path | None, leave_grace_s: float) -> None:
    """Start a server, say where it listens, and wait for its end or a signal; exits with its code."""
    code = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)  # ends the wait
    try:
        server.start()
        click.echo(f"waiting for {server.addr}, at most {server.start_timeout_s:g} s ...")
        server.wait_ready()
        if address_file is not None:
            address_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(address_file, server.addr + "\n")
        click.echo(f"serving {server.model_path} at {server.addr}")
        if server.api_key is None:
            text = "warning: without a key, every user of this machine can replace its weights: set"
            click.secho(
                f"{text} {ENGINE_KEY_VARIABLE} here and for the trainer", fg="yellow", err=True
            )
        while True:
            time.sleep(1.0)
            server.check_alive()
    except KeyboardInterrupt:
        pass
    except EngineError as error:
        click.echo(printable(str(error)), err=True)
        code = 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the end
        if address_file is not None:
            was_named = address_file.exists()
            address_file.unlink(missing_ok=True)
            if was_named and not code:
                _let_calls_end(server, leave_grace_s)
        server.stop()
    sys.exit(code)


def _let_calls_end(server: SGLangServer, grace_s: float) -> None:
    """Wait until a run has read that the address is away (--rollout-engines-file), and no request is in flight."""
    until = time.monotonic() + grace_s
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(_READ_S, left_s))
        if not server.is_busy():
            return
