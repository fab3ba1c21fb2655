"""The engine of requirements.py, and rules between the settings and the ranks or the checkpoint.

Every rule yields complaints.  The checks raise all of them at once, and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from r3train.config.requirements import Condition, Requirement
from r3train.config.run import RunConfig
from r3train.config.sources import ConfigError, places, raise_all

_PLACES = places(RunConfig)
# of Adam; the demo's tiny model learns at 2e-3
_HIGH_LR = 1e-2
_SIZES = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
_SIZES += ("expert_model_parallel", "expert_tensor_parallel")


def requirements_of(name: str) -> tuple[Requirement, ...]:
    """Return the requirements of a setting: those of every field of its section, then those of its own annotation."""
    place = _PLACES[name]
    every = RunConfig.model_fields[place.section].annotation.every_field
    annotated = (mark for mark in place.info.metadata if isinstance(mark, Requirement))
    return (*(asked for asked in every if name not in asked.but), *annotated)


class Broken(NamedTuple):
    """A broken rule.  Rules written as methods of a section have no name, asked and condition."""

    section: str
    complaint: str
    name: str = ""
    asked: Requirement | None = None
    condition: Condition | None = None


def broken(config: RunConfig) -> Iterator[Broken]:
    """Yield each broken rule between settings.  A setting that fails an ``excludes`` rule is not checked further."""
    for section, info in RunConfig.model_fields.items():
        for name in info.annotation.model_fields:
            found = [
                Broken(section, text, name, asked, condition)
                for asked in requirements_of(name)
                for condition, text in asked.broken(_PLACES[name], config)
            ]
            gone = [rule for rule in found if rule.asked.verb == "cannot go with"]
            yield from gone or found
        for method in vars(info.annotation).values():
            if getattr(method, "is_check", False):
                for text in method(getattr(config, section), config):
                    yield Broken(section, text)


def check_static(config: RunConfig, world_size: int) -> None:
    """Check the settings only; raises ConfigError with every rule that is broken."""
    raise_all([*_ranks(config, world_size), *(rule.complaint for rule in broken(config))])


def check_evaluation(config: RunConfig) -> None:
    """Check the settings of an evaluation without training; raises ConfigError as ``check_static`` does."""
    raise_all(rule.complaint for rule in broken(config) if rule.section == "eval")


def check_longest_sample(config: RunConfig, longest_prompt: int) -> None:
    """Check that a microbatch can hold the longest sample; raises ConfigError.

    longest_prompt: tokens of the longest prompt there is.
    """
    if not config.has_engines:
        return
    response = config.rollout.rollout_max_response_len
    tokens, cp = config.trainer.max_tokens_per_gpu, config.parallel.context_parallel_size
    longest, room = longest_prompt + response, tokens * cp
    if longest > room:
        raise ConfigError(
            f"max_tokens_per_gpu {tokens} * context_parallel_size {cp} = {room} is below the longest"
            f" possible sample: the longest prompt's {longest_prompt} + rollout_max_response_len"
            f" {response} = {longest} tokens"
        )


def replay_warnings(config: RunConfig) -> list[str]:
    """Return warnings about R3 settings without effect, to show once at start-up."""
    if config.replay.use_rollout_routing_replay:
        return []
    if config.replay.enable_r3_correctness_check:
        return [
            "--enable-r3-correctness-check has no effect without --use-rollout-routing-replay:"
            " no R3 evidence will be written"
        ]
    return []


def algorithm_warnings(config: RunConfig) -> list[str]:
    """Return warnings about a learning rule that works and seldom learns, to show at start-up."""
    algorithm, rollout = config.algorithm, config.rollout
    warnings = []
    if algorithm.loss_type == "sft":
        return warnings
    # at 1 the policy has moved by one step, which the loss's own clip is made for
    if rollout.max_weight_staleness > 1 and not algorithm.corrects_rollouts:
        warnings.append(
            "rollouts may be"
            f" {rollout.max_weight_staleness} weight versions old (--max-weight-staleness), and nothing"
            " corrects for it: see --rollout-is, --rollout-rs, --ratio-anchor rollout"
        )
    if algorithm.policy_loss == "gspo" and max(algorithm.eps_clip, algorithm.clip_high) > 1e-2:
        warnings.append(
            f"gspo with eps_clip {algorithm.eps_clip} and eps_clip_high {algorithm.clip_high} hardly"
            " ever clips: a sample's ratio is near 1; usual are 3e-4 and 4e-4"
        )
    return warnings


def rate_warnings(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield learning rates that work and are seldom meant, each with a remedy."""
    trainer = config.trainer
    steps = config.rollout.num_rollout * config.steps_per_rollout
    if trainer.lr_warmup_iters > steps:
        share = steps / trainer.lr_warmup_iters
        yield (
            f"lr_warmup_iters {trainer.lr_warmup_iters:,} is above the run's {steps:,} optimizer steps: the"
            f" learning rate ends at {share:.2g} of lr"
        ), "lower --lr-warmup-iters"
    if trainer.optimizer == "adam" and trainer.lr > _HIGH_LR:
        yield (
            f"lr {trainer.lr:g} is high: a step of Adam moves every weight by about lr"
        ), "usual are 1e-6 for all weights and 1e-5 to 1e-4 for adapters"


def _ranks(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield sizes of the topology, the batch and the profile that do not fit the number of ranks."""
    parallel, run = config.parallel, config.run
    sizes = {name: getattr(parallel, f"{name}_size") for name in _SIZES}
    tp, pp, cp, ep, etp = (f"{name}_size {size}" for name, size in sizes.items())
    counted = ""
    if run.dry_run and run.world_size is None and world_size == 1:
        counted = f"; a dry run counts 1 rank: --world-size {parallel.fewest_ranks}"
    for factors, ranks in (
        ((tp, pp, cp), parallel.dense_ranks),
        ((etp, ep, pp), parallel.expert_ranks),
    ):
        if world_size % ranks:
            product = " * ".join(factors)
            yield f"world size {world_size} is not a multiple of {product} = {ranks}{counted}"
    step, data_ranks = config.samples_per_step, world_size // parallel.dense_ranks
    if step < data_ranks:
        yield (
            f"global_batch_size {step} is below the {data_ranks} data-parallel ranks:"
            " some would train on nothing"
        )
    if strange := [rank for rank in run.profile_ranks if not 0 <= rank < world_size]:
        yield f"profile_ranks {strange[0]} is none of the {world_size} ranks"
