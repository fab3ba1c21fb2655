"""Settings of the rollout that would deadlock, never end or give wrong numbers."""

from __future__ import annotations

from collections.abc import Iterator

from r3train.config.run import RunConfig


def rollout_conflicts(config: RunConfig) -> Iterator[str]:
    """Yield a complaint for each pair of settings that contradict each other, with the reason."""
    yield from _sampling(config)
    yield from _buffer(config)
    yield from _filters(config)
    yield from _updates(config)
    yield from _turns(config)
    yield from _servers(config)
    yield from _environment(config)
    yield from _template(config)
    yield from config.trackers.conflicts()


# SGLang 0.5.23 (sampling_params.py) takes a lower temperature for greedy decoding
_LOWEST_TEMPERATURE = 1e-6
# SGLang 0.5.23 (scheduler.py): it says which tokens it kept of at most so many
_KEPT_TOKENS_FLAG, _MOST_KEPT_TOKENS = "sampling_mask_max_tokens", 4096


def _sampling(config: RunConfig) -> Iterator[str]:
    """Yield settings under which SGLang's log-probs are not those of what it drew."""
    rollout = config.rollout
    top_k, temperature = rollout.rollout_top_k, rollout.rollout_temperature
    if top_k == 0:
        yield "rollout_top_k 0 is not a number of tokens: set 1 or more, or -1 for no limit"
    if rollout.rollout_top_p < 1 and top_k == -1:
        yield (
            f"rollout_top_p {rollout.rollout_top_p} needs --rollout-top-k: SGLang says which tokens it kept"
            " only if their number is limited, and without them every ratio would be wrong and no metric"
            f" show it; set a number up to {_MOST_KEPT_TOKENS}"
        )
    if rollout.rollout_top_p < 1 and top_k == 1:
        yield (
            f"rollout_top_p {rollout.rollout_top_p} is without effect: rollout_top_k 1 is greedy decoding"
        )
    most = rollout.sglang.get(_KEPT_TOKENS_FLAG, _MOST_KEPT_TOKENS)
    if isinstance(most, int) and top_k > most:
        yield (
            f"rollout_top_k {top_k} is above {most}, the most tokens of which SGLang says that it kept"
            f" them: set less, or more in sglang.{_KEPT_TOKENS_FLAG}"
        )
    if rollout.replays_sampling_mask and config.algorithm.loss_type == "sft":
        yield f"rollout_top_k {top_k} is without effect: --loss-type sft draws no token"
    if temperature < _LOWEST_TEMPERATURE:
        yield (
            f"rollout_temperature {temperature} is greedy decoding for SGLang, whose log-probs are"
            " then those at temperature 1, while the actor would compute them at"
            f" {temperature}: set rollout_top_k 1 and rollout_temperature 1.0"
        )
    elif top_k == 1 and temperature != 1.0:
        yield (
            f"rollout_top_k 1 is greedy decoding: SGLang ignores rollout_temperature {temperature}"
            " and reports log-probs at temperature 1, while the actor would compute them at"
            f" {temperature}: set rollout_temperature 1.0"
        )


def _buffer(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    batch, submitted = rollout.rollout_batch_size, rollout.groups_per_rollout
    if submitted < batch:
        yield (
            f"over_sampling_batch_size {submitted} is below rollout_batch_size {batch}: a rollout"
            " would never be complete"
        )
    size = rollout.rollout_buffer_size
    if size is not None and size < max(batch, submitted):
        name = "rollout_batch_size" if submitted <= batch else "over_sampling_batch_size"
        yield (
            f"rollout_buffer_size {size} is below {name} {max(batch, submitted)}: training would"
            " wait for groups that never fit"
        )
    if rollout.stale_policy == "regenerate" and submitted <= batch:
        yield (
            "--stale-policy regenerate needs --over-sampling-batch-size above rollout_batch_size:"
            " in the order of the prompts no group gets stale"
        )


def _filters(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if "zero_variance" not in rollout.rollout_filter:
        return
    if rollout.n_samples_per_prompt < 2:
        yield (
            "--rollout-filter zero_variance needs n_samples_per_prompt above 1: every group of one"
            " would be dropped, and no rollout ever complete"
        )
    if rollout.rollout_top_k == 1:
        yield (
            "--rollout-filter zero_variance cannot go with rollout_top_k 1: greedy samples of a"
            " prompt are equal, so every group would be dropped"
        )


def _updates(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    mode = rollout.pause_generation_mode
    if mode == "retract" and config.replay.use_rollout_routing_replay:
        yield (
            "--pause-generation-mode retract cannot go with --use-rollout-routing-replay: SGLang"
            " recomputes the rows of a retracted request with the new weights, and they no longer"
            " describe the log-probs that were kept; use in_place or abort"
        )
    if mode == "drain":
        return
    if rollout.max_weight_staleness == 0:
        yield (
            f"--pause-generation-mode {mode} needs max_weight_staleness above 0: a rollout that"
            " spans an update is at least one version old"
        )
    if (
        "disable_overlap_schedule" in rollout.sglang
        and not rollout.sglang["disable_overlap_schedule"]
    ):
        yield (
            f"sglang.disable_overlap_schedule is off, and --pause-generation-mode {mode} needs it:"
            " with overlap the version of the token at an update is off by one"
        )


def _turns(config: RunConfig) -> Iterator[str]:
    """Yield settings of a run that --colocate cannot divide into turns."""
    rollout = config.rollout
    if not rollout.colocate:
        return
    if rollout.max_weight_staleness:
        yield (
            "--colocate: nothing is generated while the ranks train, so"
            f" max_weight_staleness must be 0, not {rollout.max_weight_staleness}"
        )
    if rollout.rollout_external_engine_addrs:
        yield (
            "--colocate is for servers that the run starts on its own GPUs, and"
            " --rollout-external-engine-addrs names others: leave one out"
        )
    if config.serves_adapters:
        yield (
            "--colocate cannot go with --lora-serving adapter: the base would be lost with the servers'"
            " memory; --lora-serving merged sends all weights"
        )
    if not config.has_engines or config.checkpoint.debug_rollout_only:
        yield "--colocate: this run does not both generate and train, so there are no turns to take"


def _servers(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if None not in (rollout.sglang_server_concurrency, rollout.rollout_max_concurrency):
        yield (
            "--sglang-server-concurrency is for each server and --rollout-max-concurrency for all of"
            " them: give one of the two"
        )
    others = rollout.rollout_external_engine_addrs
    for flag, given in (
        ("--rollout-num-engines", rollout.rollout_num_engines > 1),
        ("--rollout-server-env", rollout.rollout_server_env),
    ):
        if others and given:
            yield (
                f"{flag} is of our local servers, and --rollout-external-engine-addrs names others:"
                " give one of the two"
            )
    if len(set(others)) < len(others):
        yield "--rollout-external-engine-addrs names a server twice"


def _template(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.apply_chat_template:
        return
    for name in ("apply_chat_template_kwargs", "tool_key"):
        if getattr(data, name):
            yield f"{name} is for the chat template: add --apply-chat-template"


def _environment(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.environment is not None and config.data.group_rm:
        yield "--group-rm scores answers of one turn: an --environment gives rewards of its own"
    if rollout.environment is None:
        if rollout.environment_samples == "turn":
            yield "--environment-samples turn needs --environment"
        return
    if rollout.environment_samples == "turn" and config.steps_per_rollout > 1:
        yield (
            "--environment-samples turn makes as many samples as there are turns, which do not"
            " divide into optimizer steps: leave global_batch_size unset"
        )
