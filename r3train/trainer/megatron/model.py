"""The Megatron model chunks of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.config.model_settings import TE_KERNELS
from r3train.cpu.device import uses_transformer_engine
from r3train.cpu.packed_attention import PackedCoreAttention
from r3train.families import FAMILIES, weights_of
from r3train.families.family import model_arguments
from r3train.families.weights import ModelWeights
from r3train.trainer.megatron import hf_weights, lora, rotary
from r3train.trainer.megatron.freezing import freeze
from r3train.trainer.megatron.layers import ADAPTATIONS
from r3train.trainer.megatron.transformer_config import build_transformer_config


@dataclass
class Model:
    """The chunks of this rank, one for each virtual stage, wrapped for data parallelism."""

    config: TransformerConfig
    weights: ModelWeights
    chunks: list[DistributedDataParallel]
    vocab_size: int

    @property
    def unwrapped(self) -> list[GPTModel]:
        return [hf_weights.unwrap(c) for c in self.chunks]


def build_model(config: RunConfig, hf: HfModelFacts, device: torch.device) -> Model:
    """Build this rank's chunks and load the weights of ``config.model.hf_checkpoint``.

    Raises ValueError as ``uses_transformer_engine`` does.
    """
    model, parallel = config.model, config.parallel
    use_te = uses_transformer_engine(model.attention_backend, on_cuda=device.type == "cuda")
    rotary.install()
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    overrides = transformer_overrides_of(config, hf, use_te, device)
    fuses = use_te and overrides.get("gradient_accumulation_fusion", False)
    if fuses and find_spec("fused_weight_gradient_mlp_cuda") is None:
        # Megatron's output layer needs Apex's extension for it, and fails without; the others do not
        overrides["gradient_accumulation_fusion"] = False
    transformer, weights = build_transformer_config(hf, parallel, dtype, overrides), weights_of(hf)
    chunks: list[torch.nn.Module] = []
    for stage in range(parallel.virtual_pipeline_model_parallel_size or 1):
        vp_stage = stage if parallel.virtual_pipeline_model_parallel_size else None
        # moved first: weights are scattered over the device's groups, and Megatron makes the router's
        # on the host
        chunk = _build_chunk(
            transformer, hf, weights, vp_stage, use_te, adapted=config.lora.enabled
        ).to(device)
        for one in hf_weights.chunk_weights(weights, chunk):
            if one.is_float32:
                one.tensor.data = one.tensor.data.float()
        if use_te:
            _mark_sinks(chunk)
        if fuses:
            _fuse_gradients(chunk)
        chunks.append(chunk)
    hf_weights.load_hf_weights(weights, chunks, model.hf_checkpoint)
    freeze(config, weights, chunks)
    if config.lora.enabled:
        lora.install(config, weights, chunks)
    ddp_config = DistributedDataParallelConfig(
        # Megatron's optimizer takes the gradients as they are in these buffers
        grad_reduce_in_fp32=config.trainer.optimizer_overrides.get("main_grads_dtype") != "bf16",
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        # with SGD every rank updates all parameters: there is nothing to gather
        overlap_param_gather=parallel.overlap_param_gather and config.shards_optimizer,
        use_distributed_optimizer=config.shards_optimizer,
        check_for_nan_in_grad=False,
        average_in_collective=False,
    )
    wrapped = []
    for i, chunk in enumerate(chunks):
        if model.bf16:
            chunk = _in_bf16(transformer, weights, chunk)
        wrapped.append(
            DistributedDataParallel(transformer, ddp_config, chunk, disable_bucketing=i > 0)
        )
    return Model(transformer, weights, wrapped, hf.vocab_size)


class _Bf16Chunk(Float16Module):
    """A chunk whose logits stay in bfloat16: the loss makes float32 of some rows at a time."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return super().forward(*inputs, fp32_output=False, **named)


def _in_bf16(
    config: TransformerConfig, weights: ModelWeights, chunk: torch.nn.Module
) -> Float16Module:
    """Convert the chunk to bfloat16, but keep in float32 what SGLang does: decays (A_log) and expert biases."""
    in_float32 = [one for one in hf_weights.chunk_weights(weights, chunk) if one.is_float32]
    values = [one.tensor.detach().clone() for one in in_float32]
    wrapped = _Bf16Chunk(config, chunk)
    for one, value in zip(in_float32, values):
        one.tensor.data = value
    return wrapped


def _mark_sinks(chunk: torch.nn.Module) -> None:
    """Mark the sinks of Transformer Engine's attention as split over tensor ranks, for export and norm."""
    for module in chunk.modules():
        if isinstance(module, te.TEDotProductAttention):
            if isinstance(sinks := module.softmax_offset, torch.nn.Parameter):
                sinks.tensor_model_parallel = True
                sinks.partition_dim, sinks.partition_stride = 0, 1


