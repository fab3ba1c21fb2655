"""Changes of what megatron-core 0.19.2 does only with CUDA, or wrongly without it and without Transformer Engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from r3train.patches import patch


def install() -> None:
    """Replace it all, after the import of megatron-core."""
    _patch_rng()
    _patch_moe()
    _patch_uneven_collectives()
    _patch_collectives_of_one_rank()
    _patch_distributed_optimizer_checkpoint()
    _patch_norm()


def _patch_rng() -> None:
    """Give dropout and recomputation the CPU generator to save and restore."""
    from megatron.core.tensor_parallel import random

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    why = "dropout and recomputation save and restore CUDA's generator"
    for name, replacement, expects in (
        ("_get_cuda_rng_state", get_state, "(device='cuda', clone=False, graph_safe=False)"),
        ("_set_cuda_rng_state", set_state, "(new_state, device=-1, graph_safe=False)"),
    ):
        patch(random, name, replacement, expects=expects, why=why)
    # else it warns at every checkpoint that the CPU RNG state changed
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _patch_moe() -> None:
    """Fix two errors of the MoE code, and skip its sorting of chunks that are in order.

    They always are where one rank holds all experts: it copied all rows once more in each direction.  Rows that go to
    experts are selected, not sorted.  The values are the same to the bit.
    """
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu

    def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy, record_stream)
        return moved.detach().numpy() if as_numpy and torch.is_tensor(moved) else moved

    patch(
        token_dispatcher,
        "maybe_move_tensor_to_cpu",
        move_to_host,
        expects="(tensor, as_numpy=False, record_stream=False)",
        why="all_to_all_single wants lists of ints, and on a CPU the splits stay tensors",
    )
    permute = token_dispatcher.permute

    def select_rows(
        tokens,
        routing_map,
        probs=None,
        num_out_tokens=None,
        fused=False,
        drop_and_pad=False,
        tokens_per_expert=None,
        align_size=0,
    ):
        if fused or drop_and_pad:
            how = fused, drop_and_pad, tokens_per_expert, align_size
            return permute(tokens, routing_map, probs, num_out_tokens, *how)
        chosen = routing_map.bool().T.contiguous()
        rows = torch.arange(len(tokens)).expand_as(chosen).masked_select(chosen)
        if probs is not None:
            probs = probs.T.contiguous().masked_select(chosen)
        return tokens.index_select(0, rows), probs, rows, None, tokens_per_expert

    patch(
        token_dispatcher,
        "permute",
        select_rows,
        expects="(tokens, routing_map, probs=None, num_out_tokens=None, fused=False, drop_and_pad=False,"
        " tokens_per_expert=None, align_size=0)",
        why="it sorts all pairs of rows and experts, and sends rows astray where one names an expert twice",
    )
    sort = token_dispatcher.sort_chunks_by_idxs

    def sort_unless_in_order(input, split_sizes, sorted_idxs, probs=None, fused=False):
        if sorted_idxs.tolist() == list(range(len(sorted_idxs))):
            return input, probs
        return sort(input, split_sizes, sorted_idxs, probs=probs, fused=fused)

    patch(
        token_dispatcher,
        "sort_chunks_by_idxs",
        sort_unless_in_order,
        expects="(input, split_sizes, sorted_idxs, probs=None, fused=False)",
        why="it copies all rows, also where they are in order",
    )


def _patch_uneven_collectives() -> None:
    """Make up for gloo's lack of uneven all-gather and reduce-scatter (ETP > 1 with EP > 1)."""
    from megatron.core.tensor_parallel import mappings

    all_gather = mappings._gather_along_first_dim
    reduce_scatter = mappings._reduce_scatter_along_first_dim

    def gather(x, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return all_gather(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        out = x.new_empty((max(sizes) * len(sizes), *x.shape[1:]))
        dist.all_gather_into_tensor(out, padded, group=group)
        return torch.cat([share[:n] for share, n in zip(out.split(max(sizes)), sizes)])

    def scatter(x, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(x, group, input_split_sizes, use_global_buffer)
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split([int(n) for n in input_split_sizes])[group.rank()].clone()

    why = "gloo gathers and scatters equal shares only"
    for name, replacement, sizes in (
        ("_gather_along_first_dim", gather, "output_split_sizes"),
        ("_reduce_scatter_along_first_dim", scatter, "input_split_sizes"),
    ):
        expects = f"(input_, group, {sizes}=None, use_global_buffer=False)"
        patch(mappings, name, replacement, expects=expects, why=why)


def _patch_collectives_of_one_rank() -> None:
    """Leave out the distributed optimizer's collectives over one rank, whose output is its input.

    NCCL does nothing there; gloo copies the whole buffer of gradients, 3% of a small model's step.
    """
    from megatron.core.distributed import param_and_grad_buffer

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(output: torch.Tensor, input: torch.Tensor, *, group: Any, **given: Any) -> Any:
            if group.size() == 1 and output.data_ptr() == input.data_ptr():
                return None
            return collective(output, input, group=group, **given)

        return run

    for name, expects in (
        ("dist_all_gather_func", "(output_tensor, input_tensor, ...)"),
        ("dist_reduce_scatter_func", "(output, input, ...)"),
    ):
        original = unless_alone(getattr(param_and_grad_buffer, name))
        why = "gloo copies the whole buffer where one rank is alone"
        patch(param_and_grad_buffer, name, original, expects=expects, why=why)


def _patch_distributed_optimizer_checkpoint() -> None:
    """Fix the loading of a distributed optimizer that uses torch's AdamW (no TE, no apex).

    torch keeps a ``step`` for each parameter.  Megatron's load path gives all parameters one shared
    ``step``, which AdamW would then raise once for each parameter: the bias correction would be
    silently wrong.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load_state_dict = DistributedOptimizer.load_state_dict
    megatrons = DistributedOptimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def set_main_state(self, model_param, tensors):
        if not isinstance(self.optimizer, torch.optim.Adam):
            return megatrons(self, model_param, tensors)
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        for key, destination in {"param": main, **self.optimizer.state[main]}.items():
            if key != "step":
                destination.copy_(tensors[key])

    def load_with_own_steps(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:  # of torch's AdamW
                state["step"] = state["step"].clone()

    why = "torch's AdamW has a step for each parameter, and Megatron loads one for all"
    for name, replacement, expects in (
        ("_set_main_param_and_optimizer_states", set_main_state, "(self, model_param, tensors)"),
        ("load_state_dict", load_with_own_steps, "(self, state_dict)"),
    ):
        patch(DistributedOptimizer, name, replacement, expects=expects, why=why)


def _patch_norm() -> None:
    """Allow norms under sequence parallelism (MoE with TP needs it), and zero-centred ones."""
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs

    class ZeroCentredNorm(torch.nn.RMSNorm):
        """RMSNorm times (1 + weight)."""

        def forward(self, x):
            y = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
            return (y * (1.0 + self.weight.float())).to(x.dtype)

    class SequenceParallelNorm:
        """torch's norm; its weights are tagged, so that their gradients are summed."""

        def __new__(cls, config, hidden_size, eps=1e-5, **_):
            kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
            if config.layernorm_zero_centered_gamma:
                kind = ZeroCentredNorm
            norm = kind(normalized_shape=hidden_size, eps=eps)
            for p in norm.parameters():
                p.sequence_parallel = config.sequence_parallel
            return norm

    for module, name in (
        (backends, "WrappedTorchNorm"),
        (gpt_layer_specs, "LNImpl"),
    ):
        patch(
            module,
            name,
            SequenceParallelNorm,
            expects="(config, hidden_size, eps=1e-05, persist_layer_norm=False,"
            " zero_centered_gamma=False, normalization='LayerNorm')",
            why="it refuses sequence parallelism, which MoE with tensor ranks needs, and zero-centred weights",
        )
