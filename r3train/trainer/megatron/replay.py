"""Rollout routing replay inside Megatron-Core: a replay object on every router, no global list.

``TopKRouter.router_replay`` is a plain attribute.  Where it is set, megatron-core asks it for the
top-k: ``get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)``.  The manager
puts one ``RouterReplay`` on every router of every model chunk, keyed by ``router.layer_number``
(1-based, global over PP and VPP).  It is told which microbatch is being computed:

- forward: the forward step calls ``begin_forward`` before it runs the chunk;
- recomputation: a gradient hook on the chunk's output calls ``begin_backward`` when autograd starts
  to walk that microbatch's graph back, which is before any of its recomputation.  The autograd
  graph itself names the microbatch, so no schedule (1F1B, interleaved) can mix two up.

``install`` is called once.  A step then calls ``begin_pass``, forward and backward, ``end_pass`` for
each pass, and ``collect`` once.  After an exception, ``reset`` drops everything.

Example: a router of four experts, two a token, and three rows, routes [[2, 0], [1, 255], [3, 1]], scores
[[.1, .2, .3, .4], [.4, .3, .2, .1], [.1, .2, .3, .4]].  Row 0 goes to experts 2 and 0 with the scores .3 and .1, though it
would choose 3 and 2 now.  Row 1 lacks a slot, which takes the best expert that the row has not: experts 1 and 0, scores
.3 and .4; its evidence counts expert 1 alone as replayed.  Gradients reach the scores that were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.moe.router import TopKRouter

from r3train.patches import patch
from r3train.routing.padding import fill_missing, padding_routes
from r3train.trainer.megatron.indexer_replay import ReplayedCall, StagedIndexer
from r3train.trainer.megatron.replay_evidence import CallRecorder, Choice
from r3train.trainer.megatron.route_drift import RouteDrift
from r3train.types import RankSlice, ReplayEvidence, missing_marker

# (scores float[m, E], experts int64[m, k]) -> gate values at the experts, float[m, k]
Gates = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class StagedRoutes:
    """One microbatch's routes of this rank, on the device.

    routes: uint8 or int32 [m, l, K], in memory layer by layer: a router call reads one layer of it.
    Padding rows are filled, missing slots of real rows hold ``marker``.  rows_with_missing: int64[q], real
    rows with a missing slot in any layer.
    real: bool[m], False on padding.  uids: int64[m].  current: bool[m], True on real rows whose routes
    the weights of the actor's own version computed.  missing_rows_per_layer: l counts, on the host.
    """

    routes: torch.Tensor
    marker: int
    rows_with_missing: torch.Tensor | None
    real: torch.Tensor
    uids: torch.Tensor
    current: torch.Tensor
    num_rows: int
    num_real: int
    num_current: int
    missing_rows_per_layer: list[int]
    column: dict[int, int]  # layer_number -> index along l
    layer_numbers: torch.Tensor  # int64[l]

    @classmethod
    def from_slice(
        cls,
        s: RankSlice,
        num_experts: int,
        device: torch.device,
        weight_version: int | None = None,
    ) -> StagedRoutes:
        """Bring a slice's routes to the device; padding rows are spread evenly over the experts.

        On a CPU the memory stays the slice's own, and its padding rows are filled too.
        weight_version: the version that the actor holds; None if no server ever held its weights.
        """
        assert s.routes is not None, "replay needs routes"
        marker = missing_marker(s.routes.dtype)
        real = s.route_uids >= 0
        current = np.zeros_like(real)
        if weight_version is not None:
            current = real & (s.route_versions == weight_version)
        routes = np.ascontiguousarray(s.routes.swapaxes(0, 1))  # [l, m, K], as it lies in memory
        # the marker is the dtype's largest value: a maximum over layers shows it, without a mask of all slots
        slots = np.flatnonzero(routes.max(axis=0, initial=0) == marker)
        rows = np.unique(slots // routes.shape[2])
        rows_with_missing = rows[real[rows]]
        original = routes[:, rows_with_missing]
        num_padding = int((~real).sum())
        if num_padding:
            routes[:, ~real] = padding_routes(num_padding, routes.shape[2], num_experts)
        if routes.dtype == np.uint16:  # torch's uint16 has no arithmetic
            routes = routes.astype(np.int32)

        def to_device(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device, non_blocking=True)

        return cls(
            routes=to_device(routes).transpose(0, 1),
            marker=marker,
            rows_with_missing=to_device(rows_with_missing) if len(rows_with_missing) else None,
            real=to_device(real),
            uids=to_device(s.route_uids),
            current=to_device(current),
            num_rows=len(real),
            num_real=int(real.sum()),
            num_current=int(current.sum()),
            missing_rows_per_layer=(original == marker).any(2).sum(1).tolist(),
            column={int(n): i for i, n in enumerate(s.layer_numbers)},
            layer_numbers=to_device(s.layer_numbers.astype(np.int64)),
        )


class RouterReplay:
    """The replay object of one router.  Megatron calls ``get_replay_topk`` only."""

    def __init__(
        self, manager: RoutingReplayManager, vp_stage: int, layer_number: int, gates: Gates
    ):
        self._manager = manager
        self.vp_stage = vp_stage
        self.layer_number = layer_number
        self._gates = gates

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The live scores at the replayed experts.

        scores: float[m, E].  Returns (scores[m, K], experts int64[m, K]); gradients reach the router
        through the gather.  Outside a pass the router chooses for itself.
        Source of the signature: megatron-core 0.19.2 moe_utils.topk_routing_with_score_function.
        """
        staged = self._manager.staged(self.vp_stage)
        if staged is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        assert scores.shape[0] == staged.num_rows, (
            f"layer {self.layer_number}: the router sees {scores.shape[0]} rows, "
            f"{staged.num_rows} are staged"
        )
        recorded = staged.routes[:, staged.column[self.layer_number]].long()
        experts = recorded
        if (rows := staged.rows_with_missing) is not None:
            holes = recorded[rows]
            filled = fill_missing(scores[rows], holes, holes == staged.marker)
            experts = recorded.index_copy(0, rows, filled)
        if self._manager.recorder is not None or self._manager.drifts:
            actor_experts = default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1]
            self._observe(staged, scores.detach(), recorded, experts, actor_experts)
        return scores.gather(1, experts), experts

    def _observe(
        self,
        staged: StagedRoutes,
        scores: torch.Tensor,
        recorded: torch.Tensor,
        experts: torch.Tensor,
        actor_experts: torch.Tensor,
    ) -> None:
        """Show the replayed experts and the router's own top-k, int64[m, K] each, to the recorder and the drift."""
        manager = self._manager
        if manager.recorder is not None:
            manager.recorder.note_choice(Choice(self.layer_number, scores, experts, actor_experts))
        if manager.drifts and not in_recomputation():
            whole = staged.real
            if staged.rows_with_missing is not None:
                whole = whole & (recorded != staged.marker).all(1)
            gates = self._gates(scores, actor_experts), self._gates(scores, experts)
            manager.drift.add(self.layer_number, actor_experts, experts, gates, whole)


