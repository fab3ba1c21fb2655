"""Estimate of a run in words: what it will hold and take, and the topologies of so many GPUs that fit."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.config.sources import ConfigError, flag_name
from r3train.families.checks.family_checks import check_family
from r3train.families.published import config_directory
from r3train.launch.estimate.memory_use import (
    GIGA,
    SERVER_BYTES,
    Model,
    ServerEstimate,
    StageRanks,
    amount,
    estimate_server,
    gpus_in_words,
    evidence_text,
    route_text,
    server_fraction,
    stages,
    training_checkpoint_bytes,
    value_bytes,
)
from r3train.launch.estimate.step_time import step_time, StepTime
from r3train.launch.estimate.topology_search import MARGIN, Fit, fullest_rank, search

# of an H100 with 80 GB
GPU_GB = 80.0
_SHOWN = 5
_WIDTH = 78  # columns of a line, behind the "# " of a dry run


def topology_flags(given: RunConfig, found: RunConfig) -> list[str]:
    """Return the flags that make the topology of ``found`` out of the configuration ``given``."""
    words = []
    for section in ("parallel", "model", "trainer"):
        before, after = getattr(given, section), getattr(found, section)
        for name in type(after).model_fields:
            value = getattr(after, name)
            if value == getattr(before, name):
                continue
            if name == "optimizer_overrides":
                words += _optimizer_flags(getattr(before, name), value)
            elif isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{flag_name(name)[2:]}")
            else:
                words.append(f"{flag_name(name)} {'none' if value is None else value}")
    return words


def _optimizer_flags(before: dict[str, object], after: dict[str, object]) -> list[str]:
    switched_off = {name: False for name in before if name not in after and before[name] is True}
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    return [
        f"--optimizer-override {name}={str(value).lower()}"
        for name, value in (switched_off | changed).items()
    ]


def pasted(parts: Sequence[str]) -> str:
    """Return a command for a shell, its parts over lines of ``_WIDTH``."""
    lines = [f"  {parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 <= _WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}")
    return " \\\n".join(lines)


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, those wider than ``_WIDTH`` over several."""
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        yield from textwrap.wrap(
            line.lstrip(),
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
            break_long_words=False,
        )


def find_model(config: RunConfig) -> tuple[Model, list[str]]:
    """Return the model of a configuration, and notes; raises ValueError where no config.json is known."""
    directory, note = config_directory(config.model.hf_checkpoint)
    hf = read_hf_facts(directory)
    check_family(hf)
    return Model(hf, config.lora), [note] if note else []


def dry_run_lines(
    config: RunConfig, world_size: int, gpu_bytes: float, longest_prompt: int | None = None
) -> list[str]:
    """Return the estimate for a dry run (--estimate).

    gpu_bytes: of the GPUs here, 0 without.  longest_prompt: its tokens, or a conversation's.
    Raises ValueError where no config.json is known, and for settings that do not go with it.
    """
    given_gb = config.run.gpu_memory_gb
    if given_gb is not None or not gpu_bytes:
        gpu_bytes = (given_gb or GPU_GB) * GIGA
    fullest_rank(config, find_model(config)[0], world_size)
    lines, _, lack = report(config, world_size, gpu_bytes, longest_prompt)
    return [*lines, *lack]


