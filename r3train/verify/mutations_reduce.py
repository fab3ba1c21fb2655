"""Planted bugs of gradient reduction and normalisation: all show in phase 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as megatron_finalize

from r3train.trainer.megatron import actor, model
from r3train.verify.mutations import Scene, mutation, patched
from r3train.verify.compare import GRADIENTS


def _finalize_then(scale: Callable[[Any], float]) -> Any:
    """Patch the finalisation that the actor hands to Megatron: scale all gradients afterwards."""

    def make(original: Callable) -> Callable:
        def finalize(chunks: list, num_tokens: Any = None, **kwargs: Any) -> None:
            factor = scale(num_tokens)
            original(chunks, num_tokens, **kwargs)
            for chunk in chunks:
                chunk.scale_gradients(factor)

        return finalize

    return patched(actor, "finalize_model_grads", make)


@mutation("gradients are divided by this rank's tokens alone", topology="dp2", phase=GRADIENTS)
def local_token_normalisation(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def finalize(chunks: list, num_tokens: Any = None, **kwargs: Any) -> None:
            local = float(num_tokens)
            original(chunks, None, **kwargs)
            for chunk in chunks:
                chunk.scale_gradients(1.0 / local)

        return finalize

    with patched(actor, "finalize_model_grads", make):
        yield


@mutation("gradients are divided by the data-parallel size too", topology="dp2", phase=GRADIENTS)
def divided_by_dp(scene: Scene) -> Iterator[None]:
    with _finalize_then(lambda n: 1.0 / parallel_state.get_data_parallel_world_size()):
        yield


@mutation("gradients are multiplied by the context size", topology="cp2", phase=GRADIENTS)
def multiplied_by_cp(scene: Scene) -> Iterator[None]:
    with _finalize_then(lambda n: float(parallel_state.get_context_parallel_world_size())):
        yield


@mutation("expert gradients are not reduced over their data ranks", topology="tp2", phase=GRADIENTS)
def expert_sync_skipped(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def finish(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            groups, self.expert_parallel_bucket_groups = self.expert_parallel_bucket_groups, []
            try:
                original(self, *args, **kwargs)
            finally:
                self.expert_parallel_bucket_groups = groups

        return finish

    with patched(DistributedDataParallel, "finish_grad_sync", make):
        yield


@mutation("expert gradients are reduced over the dense group", topology="tp2", phase=GRADIENTS)
def expert_group_confused(scene: Scene) -> Iterator[None]:
    with patched(model, "_mark_expert_parameters", lambda original: lambda chunk, parallel: None):
        yield


@mutation(
    "norm and router gradients are averaged over tensor ranks, not summed",
    topology="tp2",
    phase=GRADIENTS,
)
def tp_mean_instead_of_sum(scene: Scene) -> Iterator[None]:
    import sys

    # the package exports a function of the module's name
    module = sys.modules[megatron_finalize.__module__]

    def make(original: Callable) -> Callable:
        def reduce(chunks: list, config: Any, *args: Any) -> None:
            original(chunks, config, *args)
            size = parallel_state.get_tensor_model_parallel_world_size()
            for chunk in chunks:
                for p in chunk.parameters():
                    if getattr(p, "sequence_parallel", False):
                        p.main_grad /= size

        return reduce

    with patched(module, "_allreduce_non_tensor_model_parallel_grads", make):
        yield