class IndexerReplay:
    """The replay of the choices of one chunk's indexers (a ``ChoiceReplay``)."""

    def __init__(self, manager: RoutingReplayManager, vp_stage: int, topk: int):
        self._manager = manager
        self._vp_stage = vp_stage
        self._topk = topk

    def begin_call(self, layer_number: int, x: torch.Tensor) -> ReplayedCall | None:
        """Return the replay of the call that begins, None outside a pass and in a pass without choices."""
        manager = self._manager
        microbatch_id = manager.current_microbatch(self._vp_stage)
        staged = None if microbatch_id is None else manager.staged_indexers.get(microbatch_id)
        if staged is None or microbatch_id is None:
            return None
        record, controls = None, False
        if manager.recorder is not None:
            again = in_recomputation()
            controls = manager.recorder.counts_controls and not again
            record = manager.recorder.begin_indexer_call(
                staged,
                staged.column[layer_number],
                x,
                vp_stage=self._vp_stage,
                microbatch_id=microbatch_id,
                layer_number=layer_number,
                stage="replay_backward" if again else "replay_forward",
                topk=self._topk,
            )
        return ReplayedCall(staged, layer_number, self._topk, record, controls)


@torch.no_grad()
def gate_values(router: TopKRouter, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The router's gate values at some experts, float[m, k], up to a factor a row.

    scores: float[m, E], from which the router chooses: logits, probabilities, or sigmoids with the
    expert bias, which is no part of the gate.  experts: int64[m, k].
    Source: megatron-core 0.19.2 moe_utils.topk_routing_with_score_function.
    """
    values = scores.gather(1, experts)
    config = router.config
    if config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax:
        return (values - scores.amax(1, keepdim=True)).exp()
    if router.enable_expert_bias:
        return values - router.expert_bias[experts]
    return values


class RoutingReplayManager:
    """The replay objects of one rank's routers, and the routes that they serve.

    ``checks`` is True if the R3 check or ci_test is on.  If it is False, a router
    call does no extra work; nor while ``records`` is False, which changes between passes.  drift: set
    where the router's drift is logged.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        topk: int,
        device: torch.device,
        rank: int,
        counts_tokens: bool,
        checks: bool,
        drift: RouteDrift | None = None,
    ):
        self.num_experts = num_experts
        self.device = device
        self._recorder: CallRecorder | None = None
        self.records = True
        if checks:
            self._recorder = CallRecorder(rank=rank, topk=topk, counts_tokens=counts_tokens)
        self.drift = drift
        self.drifts = False  # True in the pass in which the drift is counted
        self.routers: list[tuple[int, TopKRouter]] = []
        self._staged: dict[int, StagedRoutes] = {}
        self.staged_indexers: dict[int, StagedIndexer] = {}  # by microbatch
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._active = False

    @property
    def recorder(self) -> CallRecorder | None:
        """The recorder of this pass's router calls, None where they are not checked."""
        return self._recorder if self.records else None

    # -- enable ------------------------------------------------------------------------------

    def install(self, chunks: Sequence[torch.nn.Module]) -> tuple[tuple[int, ...], ...]:
        """Put a replay object on every decoder router; routers of MTP layers choose for themselves.

        Returns the 1-based MoE layer numbers of each chunk.
        """
        layers = []
        for vp_stage, chunk in enumerate(chunks):
            routers = decoder_routers(chunk)
            for router in routers:
                router.router_replay = RouterReplay(
                    self, vp_stage, router.layer_number, partial(gate_values, router)
                )
                router.register_forward_pre_hook(self._mask_padding, with_kwargs=True)
                if router.enable_expert_bias:
                    patch(
                        router,
                        "_apply_expert_bias",
                        _RowMaskedExpertBias(router),
                        expects="(routing_map, padding_mask=None)",
                        why="it masks a map [m, E] with a mask [m]",
                    )
                if self._recorder is not None:
                    router.register_forward_hook(self.record_call)
                self.routers.append((vp_stage, router))
            for attention in decoder_indexers(chunk):
                topk = attention.config.dsa_indexer_topk
                attention.choice_replay = IndexerReplay(self, vp_stage, topk)
            layers.append(tuple(r.layer_number for r in routers))
        return tuple(layers)

    def uninstall(self) -> None:
        """Remove the replay objects.  The checks stay on, and report calls without replay."""
        for _, router in self.routers:
            router.router_replay = None

    # -- fill and stage ----------------------------------------------------------------------

    def begin_pass(
        self,
        replay_pass: str,
        slices: Sequence[RankSlice],
        weight_version: int | None = None,
        *,
        counts_controls: bool = False,
    ) -> None:
        """Stage the routes of all microbatches of a pass (old_log_prob, ref_log_prob or train).

        weight_version: as for ``StagedRoutes.from_slice``.  counts_controls: True for the rollout's first
        forwards of the actor's own weights; there its own choice is compared with misaligned routes
        too, and its drift counted.
        """
        assert not self._active, "a pass is still open"
        self._staged = {
            s.microbatch_id: StagedRoutes.from_slice(
                s, self.num_experts, self.device, weight_version
            )
            for s in slices
        }
        for s in slices:
            staged = StagedIndexer.from_slice(s, self.device, weight_version)
            if staged is not None:
                self.staged_indexers[s.microbatch_id] = staged
        self._active = True
        self.drifts = self.drift is not None and counts_controls
        if self.recorder is not None:
            self.recorder.begin_pass(replay_pass, weight_version, counts_controls=counts_controls)

    def begin_forward(self, vp_stage: int, microbatch_id: int) -> None:
        """Name the microbatch that the chunk runs forward next."""
        self._forward[vp_stage] = microbatch_id

    def begin_backward(self, vp_stage: int, microbatch_id: int) -> None:
        """Name the microbatch whose graph of the chunk autograd walks back next."""
        self._backward[vp_stage] = microbatch_id

    def end_pass(self) -> None:
        """Drop the routes of the pass, so that no later pass can get them."""
        self._staged.clear()
        self.staged_indexers.clear()
        self._forward.clear()
        self._backward.clear()
        self._active = self.drifts = False
        if self.recorder is not None:
            self.recorder.end_pass()

    def reset(self) -> None:
        """Drop routes and evidence after an exception."""
        if self.recorder is not None:
            self.recorder.clear()
        self.end_pass()

    # -- given to routers --------------------------------------------------------------------

    def current_microbatch(self, vp_stage: int) -> int | None:
        """Return the microbatch of the router call in progress, None outside a pass."""
        if not self._active:
            return None
        return (self._backward if in_recomputation() else self._forward)[vp_stage]

    def staged(self, vp_stage: int) -> StagedRoutes | None:
        """Return the routes for the router call in progress, None outside a pass."""
        microbatch_id = self.current_microbatch(vp_stage)
        return None if microbatch_id is None else self._staged[microbatch_id]

    def _mask_padding(self, router: TopKRouter, args: tuple, kwargs: dict) -> tuple | None:
        """Give the router the padding mask of its rows, for auxiliary losses and bias counts.

        A mask given to the model would be lost: block recompute drops it.  A rank whose rows are all
        real gets a mask too: without one it would count its peers' padding as real.
        """
        staged = self.staged(self._vp_stage_of(router))
        counts_rows = (
            router.is_aux_loss_enabled()
            or router.enable_expert_bias
            or router.config.moe_z_loss_coeff is not None
        )
        if staged is None or not counts_rows:
            return None
        return (args[0], ~staged.real[:, None]), {}

    def record_call(self, router: TopKRouter, args: tuple, output: tuple) -> None:
        """Record what a router has returned for the staged rows; its forward hook, and nothing without a recorder."""
        if self.recorder is None:
            return
        staged = self.staged(self._vp_stage_of(router))
        if staged is not None:
            vp_stage = self._vp_stage_of(router)
            probs, routing_map = output
            if router.config.moe_token_dispatcher_type == "flex":
                # DeepEP sends a row to the K largest of its probabilities, whatever the map says
                largest = probs.topk(router.topk, dim=1).indices
                routing_map = torch.zeros_like(routing_map).scatter(1, largest, True)
            self.recorder.record(
                staged,
                routing_map=routing_map,
                vp_stage=vp_stage,
                microbatch_id=self.current_microbatch(vp_stage),
                layer_number=router.layer_number,
                stage="replay_backward" if in_recomputation() else "replay_forward",
            )

    def _vp_stage_of(self, router: TopKRouter) -> int:
        return next(v for v, r in self.routers if r is router)

    # -- evidence ----------------------------------------------------------------------------

    def collect(self, step: int) -> list[ReplayEvidence]:
        """Return all records since the last call, in order; reads the device once."""
        return [] if self.recorder is None else self.recorder.collect(step)


