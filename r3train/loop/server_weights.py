"""Weights of the servers, as an update asks for them: servers take them, and say what they hold."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from r3train.config import RunConfig
from r3train.data.sampled import outside_vocabulary
from r3train.engine.adapters import AdapterPublisher, Adapters, adapter_name
from r3train.engine.addresses import address_for, address_of_interface, host_of, interface_of
from r3train.engine.addresses import is_loopback
from r3train.engine.backend import BadAnswer
from r3train.engine.control import EngineControl
from r3train.engine.publish import BroadcastGroup, WeightPublisher
from r3train.engine.publish_disk import compare_on_servers, Comparison, DiskPublisher
from r3train.engine.publish_memory import SharedMemoryPublisher
from r3train.families import FP8_SCALE, has_fused_experts, sent_together
from r3train.families.hf_facts import HfModelFacts
from r3train.hf_checkpoint import NamedTensors
from r3train.host_group import one_node
from r3train.loop.distribute import broadcast_json, gather_json
from r3train.loop.stage_weight_sync import PerStagePublisher, StageLeaderPublisher
from r3train.types import CanaryScores

T = TypeVar("T", bound=DiskPublisher | SharedMemoryPublisher)

# of a server's arguments those by which it holds other tensors than another
_LAYOUT = (
    "version",
    "tp_size",
    "ep_size",
    "pp_size",
    "dtype",
    "quantization",
    "moe_runner_backend",
    "architectures",
)


class ServerWeights:
    """The servers' weights, as rank 0 sends them and asks for them.

    run_dir: where transports of files write.  adapters: the versions that servers hold, None where the base changes.
    """

    def __init__(
        self,
        config: RunConfig,
        hf: HfModelFacts,
        run_dir: Path,
        control: EngineControl,
        adapters: Adapters | None,
    ) -> None:
        self._config, self._hf, self._run_dir = config, hf, run_dir
        self._control = control
        self._members = control.members
        self._adapters = adapters
        self._publisher: WeightPublisher | None = None
        self._layouts: dict[int, dict[str, Any]] = {}  # of the servers' tensors

    @property
    def publisher(self) -> WeightPublisher:
        """The configured transport of new weights, made once a server is known."""
        if self._publisher is None:
            self._publisher = self._make_publisher()
        return self._publisher

    def _make_publisher(self) -> WeightPublisher:
        config, directory = self._config, self._run_dir / "weights"
        if self._adapters is not None:
            return AdapterPublisher(
                self._control,
                self._adapters,
                directory=directory,
                settings=config.lora,
                hf=self._hf,
                max_weight_staleness=config.rollout.max_weight_staleness,
            )
        flush = config.rollout.fresh_prefixes
        match config.trainer.update_weight_transfer_mode:
            case "disk":
                return _by_files(DiskPublisher, config, self._control, directory, flush_cache=flush)
            case "shared_memory":
                how = {"gather": gather_json} if _senders(config) else {}
                return _by_files(
                    SharedMemoryPublisher,
                    config,
                    self._control,
                    directory,
                    flush_cache=flush,
                    **how,
                )
            case "distributed":
                named = config.trainer.update_weight_master_address
                how = broadcast_settings(config, self._hf, self.hosts, named)
                return PerStagePublisher(self._control, _senders(config), **how)
            case mode:
                raise AssertionError(f"no transport of weights is {mode!r}")

    @property
    def hosts(self) -> list[str]:
        """The servers' hosts."""
        return [host_of(url) for url in self._members.urls]

    def present(self) -> list[int]:
        """The servers that are members now."""
        return self._members.present()

    def compare(self, weights: NamedTensors, version: int) -> Comparison:
        """Hold every server's tensors against these; see ``compare_on_servers``."""
        # the publish must have dropped the caches
        directory = self._run_dir / "weight_check"
        reference = _by_files(
            DiskPublisher, self._config, self._control, directory, flush_cache=False
        )
        return compare_on_servers(self._control, reference, weights, version=version)

    def layout(self, server: int) -> dict[str, Any]:
        """The arguments of a server by which its tensors are laid out."""
        return self._layouts.get(server) or self.read_layout(server)

    def read_layout(self, server: int) -> dict[str, Any]:
        """Ask for the layout of a server that joins, which may have been started again since."""
        info = self._control.server_info([server])[server]
        model = self._control.model_info([server])[server]
        self._layouts[server] = {key: {**model, **info}.get(key) for key in _LAYOUT}
        return self._layouts[server]

    def checksums(self, version: int | None) -> tuple[dict[int, dict[str, str]], dict[int, str]]:
        """The checksums of the tensors of every server in use, and each server's layout.

        None as ``version`` reads all servers.
        """
        layouts = {server: repr(self.layout(server)) for server in self._members.present()}
        every = self._control.weight_checksums()
        used = every if version is None else self._members.holders(version)
        return {server: every[server] for server in used if server in every}, layouts

    def score_canaries(
        self,
        texts: Sequence[np.ndarray],
        keys: Sequence[str],
        version: int,
        *,
        halves: int,
        drawn: int,
        at_once: int,
        servers: Sequence[int] | None = None,
    ) -> Callable[[], tuple[dict[int, list[CanaryScores]], float]]:
        """Let every server in use score texts, ``at_once`` at a time, or these servers.

        keys: the cache key of each text; halves: so many of the first texts are also read from the middle; drawn: tokens
        that a server draws after each.  A server that does not hold ``version`` is not in use.  The result waits for
        {server: scores of each text} and the seconds that they took.
        """
        scoring = self._members.holders(version) if servers is None else servers
        replays = self._config.replay.use_rollout_routing_replay
        routes = self._hf.route_shape if replays else None

        async def server_scores(server: int) -> list[CanaryScores]:
            if server not in scoring:
                return []
            slots = asyncio.Semaphore(at_once)

            async def read(i: int) -> CanaryScores:
                async with slots:
                    scores = await self._control.score_canary(
                        texts[i],
                        keys[i],
                        server=server,
                        routes=routes,
                        halves=i < halves,
                        new_tokens=drawn,
                        adapter=adapter,
                    )
                if found := outside_vocabulary(scores.whole.sampled, self._hf.vocab_size):
                    raise BadAnswer(f"canary {i} of server {server}: drawn {found}")
                return scores

            return list(await asyncio.gather(*map(read, range(len(texts)))))

        async def all_scores() -> tuple[dict[int, list[CanaryScores]], float]:
            began = time.monotonic()
            every = await self._control.each(server_scores, servers)
            read = {server: scores for server, scores in every.items() if scores}
            return read, time.monotonic() - began

        if not scoring:  # all have left, and the next ones get these weights anew
            return lambda: ({}, 0.0)
        adapter = adapter_name(self._adapters.newest) if self._adapters is not None else None
        return self._control.begin(all_scores())

    def close(self) -> None:
        """Leave the update group. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()


def _by_files(
    kind: type[T],
    config: RunConfig,
    control: EngineControl | None,
    directory: Path,
    **settings: Any,
) -> T:
    """Make a publisher that writes checkpoints to a directory in that of the run."""
    return kind(
        control,
        directory=directory,
        hf_checkpoint=config.server_checkpoint(directory.parent),
        bucket_bytes=config.trainer.update_weight_buffer_size,
        **settings,
    )


def _senders(config: RunConfig) -> range:
    """Return the ranks other than 0 that send weights themselves."""
    return config.weight_senders(dist.get_world_size(), one_node=one_node(os.environ))


def build_sender(
    config: RunConfig, hf: HfModelFacts, weights: ServerWeights | None
) -> WeightPublisher | None:
    """Build what sends the part of a rank other than 0, None on ranks that send none.

    A collective where there are such ranks.  weights: on rank 0, its servers ready.
    """
    senders = _senders(config)
    if not senders:
        return None
    if config.trainer.update_weight_transfer_mode == "shared_memory":
        # rank 0's is made first: it removes the links of a killed job
        directory = Path(broadcast_json(weights and str(weights.publisher.directory)))
        if weights is not None:
            return None
        return _by_files(SharedMemoryPublisher, config, None, directory, gather=gather_json)
    hosts = broadcast_json(weights and weights.hosts)
    if dist.get_rank() not in senders:
        return None
    named = config.trainer.update_weight_master_address
    if dist.get_rank() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # not on rank 0's node
        hosts = [os.environ["MASTER_ADDR"] if is_loopback(host) else host for host in hosts]
        named = named and address_of_interface(named)
    return StageLeaderPublisher(**broadcast_settings(config, hf, hosts, named))


def broadcast_settings(
    config: RunConfig, hf: HfModelFacts, hosts: Sequence[str], named: str | None
) -> dict[str, Any]:
    """Return how a rank of this node broadcasts weights to servers on these hosts.

    named: as for ``address_for``.
    """
    # NCCL refuses a device twice in a group: where ranks and servers share theirs, gloo's is of hosts
    cuda = torch.cuda.is_available() and not config.rollout.colocate
    address = address_for(hosts, named)
    group = BroadcastGroup(
        backend="nccl" if cuda else "gloo",
        device="cuda" if cuda else "cpu",
        master_address=address,
        interface=None if is_loopback(address) else interface_of(address),
    )
    return dict(
        bucket_bytes=config.trainer.update_weight_buffer_size,
        group=group,
        flush_cache=config.rollout.fresh_prefixes,
        together=_together(config, hf),
        fused_experts=has_fused_experts(hf.path),
    )


def _together(config: RunConfig, hf: HfModelFacts) -> Sequence[tuple[str, ...]]:
    """Return the tensors that one call of an update must bring, and so their scales."""
    pairs = sent_together(hf)
    scales = [tuple(name + FP8_SCALE for name in pair) for pair in pairs]
    return [*pairs, *scales] if config.serves_fp8 else pairs
