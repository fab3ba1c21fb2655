"""Settings of Megatron that routing replay refuses, wherever they are given.

Those of SGLang's servers are in r3train/engine/refusals.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

from r3train.config.replay_settings import PublishBug
from r3train.config.run import RunConfig


def _on(value: Any) -> bool:
    """Return True for a setting that is on; it may be text or a list."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "none", "false", "0")
    return bool(value)


def _routes_outside_top_k(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return any(str(kind).strip().lower() in ("sinkhorn", "quantile") for kind in kinds)


def _drops(value: Any) -> bool:
    """Return True for a capacity factor that drops tokens; a negative one drops none."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value >= 0 if number else _on(value)


# Megatron setting -> (is this value refused, why)
TRAINER_REFUSALS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "moe_router_fusion": (
        _on,
        "the fused router returns before Megatron's replay hook, so nothing would be replayed",
    ),
    "moe_router_load_balancing_type": (
        _routes_outside_top_k,
        "sinkhorn and quantile routing choose experts without the top-k that replay hooks into",
    ),
    "moe_expert_capacity_factor": (
        _drops,
        "capacity dropping discards replayed choices, so what is dispatched is not the rollout's",
    ),
    "moe_pad_expert_input_to_capacity": (
        _on,
        "padding to capacity needs capacity dropping, which discards replayed choices",
    ),
    "moe_router_force_load_balancing": (
        _on,
        "it replaces the logits with random ones, so the gate probabilities mean nothing",
    ),
    "enable_cuda_graph": (_on, "a CUDA graph over the router replays one capture's experts"),
    "external_cuda_graph": (_on, "a CUDA graph over the router replays one capture's experts"),
    "cuda_graph_impl": (_on, "a CUDA graph over the router replays one capture's experts"),
    "cuda_graph_scope": (_on, "a CUDA graph over the router replays one capture's experts"),
    "overlap_moe_expert_parallel_comm": (
        _on,
        "it interleaves two microbatches, so a router call no longer tells whose it is",
    ),
}


def replay_conflicts(config: RunConfig) -> Iterator[str]:
    """Yield a complaint for each setting that R3 refuses, with the reason."""
    places = {
        "transformer_overrides": config.model.transformer_overrides,
        "sglang": config.rollout.sglang,
    }
    for own in ("use_rollout_routing_replay", "moe_enable_routing_replay"):
        if own in config.rollout.sglang:
            yield (
                f"sglang.{own}: set --use-rollout-routing-replay instead, which asks SGLang for the"
                " routed experts too"
            )
    yield from _route_stores(config)
    bug = config.replay.plant_bug
    if bug in get_args(PublishBug):
        if not config.trainer.check_weight_update_equal:
            yield f"--plant-bug {bug} needs --check-weight-update-equal: nothing would notice the bug"
        bug = None
    if not config.replay.use_rollout_routing_replay:
        if bug is not None:
            yield "--plant-bug needs --use-rollout-routing-replay: there is no replay to spoil"
        if config.replay.r3_keep_score_ratio:
            yield "--r3-keep-score-ratio needs --use-rollout-routing-replay: nothing is replayed"
        if config.replay.log_route_drift:
            yield "--log-route-drift needs --use-rollout-routing-replay: nothing to drift away from"
        return
    if bug is not None and not config.r3_check_enabled:
        yield "--plant-bug needs --enable-r3-correctness-check: nothing would notice the bug"
    elif str(config.replay.plant_bug).startswith("answer_"):
        if not config.audit_share or config.replay.route_stores:
            yield (
                f"--plant-bug {config.replay.plant_bug} needs --r3-audit-share above 0,"
                " --flush-cache-on-update, servers, and routes on rank 0: nothing else would notice"
            )
    for place, settings in places.items():
        for name, (refused, reason) in TRAINER_REFUSALS.items():
            if name in settings and refused(settings[name]):
                yield (
                    f"{place}.{name} = {settings[name]!r} cannot go with"
                    f" --use-rollout-routing-replay: {reason}"
                )


def _route_stores(config: RunConfig) -> Iterator[str]:
    if not config.replay.route_stores:
        if config.replay.route_store_host is not None:
            yield "--route-store-host needs --route-stores"
        return
    if not config.replay.use_rollout_routing_replay:
        yield "--route-stores needs --use-rollout-routing-replay: there are no routes to keep"
    if config.checkpoint.replay_rollouts is not None:
        yield (
            "--route-stores stand between a server and the ranks: --replay-rollouts has no server"
        )
