"""The training loop: rollouts of n+1 are generated while rollout n trains.

    rank 0, producer       | generate n+1 ................... | pause | generate n+2 ..........
                           |                groups of n+1     |       ^
                           |                     v            |       | servers hold version n+1
    rank 0, training       | take n | cut slices | train n | publish n+1 | take n+1 | ...
                               ^         | v         ^           ^
                               |         | slices    |           | whole tensors, drained by all
    other ranks            | wait   | receive    | train n | send weights | wait     | ...

Rank 0 waits for the groups of a rollout.  The other ranks wait for rank 0: every arrow between ranks is a
call that all ranks make, in the same order (``rank_zero_alone`` is one too).  Generation as a whole waits in two
cases: during a weight update (as --pause-generation-mode says), and when its buffer is full because
newer groups would be too stale (--max-weight-staleness).  A request also waits for one of the slots of its servers.  Training waits for no group beyond those
of its own rollout.

With --colocate the two take turns on the same devices, and staleness is 0.  Servers release their memory when
rollout n is complete.  The actor's comes back from the host, and leaves again after training.  Then the servers get
room for weights, new weights, and room for their KV cache, before anything is asked of them.

Weight versions up to n generate rollout n, and training it makes version n+1, which the servers
hold before rollout n+1 trains.  Only rank 0 holds the servers, the display and the files.
"""

from __future__ import annotations

from dataclasses import dataclass, InitVar, KW_ONLY
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.engine.publish import WeightPublisher
from r3train.host_group import host_barrier, rank_zero_alone
from r3train.loop.canaries import Canaries, NotServed
from r3train.loop.device_turns import ColocatedTurns, DeviceTurns
from r3train.loop.distribute import gather_topologies
from r3train.loop.rank_zero import RankZero
from r3train.loop.server_checksums import ServerChecksums
from r3train.loop.step_metrics import memory_metrics, PhaseClock
from r3train.loop.intake import Intake, Taken
from r3train.loop.outcome import settle
from r3train.loop.prepare import Plant
from r3train.loop.recovery import Recovery
from r3train.loop.rollout_source import RolloutSource
from r3train.loop.route_transport import planted_in_routes, Routes
from r3train.loop.run_state import RunState
from r3train.loop.step_proof import replay_metrics, StepProof
from r3train.loop.throughput import TrainSpeed
from r3train.loop.train_rollout import train_rollout, Trained
from r3train.loop.weight_update import WeightUpdate
from r3train.observe.metrics import RolloutsWithoutAdvantage
from r3train.observe.profiler import StepProfiler
from r3train.proof.step_verdict import StepVerdict
from r3train.proof.writer import EvidenceWriter

if TYPE_CHECKING:
    from r3train.trainer.megatron.actor import MegatronActor


_MOST_ATTEMPTS = 3  # to ask the servers of a start
# modes in which servers go on with what an update froze, also after one that failed
_FREEZE = ("in_place", "retract")