def report(
    config: RunConfig, world_size: int, gpu_bytes: float, longest_prompt: int | None = None
) -> tuple[list[str], list[Fit], list[str]]:
    """Return the lines, the topologies that fit, and where none does the smallest and lines about it.

    The first is the one to go on with: the recipe's own, if it fits and its parts take no longer.
    """
    model, notes = find_model(config)
    most = (1 - MARGIN) * gpu_bytes - _shared(config, gpu_bytes)
    given = None
    try:
        given = fullest_rank(config, model, world_size)
    except ConfigError as error:
        notes += [f"this recipe's topology: {line}" for line in str(error).splitlines()]
    work_s = partial(_work_s, config, model, world_size, gpu_bytes)
    fits, lack = search(config, model, world_size, most, _SHOWN), ""
    if fits[0].fullest.total > most:
        lack = (
            f"nothing fits {gpus_in_words(world_size)} of {gpu_bytes / GIGA:,.0f} GB: the smallest needs"
            f" {amount(fits[0].fullest.total)} per rank ({fits[0].name}), and {MARGIN:.0%} of a GPU is"
            " left for CUDA, NCCL and fragments"
        )
        if not config.lora.enabled:
            lack += "; adapters (--lora-rank 16) and a lower --max-tokens-per-gpu need less"
    elif given and given.fullest.total <= most and work_s(given) <= work_s(fits[0]):
        fits = [given, *fits]
    shown = [] if lack else fits
    lines = _lines(config, model, world_size, gpu_bytes, given, shown, longest_prompt)
    return [*_wrapped(notes), *lines], fits, [*_wrapped([lack])]


def _work_s(config: RunConfig, model: Model, world_size: int, gpu_bytes: float, fit: Fit) -> float:
    """Return the seconds of all parts of a step with a topology, those that others hide too."""
    server = estimate_server(config, model, gpu_bytes)
    time = step_time(fit.config, model, fit.fullest.held, server, world_size, gpu_bytes)
    return sum(seconds for _, seconds, _ in time.parts)


def _shared(config: RunConfig, gpu_bytes: float) -> float:
    """Bytes that a server takes of a rank's GPU all the time (--sglang-base-gpu-id)."""
    rollout = config.rollout
    starts_servers = config.has_engines and not (rollout.has_external_servers or rollout.colocate)
    shares = starts_servers and rollout.sglang.get("base_gpu_id") == 0
    return server_fraction(config, gpu_bytes) * gpu_bytes if shares else 0.0


def _lines(
    config: RunConfig,
    model: Model,
    world_size: int,
    gpu_bytes: float,
    given: Fit | None,
    fits: list[Fit],
    longest_prompt: int | None = None,
) -> Iterator[str]:
    total, rows = model.total, [_HEAD]
    text = [
        f"{model.hf.model_type}: {total.total / GIGA:,.1f} billion parameters, {total.expert / GIGA:,.1f} of"
        f" experts, {amount(total.total * value_bytes(config))} of weights"
        + (f"; {total.adapters / GIGA:,.2f} billion of adapters" if config.lora.enabled else "")
    ]
    if given is not None:
        ranks = stages(config, model, world_size)
        rows += [_row("recipe", given, stage, gpu_bytes) for stage in ranks]
        fits = [fit for fit in fits if fit.name != given.name]
    rows += [_row("fits", fit, fit.fullest, gpu_bytes) for fit in fits]
    text.append(
        f"{gpus_in_words(world_size)} of {gpu_bytes / GIGA:,.0f} GB ({amount(gpu_bytes)}) for training; GiB per rank, not measured,"
        " estimated within 15% (r3train docs gpus):"
    )
    yield from _wrapped(text)
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        words = (f"{word:{'<' if i < 3 else '>'}{widths[i]}}" for i, word in enumerate(row))
        yield "  ".join(words)
    assumed = (
        "  held: weights, gradients and optimizer between microbatches; host: its memory for each rank;"
        f" {config.trainer.max_tokens_per_gpu:,} tokens per rank and microbatch (--max-tokens-per-gpu), the same in"
        " all in other topologies; CUDA, NCCL and fragments are on top, 2 to 6 GiB"
    )
    yield from _wrapped([assumed, *_elsewhere(config, model, world_size)])
    if config.has_engines:
        server = estimate_server(config, model, gpu_bytes, longest_prompt)
        yield from _wrapped(_server_lines(config, server, gpu_bytes))
        timed = [fit for fit in (given, *fits) if fit is not None]
        for fit in timed:
            time = step_time(fit.config, model, fit.fullest.held, server, world_size, gpu_bytes)
            yield from _wrapped(_time_lines(config, fit, time, with_parts=fit is timed[0]))


