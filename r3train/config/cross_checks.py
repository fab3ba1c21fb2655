"""Rules between sections, and between the configuration and the checkpoint.

Every rule yields complaints.  The checks raise all of them at once, and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from r3train.config.algorithm_settings import AlgorithmSection
from r3train.config.checkpoint_settings import rollout_path
from r3train.config.eval_checks import eval_conflicts
from r3train.config.evaluation_settings import EvalDataset
from r3train.config.hf_facts import HfModelFacts
from r3train.config.lora_checks import lora_conflicts, model_lora_conflicts
from r3train.config.pipeline_layout import parse_pipeline_layout
from r3train.config.replay_checks import replay_conflicts
from r3train.config.rollout_settings import RolloutSection
from r3train.config.rollout_checks import rollout_conflicts
from r3train.config.run import RunConfig
from r3train.config.sources import ConfigError, raise_all
from r3train.families import FAMILIES
from r3train.families.checks import topology_conflicts

# a thousand times what a large job has
_MOST_SAMPLES = 10_000_000


def check_static(config: RunConfig, world_size: int) -> None:
    """Check the settings only; raises ConfigError with every rule that is broken."""
    raise_all(
        [
            *_topology(config, world_size),
            *_batches(config, world_size),
            *_lengths(config),
            *_algorithm(config),
            *_conversations(config),
            *_distillation(config),
            *_recompute(config),
            *_checkpoints(config),
            *_debugging(config, world_size),
            *lora_conflicts(config),
            *replay_conflicts(config),
            *rollout_conflicts(config),
            *eval_conflicts(config),
        ]
    )


def check_model(config: RunConfig, hf: HfModelFacts, world_size: int) -> None:
    """Check settings against the checkpoint; raises ConfigError with every rule that is broken."""
    raise_all(
        [
            *_model_topology(config, hf, world_size),
            *topology_conflicts(hf, config.parallel),
            *_layers_over_stages(config, hf),
            *_model_lengths(config, hf),
            *_model_engine(config, hf),
            *_model_fusions(config, hf),
            *_model_replay(config, hf),
            *model_lora_conflicts(config, hf),
        ]
    )


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


def prompt_limit(config: RunConfig, hf: HfModelFacts) -> tuple[int, str]:
    """The longest prompt that leaves room for the longest response.

    Returns (tokens, words that name the settings after the limit).
    """
    context, name = _context(config, hf)
    response = config.rollout.rollout_max_response_len
    room = context - response
    asked = config.rollout.rollout_max_prompt_len
    if asked is not None and asked <= room:
        return asked, f"rollout_max_prompt_len {asked}"
    return room, f"{name} {context} - rollout_max_response_len {response}"


def eval_prompt_limit(config: RunConfig, hf: HfModelFacts, dataset: EvalDataset) -> tuple[int, str]:
    """The longest prompt of an evaluation set, see ``prompt_limit``; raises ConfigError for none."""
    context, name = _context(config, hf)
    words = f"{name} {context} - max_response_len {dataset.max_response_len}"
    if dataset.max_response_len >= context:
        raise ConfigError(f"evaluation set {dataset.name}: {words} leaves no room for a prompt")
    return context - dataset.max_response_len, words


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
    if rollout.max_weight_staleness > 0 and not algorithm.corrects_rollouts:
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


def _topology(config: RunConfig, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if world_size % parallel.dense_ranks:
        yield (
            f"world size {world_size} does not divide by tensor_model_parallel_size {tp} *"
            f" pipeline_model_parallel_size {pp} *"
            f" context_parallel_size {parallel.context_parallel_size} = {parallel.dense_ranks}"
        )
    if world_size % parallel.expert_ranks:
        yield (
            f"world size {world_size} does not divide by"
            f" expert_tensor_parallel_size {parallel.expert_tensor_parallel_size} *"
            f" expert_model_parallel_size {parallel.expert_model_parallel_size} *"
            f" pipeline_model_parallel_size {pp} = {parallel.expert_ranks}"
        )
    if parallel.sequence_parallel and tp == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size above 1"
    if parallel.virtual_pipeline_model_parallel_size is not None and pp == 1:
        yield "--virtual-pipeline-model-parallel-size needs --pipeline-model-parallel-size above 1"
    uneven = (
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    )
    if pp == 1 and any(count is not None for count in uneven):
        yield (
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need"
            " --pipeline-model-parallel-size above 1"
        )
    if parallel.overlap_param_gather and not parallel.use_distributed_optimizer:
        yield "--overlap-param-gather needs --use-distributed-optimizer"
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce"


def _batches(config: RunConfig, world_size: int) -> Iterator[str]:
    samples, step = config.samples_per_rollout, config.samples_per_step
    if samples > _MOST_SAMPLES:
        yield (
            f"rollout_batch_size {config.rollout.rollout_batch_size} * n_samples_per_prompt"
            f" {config.rollout.n_samples_per_prompt} = {samples} samples in a rollout, expected at most"
            f" {_MOST_SAMPLES}: rank 0 holds them all"
        )
    if samples % step:
        yield (
            f"rollout_batch_size {config.rollout.rollout_batch_size} * n_samples_per_prompt"
            f" {config.rollout.n_samples_per_prompt} = {samples} does not divide by"
            f" global_batch_size {step}"
        )
    if config.trainer.reuse_log_probs == "on" and not config.reuses_log_probs:
        yield (
            "--reuse-log-probs on cannot go with --kl-coef: the reward needs the old log-probs before"
            " the train forward"
            if config.steps_per_rollout == 1
            else "--reuse-log-probs on needs one optimizer step per rollout (--global-batch-size): the"
            f" log-probs of {config.steps_per_rollout} steps come from different weights"
        )
    data_ranks = world_size // config.parallel.dense_ranks
    if step < data_ranks:
        yield (
            f"global_batch_size {step} is below the {data_ranks} data-parallel ranks:"
            " some would train on nothing"
        )


def _lengths(config: RunConfig) -> Iterator[str]:
    context = config.rollout.rollout_max_context_len
    if context is not None:
        yield from _no_room(config.rollout, context, f"rollout_max_context_len {context}")


def _no_room(rollout: RolloutSection, context: int, name: str) -> Iterator[str]:
    """Yield lengths of prompts and responses that ``context`` tokens do not hold; name: in words."""
    prompt, response = rollout.rollout_max_prompt_len, rollout.rollout_max_response_len
    if response >= context:
        yield f"rollout_max_response_len {response} leaves no room for a prompt in {name}"
    if prompt is not None and prompt + response > context:
        yield (
            f"rollout_max_prompt_len {prompt} + rollout_max_response_len {response} ="
            f" {prompt + response} exceeds {name}"
        )


def _algorithm(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.tis_clip_low > algorithm.tis_clip:
        yield f"tis_clip_low {algorithm.tis_clip_low} exceeds tis_clip {algorithm.tis_clip}"
    yield from _corrections(algorithm)
    yield from _reward_keys(config)
    longest = config.rollout.rollout_max_response_len
    if algorithm.overlong_buffer_len is not None and algorithm.overlong_buffer_len > longest:
        yield (
            f"overlong_buffer_len {algorithm.overlong_buffer_len} exceeds rollout_max_response_len"
            f" {longest}"
        )
    if algorithm.loss_type != "sft":
        yield from _without_effect(config)
    elif config.model.ref_load is not None and not algorithm.needs_reference:
        yield _NO_REFERENCE
    if algorithm.kl_coef and config.faults.plant_fault not in (None, "disk_full"):
        yield (
            f"--plant-fault {config.faults.plant_fault} has no effect with --kl-coef, which makes the"
            " advantages again"
        )
    if config.trainer.min_lr > config.trainer.lr:
        yield f"min_lr {config.trainer.min_lr} exceeds lr {config.trainer.lr}"


def _reward_keys(config: RunConfig) -> Iterator[str]:
    algorithm, keys = config.algorithm, config.algorithm.reward_keys
    if keys and config.data.reward_key is not None:
        yield f"--reward-key {config.data.reward_key} cannot go with --reward-keys: the reward is one"
    named = config.data.custom_rm_path is None and config.checkpoint.replay_rollouts is None
    name = config.data.rm_type if named else None  # recorded rollouts have their rewards
    if keys and name is not None and ":" not in name and name.removeprefix("boxed_") != "remote_rm":
        yield f"--reward-keys needs a reward that returns a table: --rm-type {name} returns a number"
    if len(set(keys)) < len(keys):
        yield f"reward_keys {' '.join(keys)} names a key twice"
    if keys and algorithm.reward_weights and len(algorithm.reward_weights) != len(keys):
        yield f"reward_weights has {len(algorithm.reward_weights)} entries for {len(keys)} reward_keys"
    if algorithm.advantage_estimator != "gdpo":
        return
    if not keys:
        yield "--advantage-estimator gdpo needs --reward-keys: it compares each by itself"
    added = {
        "--kl-coef": algorithm.kl_coef,
        "--overlong-buffer-len": algorithm.overlong_buffer_len,
        "--length-penalty-coef": algorithm.length_penalty_coef,
    }
    for flag, value in added.items():
        if value:
            yield (
                f"{flag} has no effect with --advantage-estimator gdpo, which reads the numbers at"
                " --reward-keys and not the reward"
            )


_NO_REFERENCE = (
    "--ref-load needs --kl-loss-coef or --kl-coef above 0: without them no reference is loaded"
)


def _without_effect(config: RunConfig) -> Iterator[str]:
    """Yield the settings of the learning rule that the others leave without any effect.

    An estimator or a loss by import path may read every setting that its kind can read.
    """
    algorithm = config.algorithm
    estimator, loss = algorithm.advantage_estimator, algorithm.policy_loss
    own_loss, dppo = ":" in loss, algorithm.is_dppo

    def other(*names: str) -> bool:
        return estimator not in names and ":" not in estimator

    no_weights = algorithm.importance_level == "none" and not own_loss
    no_old = config.steps_per_rollout == 1
    of_dppo = f"--policy-loss {loss} clips nothing: its bound is --dppo-delta"
    itself = (
        "it compares the actor with itself before the rollout, which one optimizer step per rollout"
        " (--global-batch-size) leaves equal"
    )
    whitened = f"--advantage-estimator {estimator} whitens its advantages already"
    needs_weights = "it needs --rollout-is or --use-tis"
    no_reference = not algorithm.needs_reference
    no_kl = algorithm.kl_loss_coef == 0
    # setting -> whether it is without effect, and why
    rules = {
        "grpo_std_normalization": (other("grpo"), "it needs --advantage-estimator grpo"),
        "gamma": (
            other("reinforce_plus_plus"),
            "it needs --advantage-estimator reinforce_plus_plus",
        ),
        "reward_weights": (not algorithm.reward_keys, "it needs --reward-keys"),
        "normalize_advantages": (
            estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"),
            whitened,
        ),
        "overlong_penalty_factor": (
            algorithm.overlong_buffer_len is None,
            "it needs --overlong-buffer-len",
        ),
        "eps_clip": (dppo, of_dppo),
        "eps_clip_high": (dppo and algorithm.clip_high != algorithm.eps_clip, of_dppo),
        "eps_clip_c": (
            loss == "cispo" or dppo,
            f"--policy-loss {loss} has no dual clip",
        ),
        "dppo_delta": (not (dppo or own_loss), "it needs --policy-loss dppo_tv or dppo_kl"),
        "ratio_anchor": (dppo, f"--policy-loss {loss} is against the engine as it is"),
        "kl_loss_type": (no_kl, "it needs --kl-loss-coef above 0"),
        "use_unbiased_kl": (
            no_kl or no_old,
            "it needs --kl-loss-coef above 0" if no_kl else itself,
        ),
        "ref_routing": (
            no_reference or not config.replay.use_rollout_routing_replay,
            "it needs a reference (--kl-loss-coef or --kl-coef above 0) and"
            " --use-rollout-routing-replay",
        ),
        "rollout_is_mode": (no_weights, needs_weights),
        "tis_clip": (no_weights, needs_weights),
        "tis_clip_low": (no_weights, needs_weights),
        "rollout_rs_threshold": (not algorithm.rollout_rs, "it needs --rollout-rs"),
        "opd_type": (not algorithm.use_opd, "it needs --use-opd"),
        "opd_kl_coef": (not algorithm.use_opd, "it needs --use-opd"),
        "opsm_delta": (no_old, itself),
    }
    for name in (name for name in algorithm.changed() if name in rules):
        value, (without, reason) = getattr(algorithm, name), rules[name]
        if without:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            yield f"{name} {shown} has no effect: {reason}"
    if config.model.ref_load is not None and no_reference:
        yield _NO_REFERENCE


# settings that --loss-type sft reads; every other one of the learning rule has no effect with it
_OF_SFT = {
    *("loss_type", "mask_truncated", "loss_aggregation", "kl_loss_coef", "kl_loss_type"),
    "entropy_coef",
}


def _conversations(config: RunConfig) -> Iterator[str]:
    """Yield settings that --loss-type sft leaves without effect, and those that it needs."""
    if config.algorithm.loss_type != "sft":
        return
    for name in config.algorithm.changed():
        if name not in _OF_SFT:
            yield (
                f"{name} {getattr(config.algorithm, name)} has no effect with --loss-type sft, which has"
                " no reward and no ratio"
            )
    if not config.learns_conversations:
        return
    if config.rollout.n_samples_per_prompt != 1:
        yield (
            f"n_samples_per_prompt {config.rollout.n_samples_per_prompt}: --loss-type sft trains a"
            " conversation once, so it must be 1"
        )
    if config.replay.use_rollout_routing_replay:
        yield "--use-rollout-routing-replay cannot go with --loss-type sft: conversations have no routes"
    if config.rollout.environment is not None:
        yield "--environment has no effect with --loss-type sft: nothing is generated"


def _distillation(config: RunConfig) -> Iterator[str]:
    """Yield teachers that are missing, without effect, or whose log-probs would be of another kind."""
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.use_opd and algorithm.opd_type is None:
        yield "--use-opd needs --opd-type: sglang or megatron"
        return
    load = config.model.opd_teacher_load
    if algorithm.holds_teacher and load is None:
        yield "--opd-type megatron needs --opd-teacher-load"
    if load is not None and not algorithm.holds_teacher:
        yield f"opd_teacher_load {load} has no effect: it needs --use-opd and --opd-type megatron"
    url = rollout.opd_teacher_url
    if url is not None and not algorithm.asks_teacher:
        yield f"opd_teacher_url {url} has no effect: it needs --use-opd and --opd-type sglang"
    if not algorithm.asks_teacher:
        return
    if url is None and config.has_engines:
        yield "--opd-type sglang needs --opd-teacher-url"
    if rollout.rollout_temperature != 1:
        yield (
            f"--opd-type sglang cannot go with rollout_temperature {rollout.rollout_temperature}: the"
            " log-probs that SGLang computes of a text are those at temperature 1, and the actor's are"
            " not; set 1, or take --opd-type megatron"
        )
    if rollout.replays_sampling_mask:
        yield (
            f"--opd-type sglang cannot go with rollout_top_k {rollout.rollout_top_k}: the log-probs that"
            " SGLang computes of a text are those of the whole vocabulary, and the actor's are those"
            " within the sampling mask; set -1, or take --opd-type megatron"
        )


def _corrections(algorithm: AlgorithmSection) -> Iterator[str]:
    against_engine = algorithm.is_dppo
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        yield (
            f"--kl-coef {algorithm.kl_coef} cannot go with --kl-loss-coef {algorithm.kl_loss_coef}: the"
            " KL from the reference would count twice, in the reward and in the loss"
        )
    if algorithm.use_tis and algorithm.rollout_is not in ("none", "token"):
        yield f"--use-tis is --rollout-is token, and --rollout-is is {algorithm.rollout_is}"
    if algorithm.importance_level != "none":
        if algorithm.ratio_anchor == "rollout":
            yield (
                "--ratio-anchor rollout cannot go with --rollout-is or --use-tis: its ratio is against"
                " the engine, and would be corrected twice"
            )
        if against_engine:
            yield (
                f"--policy-loss {algorithm.policy_loss} cannot go with --rollout-is or --use-tis: its"
                " ratio is against the engine, and would be corrected twice"
            )
    if len(set(algorithm.rollout_rs)) < len(algorithm.rollout_rs):
        yield f"rollout_rs {' '.join(algorithm.rollout_rs)} names an estimate twice"
    try:
        algorithm.rejection_bounds
    except ValueError as error:
        yield str(error)


def _recompute(config: RunConfig) -> Iterator[str]:
    model = config.model
    full = model.recompute_granularity == "full"
    if full and (model.recompute_method is None or model.recompute_num_layers is None):
        yield ("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
    if not full and (model.recompute_method or model.recompute_num_layers):
        yield ("--recompute-method and --recompute-num-layers need --recompute-granularity full")
    if model.recompute_modules and model.recompute_granularity != "selective":
        yield "--recompute-modules needs --recompute-granularity selective"


def _checkpoints(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    wants_save = {
        "--save-interval": checkpoint.save_interval and not checkpoint.exports_often,
        "--save-keep-last": checkpoint.save_keep_last,
        "--async-save": checkpoint.async_save,
        "--auto-resume": checkpoint.auto_resume,
    }
    for flag, value in wants_save.items():
        if value and checkpoint.save is None:
            yield f"{flag} needs --save"
    if checkpoint.load is not None and not checkpoint.load.is_dir():
        yield f"{checkpoint.load}: no such checkpoint directory (load)"
    if checkpoint.load_model_only and checkpoint.load is None:
        yield "--load-model-only needs --load"
    if config.faults.max_engine_restarts and config.rollout.rollout_external_engine_addrs:
        yield (
            "--max-engine-restarts restarts servers of our own: those of"
            " --rollout-external-engine-addrs belong to somebody else"
        )
    if config.has_engines:
        return
    replay = checkpoint.replay_rollouts
    name = "--loss-type sft" if replay is None else "--replay-rollouts"
    if replay is not None and not replay.is_dir():
        yield f"{replay}: no such directory of rollouts (replay_rollouts)"
    if config.trainer.check_weight_update_equal:
        yield f"--check-weight-update-equal needs a server: {name} has none"
    if checkpoint.dump_rollouts:
        yield f"--dump-rollouts would copy what {name} reads"
    if config.faults.max_engine_restarts:
        yield f"--max-engine-restarts needs a server: {name} has none"


def _debugging(config: RunConfig, world_size: int) -> Iterator[str]:
    checkpoint, run = config.checkpoint, config.run
    yield from _injection(config)
    if run.gpu_memory_gb is not None and not run.estimate:
        yield "gpu_memory_gb has no effect without --estimate"
    if run.estimate and not run.dry_run:
        yield "estimate has no effect without --dry-run"
    if (
        run.use_pytorch_profiler or run.record_memory_history
    ) and not checkpoint.debug_rollout_only:
        start, end = run.profile_step_start, run.profile_step_end
        if end <= start:
            yield f"profile_step_end {end} is not after profile_step_start {start}"
        elif start >= config.rollout.num_rollout:
            yield (
                f"profile_step_start {start}: the run ends after num_rollout"
                f" {config.rollout.num_rollout}, so nothing would be profiled"
            )
        if strange := [rank for rank in run.profile_ranks if not 0 <= rank < world_size]:
            yield f"profile_ranks {strange[0]} is none of the {world_size} ranks"
    else:
        for name in (name for name in run.changed() if name.startswith("profile_")):
            yield f"{name} has no effect without --use-pytorch-profiler or --record-memory-history"
    if not checkpoint.debug_rollout_only:
        return
    only = "--debug-rollout-only"
    if not config.has_engines:
        yield f"{only} generates, and --replay-rollouts and --loss-type sft do not"
    if config.rollout.rollout_external_engine_addrs:
        yield (
            f"{only} starts servers of its own: nothing would bring those of"
            " --rollout-external-engine-addrs to hf_checkpoint's weights"
        )
    if config.serves_adapters:
        yield f"{only} cannot go with --lora-serving adapter: no adapter would be sent to the servers"
    no_effect = {
        "--save": checkpoint.save,
        "--save-hf": checkpoint.save_hf,
        "--load": checkpoint.load,
        "--lora-adapter-path": config.lora.lora_adapter_path,
        "--ci-inject-rollout-data-path": checkpoint.ci_inject_rollout_data_path,
        "--use-pytorch-profiler": run.use_pytorch_profiler,
        "--record-memory-history": run.record_memory_history,
        "--check-weight-update-equal": config.trainer.check_weight_update_equal,
        "--ci-test": config.trainer.ci_test,
        "--plant-fault": config.faults.plant_fault,
        "--eval-prompt-data": config.eval_sets,
        "--route-stores": config.replay.route_stores,
        "--max-engine-restarts": config.faults.max_engine_restarts,
    }
    for flag, value in no_effect.items():
        if value:
            yield f"{flag} has no effect with {only}, which builds no actor and publishes no weights"


def _injection(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    path, flag = checkpoint.ci_inject_rollout_data_path, "--ci-inject-rollout-data-path"
    if path is None:
        for name in (name for name in checkpoint.changed() if name.startswith("ci_inject_")):
            yield f"{name} has no effect without {flag}"
        return
    if not config.has_engines:
        yield f"{flag} is held against what servers generate: --replay-rollouts has no servers"
    if config.replay.route_stores:
        yield f"{flag} cannot go with --route-stores: the recorded routes are on rank 0"
    start, end = checkpoint.ci_inject_rollout_data_start_rollout_id, config.rollout.num_rollout
    if start >= end:
        yield f"ci_inject_rollout_data_start_rollout_id {start}: the run ends after num_rollout {end}"
    missing = [i for i in range(start, end) if not rollout_path(path, i).is_file()]
    if missing:
        yield (
            f"{rollout_path(path, missing[0])}: no such file ({flag} needs rollouts"
            f" {start} to {end - 1})"
        )


def _model_topology(config: RunConfig, hf: HfModelFacts, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    for key, count in (
        ("num_attention_heads", hf.num_attention_heads),
        ("hidden_size", hf.hidden_size),
        ("vocab_size", hf.vocab_size),
    ):
        if count % tp:
            yield f"{hf.path}: {key} {count} does not divide by tensor_model_parallel_size {tp}"
    if hf.num_key_value_heads % tp and tp % hf.num_key_value_heads:
        yield (
            f"{hf.path}: num_key_value_heads {hf.num_key_value_heads} is neither a multiple nor a"
            f" divisor of tensor_model_parallel_size {tp}"
        )
    if not hf.is_moe:
        if ep > 1:
            yield (
                f"{hf.path}: {hf.model_type} has no experts:"
                f" expert_model_parallel_size must be 1, got {ep}"
            )
        return
    if hf.num_experts % ep:
        yield (
            f"{hf.path}: {hf.num_experts} experts do not divide by expert_model_parallel_size {ep}"
        )
    if hf.num_experts_per_tok > hf.num_experts:
        yield (
            f"{hf.path}: num_experts_per_tok {hf.num_experts_per_tok} exceeds the"
            f" {hf.num_experts} experts"
        )
    if tp > 1 and not parallel.sequence_parallel:
        yield (
            f"tensor_model_parallel_size {tp} with experts needs --sequence-parallel:"
            " Megatron's MoE layer refuses to train without it"
        )


def _layers_of_layout(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    """Yield errors of the layout, and settings that contradict it."""
    parallel = config.parallel
    layout = parallel.pipeline_model_parallel_layout
    try:
        stages = parse_pipeline_layout(layout, parallel.pipeline_model_parallel_size)
    except ValueError as error:
        yield str(error)
        return
    held = sum(len(chunk) for stage in stages for chunk in stage)
    if held != hf.num_hidden_layers:
        yield (
            f"pipeline_model_parallel_layout {layout!r} holds {held} layers, {hf.path} has"
            f" {hf.num_hidden_layers}"
        )
    vpp = parallel.virtual_pipeline_model_parallel_size or 1
    if len(stages[0]) != vpp:
        yield (
            f"pipeline_model_parallel_layout {layout!r} has {len(stages[0])} chunks a stage, but"
            f" virtual_pipeline_model_parallel_size is {vpp}"
        )
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if getattr(parallel, name) is not None:
            yield f"{name} cannot be set next to pipeline_model_parallel_layout"


def _layers_over_stages(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    """Yield errors of the division of layers over stages and chunks, by Megatron's own rules."""
    parallel = config.parallel
    pp, layers = parallel.pipeline_model_parallel_size, hf.num_hidden_layers
    if parallel.pipeline_model_parallel_layout is not None:
        yield from _layers_of_layout(config, hf)
        return
    if pp == 1:
        return
    first, last = (
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    )
    told = [count for count in (first, last) if count is not None]
    middle_layers, middle_stages = layers - sum(told), pp - len(told)
    if middle_layers < 0 or bool(middle_layers) != bool(middle_stages):
        yield (
            f"{hf.path}: {layers} layers less the first and last stage's {sum(told)} leave"
            f" {middle_layers} for {middle_stages} stages"
        )
        return
    if middle_stages and middle_layers % middle_stages:
        yield (
            f"{hf.path}: {middle_layers} layers do not divide by {middle_stages} pipeline stages;"
            " for uneven stages set --decoder-first-pipeline-num-layers or"
            " --decoder-last-pipeline-num-layers"
        )
        return
    vpp = parallel.virtual_pipeline_model_parallel_size
    stages = told + ([middle_layers // middle_stages] if middle_stages else [])
    for count in dict.fromkeys(stages):
        if vpp is not None and count % vpp:
            yield (
                f"{hf.path}: a stage of {count} layers does not divide by"
                f" virtual_pipeline_model_parallel_size {vpp}"
            )


def _context(config: RunConfig, hf: HfModelFacts) -> tuple[int, str]:
    """Return the tightest limit on prompt and response together, with its name."""
    limits = [(hf.max_position_embeddings, "max_position_embeddings")]
    if config.rollout.rollout_max_context_len is not None:
        limits.append((config.rollout.rollout_max_context_len, "rollout_max_context_len"))
    server = config.rollout.sglang.get("context_length")
    if isinstance(server, int) and not isinstance(server, bool):
        limits.append((server, "sglang context_length"))
    return min(limits)


def _model_lengths(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    rollout = config.rollout
    asked = rollout.rollout_max_context_len
    if asked is not None and asked > hf.max_position_embeddings:
        yield (
            f"rollout_max_context_len {asked} exceeds the model's max_position_embeddings"
            f" {hf.max_position_embeddings} ({hf.path})"
        )
    context, name = _context(config, hf)
    yield from _no_room(rollout, context, f"{name} {context} ({hf.path})")
    for name, tokens in (
        ("rollout_stop_token_ids", rollout.rollout_stop_token_ids),
        ("eos_token_id", hf.eos_token_ids),
    ):
        for token in tokens:
            if not 0 <= token < hf.vocab_size:
                yield f"{name}: {token} is not in 0..{hf.vocab_size - 1} ({hf.path})"


def _model_engine(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    """Yield models that SGLang 0.5.23 serves wrongly: MoE models with a tied output layer."""
    if hf.is_moe and hf.tie_word_embeddings and config.has_engines:
        yield (
            f"{hf.path}: tie_word_embeddings is true, expected false: SGLang's mixture-of-experts"
            " models would generate from an output layer that nothing was loaded into; write"
            " lm_head.weight, a copy of the embedding, into the checkpoint and untie it"
        )


def _model_fusions(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    family = FAMILIES.get(hf.model_type)
    if family is None or not config.model.transformer_overrides.get("apply_rope_fusion"):
        return
    if family.unfused_rope:
        yield (
            f"transformer_overrides.apply_rope_fusion cannot be on for {hf.model_type}:"
            f" {family.unfused_rope}"
        )


def _model_replay(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    if config.replay.use_rollout_routing_replay and not hf.is_moe:
        yield (
            f"--use-rollout-routing-replay needs a mixture-of-experts model: {hf.path} is"
            f" {hf.model_type} without experts, so there is no routing to replay"
        )
    if config.trainer.freeze_moe_router and not hf.is_moe:
        yield f"--freeze-moe-router: {hf.path} is {hf.model_type} without experts: no router to freeze"
    every = tuple(range(1, hf.num_hidden_layers + 1))
    family = FAMILIES.get(hf.model_type)
    if family is not None and family.served_sparse and hf.is_moe and hf.moe_layer_numbers != every:
        # sglang 0.5.23 builds every layer of them sparse and would serve garbage for the others
        missing = sorted(set(every) - set(hf.moe_layer_numbers))
        yield (
            f"{hf.path}: layers {missing} are dense (mlp_only_layers, decoder_sparse_step), and"
            f" SGLang serves every {hf.model_type} layer with experts: its answers would be wrong"
        )
