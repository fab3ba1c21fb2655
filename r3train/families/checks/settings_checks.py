"""Settings against a checkpoint's model: its layers, lengths and experts, and what SGLang serves of it."""

from __future__ import annotations

from collections.abc import Iterator

from r3train.config.evaluation_settings import EvalDataset
from r3train.config.pipeline_layout import parse_pipeline_layout
from r3train.config.run import RunConfig
from r3train.config.sources import ConfigError, flag_name, raise_all
from r3train.families import FAMILIES
from r3train.families.checks.family_checks import topology_conflicts
from r3train.families.checks.fp8_checks import model_fp8_conflicts
from r3train.families.checks.lora_checks import model_lora_conflicts
from r3train.families.hf_facts import HfModelFacts


def check_model(config: RunConfig, hf: HfModelFacts, world_size: int) -> None:
    """Check settings against the checkpoint; raises ConfigError with every rule that is broken."""
    raise_all(
        [
            *_model_topology(config, hf, world_size),
            *topology_conflicts(hf, config.parallel),
            *_layers_over_stages(config, hf),
            *_model_lengths(config, hf),
            *_model_engine(config, hf),
            *_model_overrides(config, hf),
            *_model_replay(config, hf),
            *model_lora_conflicts(config, hf),
            *model_fp8_conflicts(config, hf),
        ]
    )


def prompt_limit(config: RunConfig, hf: HfModelFacts) -> tuple[int, str]:
    """The longest prompt that leaves room for the longest response.

    Returns (tokens, words that name the settings after the limit).
    """
    context, name = _context(config, hf)
    response = config.rollout.rollout_max_response_len
    room = context - response
    prompt_len = config.rollout.rollout_max_prompt_len
    if prompt_len is not None and prompt_len <= room:
        return prompt_len, f"rollout_max_prompt_len {prompt_len}"
    return room, f"{name} {context} - rollout_max_response_len {response}"


def eval_prompt_limit(config: RunConfig, hf: HfModelFacts, dataset: EvalDataset) -> tuple[int, str]:
    """The longest prompt of an evaluation set, see ``prompt_limit``; raises ConfigError for none."""
    context, name = _context(config, hf)
    words = f"{name} {context} - max_response_len {dataset.max_response_len}"
    if dataset.max_response_len >= context:
        raise ConfigError(f"evaluation set {dataset.name}: {words} leaves no room for a prompt")
    return context - dataset.max_response_len, words


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


def context_len(config: RunConfig, hf: HfModelFacts) -> int:
    """The most tokens of a sample: --rollout-max-context-len, or what the model and the servers take."""
    return _context(config, hf)[0]


def replayed_index_topk(config: RunConfig, hf: HfModelFacts) -> int | None:
    """Return the tokens that an indexer chooses for a row where its choice is replayed, else None.

    It is with R3, where samples may be longer: up to ``index_topk`` tokens all are chosen.
    """
    if not config.replay.use_rollout_routing_replay or hf.index_topk is None:
        return None
    return hf.index_topk if context_len(config, hf) > hf.index_topk else None


def check_longest_chain(config: RunConfig, hf: HfModelFacts) -> None:
    """Check that a microbatch can hold what an agent may send; raises ConfigError."""
    context, name = _context(config, hf)
    tokens, cp = config.trainer.max_tokens_per_gpu, config.parallel.context_parallel_size
    if context > tokens * cp:
        raise ConfigError(
            f"max_tokens_per_gpu {tokens} * context_parallel_size {cp} = {tokens * cp} is below {name}"
            f" {context}, up to which an agent may send and sample tokens: lower --rollout-max-context-len"
        )


def _model_lengths(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    rollout = config.rollout
    longest = rollout.rollout_max_context_len
    if longest is not None and longest > hf.max_position_embeddings:
        yield (
            f"rollout_max_context_len {longest} exceeds the model's max_position_embeddings"
            f" {hf.max_position_embeddings} ({hf.path})"
        )
    context, name = _context(config, hf)
    yield from rollout.no_room(context, f"{name} {context} ({hf.path})")
    for name, tokens in (
        ("rollout_stop_token_ids", rollout.rollout_stop_token_ids),
        ("eos_token_id", hf.eos_token_ids),
    ):
        for token in tokens:
            if not 0 <= token < hf.vocab_size:
                yield f"{name}: {token} is not in 0..{hf.vocab_size - 1} ({hf.path})"


def _model_engine(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    """Yield models that SGLang 0.5.23 serves wrongly: most MoE models with a tied output layer."""
    family = FAMILIES.get(hf.model_type)
    serves_tied = family is not None and family.serves_tied
    if hf.is_moe and hf.tie_word_embeddings and config.has_engines and not serves_tied:
        yield (
            f"{hf.path}: tie_word_embeddings is true, expected false: SGLang's {hf.model_type}"
            " models would generate from an output layer that nothing was loaded into; write"
            " lm_head.weight, a copy of the embedding, into the checkpoint and untie it"
        )


def _model_overrides(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    family, overrides = FAMILIES.get(hf.model_type), config.model.transformer_overrides
    for name, why in family.refused_overrides.items() if family is not None else ():
        if overrides.get(name):
            yield f"transformer_overrides.{name} cannot be on for {hf.model_type}: {why}"


def _model_replay(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    for name in ("use_rollout_routing_replay", "use_routing_replay"):
        if getattr(config.replay, name) and not hf.is_moe:
            yield (
                f"{flag_name(name)} needs a mixture-of-experts model: {hf.path} is"
                f" {hf.model_type} without experts, so there is no routing to replay"
            )
    if config.trainer.freeze_moe_router and not hf.is_moe:
        yield f"--freeze-moe-router: {hf.path} is {hf.model_type} without experts: no router to freeze"
    context, name = _context(config, hf)
    if config.replay.route_stores and replayed_index_topk(config, hf) is not None:
        yield (
            f"--route-stores: {name} is {context}, and beyond index_topk {hf.index_topk} ({hf.path}) an indexer"
            " chooses tokens, which no store carries: leave it out, or give a --rollout-max-context-len of at"
            f" most {hf.index_topk}"
        )
    every = tuple(range(1, hf.num_hidden_layers + 1))
    family = FAMILIES.get(hf.model_type)
    if family is not None and family.served_sparse and hf.is_moe and hf.moe_layer_numbers != every:
        # sglang 0.5.23 builds every layer of them sparse and would serve garbage for the others
        missing = sorted(set(every) - set(hf.moe_layer_numbers))
        yield (
            f"{hf.path}: layers {missing} are dense (mlp_only_layers, decoder_sparse_step), and"
            f" SGLang serves every {hf.model_type} layer with experts: its answers would be wrong"
        )
