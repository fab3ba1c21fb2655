"""Planted bugs of replay itself: which layer, which microbatch, which pass, which probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import router as megatron_router

from r3train.trainer.megatron import actor, hf_bridge, replay
from r3train.trainer.megatron.replay import RouterReplay, RoutingReplayManager
from r3train.verify.mutations import Scene, mutation, patched
from r3train.verify.compare import GRADIENTS, LOSS, ROUTES


@contextmanager
def _layers_read(as_layer: Callable[[int, int], int]) -> Iterator[None]:
    """Make every replay object serve another layer's routes: (vp_stage, layer) -> layer.

    The rank is sent those layers' routes as well, so nothing is missing: they are just wrong.
    """

    def make_init(original: Callable) -> Callable:
        def init(self: RouterReplay, manager: Any, vp_stage: int, layer_number: int) -> None:
            original(self, manager, vp_stage, as_layer(vp_stage, layer_number))

        return init

    def make_layers(original: Callable) -> Callable:
        def with_layers(topology: Any, layers: tuple) -> Any:
            also = tuple(
                tuple(dict.fromkeys([*chunk, *(as_layer(v, n) for n in chunk)]))
                for v, chunk in enumerate(layers)
            )
            return original(topology, also)

        return with_layers

    with patched(RouterReplay, "__init__", make_init), patched(actor, "with_layers", make_layers):
        yield


@mutation(
    "layers are counted as if all pipeline stages were equal", topology="pp2_uneven", phase=ROUTES
)
def uneven_first_stage_ignored(scene: Scene) -> Iterator[None]:
    first = scene.topology.parallel["decoder_first_pipeline_num_layers"]
    even = scene.variant.num_layers // scene.topology.parallel["pipeline_model_parallel_size"]

    def as_layer(vp_stage: int, layer: int) -> int:
        behind = parallel_state.get_pipeline_model_parallel_rank() > 0
        return min(layer - first + even, scene.variant.num_layers) if behind else layer

    with _layers_read(as_layer):
        yield


@mutation("the second model chunk replays the first one's layers", topology="vpp2pp2", phase=ROUTES)
def first_chunk_reused(scene: Scene) -> Iterator[None]:
    parallel = scene.topology.parallel
    stride = scene.variant.num_layers // parallel["virtual_pipeline_model_parallel_size"]
    with _layers_read(lambda vp_stage, layer: layer - vp_stage * stride):
        yield


@mutation(
    "the router of a multi-token-prediction layer, whose numbers restart, counts as layer 1",
    topology="one",
    phase=ROUTES,
)
def mtp_router_counted(scene: Scene) -> Iterator[None]:
    with attached_mtp(), patched(replay, "decoder_routers", _with_mtp):
        yield


@mutation("a multi-token-prediction router is there and left alone", topology="one", phase=None)
def null_with_mtp(scene: Scene) -> Iterator[None]:
    with attached_mtp():
        yield


def _with_mtp(original: Callable) -> Callable:
    def all_routers(chunk: torch.nn.Module) -> list:
        # the later of two routers with the same number is the one that keeps the layer's name
        last = {
            m.layer_number: m for m in chunk.modules() if isinstance(m, megatron_router.TopKRouter)
        }
        return [last[number] for number in sorted(last)]

    return all_routers


@contextmanager
def attached_mtp() -> Iterator[None]:
    """Give every chunk a multi-token-prediction router that routes the decoder's output, natively.

    A real Megatron router numbered 1; its weight is no parameter, so that checkpoints do not ask
    for it.  (mbridge's families have no MTP block that runs without Transformer Engine.)
    """

    def make(original: Callable) -> Callable:
        def load(bridge: Any, chunks: Sequence[torch.nn.Module], path: Any) -> None:
            original(bridge, chunks, path)
            for chunk in map(hf_bridge.unwrap, chunks):
                if not hasattr(chunk.decoder, "mtp"):
                    _attach(chunk)

        return load

    def _attach(chunk: torch.nn.Module) -> None:
        model = next(m for m in chunk.modules() if isinstance(m, megatron_router.TopKRouter))
        router = megatron_router.TopKRouter(config=model.config, pg_collection=_groups(model))
        router.set_layer_number(1)
        weight = model.weight.detach().clone()
        del router._parameters["weight"]
        router.register_buffer("weight", weight, persistent=False)
        # inside the decoder: Megatron walks an ``mtp`` of the model itself, layer by layer
        chunk.decoder.mtp = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([router])})

        def run(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
            with torch.no_grad():
                router(output.detach())

        chunk.decoder.register_forward_hook(run)

    with patched(hf_bridge, "load_hf_weights", make):
        yield


def _groups(router: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


@mutation(
    "the routes of a forward-only pass stay and are served to the next one",
    topology="dp2",
    phase=ROUTES,
    decoy_pass=True,
)
def routes_not_cleared(scene: Scene) -> Iterator[None]:
    def make_end(original: Callable) -> Callable:
        def end_pass(self: RoutingReplayManager) -> None:
            staged = dict(self._staged)
            original(self)
            self._staged = staged

        return end_pass

    def make_begin(original: Callable) -> Callable:
        def begin_pass(self: RoutingReplayManager, *args: Any) -> None:
            stale = dict(self._staged)
            original(self, *args)
            self._staged.update(stale)

        return begin_pass

    with patched(RoutingReplayManager, "end_pass", make_end):
        with patched(RoutingReplayManager, "begin_pass", make_begin):
            yield


@mutation(
    "recomputation uses the microbatch that ran forward last",
    topology="pp2_uneven_level",
    phase=ROUTES,
)
def last_in_first_out_recompute(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def current(self: RoutingReplayManager, vp_stage: int) -> int | None:
            return self._forward[vp_stage] if self._active else None

        return current

    with patched(RoutingReplayManager, "current_microbatch", make):
        yield


@mutation(
    "recomputation uses the last microbatch forward, interleaved",
    topology="vpp2pp2_level",
    phase=ROUTES,
)
def last_in_first_out_interleaved(scene: Scene) -> Iterator[None]:
    yield from last_in_first_out_recompute(scene)


@mutation("recomputation routes for itself", topology="recompute_uniform", phase=ROUTES)
def native_recompute(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def staged(self: RoutingReplayManager, vp_stage: int) -> Any:
            return None if replay.in_recomputation() else original(self, vp_stage)

        return staged

    with patched(RoutingReplayManager, "staged", make):
        yield


@mutation("every microbatch gets the routes of the one before", topology="one_level", phase=ROUTES)
def stale_microbatch(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def begin_forward(self: RoutingReplayManager, vp_stage: int, microbatch_id: int) -> None:
            before = getattr(self, "_before", microbatch_id)
            self._before = microbatch_id
            original(self, vp_stage, before if before in self._staged else microbatch_id)

        return begin_forward

    with patched(RoutingReplayManager, "begin_forward", make):
        yield


@mutation("the fused router returns before it asks for a replay", topology="tp2", phase=ROUTES)
def fused_router(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def route(*args: Any, router_replay: Any = None, **kwargs: Any) -> Any:
            return original(*args, router_replay=None, **kwargs)

        return route

    with patched(megatron_router, "topk_routing_with_score_function", make):
        yield


@mutation(
    "moe_router_fusion set in spite of the start-up check",
    topology="one",
    phase=ROUTES,
    overrides={"moe_router_fusion": True},
    expect_error="fused",
)
def fused_router_flag(scene: Scene) -> Iterator[None]:
    yield


@mutation("no gradient reaches the router through the gates", topology="tp2", phase=GRADIENTS)
def gates_detached(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def get_replay_topk(self: RouterReplay, scores: torch.Tensor, *args: Any) -> Any:
            return original(self, scores.detach(), *args)

        return get_replay_topk

    with patched(RouterReplay, "get_replay_topk", make):
        yield


@mutation("padding rows count as load for the expert biases", topology="cp2_glm", phase=ROUTES)
def padding_counted(scene: Scene) -> Iterator[None]:
    with patched(RoutingReplayManager, "_mask_padding", lambda original: lambda *_: None):
        yield


@mutation("the last microbatch of the step is left out", topology="dp2", phase=LOSS)
def last_microbatch_skipped(scene: Scene) -> Iterator[None]:
    def make(original: Callable) -> Callable:
        def run(self: Any, step: Any, slices: Sequence, *, forward_only: bool) -> list:
            kept = slices if forward_only else slices[:-1]
            return original(self, step, kept, forward_only=forward_only)

        return run

    with patched(actor.MegatronActor, "_run_schedule", make):
        yield
