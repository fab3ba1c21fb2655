"""The layers whose routers run a second time, by arithmetic only: for start-up checks, and as an oracle for the trainer."""

from __future__ import annotations

from r3train.families.hf_facts import HfModelFacts
from r3train.config.model_settings import ModelSection
from r3train.config.parallel_settings import ParallelSection
from r3train.config.pipeline_layout import layers_by_stage


def recomputed_layers(
    chunk_layers: tuple[int, ...],
    *,
    granularity: str | None,
    method: str | None,
    num_layers: int | None,
    modules: tuple[str, ...],
    module: str = "moe",
) -> tuple[int, ...]:
    """Layers of one chunk whose router, or another module, runs a second time in backward.

    Full uniform recomputes all; full block the first ``num_layers`` of the chunk; selective only
    when the ``module`` is recomputed: ``moe`` is the router's, ``core_attn`` an indexer's.
    Source: Megatron-Core TransformerBlock, MoELayer and MultiLatentAttention.
    """
    if granularity == "full":
        return chunk_layers if method == "uniform" else chunk_layers[: num_layers or 0]
    if granularity == "selective" and module in modules:
        return chunk_layers
    return ()


def recomputed_moe_layers(
    parallel: ParallelSection, model: ModelSection, hf: HfModelFacts
) -> tuple[int, ...]:
    """Numbers of the MoE layers whose router runs a second time in backward."""
    layers = layers_with_recomputed("moe", parallel, model, hf)
    return tuple(layer for layer in layers if layer in hf.moe_layer_numbers)


def layers_with_recomputed(
    module: str, parallel: ParallelSection, model: ModelSection, hf: HfModelFacts
) -> tuple[int, ...]:
    """Numbers of the layers of which a module runs a second time in backward, see ``recomputed_layers``."""
    return tuple(
        layer
        for stage in layers_by_stage(parallel, hf.num_hidden_layers)
        for chunk in stage
        for layer in recomputed_layers(
            chunk,
            granularity=model.recompute_granularity,
            method=model.recompute_method,
            num_layers=model.recompute_num_layers,
            modules=model.recompute_modules,
            module=module,
        )
    )
