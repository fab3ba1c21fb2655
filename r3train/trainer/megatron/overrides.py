"""Fields of Megatron's TransformerConfig and OptimizerConfig: which a run decides, which a user may set.

Every field of the measured Megatron has its place here; one that has none (of another version) is
refused, for nobody has looked at it.  Nothing here imports Megatron: a wrong name is found in its
source, before any rank joins.

Source: megatron-core 0.16.1, ``TransformerConfig``, ``ModelParallelConfig`` and ``OptimizerConfig``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.config.sources import nearest, places, raise_all

# field -> the flag of ours that decides it, where it has another name
_OUR_NAMES = {
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "account_for_embedding_in_pipeline_split": "--decoder-first-pipeline-num-layers",
    "account_for_loss_in_pipeline_split": "--decoder-last-pipeline-num-layers",
    "fp16": "--bf16",
    "params_dtype": "--bf16",
    "pipeline_dtype": "--bf16",
    "enable_autocast": "--bf16",
    "autocast_dtype": "--bf16",
    "transformer_impl": "--attention-backend",
    "moe_layer_recompute": "--recompute-modules moe",
    "moe_enable_routing_replay": "--use-rollout-routing-replay",
}

# reason -> fields, or patterns of them
_REFUSED: dict[str, str] = {
    "the checkpoint decides it: set --hf-checkpoint, from which SGLang starts too": """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels
        layernorm_epsilon layernorm_zero_centered_gamma normalization qk_layernorm qk_l2_norm
        add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset
        activation_func_clamp_value use_te_activation_func use_fused_weighted_squared_relu
        softmax_scale softmax_type attention_output_gate window_size window_attn_skip_freq
        rotary_interleaved no_rope_freq mrope_section multi_latent_attention
        apply_residual_connection_post_layernorm fp32_residual_connection
        experimental_attention_variant dsa_* linear_* mamba_* use_mamba_mem_eff_path is_hybrid_model
        heterogeneous_block_specs mtp_* *init_method* perform_initialization
        num_moe_experts moe_router_topk moe_router_topk_limited_devices moe_router_num_groups
        moe_router_group_topk moe_router_topk_scaling_factor moe_router_score_function
        moe_router_pre_softmax moe_router_enable_expert_bias moe_apply_probs_on_input moe_layer_freq
        moe_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size
        moe_shared_expert_gate""",
    "the actor's loss is a sum, which it divides by the loss tokens of all ranks": """
        calculate_per_token_loss cross_entropy_* grad_scale_func""",
    "noise would give the same tokens other log-probs in every pass; SGLang has none": """
        hidden_dropout attention_dropout moe_input_jitter_eps qk_clip*""",
    "the actor drives the pipeline: packs of unequal length, and replay, need it as it is": """
        variable_seq_lengths overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_comm
        batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs timers
        finalize_model_grads_func no_sync_func grad_sync_func param_sync_func
        microbatch_group_size_per_vp_stage num_microbatches_with_partial_activation_checkpoints
        pipeline_model_parallel_comm_backend defer_embedding_wgrad_compute wgrad_deferral_limit
        delay_wgrad_compute ep_overlap_early_attn_memory_release cpu_offloading* _cpu_offloading*""",
    "the actor lays tokens out over the ranks itself (--context-parallel-size)": """
        hybrid_context_parallel hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank""",
    "the actor trains in float32 or bfloat16 (--bf16), in which weights are loaded and exported": """
        fp8 fp8_* fp4 fp4_* *_fp8 *_fp8_* *_for_quantization tp_only_amax_red first_last_layers_bf16
        num_layers_at_*_in_bf16 *kitchen* quant_recipe""",
    "softmax in lower precision moves log-probs away from SGLang's": "attention_softmax_in_fp32",
    "the actor builds its chunks itself and loads the checkpoint into them": """
        use_cpu_initialization init_model_with_meta_device moe_use_legacy_grouped_gemm moe_extended_tp
        hetereogenous_dist_checkpoint test_mode""",
    "it is for inference, and the actor trains": """
        flash_decode inference_* symmetric_ar_type use_inference_optimized_layers
        mlp_chunks_for_prefill""",
}

# what is left to the user; replay_checks refuses some values of these with R3
_FREE = """
    deterministic_mode batch_invariant_mode disable_bf16_reduced_precision_matmul
    apply_query_key_layer_scaling gradient_accumulation_fusion async_tensor_model_parallel_allreduce
    use_te_rng_tracker tp_comm_* barrier_with_L1_time cp_comm_type bias_activation_fusion
    masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion
    apply_rope_fusion fused_single_qkv_rope distribute_saved_activations log_max_attention_logit
    moe_shared_expert_overlap moe_router_load_balancing_type moe_router_dtype
    moe_router_bias_update_rate moe_router_force_load_balancing moe_router_fusion moe_grouped_gemm
    moe_z_loss_coeff moe_token_dropping moe_token_drop_policy moe_enable_deepep
    moe_flex_dispatcher_backend moe_per_layer_logging moe_expert_capacity_factor
    moe_pad_expert_input_to_capacity moe_permute_fusion moe_deepep_num_sms moe_hybridep_num_sms
    overlap_moe_expert_parallel_comm enable_cuda_graph external_cuda_graph cuda_graph_*
    clone_scatter_output_in_embedding disable_parameter_transpose_cache config_logger_dir
    fine_grained_activation_offloading offload_modules min_offloaded_tensor_size"""


# the same of OptimizerConfig; the value of a free field is checked against its kind
_OPTIMIZER_NAMES = {"fp16": "--bf16", "bf16": "--bf16", "params_dtype": "--bf16"}
_OPTIMIZER_REFUSED = {
    "the actor trains in float32 or bfloat16 (--bf16), which need no scaling of the loss": """
        fp8_recipe reuse_grad_buf_for_mxfp8_param_ag loss_scale initial_loss_scale min_loss_scale
        loss_scale_window hysteresis""",
    "--optimizer is adam, or sgd without momentum": "sgd_momentum muon_*",
    "all parameters that are trained have one learning rate and one decay": """
        decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm""",
    "the actor starts the gathering of parameters itself": "overlap_param_gather_with_optimizer_step",
    "it would be without effect: the loop measures and reports by itself": """
        log_num_zeros_in_grad barrier_with_L1_time timers config_logger_dir""",
    "it would be without effect: Megatron takes Transformer Engine's Adam all the same": """
        use_torch_optimizer_for_cpu_offload""",
}
_SWITCHES = """use_precision_aware_optimizer store_param_remainders decoupled_weight_decay
    optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params"""
_FRACTIONS = "optimizer_offload_fraction"
# as Megatron's own flags of these names take them
OPTIMIZER_DTYPES = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "bf16", "fp16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "bf16", "fp16", "fp8"),
}
# field -> the switch without which it is without effect
_NEEDS = {
    **dict.fromkeys(
        ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")
        + ("pin_cpu_grads", "pin_cpu_params"),
        "optimizer_cpu_offload",
    ),
    **dict.fromkeys((*OPTIMIZER_DTYPES, "store_param_remainders"), "use_precision_aware_optimizer"),
}
# those of a state on the device only
_ON_DEVICE = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders")


@dataclass(frozen=True)
class MegatronFields:
    """The fields of one of Megatron's configurations, each in one place."""

    name: str  # of the class
    sources: tuple[str, ...]  # files that declare it, and what it inherits
    classes: tuple[str, ...]
    our_names: dict[str, str]
    refused: dict[str, str]
    free: str

    def known(self) -> frozenset[str]:
        """Those of the installed Megatron; empty if it or its known layout is missing."""
        return _fields_of(self.sources, self.classes)

    def refusal(self, name: str) -> str | None:
        """Return the reason why no override may set this field; None if it may."""
        place = places(RunConfig).get(name)
        if name in self.our_names:
            return f"has a flag of its own: set {self.our_names[name]}"
        if place is not None:
            return f"has a flag of its own: set {place.flag}, or {name} under [{place.section}]"
        for reason, patterns in self.refused.items():
            if _matches(name, patterns):
                return f"cannot be set: {reason}"
        if _matches(name, self.free):
            return None
        known = self.known()
        if known and name not in known:
            return f"is no field of the installed Megatron's {self.name}.{nearest(name, known)}"
        return "cannot be set: megatron-core 0.16.1 does not have it, so nobody has tried it here"


