"""Fields of Megatron's TransformerConfig and OptimizerConfig that a run decides: no override sets these.

All others are passed on, and Megatron's dataclasses check their values when the actor is built.
Nothing here imports Megatron: a wrong name is found in its source, before any rank joins.

Source: megatron-core 0.19.2, ``TransformerConfig``, ``ModelParallelConfig`` and ``OptimizerConfig``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.config.sources import nearest, places, raise_all

# file -> the classes in it
TRANSFORMER = {
    "model_parallel_config.py": "ModelParallelConfig",
    "transformer/transformer_config.py": "TransformerConfig",
}
OPTIMIZER = {"optimizer/optimizer_config.py": "OptimizerConfig"}

_BF16 = "--bf16 decides it"
# what decides it, or why -> fields, or patterns of them, next to those with a flag of their own name
OWNED = {
    "the checkpoint decides it: set --hf-checkpoint, from which SGLang starts too": """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels
        layernorm_epsilon layernorm_zero_centered_gamma normalization qk_layernorm qk_l2_norm
        add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset
        activation_func_clamp_value softmax_scale softmax_type attention_output_gate window_*
        rotary_interleaved no_rope_freq mrope_section multi_latent_attention
        apply_residual_connection_post_layernorm fp32_residual_connection
        experimental_attention_variant* dsa_* linear_* mamba_* is_hybrid_model use_mup mup_*
        heterogeneous_block_specs mtp_* *init_method* num_moe_experts moe_router_topk
        moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_score_function
        moe_router_pre_softmax moe_router_enable_expert_bias moe_apply_probs_on_input moe_layer_freq
        moe_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size
        moe_shared_expert_gate""",
    "--decoder-first-pipeline-num-layers decides it": """
        num_layers_in_first_pipeline_stage account_for_embedding_in_pipeline_split""",
    "--decoder-last-pipeline-num-layers decides it": """
        num_layers_in_last_pipeline_stage account_for_loss_in_pipeline_split""",
    _BF16: "fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype",
    "--attention-backend decides it": "transformer_impl",
    "the actor lays tokens out over the ranks itself (--context-parallel-size)": """
        hybrid_context_parallel hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank""",
    "--recompute-modules moe decides it": "moe_layer_recompute",
    "--use-rollout-routing-replay decides it": "moe_enable_routing_replay",
    "the actor's loss is a sum, which it divides by the loss tokens of all ranks": """
        calculate_per_token_loss cross_entropy_* *grad_scale_func""",
    "noise would give the same tokens other log-probs in every pass; SGLang has none": """
        hidden_dropout attention_dropout moe_input_jitter_eps moe_router_force_biased qk_clip*""",
    "the actor drives the pipeline: packs of unequal length, and replay, need it as it is": """
        variable_seq_lengths overlap_p2p_comm* batch_p2p_* use_ring_exchange_p2p
        deallocate_pipeline_outputs timers finalize_model_grads_func *_sync_func
        microbatch_group_size_per_vp_stage num_microbatches_with_partial_activation_checkpoints
        pipeline_model_parallel_comm_backend defer_embedding_wgrad_compute wgrad_deferral_limit
        delay_wgrad_compute ep_overlap_early_attn_memory_release cpu_offloading* _cpu_offloading*""",
    "the actor trains in float32 or bfloat16 (--bf16), in which weights are loaded and exported": """
        fp8* fp4* *_fp8 *_fp8_* *_for_quantization tp_only_amax_red first_last_layers_bf16
        num_layers_at_*_in_bf16 *kitchen* quant_recipe""",
    "softmax in lower precision moves log-probs away from SGLang's": "attention_softmax_in_fp32",
    "the actor builds its chunks itself and loads the checkpoint into them": """
        perform_initialization use_cpu_initialization init_model_with_meta_device test_mode
        *gtp_weight_remat_size *_num_weight_shards moe_single_grouped_*
        use_grouped_gemm_for_* use_transformer_engine_op_fuser *_glu_interleave_size""",
}
OWNED_OPTIMIZER = {
    _BF16: "fp16 bf16 params_dtype",
    "the actor trains in float32 or bfloat16 (--bf16), which need no scaling of the loss": """
        fp8_recipe reuse_grad_buf_for_mxfp8_param_ag *loss_scale* hysteresis""",
    "--optimizer is adam, or sgd without momentum": """
        sgd_momentum *muon_* lion_* soap_* use_layer_wise_distributed_optimizer""",
    "all parameters that are trained have one learning rate and one decay": """
        decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm""",
    "the actor starts the gathering of parameters itself": "overlap_param_gather_with_optimizer_step",
}

# as Megatron's own flags of these names take them
OPTIMIZER_DTYPES = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "bf16", "fp16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "bf16", "fp16", "fp8"),
}


def _refusal(name: str, owned: Mapping[str, str], declared: Mapping[str, str]) -> str | None:
    """Return the reason why no override may set this field; None if it may."""
    place = places(RunConfig).get(name)
    if place is not None:
        return f"has a flag of its own: set {place.flag}, or {name} under [{place.section}]"
    for reason, patterns in owned.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return f"cannot be set: {reason}"
    known = fields_of(tuple(declared.items()))
    if known and name not in known:
        config = list(declared.values())[-1]
        return f"is no field of the installed Megatron's {config}.{nearest(name, known)}"
    return None


@cache
def fields_of(declared: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """The annotated fields of the installed Megatron's classes; empty without it."""
    spec = find_spec("megatron")
    roots = spec.submodule_search_locations if spec is not None else None
    files = [(Path(root) / "core" / file, name) for root in roots or () for file, name in declared]
    return frozenset(
        field.target.id
        for file, name in files
        if file.is_file()
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def override_conflicts(config: RunConfig) -> Iterator[str]:
    """Yield a complaint for each override that the run decides, that Megatron does not have, or that would harm."""
    for name in config.model.transformer_overrides:
        if reason := _refusal(name, OWNED, TRANSFORMER):
            yield f"transformer_overrides.{name} {reason}"
    rate = "moe_router_bias_update_rate"
    if config.trainer.freeze_moe_router and rate in config.model.transformer_overrides:
        yield f"transformer_overrides.{rate} moves the routers that --freeze-moe-router holds still"
    given = config.trainer.optimizer_overrides
    for name, value in given.items():
        choices = OPTIMIZER_DTYPES.get(name, (value,))
        if reason := _refusal(name, OWNED_OPTIMIZER, OPTIMIZER):
            yield f"optimizer_overrides.{name} {reason}"
        elif value not in choices:
            yield f"optimizer_overrides.{name} must be {', '.join(choices)}, got {value!r}"
    if given.get("optimizer_cpu_offload"):
        yield from _offload_conflicts(config, given)


def _offload_conflicts(config: RunConfig, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a complaint for what Megatron takes next to an optimizer on the host, and does wrong."""
    offload = "optimizer_overrides.optimizer_cpu_offload needs"
    if given.get("optimizer_offload_fraction") != 1:
        yield (
            f"{offload} optimizer_offload_fraction=1: with a part of the state on the device its bias"
            " correction stands still after a resume"
        )
    if not given.get("use_precision_aware_optimizer"):
        yield f"{offload} use_precision_aware_optimizer=true: Megatron loads no checkpoint without it"
    if not given.get("decoupled_weight_decay", True):
        yield f"{offload} decoupled_weight_decay=true"
    if not config.model.bf16:
        yield (
            f"{offload} --bf16: Megatron brings no loaded float32 weights to their copies on the host"
        )


def check_overrides(config: RunConfig) -> None:
    """Raise ConfigError with a line for each override that cannot be set."""
    raise_all(override_conflicts(config))
