"""The servers that rank 0 would start with given flags; none is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from r3train.config.agent_settings import AgentSection
from r3train.launch.start.servers import RunServers
from r3train.loop.route_transport import RoutesOnRank0
from r3train.engine.server import SGLangServer


def servers_of_rank_0(
    directory: Path,
    servers: int,
    mode: str = "distributed",
    colocate: bool = False,
    **sglang: object,
) -> list[SGLangServer]:
    """Raises what the job would; then none was started.  ``SGLangServer.start`` must do nothing."""
    rollout = SimpleNamespace(
        rollout_num_engines=servers,
        rollout_seed=1,
        rollout_server_start_timeout_s=60.0,
        rollout_external_engine_addrs=[],
        has_external_servers=False,
        rollout_server_env=(),
        colocate=colocate,
        exact_boundaries=False,
        sglang=sglang,
    )
    config = SimpleNamespace(
        agent=AgentSection(),
        model=SimpleNamespace(hf_checkpoint=directory, dtype_name="float32"),
        replay=SimpleNamespace(use_rollout_routing_replay=False),
        has_engines=True,
        serves_adapters=False,
        serves_fp8=False,
        server_checkpoint=lambda run_dir: directory,
        trainer=SimpleNamespace(update_weight_transfer_mode=mode),
        rollout=rollout,
    )
    made = RunServers(
        SimpleNamespace(config=config, hf=None), directory, None, RoutesOnRank0(None, ())
    )
    try:
        made.start()
    except ValueError:
        assert not made.own, "one was started before the refusal"
        raise
    return made.own