def decoder_routers(chunk: torch.nn.Module) -> list[TopKRouter]:
    """Return the chunk's decoder routers by layer number, without those of multi-token prediction.

    MTP layers count from 1 again: their routers would be confused with the decoder's.
    """
    mtp = {id(m) for name, m in chunk.named_modules() if "mtp" in name.split(".")}
    routers = [m for m in chunk.modules() if isinstance(m, TopKRouter) and id(m) not in mtp]
    return sorted(routers, key=lambda r: r.layer_number)


def decoder_indexers(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the chunk's sparse attentions by layer number, without those of multi-token prediction."""
    found = [
        m
        for name, m in chunk.named_modules()
        if hasattr(m, "choice_replay") and "mtp" not in name.split(".")
    ]
    return sorted(found, key=lambda m: m.layer_number)


def in_recomputation() -> bool:
    """Return True while Megatron repeats a checkpointed forward during backward."""
    return is_checkpointing() and torch.is_grad_enabled()


class _RowMaskedExpertBias:
    """Count of tokens per expert without the padding rows.

    megatron-core 0.19.2 masks the map [m, E] with a mask [m], which does not broadcast.
    """

    def __init__(self, router: TopKRouter):
        self._router = router

    @torch.no_grad()
    def _count(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None) -> None:
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        self._router.local_tokens_per_expert += routing_map.sum(dim=0)

    def __call__(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        # so that a token counts once: not in evaluation, not in a forward that is recomputed
        if torch.is_grad_enabled():
            self._count(routing_map, padding_mask)