_HEAD = ("", "topology", "ranks", "held", "peak", "GPU", "host")


def _row(mark: str, fit: Fit, stage: StageRanks, gpu_bytes: float) -> tuple[str, ...]:
    """Return the cells of a row, in GiB but for the peak's part of a GPU."""
    held = stage.held
    host = held.offloaded + held.reference
    if fit.config.rollout.colocate:  # while servers generate
        host += held.weights + held.optimizer
    held_gib, peak, on_host = (f"{n / 2**30:,.1f}" for n in (held.rank, stage.total, host))
    ranks = f"{stage.ranks[0]}-{stage.ranks[-1]}"
    return mark, fit.name, ranks, held_gib, peak, f"{stage.total / gpu_bytes:.0%}", on_host


def _elsewhere(config: RunConfig, model: Model, world_size: int) -> Iterator[str]:
    """Yield what the host of rank 0 and the disk hold."""
    hf, weights = model.hf, model.total.total * value_bytes(config)
    if config.replay.use_rollout_routing_replay and hf.is_moe:
        most = config.rollout.buffer_groups * config.rollout.n_samples_per_prompt
        yield (
            f"routes on the host of rank 0: {route_text(config, hf)}; the buffer may hold {most:,} samples"
        )
    if config.has_engines and config.trainer.update_weight_transfer_mode == "shared_memory":
        yield f"weights for the servers, on the host of rank 0: {amount(weights)}"
    if config.has_engines and config.trainer.update_weight_transfer_mode == "disk":
        yield f"weights for the servers, below the run directory: {amount(2 * weights)}"
    if config.r3_check_enabled and hf.is_moe:
        text = evidence_text(config, hf, world_size)
        yield f"evidence on disk, below the run directory: {text}"
    if config.checkpoint.save is not None:
        one = training_checkpoint_bytes(config, model)
        # the new one is complete before the old one goes
        kept = (config.checkpoint.save_keep_last or 2) + 1
        yield f"a training checkpoint: {amount(one)}, {kept} of them {amount(kept * one)} on disk"
        if config.checkpoint.async_save:
            yield f"  {amount(one)} of the hosts' memory while it is written (--async-save)"


def _time_lines(config: RunConfig, fit: Fit, time: StepTime, *, with_parts: bool) -> Iterator[str]:
    """Yield the seconds of a step with a topology, and the flags that make it out of ``config``."""
    if with_parts:
        yield f"seconds of a step on {time.card}s, by assumed rates (r3train docs gpus):"
        parts = (part for part in time.parts if part[1])
        yield from (f"{seconds:8.1f}  {name}: {words}" for name, seconds, words in parts)
    yield f"{fit.name}: {time.seconds:,.0f} s a step, {time.rate:,.0f} tokens/s/GPU"
    if flags := topology_flags(config, fit.config):
        yield from pasted(flags).splitlines()


def _server_lines(config: RunConfig, server: ServerEstimate, gpu_bytes: float) -> Iterator[str]:
    share = min(1.0, server.pool_tokens / server.needed_tokens)
    verdict = "all fit" if share == 1 else f"{share:.0%} fit, the others wait or are computed again"
    where = "" if "base_gpu_id" in config.rollout.sglang else "besides the GPUs that train, "
    where = "colocated with the ranks, " if config.rollout.colocate else where
    yield (
        f"each server, {where}of {gpus_in_words(server.gpus)}: weights"
        f" {amount(server.weights)} per GPU, a pool of {server.pool_tokens:,} tokens;"
        f" {server.in_flight:,} requests at their full length need {server.needed_tokens:,}: {verdict}"
    )
    size = "--sglang-tp-size" if server.is_given else "the fewest GPUs that leave room for a pool"
    yield (
        f"  assumed: {size}; {server_fraction(config, gpu_bytes):.2f} of {amount(gpu_bytes)} for weights and"
        f" pool, {amount(SERVER_BYTES)} of it for CUDA and NCCL; {amount(server.token_bytes)} a token"
    )
