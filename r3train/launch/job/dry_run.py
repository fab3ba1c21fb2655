"""Dry run of a job: its checks, and in words what a run of it would do."""

from __future__ import annotations

import click

from r3train.config import RunConfig
from r3train.cuda_environment import RANK_DEFAULTS
from r3train.launch.estimate.estimate_lines import dry_run_lines
from r3train.launch.gpus import gpus_here
from r3train.launch.job.agent_session import try_session
from r3train.launch.job.checked_job import Job
from r3train.launch.job.preflight import By, preflight, PreflightError


def show_dry_run(config: RunConfig, world_size: int, num_ranks: int | None = None) -> None:
    """Check the settings, and print them and what a run of ``world_size`` ranks would do.

    num_ranks: of this machine, where it is known.
    With --estimate what is not there (weights, data, a server) is a line of the output.
    Raises PreflightError with every fault.
    """
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
            found, failed = try_session(config, job.prompts[0])
            lines, warnings = [*lines, *found], (*warnings, *failed)
        job.close()
    if config.run.estimate:
        lines += dry_run_lines(config, world_size, gpus_here()[1], longest)
    click.echo(config.given_toml())
    click.echo("\n".join(f"# {line}" for line in lines))
    for warning in warnings:  # last: the configuration fills more than a screen
        click.secho(str(warning), fg="yellow", err=True)


def would_run(job: Job, world_size: int) -> list[str]:
    """Lines that say what a run of the job would do, for its dry run."""
    config, lengths = job.config, sorted(job.lengths)
    rollout, num, steps = config.rollout, len(lengths), config.steps_per_rollout
    kind = "conversations" if config.learns_conversations else "prompts"
    sizes = f"{lengths[0]:,} to {lengths[-1]:,} tokens, median {lengths[num // 2]:,}"
    sizes = sizes if lengths[0] < lengths[-1] else f"{lengths[0]:,} tokens each"
    per_epoch = num / rollout.rollout_batch_size
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    dp_size = world_size // config.parallel.dense_ranks
    return [
        f"{num:,} {kind} of {sizes}",
        f"{rollout.num_rollout:,} rollouts of {rollout.rollout_batch_size:,} {kind}: an epoch is"
        f" {per_epoch:,.4g} rollouts, the run {rollout.num_rollout / per_epoch:,.3g} epochs",
        f"a rollout is {samples:,} samples and {steps:,} optimizer step{'s' * (steps != 1)} of"
        f" {samples // steps:,}",
        *job.agent_facts,
        f"{world_size} rank{'s' * (world_size != 1)}, data-parallel size {dp_size}",
        "on CUDA every rank sets, unless you do: "
        + ", ".join(f"{name}={value}" for name, value in RANK_DEFAULTS.items()),
    ]
