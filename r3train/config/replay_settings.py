"""Rollout routing replay (R3) and its proof."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from pydantic import Field

from r3train.config.requirements import check, excludes, requires
from r3train.config.section import Section

if TYPE_CHECKING:
    from r3train.config.run import RunConfig

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
    "canaries_of_itself",
    "expert_bias_not_exported",
    "version_with_first_bucket",
    "cache_not_flushed",
]

_ROUTE, _PUBLISH = "|".join(get_args(RouteBug)), "|".join(get_args(PublishBug))
_FEWEST_CANARY_TOKENS = 32
_GRAPH = "a CUDA graph over the router replays one capture's experts"
# settings of Megatron, wherever they are given, with the values that harm -> why
_NOT_REPLAYED = {
    "moe_router_fusion": "the fused router returns before Megatron's replay hook",
    "moe_router_load_balancing_type = *sinkhorn*|*quantile*": "these choose experts without top-k",
    "moe_expert_capacity_factor >= 0": "capacity dropping discards replayed choices",
    "moe_expert_rank_capacity_factor >= 0": "capacity dropping discards replayed choices",
    "moe_pad_expert_input_to_capacity": "it needs capacity dropping, which discards replayed choices",
    "moe_router_force_load_balancing": "it replaces the logits with random ones",
    "enable_cuda_graph": _GRAPH,
    "external_cuda_graph": _GRAPH,
    "cuda_graph_impl": _GRAPH,
    "cuda_graph_scope": _GRAPH,
    "cuda_graph_modules": _GRAPH,
    "overlap_moe_expert_parallel_comm": "it interleaves two microbatches in the router's calls",
}


class ReplaySection(Section):
    """Replay of the rollout's experts in the trainer, and its proof."""

    title: ClassVar[str] = "Rollout routing replay (R3)"
    test_hooks = ("plant_bug",)

    use_rollout_routing_replay: Annotated[
        bool,
        excludes("learns_conversations: conversations have no routes"),
        *(
            excludes(f"transformer_overrides.{name} or sglang.{name}: {why}")
            for name, why in _NOT_REPLAYED.items()
        ),
        excludes(
            "transformer_overrides.dsa_kernel_backend = tilelang|cudnn: the kernel chooses an indexer's tokens itself"
        ),
    ] = False
    """Turn R3 on: SGLang returns the experts that it chose, and the actor replays them."""
    use_routing_replay: Annotated[
        bool,
        excludes(
            "use_rollout_routing_replay: a router replays one choice, the rollout's or its own"
        ),
        excludes("learns_conversations: no old log-probs are computed, whose routes it replays"),
        excludes("reuse_log_probs = on: the routes are those of the pass that it skips"),
        *(excludes(f"transformer_overrides.{name}: {why}") for name, why in _NOT_REPLAYED.items()),
    ] = False
    """Replay the actor's own routes of its old-log-prob pass in its train passes (R2), not the rollout's:
    a control for comparisons. The pass is always made then."""
    enable_r3_correctness_check: bool = False
    """Write evidence of every router call; the run fails if replay is not exact."""
    r3_check_interval: int = Field(default=1, ge=1)
    """Check the first N rollouts, every Nth after them, and the first of every start, each with all
    of its router calls; 1 checks every rollout.  Replay goes on in the others, unchecked."""
    r3_evidence: Literal["calls", "summed"] = "calls"
    """With the check on: calls writes a record and two log lines of every router call; summed
    writes one for all calls of a rank, pass and layer in a step, and every call where anything is wrong."""
    r3_mismatch_threshold: float | None = Field(default=None, ge=0, le=1)
    """A larger share of rows that have no expert in common with the trainer's own choice is suspect (r3_suspect_limit).
    Rows of the actor's own weight version count; a larger share of staler rows is a warning.  Unset: 0.01, with servers
    of fp8 0.03."""
    r3_recheck_share: float = Field(default=0.01, ge=0, le=1)
    """With the check on: share of a rollout's samples, at least one, that their servers compute again,
    to compare rows and log-probs with those delivered; 0 is off.  Its former name is r3_audit_share."""
    r3_canaries: int = Field(default=1024, ge=0)
    """With the check on, or --check-weight-update-equal: tokens of fixed texts, two at least, that every server and
    the actor score after weight updates, before the next training; the run ends where they disagree (docs/proof/r3.md).
    0 is off."""
    r3_canary_share: float = Field(default=0.02, ge=0, le=1)
    """Share of the time that canaries may take, of servers and actor together: it decides which updates are judged.  The
    first two of a start, and those after a restart of servers, are judged in any case; with 1 or ci_test all are."""
    r3_suspect_limit: float = Field(default=5.0, ge=0)
    """With the check on: a statistic of the proof that stays above twice the usual is suspect, with a warning for each
    step, and ends the run when its suspicion, which grows by 1 a step at most, reaches this.  0: never; with ci_test 1.
    What is exact ends the run at once (docs/proof/r3.md)."""
    log_route_drift: Annotated[
        bool, requires("use_rollout_routing_replay: there is nothing to drift away from")
    ] = False
    """Log how far the router has drifted from the replayed experts, for each MoE layer and their mean: rows
    whose live choice differs, gate mass on the replayed experts, entropy of the load, dead experts."""
    route_stores: Annotated[
        bool,
        requires("use_rollout_routing_replay: there are no routes to keep"),
        excludes("replay_rollouts: route stores stand between a server and the ranks"),
    ] = False
    """Keep routes on the first rank of each data-parallel replica instead of rank 0. Each keeps a share,
    and fetches from the others the further routes that its ranks train."""
    route_store_host: Annotated[str | None, requires("route_stores")] = Field(
        default=None, min_length=1
    )
    """Address or network interface that the route stores bind.  Unset: loopback on one node; over
    several nodes, the address by which each node reaches the rendezvous."""
    plant_bug: Annotated[
        Literal[RouteBug, PublishBug] | None,
        requires(
            "check_weight_update_equal or canary_tokens > 0: nothing would notice the bug",
            when=_PUBLISH,
        ),
        requires("use_rollout_routing_replay: there is no replay to spoil", when=_ROUTE),
        requires(
            "enable_r3_correctness_check or ci_test: nothing would notice the bug", when=_ROUTE
        ),
        requires("recheck_share > 0: nothing else would notice the bug", when="answer_*"),
        excludes("route_stores: answers are rechecked on rank 0", when="answer_*"),
    ] = None
    """Plant a deliberate bug, to see its check fail: in the replay, in the servers' answers (answer_...), or
    in the weights on their way to the servers."""

    @check
    def _canaries(self, run: RunConfig) -> Iterator[str]:
        tokens = self.r3_canaries
        if 0 < tokens < _FEWEST_CANARY_TOKENS:
            yield (
                f"r3_canaries {tokens} is below {_FEWEST_CANARY_TOKENS}: two texts of sixteen tokens; 0 is off"
            )

    @check
    def _switches(self, run: RunConfig) -> Iterator[str]:
        for name in ("use_rollout_routing_replay", "moe_enable_routing_replay"):
            if name in run.rollout.sglang:
                yield (
                    f"sglang.{name}: set --use-rollout-routing-replay instead, which asks SGLang for the"
                    " routed experts too"
                )
