"""Rollout routing replay (R3) and its proof."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from r3train.config.section import Section


class ReplaySection(Section):
    """Whether the rollout's experts are replayed, and whether that is proved."""

    title: ClassVar[str] = "Rollout routing replay (R3)"

    use_rollout_routing_replay: bool = False
    """Master switch: SGLang returns the experts it chose and the actor replays them."""
    enable_r3_correctness_check: bool = False
    """Write the evidence of every router call and fail where replay is not exact."""
    r3_mismatch_threshold: float = Field(default=1e-2, ge=0, le=1)
    """Share of token rows without a common expert above which the check fails."""
    route_stores: bool = False
    """Let every data-parallel leader receive and keep a share of the routes, and fetch what its ranks
    train from the others, instead of sending them all through rank 0."""
    route_store_host: str | None = Field(default=None, min_length=1)
    """Address or network interface that the route stores bind; unset means loopback on one node, and
    over several nodes the address by which each reaches the rendezvous."""
    plant_bug: Literal["one_expert", "token_shift", "layer_swap", "bypass"] | None = None
    """Plant a deliberate fault in the replay, to see the check fail."""
