"""Process groups of torch.distributed and Megatron, and this rank's place in them."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from r3train.config.parallel_settings import ParallelSection
from r3train.host_group import join_ranks, leave_ranks
from r3train.types import RankTopology


def init_distributed(backend: str, timeout_minutes: float) -> dist.Store:
    """Join torchrun's rendezvous; torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    backend: of the default group, see ``join_ranks``.  Returns the rendezvous' store, which torchrun holds.
    """
    timeout = timedelta(minutes=timeout_minutes)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    # torchrun (torch 2.13) keeps its store over --max-restarts.  Without a prefix of their own, the
    # new ranks would find the addresses of the dead ones in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    join_ranks(backend, store, rank, world_size, timeout=timeout)
    return store


def init_model_parallel(parallel: ParallelSection, seed: int) -> RankTopology:
    """Build Megatron's groups for the topology and seed its RNG trackers.

    Returns this rank's place, without its layers: those are known once the model is built.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        create_gloo_process_groups=False,  # nothing that we use of Megatron's asks for them
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return RankTopology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp_size=parallel.virtual_pipeline_model_parallel_size or 1,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        sequence_parallel=parallel.sequence_parallel,
    )


def with_layers(
    topology: RankTopology,
    moe_layer_numbers: tuple[tuple[int, ...], ...],
    indexer_layer_numbers: tuple[tuple[int, ...], ...] = (),
) -> RankTopology:
    """Return the topology with the MoE layers of the built model, and its layers with an indexer."""
    return replace(
        topology,
        moe_layer_numbers=moe_layer_numbers,
        indexer_layer_numbers=indexer_layer_numbers,
    )


def shutdown() -> None:
    """Leave every process group, if any was joined."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        leave_ranks()
