"""The servers that a run starts on rank 0's node; importing this imports no torch, so they start before it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from r3train.config import RunConfig
from r3train.families.checks.settings_checks import replayed_index_topk
from r3train.families.hf_facts import HfModelFacts
from r3train.engine.addresses import LOOPBACK
from r3train.engine.key import engine_api_key
from r3train.engine.server import SGLangServer
from r3train.hf_checkpoint import write_fp8_checkpoint
from r3train.launch.gpus import server_gpus_here

if TYPE_CHECKING:
    from r3train.launch.job.checked_job import Job


def start_servers(job: Job, run_dir: Path, num_ranks: int | None = None) -> list[SGLangServer]:
    """Start this run's servers and return at once; none where others generate, or nobody does.

    num_ranks: ranks of this node, which take the first GPUs; None means as torchrun says.
    Raises ValueError for a server's flags or GPUs; then none is started.
    """
    config, hf = job.config, job.hf
    if not config.has_engines or config.rollout.has_external_servers:
        return []
    checkpoint = config.server_checkpoint(run_dir)
    gpus = server_gpus_here(config, num_ranks)
    if config.serves_fp8:
        click.echo(f"writing the servers' checkpoint in fp8: {checkpoint} ...", err=True)
        write_fp8_checkpoint(hf, checkpoint)
    # one key for all servers, which only this job knows: every user of the node reaches loopback
    api_key = engine_api_key(os.environ) or secrets.token_hex(16)
    servers, count = [], config.rollout.rollout_num_engines
    for i in range(count):
        args = _server_args(config, i, gpus)
        server = build_server(
            config,
            hf,
            run_dir / "logs" / ("sglang.log" if count == 1 else f"sglang_{i}.log"),
            args,
            i,
            checkpoint,
            host=str(args.pop("host", LOOPBACK)),
            port=args.pop("port", None),
            api_key=api_key,
            adapter_flags=_adapter_flags(config, hf),
        )
        servers.append(server)
    return [server.start() for server in servers]


def build_server(
    config: RunConfig,
    hf: HfModelFacts,
    log: Path,
    flags: dict[str, object],
    index: int,
    checkpoint: Path | None = None,
    **server_options: Any,
) -> SGLangServer:
    """Make a server of the run's model.  flags: SGLang's.  index: its number among all of the run.

    checkpoint: it starts from, None for the run's own.
    """
    return SGLangServer(
        checkpoint or config.model.hf_checkpoint,
        log,
        dtype=config.model.dtype_name,
        server_args=flags,
        return_routed_experts=config.replay.use_rollout_routing_replay,
        return_indexer_topk=replayed_index_topk(config, hf) is not None,
        exact_boundaries=config.rollout.exact_boundaries,
        seed=config.rollout.rollout_seed
        + index,  # with equal seeds, servers would give equal answers
        start_timeout_s=config.rollout.rollout_server_start_timeout_s,
        env_names=config.rollout.rollout_server_env,
        **server_options,
    )


def _server_args(config: RunConfig, index: int, gpus: list[range]) -> dict[str, object]:
    """Return a server's flags, with its own port and its own GPUs."""
    given: dict[str, object] = dict(config.rollout.sglang)
    if "port" in given:
        given["port"] = int(given["port"]) + index
    if gpus:
        given["base_gpu_id"] = gpus[index].start
    if config.rollout.colocate:
        given["enable_memory_saver"] = True
    return given


def _adapter_flags(config: RunConfig, hf: HfModelFacts) -> dict[str, object] | None:
    """Return the flags of servers that get adapters; None if they get merged weights."""
    if not config.serves_adapters:
        return None
    from r3train.engine.adapters import adapter_flags  # it imports torch

    return adapter_flags(config.lora, hf, config.rollout.max_weight_staleness)
