"""Runs of one rank that only publish: real servers, a real actor, the loop's own updates and verdicts.

Between two versions a test moves the actor's parameters by hand, as a step would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from r3train.cpu.device import prepare_device

DEVICE = prepare_device()

from r3train.config import RunConfig  # noqa: E402
from r3train.families.hf_facts import HfModelFacts  # noqa: E402
from r3train.families.read_facts import read_hf_facts  # noqa: E402
from r3train.host_group import join_ranks  # noqa: E402
from r3train.launch.job.checked_job import Job  # noqa: E402
from r3train.launch.job.resume import ResumePoint  # noqa: E402
from r3train.launch.start.build_actor import build_actor, build_routes  # noqa: E402
from r3train.launch.start.rollouts import GeneratedRollouts  # noqa: E402
from r3train.launch.start.servers import RunServers  # noqa: E402
from r3train.loop.canaries import Canaries  # noqa: E402
from r3train.loop.device_turns import DeviceTurns  # noqa: E402
from r3train.loop.distribute import gather_topologies  # noqa: E402
from r3train.loop.rank_zero import RankZero  # noqa: E402
from r3train.loop.recovery import Recovery  # noqa: E402
from r3train.loop.server_checksums import ServerChecksums  # noqa: E402
from r3train.loop.weight_update import WeightUpdate  # noqa: E402
from r3train.observe.console import RunDisplay  # noqa: E402
from r3train.proof.writer import EvidenceWriter  # noqa: E402
from r3train.trainer.megatron import topology  # noqa: E402
from r3train.trainer.megatron.actor import MegatronActor  # noqa: E402
from r3train.types import Prompt  # noqa: E402
from r3train.verify.mutations import MUTATIONS  # noqa: E402


@dataclass
class PublishingRun:
    """Settings of a run, and what brings its servers to the actor's weights; a test may take canaries and checksums off."""

    config: RunConfig
    hf: HfModelFacts
    run_dir: Path
    update: WeightUpdate
    canaries: Canaries
    checksums: ServerChecksums

    def publish(self, version: int) -> dict[str, Any]:
        """Bring the servers to the actor's weights; returns metrics, those of the canaries' verdict too."""
        metrics = self.update.publish(version)
        if self.update.canaries is not None and self.canaries.ready:
            self.canaries.wait()
            metrics |= self.canaries.judge(version)
        return metrics

    def planted(self, bug: str) -> AbstractContextManager[None]:
        return MUTATIONS[bug].planted(self.config, self.hf)


@contextmanager
def publishing(
    configs: Mapping[Any, RunConfig], run_dir: Path, prompts: list[Prompt], tokenizer: Any
) -> Iterator[tuple[MegatronActor, dict[Any, PublishingRun]]]:
    """An actor, and runs of it by the names of their settings."""
    store = torch.distributed.FileStore(str(run_dir / "store"), 1)
    join_ranks("auto", store, 0, 1, timeout=timedelta(minutes=5))
    display, actor, runs = RunDisplay(1, enabled=False), None, {}
    with ExitStack() as held:
        held.callback(topology.shutdown)
        for name, config in configs.items():
            hf = read_hf_facts(config.model.hf_checkpoint)
            reward = SimpleNamespace(close=lambda: None)
            job = Job(config, hf, prompts, tokenizer, reward, None)
            actor = actor or build_actor(job, DEVICE, ResumePoint())
            own_dir = run_dir / f"run_{name}"
            (own_dir / "logs").mkdir(parents=True)
            routes = build_routes(config, hf)
            routes.open(actor.topology)
            servers = held.enter_context(closing(RunServers(job, own_dir, display, routes)))
            servers.start(num_ranks=0)  # none where settings name some
            servers.wait_ready()
            rollouts = held.enter_context(closing(GeneratedRollouts(servers)))
            evidence = None
            if config.replay.enable_r3_correctness_check:
                evidence = held.enter_context(closing(EvidenceWriter(own_dir, 0, "now")))
            rank_zero = RankZero(servers, servers.weights, rollouts, display, None, None)
            topologies = gather_topologies(actor.topology)
            canaries = Canaries(config, hf, actor, topologies, rank_zero, evidence)
            checksums = ServerChecksums(config, rank_zero, evidence)
            update = WeightUpdate(
                config,
                hf,
                actor,
                rank_zero,
                turns=DeviceTurns(),
                recovery=Recovery(servers, enabled=config.servers_change),
                run_state=None,
                sender=None,
                canaries=canaries,
                checksums=checksums if config.judges_checksums else None,
            )
            runs[name] = PublishingRun(config, hf, own_dir, update, canaries, checksums)
        yield actor, runs
