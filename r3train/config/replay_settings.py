"""Rollout routing replay (R3) and its proof."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from r3train.config.section import Section

RouteBug = Literal[
    "one_expert",
    "token_shift",
    "layer_swap",
    "bypass",
    "answer_with_rows_of_another",
    "answer_without_second_stage",
]
PublishBug = Literal[
    "expert_never_sent",
    "tensor_of_last_version",
    "weights_frozen",
    "export_frozen",
    "probe_of_itself",
    "expert_bias_not_exported",
    "version_with_first_bucket",
    "cache_not_flushed",
]


class ReplaySection(Section):
    """Replay of the rollout's experts in the trainer, and its proof."""

    title: ClassVar[str] = "Rollout routing replay (R3)"

    use_rollout_routing_replay: bool = False
    """Turn R3 on: SGLang returns the experts that it chose, and the actor replays them."""
    enable_r3_correctness_check: bool = False
    """Write evidence of every router call; the run fails if replay is not exact."""
    r3_check_interval: int = Field(default=1, ge=1)
    """Check the first N rollouts, every Nth after them, and the first of every start, each with all
    of its router calls; 1 checks every rollout.  Replay goes on in the others, unchecked."""
    r3_evidence: Literal["calls", "summed"] = "calls"
    """With the check on: calls writes a record and two log lines of every router call; summed
    writes one for all calls of a rank, pass and layer in a step, and every call where anything is wrong."""
    r3_mismatch_threshold: float = Field(default=1e-2, ge=0, le=1)
    """The check fails if a larger share of rows has no expert in common with the trainer's own choice.
    Rows of the actor's own weight version count; a larger share of staler rows is a warning."""
    r3_audit_share: float = Field(default=0.01, ge=0, le=1)
    """With the check on: share of a rollout's samples, at least one, that their servers compute again,
    to compare rows and log-probs with those delivered; 0 is off."""
    r3_keep_score_ratio: float = Field(default=0.0, ge=0, le=1)
    """Keep a replayed expert only while its live score is at least this share of the score of the live
    top-k's weakest; the best live expert that the row lacks takes its place.  0 keeps all."""
    log_route_drift: bool = False
    """Log how far the router has drifted from the replayed experts, for each MoE layer and their mean:
    rows whose live choice is another, gate mass on the replayed experts, entropy of the load, dead
    experts."""
    route_stores: bool = False
    """Keep routes on the first rank of each data-parallel replica instead of rank 0.  Each keeps a
    share, and fetches from the others what else its ranks train."""
    route_store_host: str | None = Field(default=None, min_length=1)
    """Address or network interface that the route stores bind.  Unset: loopback on one node; over
    several nodes, the address by which each node reaches the rendezvous."""
    plant_bug: Literal[RouteBug, PublishBug] | None = None
    """Plant a deliberate bug, to see its check fail: in the replay, in the servers' answers (answer_...), or
    in the weights on their way to the servers."""
