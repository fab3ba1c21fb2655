"""Transport of routes: through rank 0, or with --route-stores through data-parallel leaders."""

from __future__ import annotations

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.loop.route_transport import Routes, RoutesOnRank0
from r3train.route_stores.stores import RouteStores


def build_routes(config: RunConfig, hf: HfModelFacts) -> Routes:
    """Build this rank's part; raises ValueError if leaders could not reach the servers."""
    if config.replay.route_stores:
        return RouteStores(config, hf.route_shape, hf.moe_layer_numbers)
    if config.replay.use_rollout_routing_replay:
        return RoutesOnRank0(hf.route_shape, hf.moe_layer_numbers)
    return RoutesOnRank0(None, ())
