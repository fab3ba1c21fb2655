"""Replay of the trainer's own routes (R2): the choice of its old-log-prob pass, in its train passes.

The control of R3: old and new log-probs go through the same experts, in every optimizer step of a rollout and in
recomputation, and the rollout's experts are not used.  Source: R2 in arXiv 2510.11370 and 2512.01374.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.moe.router import TopKRouter

from r3train.trainer.megatron.replay import decoder_routers, in_recomputation
from r3train.types import RankSlice, ReplayEvidence


class ActorRoutes:
    """The choices of one rank's routers in the old-log-prob pass, and their replay.

    It takes the calls of ``RoutingReplayManager``.  Its proof is of this process: a train pass raises AssertionError
    where a router call was not served exactly once (covered) or dispatched other experts (applied).
    """

    recorder = None  # the rollout's evidence
    drift = None
    records = False

    def __init__(self, device: torch.device):
        self._device = device
        self._routers: list[TopKRouter] = []
        self._pass: str | None = None
        self._microbatches: list[int] = []
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        # (microbatch, layer) -> experts int16[m, K], of the rollout's old-log-prob pass
        self.chosen: dict[tuple[int, int], torch.Tensor] = {}
        self._times_replayed: Counter[tuple[int, int]] = Counter()
        self._applied = torch.ones((), dtype=torch.bool, device=device)

    def install(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Put a replay object on every decoder router; routers of MTP layers choose for themselves."""
        for vp_stage, chunk in enumerate(chunks):
            for router in decoder_routers(chunk):
                router.router_replay = _RouterReplay(self, vp_stage, router.layer_number)
                router.register_forward_hook(router.router_replay.compare)
                self._routers.append(router)

    def begin_pass(
        self,
        replay_pass: str,
        slices: Sequence[RankSlice],
        weight_version: int | None = None,
        *,
        counts_controls: bool = False,
    ) -> None:
        """Record in old_log_prob, replay in train; other passes (other weights) route freely."""
        if replay_pass == "old_log_prob":
            self.chosen.clear()
        self._pass = replay_pass if replay_pass in ("old_log_prob", "train") else None
        self._microbatches = [s.microbatch_id for s in slices]

    def begin_forward(self, vp_stage: int, microbatch_id: int) -> None:
        """Name the microbatch that the chunk runs forward next."""
        self._forward[vp_stage] = microbatch_id

    def begin_backward(self, vp_stage: int, microbatch_id: int) -> None:
        """Name the microbatch whose graph of the chunk autograd walks back next."""
        self._backward[vp_stage] = microbatch_id

    def end_pass(self) -> None:
        """Judge a train pass; waits once for the device."""
        replayed, times, applied = self._pass == "train", self._times_replayed.copy(), self._applied
        expected = {(m, r.layer_number): 1 for m in self._microbatches for r in self._routers}
        self.reset()
        if replayed:
            wrong = {call: times[call] for call in expected | times if times[call] != 1}
            assert not wrong, f"R2: {{(microbatch, layer): times replayed}} is {wrong}, expected 1"
            assert bool(applied), "R2: a router dispatched other experts than those replayed"

    def reset(self) -> None:
        """Leave a pass, also after an exception; the rollout's choices stay for its other steps."""
        self._pass = None
        self._forward.clear()
        self._backward.clear()
        self._times_replayed.clear()
        self._applied = torch.ones((), dtype=torch.bool, device=self._device)

    def collect(self, step: int) -> list[ReplayEvidence]:
        """Return no evidence: that is about the rollout's routes."""
        return []

    def call(self, vp_stage: int, layer_number: int) -> tuple[int, int]:
        """Name the router call in progress: (microbatch, 1-based layer)."""
        microbatches = self._backward if in_recomputation() else self._forward
        return microbatches[vp_stage], layer_number

    def experts(self, vp_stage: int, layer_number: int) -> torch.Tensor | None:
        """Return the experts int64[m, K] for the call in progress; None where the router chooses."""
        if self._pass != "train":
            return None
        return self.chosen[self.call(vp_stage, layer_number)].long()

    def note_choice(self, vp_stage: int, layer_number: int, experts: torch.Tensor) -> None:
        """Keep a router's own choice, where it is the old-log-prob pass's."""
        if self._pass == "old_log_prob":
            self.chosen[self.call(vp_stage, layer_number)] = experts.to(torch.int16)

    def note_dispatch(self, vp_stage: int, layer_number: int, routing_map: torch.Tensor) -> None:
        """Compare what a router returned, bool[m, E], with what it had to; without waiting for the device."""
        experts = self.experts(vp_stage, layer_number)
        if experts is None:
            return
        expected = torch.zeros_like(routing_map).scatter(1, experts, True)
        self._applied = self._applied & (routing_map == expected).all()
        if not in_recomputation():
            self._times_replayed[self.call(vp_stage, layer_number)] += 1


class _RouterReplay:
    """The replay object of one router.  Megatron calls ``get_replay_topk`` only."""

    def __init__(self, routes: ActorRoutes, vp_stage: int, layer_number: int):
        self._routes = routes
        self._call = vp_stage, layer_number

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The live scores at the experts of the old-log-prob pass, as ``replay.RouterReplay`` has them."""
        experts = self._routes.experts(*self._call)
        if experts is not None:
            return scores.gather(1, experts), experts
        values, experts = default_compute_topk(scores, topk, num_groups, group_topk)
        self._routes.note_choice(*self._call, experts)
        return values, experts

    def compare(self, router: TopKRouter, args: tuple, output: tuple) -> None:
        """Hand on what the router returned."""
        self._routes.note_dispatch(*self._call, output[1])
