"""Run of one rank once all have joined: build the parts, run the loop, say how it ended.

Import this module after ``prepare_device()``: it imports megatron-core.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from r3train.config import RunConfig
from r3train.engine.server import SGLangServer
from r3train.host_group import host_barrier, rank_zero_alone
from r3train.launch.gpus import torchruns_number
from r3train.launch.job.checked_job import eval_settings, Job
from r3train.launch.job.resume import resume_point, ResumePoint
from r3train.launch.job.run_dir import start_stamp
from r3train.launch.start.build_actor import build_actor, build_run_state, export_hf, build_routes
from r3train.launch.start.rollouts import build_rollouts
from r3train.launch.start.servers import RunServers
from r3train.loop.async_loop import AsyncLoop
from r3train.loop.distribute import broadcast_json
from r3train.loop.rank_zero import RankZero
from r3train.loop.rollouts_only import generate_only
from r3train.loop.route_transport import Routes
from r3train.loop.run_evaluations import Evaluations
from r3train.loop.server_weights import build_sender
from r3train.loop.stop import StopSignal
from r3train.observe.console import RunDisplay
from r3train.observe.metrics import (
    cut_answers,
    MetricsWriter,
    nothing_learned,
    numbers as numbers_by_step,
    read_metrics,
    steps_s,
    summarise,
    summarise_evaluations,
)
from r3train.observe.profiler import StepProfiler
from r3train.observe.prometheus import PrometheusSink
from r3train.observe.sinks import open_sinks
from r3train.observe.starts import record_start
from r3train.proof.writer import EvidenceWriter


@dataclass(frozen=True, eq=False)
class RankOfRun:
    """One rank, and what it has open.

    parent: the process that has started it; parts: closes all that is opened, in reverse order; servers: those that rank 0
    has started.
    """

    job: Job
    rank: int
    run_dir: Path
    display: RunDisplay
    stop: StopSignal
    parent: int
    parts: ExitStack
    servers: Sequence[SGLangServer]

    def train(self, device: torch.device) -> None:
        """Build the parts and run the loop."""
        gc.freeze()
        gc.enable()
        job, config, parts, plant = self.job, self.job.config, self.parts, None
        if config.replay.plant_bug is not None or config.faults.plant_fault is not None:
            from r3train.verify.mutations import planted_in_job  # of another room, for its tests

            plant = parts.enter_context(planted_in_job(config, job.hf))
        if config.checkpoint.debug_rollout_only:
            self.generate()
            return
        resume = resume_point(job)
        servers = rank_zero = evidence = None
        routes = build_routes(config, job.hf)
        parts.callback(routes.close)  # closed after the servers' client, whose requests may use it
        if self.rank == 0:
            ranks, first = torchruns_number("WORLD_SIZE", 1), resume.start_rollout_id
            record_start(self.run_dir, start_stamp(), first, self.parent, ranks, device)
            self._show_job()
            if resume.checkpoint is not None:
                self.display.note(f"resuming from {resume.checkpoint} at rollout {first}")
            servers = self._make_servers(routes)
        with self.display.phase("building the Megatron actor"):
            actor = build_actor(job, device, resume)
        routes.open(actor.topology)
        if config.rollout.colocate:
            actor.memory.hold()
            host_barrier()
        with rank_zero_alone():
            if self.rank == 0:
                rank_zero = self._rank_zero(servers, resume)
        sender = build_sender(config, job.hf, rank_zero and rank_zero.weights)
        if sender is not None:
            parts.callback(sender.close)
        profiler = StepProfiler(config.run, self.run_dir, self.rank)
        parts.callback(profiler.close)
        if config.r3_check_enabled:
            attempt = broadcast_json(start_stamp())
            evidence = EvidenceWriter(self.run_dir, self.rank, attempt, summed=config.sums_evidence)
            parts.callback(evidence.close)
        self.stop.begin()
        note, stop = self.display.note, self.stop
        trained = AsyncLoop(
            config,
            job.hf,
            actor,
            rank_zero=rank_zero,
            evidence=evidence,
            run_state=build_run_state(job, actor, self.run_dir, stop, note, resume, routes.read),
            routes=routes,
            plant=plant,
            profiler=profiler,
            sender=sender,
            resumed=None if resume.model_only else resume.checkpoint,
        ).run(resume.start_rollout_id)
        if config.checkpoint.save_hf is not None:
            export_hf(job, actor, trained)
        stop.finished = trained >= config.rollout.num_rollout

    def generate(self) -> None:
        """Generate and dump every rollout (--debug-rollout-only); other ranks than 0 wait."""
        self.stop.begin()
        with rank_zero_alone():
            if self.rank != 0:
                return
            self._show_job()
            config, resume = self.job.config, ResumePoint()
            servers = self._make_servers(build_routes(config, self.job.hf))
            rank_zero = self._rank_zero(servers, resume)
            generate_only(config, self.run_dir, rank_zero, self.stop)

    def _show_job(self) -> None:
        self.display.note(f"run directory: {self.run_dir}")
        for warning in self.job.warnings:
            self.display.note(str(warning), style="yellow")
        for line in (
            self.job.first_prompt if not self.job.config.checkpoint.debug_rollout_only else ()
        ):
            self.display.note(line)

    def _make_servers(self, routes: Routes) -> RunServers | None:
        if not self.job.config.has_engines:
            return None
        servers = RunServers(self.job, self.run_dir, self.display, routes, self.servers)
        self.parts.callback(servers.close)
        return servers

    def _rank_zero(self, servers: RunServers | None, resume: ResumePoint) -> RankZero:
        """Rank 0: wait for the servers, with --colocate started here, and open what writes their numbers."""
        config, run_dir = self.job.config, self.run_dir
        rollouts = build_rollouts(self.job, servers, self.display, resume)
        self.parts.callback(rollouts.close)
        if servers is not None:
            servers.start()
            servers.wait_ready()
        sinks = open_sinks(config, run_dir, None if resume.model_only else resume.checkpoint)
        if (port := config.trackers.metrics_port) is not None:
            sinks.append(server := PrometheusSink(port))
            self.display.note(f"metrics: {server.url}")
        metrics = self.parts.enter_context(MetricsWriter(run_dir, config.run.tensorboard, sinks))
        settings = {}
        if not config.checkpoint.debug_rollout_only:
            settings = eval_settings(self.job, resume.checkpoint if resume.model_only else None)
        evaluations = Evaluations(rollouts.eval_sets(), settings, metrics, self.display)
        weights = servers.weights if servers is not None else None
        return RankZero(servers, weights, rollouts, self.display, metrics, evaluations)


def finish(config: RunConfig, run_dir: Path, began: float, stopped: str | None = None) -> dict:
    """Draw the plot; returns the numbers of the summary.  stopped: the signal that has ended the run."""
    from r3train.report.plot import plot_run  # it imports matplotlib

    plot = plot_run(run_dir) if config.run.plot else None
    wall_s, records = time.monotonic() - began, read_metrics(run_dir)
    numbers = {**summarise(records), **summarise_evaluations(run_dir)}
    if config.algorithm.loss_type == "sft":
        del numbers["r3"]  # nothing is generated, so there is nothing to replay
        if losses := numbers_by_step(records, "train/loss")[1]:
            numbers["loss"] = f"{losses[0]:.4f} -> {losses[-1]:.4f}"
    elif reason := nothing_learned(records):
        numbers["nothing was learned"] = reason
    if cut := cut_answers(records):
        numbers["answers cut"] = cut
    times = {"wall_s": wall_s, "steps_s": steps_s(records, since=time.time() - wall_s)}
    if not (stopped or times["steps_s"] or config.checkpoint.debug_rollout_only):
        last = config.rollout.num_rollout
        numbers["nothing was trained"] = f"{last} of {last} rollouts were before (--num-rollout)"
    files = {"run_dir": run_dir, "plot": plot, "next": f"r3train report {run_dir}"}
    if config.r3_check_enabled:
        files["next"] += f"\nr3train check-evidence {run_dir}"  # a line to copy for each
    return {**numbers, **times, **files, "stopped": stopped}