def _fuse_gradients(chunk: torch.nn.Module) -> None:
    """Let every layer of Transformer Engine add its weight's gradient to ``main_grad`` in the product itself.

    Each reads the attribute in its forward.  Megatron's ``DistributedDataParallel`` adds nothing for a weight that
    says so.  Source: transformer_engine 2.12.0, ``module/linear.py`` and ``grouped_linear.py``.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def transformer_overrides_of(
    config: RunConfig, hf: HfModelFacts, use_te: bool, device: torch.device
) -> dict[str, Any]:
    """TransformerConfig fields that we set; the others follow from the checkpoint."""
    model, parallel = config.model, config.parallel
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    fields: dict[str, Any] = dict(
        moe_layer_freq=[int(n in hf.moe_layer_numbers) for n in range(1, hf.num_hidden_layers + 1)],
        moe_token_dispatcher_type=model.moe_token_dispatcher_type,
        moe_router_dtype="fp32",
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
        moe_router_load_balancing_type="aux_loss" if model.moe_aux_loss_coeff else "none",
        sequence_parallel=parallel.sequence_parallel,
        num_layers_in_first_pipeline_stage=parallel.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=parallel.decoder_last_pipeline_num_layers,
        pipeline_model_parallel_layout=parallel.pipeline_model_parallel_layout,
        # packs differ in length: stages send one another the shape
        variable_seq_lengths=True,
        # with batched p2p, interleaved schedules give wrong numbers and no error
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # an output that was sent is kept by the stage that got it
        deallocate_pipeline_outputs=True,
        # the loss is a sum; gradients are divided by the global number of loss tokens
        calculate_per_token_loss=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        attention_backend=AttnBackend[
            model.attention_backend if model.attention_backend in TE_KERNELS else "auto"
        ],
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=list(model.recompute_modules) or None,
    )
    if not use_te:
        fields.update(
            transformer_impl="local",
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            moe_permute_fusion=False,
            moe_grouped_gemm=False,
            moe_shared_expert_overlap=False,
        )
    elif device.type == "cuda":
        fields.update(_fusions(hf))
    if device.type == "cpu":
        fields["use_cpu_initialization"] = True
    if config.lora.enabled:  # overlapped shared experts do without the collectives of their linears
        fields["moe_shared_expert_overlap"] = False
    # the bias is no parameter, and moves by this rate
    if config.trainer.freeze_moe_router or config.lora.enabled:
        fields["moe_router_bias_update_rate"] = 0.0
    fields.update(model.transformer_overrides)
    return fields


def _fusions(hf: HfModelFacts) -> dict[str, bool]:
    """Fused kernels of Transformer Engine's layers on CUDA, which Megatron leaves off.

    Unfused rotary positions of packed sequences read their lengths back to the host in every layer, and
    unfused permutation takes a kernel for every step of it.
    """
    return {
        "apply_rope_fusion": "apply_rope_fusion" not in FAMILIES[hf.model_type].refused_overrides,
        "moe_permute_fusion": hf.is_moe,
        "gradient_accumulation_fusion": True,
        # a first microbatch would be written over what main_grad holds, not added
        "disable_parameter_transpose_cache": True,
    }


def _save_norms_as_local(layer: TransformerLayerSubmodules) -> None:
    """Name a Transformer Engine layer's norms in checkpoints as Megatron's local layers name theirs.

    With latent attention a norm has its own name there.  In all other layers it has the name of the linear
    that follows, and the norm before experts that of a dense layer's.
    """
    is_dense, names = layer.mlp.func == MLP.as_mlp_submodule, {}
    if issubclass(layer.self_attention.module, MLASelfAttention):
        for norm, behind in (("q_layernorm", "q_up"), ("kv_layernorm", "kv_up")):
            names[f"self_attention.linear_{behind}_proj.layer_norm_"] = f"self_attention.{norm}."
        if is_dense:
            names["mlp.linear_fc1.layer_norm_"] = "pre_mlp_layernorm."
    elif not is_dense:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    layer.sharded_state_dict_keys_map = names


def _build_chunk(
    config: TransformerConfig,
    hf: HfModelFacts,
    weights: ModelWeights,
    vp_stage: int | None,
    use_te: bool,
    *,
    adapted: bool = False,
) -> GPTModel:
    family = FAMILIES[hf.model_type]
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_te, normalization="RMSNorm", vp_stage=vp_stage
    )
    if not use_te:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    elif not adapted:
        for layer in spec.layer_specs:
            _save_norms_as_local(layer.submodules)
    first_layer = get_transformer_layer_offset(config, vp_stage=vp_stage)
    ADAPTATIONS[family.layers](spec, weights, first_layer, use_te)
    if use_te and adapted:
        lora.norms_apart(spec)
    return GPTModel(
        config,
        spec,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        vp_stage=vp_stage,
        **model_arguments(family, hf),
    )
