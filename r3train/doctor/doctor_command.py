"""``r3train doctor``: every finding as a line, and an exit code."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from r3train.config.options import parse_train_flags
from r3train.config.sources import printable
from r3train.doctor.kernels import CARDS
from r3train.launch.job.finding import FACT, OK, PROBLEM, WARNING, Finding
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
    # it imports all that a start does, which --help does without
    from r3train.doctor.diagnosis import diagnose

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
