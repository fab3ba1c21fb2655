"""``r3train estimate``: what a recipe will hold, and the topologies of so many GPUs that fit."""

from __future__ import annotations

import shlex

import click

from r3train.config.options import parse_train_flags, usage_errors
from r3train.config.recipes import recipe_path
from r3train.config.sources import ConfigError
from r3train.launch.estimate.estimate_lines import GPU_GB, pasted, report, topology_flags
from r3train.launch.estimate.memory_use import GIGA


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipe", required=False)
@click.option("--config", "named", metavar="RECIPE", help="RECIPE, as other commands take it.")
@click.option(
    "--gpus",
    type=click.IntRange(1),
    help="GPUs that train, without those of servers.  [default: --world-size]",
)
@click.option(
    "--gpu-memory-gb",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory of a GPU in 10^9 bytes.  [default: the recipe's gpu_memory_gb, or 80]",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def estimate(
    recipe: str | None,
    named: str | None,
    gpus: int | None,
    gpu_memory_gb: float | None,
    flags: tuple[str, ...],
) -> None:
    """Say what a run of RECIPE will hold and take, from config.json alone, and which topologies fit.

    RECIPE is a TOML file or a recipe's bare name, such as qwen3_30b_a3b; FLAGS (--lora-rank and others) are
    train_async.py's.  The bytes of a rank hold within 15%; the seconds of a step follow from assumed rates.  The
    last lines are a command to paste: a dry run of RECIPE with the flags of the topology that is recommended.  It
    reads no weights, tokenizer or prompts, asks no server, and needs no GPU.  Exit code: 0 if a topology fits, 1
    if none does, 2 wrong usage.
    """
    if named is not None:  # then the first word without a dash is a flag's
        recipe, flags = named, (*filter(None, [recipe]), *flags)
    if recipe is None:
        raise click.UsageError("which recipe? r3train recipes lists those with a name")
    with usage_errors():
        given = ["--config", str(recipe_path(recipe)), *flags]
        config = parse_train_flags(given, prog_name="estimate")
        world_size = gpus or config.run.world_size
        if world_size is None:
            raise ConfigError(f"--gpus is required: {recipe} does not say how many GPUs train")
        gpu_bytes = (gpu_memory_gb or config.run.gpu_memory_gb or GPU_GB) * GIGA
        lines, fits, lack = report(config, world_size, gpu_bytes)
    click.echo("\n".join(lines))
    if lack:
        raise click.ClickException("\n".join(lack))
    start = [f"r3train train --config {shlex.quote(recipe)}", *map(shlex.quote, flags)]
    if world_size != config.run.world_size:
        start.append(f"--world-size {world_size}")
    start.append("--dry-run --estimate")
    click.echo(f"to go on with {fits[0].name}:")
    click.echo(pasted([*start, *topology_flags(config, fits[0].config)]))
