"""``r3train doctor``: checks as a table, and an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from r3train.doctor.finding import FACT, OK, PROBLEM, WARNING, Finding

_STYLE = {OK: "green", FACT: "cyan", WARNING: "yellow", PROBLEM: "bold red"}


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--world-size",
    type=click.IntRange(1),
    envvar="WORLD_SIZE",
    default=1,
    help="Ranks in all.  [default: $WORLD_SIZE or 1]",
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(1),
    envvar="LOCAL_WORLD_SIZE",
    help="Ranks on this node.  [default: $LOCAL_WORLD_SIZE, or all that its GPUs take]",
)
@click.option(
    "--port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    help="A port the run will listen on.",
)
@click.option(
    "--probe", is_flag=True, help="Start a server and an actor and compare them (minutes)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def doctor(
    world_size: int,
    nproc_per_node: int | None,
    ports: tuple[int, ...],
    probe: bool,
    as_json: bool,
    flags: tuple[str, ...],
) -> None:
    """Look for what will go wrong; FLAGS (--config FILE.toml and others) are train_async.py's.

    Exit code: 0 without problems (warnings may be there), 1 with problems, 2 wrong usage.
    """
    config = _config(flags) if flags else None
    if probe and config is None:
        raise click.UsageError("--probe needs a configuration: --config FILE.toml")
    if nproc_per_node is not None and nproc_per_node > world_size:
        raise click.UsageError(
            f"--nproc-per-node (LOCAL_WORLD_SIZE) {nproc_per_node} is more than --world-size "
            f"(WORLD_SIZE) {world_size}, the ranks in all"
        )
    findings: list[Finding] = []
    show = None if as_json else _Printer()
    for finding in diagnose(config, world_size, ports, nproc_per_node=nproc_per_node, probe=probe):
        findings.append(finding)
        if show is not None:
            show(finding)
    problems = sum(f.level == PROBLEM for f in findings)
    warnings = sum(f.level == WARNING for f in findings)
    if as_json:
        click.echo(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        click.echo(f"{problems} problem(s), {warnings} warning(s)")
    sys.exit(1 if problems else 0)


def diagnose(
    config: Any | None,
    world_size: int,
    ports: tuple[int, ...] = (),
    *,
    nproc_per_node: int | None = None,
    probe: bool = False,
) -> Iterator[Finding]:
    """All findings, cheap ones first; ``config`` is a RunConfig or None.

    world_size: ranks in all.  nproc_per_node: those of this node; None means as many as its GPUs
    take, and without GPUs all of them.
    """
    from r3train.doctor import machine, model, versions
    from r3train.launch.gpus import ranks_that_fit

    num_gpus, gpu_bytes = _gpus()
    yield from versions.check_versions(cuda=bool(num_gpus))
    here = nproc_per_node or ranks_that_fit(world_size, num_gpus)
    yield from machine.check_devices(num_gpus, gpu_bytes, world_size, here, os.cpu_count() or 1)
    yield from machine.check_shared_memory(here)
    for port in ports:
        yield from machine.check_port("port", "127.0.0.1", port)
    rendezvous = os.environ.get("MASTER_PORT")
    if rendezvous and os.environ.get("RANK") is None:
        yield from machine.check_port("MASTER_PORT", "127.0.0.1", rendezvous)
    if config is None:
        return
    failed = False
    for finding in _of_config(config, world_size, here, num_gpus, gpu_bytes):
        failed |= finding.level == PROBLEM
        yield finding
    if not failed:
        for finding in model.check_preflight(config, world_size):
            failed |= finding.level == PROBLEM
            yield finding
    if probe and failed:
        from r3train.doctor.finding import warning

        yield warning("probe", "not run: the problems above come first", "solve them, run it again")
    elif probe:
        from r3train.doctor.probe import probe_engines

        yield from probe_engines(config, gpu_bytes)


def _of_config(
    config, world_size: int, nproc_per_node: int, num_gpus: int, gpu_bytes: int
) -> Iterator[Finding]:
    import psutil

    from r3train.config.hf_facts import read_hf_facts
    from r3train.doctor import estimates, gpus, machine, model
    from r3train.doctor.finding import problem
    from r3train.engine.key import engine_api_key

    yield from model.check_config(config, world_size)
    yield from model.check_checkpoint(config)
    try:
        hf = read_hf_facts(config.model.hf_checkpoint)
    except ValueError:
        hf = None
    yield from model.check_tokenizer(config, hf)
    host, port = config.rollout.sglang.get("host", "127.0.0.1"), config.rollout.sglang.get("port")
    if port is not None:
        yield from machine.check_port("SGLang", str(host), port)
    api_key = None
    try:
        api_key = engine_api_key(os.environ)
    except ValueError as error:
        yield problem("key of the servers", str(error), "set another one, or none")
    for address in config.rollout.rollout_external_engine_addrs:
        yield from machine.check_external_server(address, api_key)
    yield from gpus.check_placement(config, num_gpus, nproc_per_node)
    run_dir = config.run.run_dir or Path("runs")
    try:
        weights = model.read_weights(config.model.hf_checkpoint) if hf else None
    except ValueError:
        weights = None
    if weights is None:
        yield from machine.check_room("run directory", run_dir, 1 << 30)
        return
    e = estimates.estimate(config, hf, weights, world_size)
    disk = 256 << 20
    if config.trainer.update_weight_transfer_mode == "disk":
        disk += 2 * weights.num_bytes
    yield from machine.check_room("run directory", run_dir, disk)
    if config.checkpoint.save is not None:
        # the new one is complete before the old one goes
        kept = (config.checkpoint.save_keep_last or 2) + 1
        yield from machine.check_room(
            "checkpoints", config.checkpoint.save, kept * e.checkpoint_bytes
        )
    on_host = (nproc_per_node + 1) * estimates.PROCESS_BYTES + e.reference_bytes * nproc_per_node
    if num_gpus:
        yield from gpus.check_gpu_memory(config, e, gpu_bytes, num_gpus, nproc_per_node)
    else:
        on_host += e.rank_bytes * nproc_per_node + 2 * weights.num_bytes
    yield from machine.check_memory(psutil.virtual_memory().available, on_host)
    yield from estimates.describe(e, config)


def _gpus() -> tuple[int, int]:
    """(how many, the smallest one's bytes)."""
    try:
        import torch
    except ImportError:
        return 0, 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return count, min(sizes, default=0)


def _config(flags: tuple[str, ...]) -> Any:
    from r3train.config import RunConfig
    from r3train.config.options import train_options

    found: list[RunConfig] = []
    train_options(found.append).main(args=list(flags), prog_name="doctor", standalone_mode=False)
    if not found:
        raise click.exceptions.Exit(0)
    return found[0]


class _Printer:
    """One line a finding, as it comes; the remedy below it."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())

    def __call__(self, finding: Finding) -> None:
        from rich.text import Text

        head = Text(f"{finding.level:>8}  ", style=_STYLE[finding.level])
        self._console.print(Text.assemble(head, (f"{finding.subject}: ", "bold"), finding.text))
        if finding.remedy:
            self._console.print(Text(f"          remedy: {finding.remedy}", style="dim"))