TRANSFORMER = MegatronFields(
    "TransformerConfig",
    ("model_parallel_config.py", "transformer/transformer_config.py"),
    ("ModelParallelConfig", "TransformerConfig"),
    _OUR_NAMES,
    _REFUSED,
    _FREE,
)
OPTIMIZER = MegatronFields(
    "OptimizerConfig",
    ("optimizer/optimizer_config.py",),
    ("OptimizerConfig",),
    _OPTIMIZER_NAMES,
    _OPTIMIZER_REFUSED,
    " ".join((_SWITCHES, _FRACTIONS, *OPTIMIZER_DTYPES)),
)


@cache
def _fields_of(sources: tuple[str, ...], classes: tuple[str, ...]) -> frozenset[str]:
    spec = find_spec("megatron")
    roots = spec.submodule_search_locations if spec is not None else None
    found: set[str] = set()
    for root in map(Path, roots or ()):
        for source in (root / "core" / file for file in sources):
            if source.is_file():
                found |= _annotated(source, classes)
    return frozenset(found)


def _annotated(source: Path, classes: tuple[str, ...]) -> set[str]:
    """Return the annotated fields of the classes of these names in a source file."""
    return {
        field.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def override_conflicts(config: RunConfig) -> Iterator[str]:
    """Yield a complaint for each override that the run decides, or that Megatron does not have."""
    for name in config.model.transformer_overrides:
        reason = TRANSFORMER.refusal(name)
        if reason is not None:
            yield f"transformer_overrides.{name} {reason}"
    rate = "moe_router_bias_update_rate"
    if config.trainer.freeze_moe_router and rate in config.model.transformer_overrides:
        yield f"transformer_overrides.{rate} moves the routers that --freeze-moe-router holds still"
    given = config.trainer.optimizer_overrides
    reasons = {name: OPTIMIZER.refusal(name) or _of_value(name, given[name]) for name in given}
    for name, reason in reasons.items():
        if reason is not None:
            yield f"optimizer_overrides.{name} {reason}"
    if not any(reasons.values()):
        yield from _optimizer_conflicts(config, given)


def _of_value(name: str, value: Any) -> str | None:
    """The reason why a field of OptimizerConfig that may be set cannot have this value."""
    if name in OPTIMIZER_DTYPES:
        choices = OPTIMIZER_DTYPES[name]
        return None if value in choices else f"must be {', '.join(choices)}, got {value!r}"
    if name in _FRACTIONS.split():
        is_one = type(value) in (int, float) and value == 1
        reason = (
            "with a part of the state on the device its bias correction stands still after a resume"
        )
        return None if is_one else f"must be 1, got {value!r}: {reason}"
    return None if type(value) is bool else f"must be true or false, got {value!r}"


def _optimizer_conflicts(config: RunConfig, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a complaint for overrides, each good by itself, that do not go with the other settings."""
    if given and config.trainer.optimizer != "adam":
        yield f"optimizer_overrides.{next(iter(given))} needs --optimizer adam"
    for name in given:
        if name in _NEEDS and not given.get(_NEEDS[name]):
            yield f"optimizer_overrides.{name} is without effect without {_NEEDS[name]}=true"
    if given.get("optimizer_cpu_offload"):
        if not given.get("optimizer_offload_fraction"):
            yield (
                "optimizer_overrides.optimizer_cpu_offload is without effect without"
                " optimizer_offload_fraction=1, the part of the state that lies on the host"
            )
        if not config.model.bf16:
            yield (
                "optimizer_overrides.optimizer_cpu_offload needs --bf16: Megatron brings no loaded"
                " float32 weights to their copies on the host"
            )
        for name in (name for name in _ON_DEVICE if name in given):
            yield (
                f"optimizer_overrides.{name} is without effect with optimizer_cpu_offload: the state on"
                " the host is float32"
            )
        if not given.get("use_precision_aware_optimizer"):
            yield (
                "optimizer_overrides.optimizer_cpu_offload needs use_precision_aware_optimizer=true:"
                " Megatron loads no checkpoint without it"
            )
        if not given.get("decoupled_weight_decay", True):
            yield "optimizer_overrides.optimizer_cpu_offload needs decoupled_weight_decay=true"
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if given.get(name) and not config.shards_optimizer:
            yield f"optimizer_overrides.{name} needs --use-distributed-optimizer"


def check_overrides(config: RunConfig) -> None:
    """Raise ConfigError with a line for each override that cannot be set."""
    raise_all(override_conflicts(config))