@dataclass(eq=False)
class AsyncLoop:
    """Trains one rollout after another; all ranks call its methods together.

    rank_zero: None on other ranks; evidence: None with the R3 check off; routes: brings
    routes to the slices; plant: spoils a rollout's samples on purpose (--plant-bug, --plant-fault);
    profiler: of the steps that the settings name; sender: of this rank's own part of the weights;
    resumed: the checkpoint that the run goes on from.
    """

    config: RunConfig
    hf: HfModelFacts
    actor: MegatronActor
    _: KW_ONLY
    rank_zero: RankZero | None
    evidence: EvidenceWriter | None
    run_state: RunState
    routes: Routes
    plant: InitVar[Plant | None] = None
    profiler: StepProfiler | None = None
    sender: WeightPublisher | None = None
    resumed: Path | None = None

    def __post_init__(self, plant: Plant | None) -> None:
        config, hf, actor, rank_zero = self.config, self.hf, self.actor, self.rank_zero
        run_state, routes, servers = self.run_state, self.routes, rank_zero and rank_zero.servers
        self._topologies = gather_topologies(actor.topology)
        self._recovery = Recovery(servers, enabled=config.servers_change)
        self._turns = DeviceTurns()
        if config.rollout.colocate:
            self._turns = ColocatedTurns(config, actor, servers, self._recovery)
        self._canaries = None
        if config.canary_tokens:
            self._canaries = Canaries(
                config=config,
                hf=hf,
                actor=actor,
                topologies=self._topologies,
                rank_zero=rank_zero,
                evidence=self.evidence,
                resumed=self.resumed,
            )
            run_state.keep_more = self._canaries.keep
            if servers is not None:
                servers.score_joiner = self._canaries.score_joiner
        checksums = None
        if config.judges_checksums:
            checksums = ServerChecksums(config, rank_zero, self.evidence)
        self._checksums = checksums
        self._update = WeightUpdate(
            config=config,
            hf=hf,
            actor=actor,
            rank_zero=rank_zero,
            turns=self._turns,
            recovery=self._recovery,
            run_state=run_state,
            sender=self.sender,
            canaries=self._canaries,
            checksums=checksums,
        )
        plant = planted_in_routes(plant, routes) if plant is not None else None
        self._intake = Intake(
            config, hf, rank_zero, routes, run_state, self._update, self._topologies, plant
        )
        self._proof = StepProof(config, hf, actor, self.evidence, routes, self._canaries, checksums)
        self._source: RolloutSource | None = None  # on rank 0
        self._route_wire_bytes = 0
        self._speed = None
        self._without_advantage = RolloutsWithoutAdvantage()
        if rank_zero is not None:
            self._speed = TrainSpeed(config, hf, dist.get_world_size())

    def run(self, start_rollout_id: int) -> int:
        """Train to the end, or until told to stop; returns the number of rollouts trained by then.

        Raises what went wrong: most errors on all ranks, of which rank 0 has the cause; an error of a weight update, or
        one that ``Recovery.fatal`` holds at the end, on rank 0.
        """
        try:
            return self._run(start_rollout_id)
        except NotServed as error:
            # at its update with --colocate the actor is away, and was saved before
            if error.version > start_rollout_id and (
                error.sampled or not self.config.rollout.colocate
            ):
                what = "a server does not compute what the actor computes"
                # nobody knows which answers are that server's; behind the last rollout all are trained
                if error.sampled and error.version < self.config.rollout.num_rollout:
                    self.run_state.put_back()
                # what was frozen may have been sampled under the weights that were refused
                freezes = self.config.rollout.pause_generation_mode in _FREEZE
                keeps_samples = not (error.sampled or freezes)
                self.run_state.save_failed(
                    error.version, str(error), what, keeps_samples=keeps_samples
                )
            if self.rank_zero is None:
                host_barrier()  # rank 0 ends the job with the verdict, and would be hidden
            raise

    def _run(self, start_rollout_id: int) -> int:
        run_state, num_rollout = self.run_state, self.config.rollout.num_rollout
        self._start(start_rollout_id)
        for rollout_id in range(start_rollout_id, num_rollout):
            if self.profiler is not None:
                self.profiler.at(rollout_id)
            clock = PhaseClock()
            with clock.phase("rollout_wait"):
                taken = self._intake.take(rollout_id)
            if taken is None:  # told to stop while waiting
                self._end_evaluation()
                self._turns.end()
                run_state.save_stopped(rollout_id)
                return rollout_id
            with clock.phase("train"):
                self._turns.actor_onloads()
            canary_metrics = self._judge_canaries(rollout_id, clock, taken.metrics)
            with clock.phase("train"):
                trained, verdict, metrics = self._train(rollout_id, taken)
                metrics |= canary_metrics
                report = partial(self._report, rollout_id, metrics)
                settle(rollout_id, trained, verdict, run_state, report)
            with clock.phase("eval_wait"):
                self._end_evaluation()
            stopping, is_last = run_state.agree_on_stop(), rollout_id + 1 == num_rollout
            try:
                update = self._hand_over(rollout_id + 1, clock, stopping=stopping, is_last=is_last)
            except NotServed as error:
                self._report(rollout_id, {**metrics, **error.metrics})
                raise
            self._report(rollout_id, {**metrics, **update, **self._step_metrics(clock, taken)})
            if stopping and not is_last:
                run_state.save_stopped(rollout_id + 1)
                return rollout_id + 1
        if num_rollout > start_rollout_id:
            self._save_the_last(num_rollout, evaluates=not stopping)
        self._end_evaluation()
        if self._canaries is not None:  # the last weights, if they were evaluated
            with rank_zero_alone():
                if self.rank_zero is not None and self._recovery.fatal is None:
                    self._canaries.wait()
        self._turns.end()
        self._judge_canaries(num_rollout, PhaseClock(), {})
        host_barrier()
        if self._recovery.fatal is not None:
            raise self._recovery.fatal
        return max(num_rollout, start_rollout_id)

    def _start(self, rollout_id: int) -> None:
        """Bring the servers to the weights that the run starts from, and begin to generate."""
        if self._checksums is not None:
            self._ask_servers(rollout_id, self._checksums.begin)
        if rollout_id or self.config.servers_may_hold_other_weights:
            self._update.publish(rollout_id)
        if self._canaries is not None:
            self._ask_servers(rollout_id, self._canaries.ask_first)
        self._generate()
        if self._canaries is not None:
            self._canaries.begin(rollout_id)
        self._begin_evaluation(rollout_id, at_start=True)

    def _ask_servers(self, version: int, ask: Callable[[int], None]) -> None:
        """Let rank 0 ask the servers, again with others where all were lost meanwhile; a collective.

        Raises the third loss: servers that are alive may be too slow for it.
        """
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            failure = None
            with rank_zero_alone():
                if self.rank_zero is not None:
                    try:
                        ask(version)
                    except self._recovery.caught as error:
                        if attempt == _MOST_ATTEMPTS:
                            raise
                        failure = error
            if not self._recovery.rank_zero_failed(failure):
                return
            self._update.revive(version, failure)
            self._turns.actor_offloads()

    def _generate(self) -> None:
        if self.rank_zero is not None:
            self._source = self.run_state.watch(self.rank_zero.rollouts.start_producer())
            self._intake.set_source(self._source)
        self._update.set_source(self._source)

    def _judge_canaries(
        self, weight_version: int, clock: PhaseClock, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        """Judge what servers said of canaries under the weights that train next; returns metrics.

        Raises NotServed, after ``metrics`` of the rollout are written.
        """
        if self._canaries is None:
            return {}
        try:
            with clock.phase("canaries"):
                return self._canaries.judge(weight_version)
        except NotServed as error:
            self._report(weight_version, {**metrics, **error.metrics})
            raise

    def _train(
        self, rollout_id: int, taken: Taken
    ) -> tuple[Trained, StepVerdict | None, dict[str, Any]]:
        """Train a rollout and prove its replay; returns (what became of it, verdict, metrics)."""
        checked = self._proof.is_due(rollout_id)
        self.actor.check_replay(checked)
        if self.rank_zero is not None:
            self.rank_zero.display.train_update("training")
        trained = train_rollout(rollout_id, taken, self.config, self.actor, self._topologies)
        metrics, verdict = {**taken.metrics, **trained.metrics}, None
        if not trained.first_step_done:
            return trained, None, metrics
        if checked:
            verdict = self._proof.judge(rollout_id, taken.prepared, self._source)
        elif self.evidence is not None:
            metrics["r3/unchecked"] = True
        metrics.update(self._route_metrics())
        metrics.update(memory_metrics(self.actor.device))
        if verdict is not None:
            metrics.update(replay_metrics(verdict))
        if self.rank_zero is not None:
            metrics.update(self._proof.gap_metrics(metrics))
        return trained, verdict, metrics

    def _hand_over(
        self, weight_version: int, clock: PhaseClock, *, stopping: bool, is_last: bool
    ) -> dict[str, Any]:
        """Save what is due and give the servers the new weights, in the order of the devices' turns.

        Returns the update's metrics on rank 0.
        """
        goes_on, metrics = not stopping and not is_last, {}
        if self._turns.saves_before_publish:  # the actor is on the device until the servers' turn
            with clock.phase("save"):
                self.run_state.save_due(weight_version, goes_on=goes_on, now=is_last)
        with clock.phase("publish"):
            # the last weights generate nothing; only --check-weight-update-equal compares them
            if goes_on or (not stopping and self.config.trainer.check_weight_update_equal):
                metrics = self._update.publish(weight_version)
            if goes_on:
                self._begin_evaluation(weight_version)
        if not self._turns.saves_before_publish:
            with clock.phase("save"):
                self.run_state.save_due(weight_version, goes_on=goes_on)
        return metrics

    def _save_the_last(self, weight_version: int, *, evaluates: bool) -> None:
        """Save the run's last weights, and begin their evaluation, which cannot spoil the save then.

        With --colocate the weights are saved already, and only the buffer is written anew.
        """
        self.run_state.save_last(weight_version)
        if evaluates and self.config.eval_due(weight_version):
            if not self.config.trainer.check_weight_update_equal:
                self._update.publish(weight_version)
            self._begin_evaluation(weight_version)

    def _begin_evaluation(self, weight_version: int, *, at_start: bool = False) -> None:
        """Rank 0: begin to evaluate the weights that the servers hold, if the settings ask for it."""
        failed = self._recovery.fatal is not None  # then the servers may hold older weights
        if self.rank_zero is not None and self.config.eval_due(weight_version) and not failed:
            self.rank_zero.evaluations.begin(self._source, weight_version, at_start=at_start)

    def _end_evaluation(self) -> None:
        """Wait for the evaluation under way, which rank 0 writes; a collective."""
        with rank_zero_alone():
            if self.rank_zero is not None:
                self.rank_zero.evaluations.end(self._source)

    # -- metrics -----------------------------------------------------------------------------

    def _report(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        if self.rank_zero is not None:
            self.rank_zero.metrics.write(rollout_id, metrics)
            self.rank_zero.display.step_line({**metrics, "step": rollout_id})
            teaches = (
                self.config.algorithm.loss_type != "sft" and not self.config.reward_is_optional
            )
            if teaches and (text := self._without_advantage.warning(metrics)):
                self.rank_zero.display.note(text, style="yellow")

    def _step_metrics(self, clock: PhaseClock, taken: Taken) -> dict[str, Any]:
        """Faults so far, and the step's seconds and speed; on rank 0."""
        if taken.prepared is None:
            return {}
        samples = [s.sample for s in taken.prepared.samples]
        lengths = np.array([s.num_tokens for s in samples])
        loss_tokens = sum(int(s.loss_mask.sum()) for s in samples)
        speed = self._speed.metrics(lengths, loss_tokens, clock.seconds["train"])
        seconds = clock.metrics(taken.metrics.get("rollout/tokens", 0))
        if not self.config.eval_sets:
            del seconds["perf/eval_wait_s"]
        servers = self.rank_zero.servers
        return {**(servers.fault_counts() if servers is not None else {}), **speed, **seconds}

    def _route_metrics(self) -> dict[str, Any]:
        """The step's route bytes, on rank 0's client and beyond; a collective."""
        metrics = self.routes.metrics()
        if self.rank_zero is not None and self.config.replay.use_rollout_routing_replay:
            now = self.rank_zero.rollouts.route_wire_bytes()
            metrics["perf/route_wire_bytes_rank0"] = now - self._route_wire_bytes
            self._route_wire_bytes = now
        return metrics
