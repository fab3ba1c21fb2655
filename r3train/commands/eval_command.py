"""``r3train eval``: the evaluation of a training run, on a checkpoint and without training."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r3train.config import RunConfig
from r3train.config.options import parse_train_flags, usage_errors
from r3train.engine.backend import EngineError
from r3train.generation.eval_sets import EvalSet, Row, evaluate
from r3train.launch.gpus import server_gpus_here
from r3train.launch.job.checked_job import Job, eval_settings
from r3train.launch.job.preflight import preflight_evaluation
from r3train.launch.job.run_dir import claim_directories, open_run_dir, raise_file_limit
from r3train.observe.console import RunDisplay
from r3train.observe.metrics import MetricsWriter
from r3train.user_code import find_modules_here

if TYPE_CHECKING:
    from r3train.launch.start.rollouts import GeneratedRollouts

# fields that a configuration needs and an evaluation does not
_UNUSED = ("--num-rollout", "1", "--rollout-batch-size", "1", "--prompt-data", "none")
# what is evaluated is the checkpoint, whatever the recipe trains.  Another job may hold the recipe's
# directory of checkpoints.  Nothing starts a server again: its end is the evaluation's
_OVERRIDDEN = tuple(
    "--no-use-rollout-routing-replay --lora-serving merged --save none --max-engine-restarts 0".split()
)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def evaluate_command(checkpoint: Path, flags: tuple[str, ...]) -> None:
    """Evaluate CHECKPOINT, a Hugging Face directory; FLAGS are those of train_async.py.

    With --config FILE.toml the evaluation sets and their settings are the run's.  It starts a server of its
    own and ends it, or asks those of --rollout-external-engine-addrs.  Rows and numbers go to --run-dir.
    The exit code is 1 if a set could not be evaluated.
    """
    find_modules_here()
    config = parse_train_flags(with_defaults(checkpoint, flags), prog_name="eval")
    with usage_errors():
        server_gpus_here(config, num_ranks=0)
        job = preflight_evaluation(config)
    if config.run.dry_run:
        click.echo(config.given_toml())
        job.close()
        return
    with ExitStack() as claims:
        with usage_errors():
            run_dir = claim_directories(config, claims)
        raise_file_limit()
        open_run_dir(config, run_dir, lambda value: value)
        sys.exit(evaluate_job(job, run_dir))


def evaluate_job(job: Job, run_dir: Path) -> int:
    """Evaluate every set of a checked job on a server, and write it; returns the exit code."""
    # they import torch, which --help does without
    from r3train.launch.start import rollouts as generated, servers as of_run
    from r3train.loop.run_evaluations import write_evaluation
    from r3train.loop.route_transport import RoutesOnRank0

    config, settings, code = job.config, eval_settings(job), 0
    live = None if config.run.progress else False
    with RunDisplay(1, enabled=True, live=live) as display, ExitStack() as parts:
        display.note(f"run directory: {run_dir}")
        for warning in job.warnings:
            display.note(str(warning), style="yellow")
        servers = of_run.RunServers(job, run_dir, display, RoutesOnRank0(None, ()))
        parts.callback(servers.close)
        rollouts = generated.GeneratedRollouts(servers)
        parts.callback(rollouts.close)
        try:
            servers.start(num_ranks=0)
            servers.wait_ready()
        except EngineError as error:
            display.error(error, run_dir / "logs")
            return 1
        metrics = parts.enter_context(MetricsWriter(run_dir, config.run.tensorboard))
        for eval_set in rollouts.eval_sets():
            try:
                rows = _rows(rollouts, eval_set, config, display)
            except (EngineError, ValueError) as error:
                display.note(f"{eval_set.name} was not evaluated: {error}", style="red")
                code = 1
                continue
            version = rows[0]["version"]
            display.note(
                write_evaluation(metrics, eval_set, version, settings[eval_set.name], rows)
            )
    return code


def with_defaults(checkpoint: Path, flags: tuple[str, ...]) -> list[str]:
    """The flags of a whole configuration: these, the checkpoint, and values for what is unused."""
    words = list(flags)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    before = ["--run-dir", f"runs/{stamp}-eval"]
    if not any(word.partition("=")[0] == "--config" for word in words):
        before += _UNUSED
        for i, word in enumerate(words):  # the longest answer is known, whichever flag says it
            if word.partition("=")[0] == "--eval-max-response-len":
                value = word.partition("=")[2] or "".join(words[i + 1 : i + 2])
                before += ["--rollout-max-response-len", value]
    return [*before, *words, "--hf-checkpoint", str(checkpoint), *_OVERRIDDEN]


def _rows(
    rollouts: GeneratedRollouts, eval_set: EvalSet, config: RunConfig, display: RunDisplay
) -> list[Row]:
    total, done = len(eval_set.prompts) * eval_set.num_samples, 0

    async def run() -> list[Row]:
        client = rollouts.make_client()
        try:
            room = asyncio.Semaphore(config.rollout.max_concurrency)
            begun = asyncio.Semaphore(config.max_sessions)
            return await evaluate(eval_set, client, None, lambda: room, on_answer, lambda: begun)
        finally:
            await rollouts.end_sessions()
            await client.aclose()

    def on_answer() -> None:
        nonlocal done
        done += 1
        phase.detail(f"{done}/{total} answers")

    with display.phase(f"evaluating {eval_set.name}") as phase:
        return asyncio.run(run())
