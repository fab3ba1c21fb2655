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
    "--world-size", type=click.IntRange(1), help="Ranks in all.  [default: $WORLD_SIZE or 1]"
)
@click.option("--port", "ports", type=int, multiple=True, help="A port the run will listen on.")
@click.option(
    "--probe", is_flag=True, help="Start a server and an actor and compare them (minutes)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def doctor(
    world_size: int | None,
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
    world = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    findings: list[Finding] = []
    show = None if as_json else _Printer()
    for finding in diagnose(config, world, ports, probe=probe):
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
    config: Any | None, world_size: int, ports: tuple[int, ...] = (), *, probe: bool = False
) -> Iterator[Finding]:
    """All findings, cheap ones first; ``config`` is a RunConfig or None."""
    from r3train.doctor import machine, model, versions

    num_gpus, gpu_bytes = _gpus()
    yield from versions.check_versions(cuda=bool(num_gpus))
    yield from machine.check_devices(num_gpus, gpu_bytes, world_size, os.cpu_count() or 1)
    yield from machine.check_shared_memory(world_size)
    for port in ports:
        yield from machine.check_port("port", "127.0.0.1", port)
    rendezvous = os.environ.get("MASTER_PORT")
    if rendezvous and rendezvous.isdigit() and os.environ.get("RANK") is None:
        yield from machine.check_port("MASTER_PORT", "127.0.0.1", int(rendezvous))
    if config is None:
        return
    failed = False
    for finding in _of_config(config, world_size, num_gpus, gpu_bytes):
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

        yield from probe_engines(config)


def _of_config(config, world_size: int, num_gpus: int, gpu_bytes: int) -> Iterator[Finding]:
    import psutil

    from r3train.config.hf_facts import read_hf_facts
    from r3train.doctor import estimates, machine, model
    from r3train.doctor.finding import problem
    from r3train.rollout.engine_key import engine_api_key

    yield from model.check_config(config, world_size)
    yield from model.check_checkpoint(config)
    try:
        hf = read_hf_facts(config.model.hf_checkpoint)
    except ValueError:
        hf = None
    yield from model.check_tokenizer(config, hf)
    host, port = config.rollout.sglang.get("host", "127.0.0.1"), config.rollout.sglang.get("port")
    if port is not None:
        yield from machine.check_port("SGLang", str(host), int(port))
    api_key = None
    try:
        api_key = engine_api_key(os.environ)
    except ValueError as error:
        yield problem("key of the servers", str(error), "set another one, or none")
    for address in config.rollout.rollout_external_engine_addrs:
        yield from machine.check_external_server(address, api_key)
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
    if not num_gpus:
        needed = e.rank_bytes * world_size + 2 * weights.num_bytes + (world_size + 1) * (1 << 29)
        yield from machine.check_memory(psutil.virtual_memory().available, needed)
    yield from estimates.describe(e, config, gpu_bytes)


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
