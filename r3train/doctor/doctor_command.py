"""``r3train doctor``: every finding as a line, and an exit code."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict

import click

from r3train.config import RunConfig
from r3train.config.sources import printable
from r3train.doctor.finding import FACT, OK, PROBLEM, WARNING, Finding, Findings
from r3train.doctor.kernels import CARDS
from r3train.doctor.machine import Node
from r3train.launch.gpus import gpus_here
from r3train.user_code import find_modules_here

_STYLE = {OK: "green", FACT: "cyan", WARNING: "yellow", PROBLEM: "red"}


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--world-size",
    type=click.IntRange(1),
    envvar="WORLD_SIZE",
    help="Ranks in all.  [default: $WORLD_SIZE, the configuration's, or as few as it allows]",
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(1),
    envvar="LOCAL_WORLD_SIZE",
    help="Ranks on this node.  [default: $LOCAL_WORLD_SIZE, or all that its GPUs take]",
)
@click.option(
    "--gpu",
    type=click.Choice(list(CARDS)),
    help="The servers' GPU.  [default: the one that is here]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def doctor(
    world_size: int | None,
    nproc_per_node: int | None,
    gpu: str | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> None:
    """Look for what will go wrong; FLAGS (--config FILE.toml and others) are train_async.py's.

    Exit code: 0 without problems (warnings may be there), 1 with problems, 2 wrong usage.
    """
    from r3train.config.options import parse_train_flags

    find_modules_here()
    config = parse_train_flags(flags, prog_name="doctor") if flags else None
    if world_size is None:
        world_size = 1 if config is None else config.run.world_size or config.parallel.fewest_ranks
    if nproc_per_node is not None and nproc_per_node > world_size:
        raise click.UsageError(
            f"--nproc-per-node (LOCAL_WORLD_SIZE) {nproc_per_node} is more than --world-size "
            f"(WORLD_SIZE) {world_size}, the ranks in all"
        )
    findings: list[Finding] = []
    for finding in diagnose(config, world_size, nproc_per_node=nproc_per_node, gpu=gpu):
        findings.append(finding)
        if not as_json:
            _show(finding)
    problems = sum(f.level == PROBLEM for f in findings)
    warnings = sum(f.level == WARNING for f in findings)
    if as_json:
        click.echo(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        click.echo(f"{problems} problem(s), {warnings} warning(s)")
    sys.exit(1 if problems else 0)


def _show(finding: Finding) -> None:
    level, is_problem = f"{finding.level:>8}  ", finding.level == PROBLEM
    level = click.style(level, fg=_STYLE[finding.level], bold=is_problem)
    click.echo(f"{level}{click.style(f'{finding.subject}: ', bold=True)}{printable(finding.text)}")
    if finding.remedy:
        click.secho(f"          remedy: {printable(finding.remedy)}", dim=True)


def diagnose(
    config: RunConfig | None,
    world_size: int,
    *,
    nproc_per_node: int | None = None,
    gpu: str | None = None,
) -> Findings:
    """Yield all findings, cheap ones first; without a configuration those of the machine only.

    world_size: ranks in all.  nproc_per_node: those of this node; None means as many as its GPUs
    take, and without GPUs all of them.  gpu: a name of ``kernels.CARDS``; None means the first that is here.
    """
    from r3train.doctor import kernels, machine, patch_list
    from r3train.launch.gpus import ranks_that_fit

    patches = patch_list.PatchList()
    num_gpus, gpu_bytes = gpus_here()
    num_ranks = nproc_per_node or ranks_that_fit(world_size, num_gpus)
    node = Node(num_gpus, gpu_bytes, world_size, num_ranks)
    yield from machine.check_versions(cuda=bool(num_gpus))
    yield from machine.check_devices(node, os.cpu_count() or 1)
    yield from machine.check_capability(num_gpus)
    if config is None:  # a job's own checks say it too
        yield from machine.check_transformer_engine(num_gpus)
    yield from kernels.check_cudnn(num_gpus)
    nodes = -(-world_size // num_ranks)
    yield from kernels.check_warm_up(num_gpus, nodes, machine.installed_version, os.environ)
    yield from machine.check_shared_memory(num_ranks)
    rendezvous = os.environ.get("MASTER_PORT")
    if rendezvous and os.environ.get("RANK") is None:
        yield from machine.check_port("MASTER_PORT", "127.0.0.1", rendezvous)
    if config is None:
        yield from patches.findings()
        return
    yield from _of_config(config, node, CARDS.get(gpu) or machine.first_card())
    yield from patches.findings()


def _of_config(config: RunConfig, node: Node, card: str | None) -> Findings:
    from r3train.config.hf_facts import read_hf_facts
    from r3train.doctor import kernels, memory, model_checks
    from r3train.families.published import config_directory

    yield from model_checks.check_job(config, node.world_size)
    with suppress(ValueError):  # check_job has said so
        hf = read_hf_facts(config_directory(config.model.hf_checkpoint)[0])
        yield from kernels.check_attention(config, hf, node.num_gpus)
        yield from kernels.check_tuned_experts(config, hf, card, os.environ)
    yield from memory.check_room(config, node)
