"""The training loop: rollouts of n+1 are generated while rollout n trains.

    rank 0, event loop     | generate n+1 ................... | pause | generate n+2 ..........
                           |                groups of n+1     |       ^
                           |                     v            |       | servers hold version n+1
    rank 0, training       | take n | cut slices | train n | publish n+1 | take n+1 | ...
                               ^         | v         ^           ^
                               |         | slices    |           | whole tensors, drained by all
    other ranks            | wait   | receive    | train n | send weights | wait     | ...

Rank 0 waits for the groups of a rollout.  The other ranks wait for rank 0: every arrow between the
two lines is a collective, and all ranks make them in the same order.  Generation waits in two cases
alone: during a weight update (as --pause-generation-mode says), and when its buffer is full because
newer groups would be too stale (--max-weight-staleness).  Training waits for no group beyond those
of its own rollout.

With --colocate the two take turns on the same devices, and staleness is 0.  Servers release their memory when
rollout n is complete.  The actor's comes back from the host, and leaves again after training.  Then the servers get
room for weights, new weights, and room for their KV cache, before anything is asked of them.

Weight versions up to n generate rollout n, and training it makes version n+1, which the servers
hold before rollout n+1 trains.  Rank 0 alone holds the engines, the display and the files.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, InitVar, KW_ONLY
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts
from r3train.hf_checkpoint import WeightIndex
from r3train.host_group import host_barrier, rank_zero_alone
from r3train.proof.judge import StepVerdict
from r3train.proof.findings import FAILED, PASSED
from r3train.proof.live import prove_step
from r3train.proof.recheck_verdict import compare_rollout, RecheckRecord
from r3train.proof.writer import EvidenceWriter
from r3train.loop import weight_probe
from r3train.loop.run_state import RunState
from r3train.loop.kl_reward import add_kl_to_rewards
from r3train.loop.fleet import RankZero
from r3train.observe.profiler import StepProfiler
from r3train.loop.prepare import Plant, Prepared, prepare
from r3train.loop.recovery import Recovery
from r3train.loop.replay_source import RolloutSource
from r3train.loop.step_metrics import gap_warning, report_rollout, train_metrics
from r3train.loop.route_transport import Routes, planted_in_routes
from r3train.loop.distribute import broadcast_json, gather_json, gather_topologies
from r3train.loop.stage_weight_sync import StageLeaderPublisher
from r3train.loop.stop import StopRequested
from r3train.loop.throughput import TrainSpeed
from r3train.user_code import UserCodeFailed
from r3train.types import is_checked, RankSlice, Scored

if TYPE_CHECKING:
    from r3train.trainer.megatron.actor import MegatronActor


logger = logging.getLogger(__name__)

_TRAINING = ("weights", "gradients", "optimizer")  # what the actor holds in its turn


@dataclass(eq=False)
class AsyncLoop:
    """Trains one rollout after another; all ranks call its methods together.

    rank_zero: None on other ranks; evidence: None with the R3 check off; routes: brings
    routes to the slices; plant: spoils a rollout's samples on purpose (--plant-bug, --plant-fault);
    profiler: of the steps that the settings name; stage: sends a later pipeline stage's weights, on its leader.
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
    stage: StageLeaderPublisher | None = None

    def __post_init__(self, plant: Plant | None) -> None:
        config, engines = self.config, self.rank_zero and self.rank_zero.engines
        self._warned_of_staleness = False
        self._loss_error = ""  # of the user's loss, on all ranks
        self._plant = planted_in_routes(plant, self.routes) if plant is not None else None
        self._recovery = Recovery(engines, enabled=config.faults.max_engine_restarts > 0)
        self._colocate = config.rollout.colocate
        # on rank 0: no request is sent until the servers have their memory back
        self._quiet = ExitStack()
        self._source: RolloutSource | None = None
        self._source_stats: dict[str, Any] = {}
        self._route_wire_bytes = 0
        self._held_export: Path | None = None  # on rank 0, of the newest update
        self._servers_hold_base = False  # with LoRA: all tensors without an adapter were sent
        self._weight_index = None
        self._speed = None
        if engines is not None:
            self._speed = TrainSpeed(config, self.hf, dist.get_world_size())
            if config.has_engines:
                self._weight_index = WeightIndex(self.hf, config.model.dtype_name, config.lora)
        self._topologies = gather_topologies(self.actor.topology)
        self._stages_send = bool(config.weight_leaders(len(self._topologies)))

    def run(self, start_rollout_id: int) -> int:
        """Train to the end, or until told to stop; returns the number of rollouts trained by then.

        Raises what went wrong, on the rank where it did.
        """
        config, run_state = self.config, self.run_state
        num_rollout = config.rollout.num_rollout
        if start_rollout_id or config.servers_may_hold_other_weights:
            self._publish(start_rollout_id)
        if self.rank_zero is not None:
            self._source = run_state.watch(self.rank_zero.engines.start_producer())
        self._begin_evaluation(start_rollout_id, at_start=True)
        for rollout_id in range(start_rollout_id, num_rollout):
            if self.profiler is not None:
                self.profiler.at(rollout_id)
            began = time.monotonic()
            taken = self._take_rollout(rollout_id)
            if taken is None:  # told to stop while waiting
                self._end_evaluation()
                self._last_turn()
                run_state.stopped(rollout_id)
                return rollout_id
            slices, prepared, metrics = taken
            waited = time.monotonic()
            checked = self._checks(rollout_id, start_rollout_id)
            self.actor.check_replay(checked)
            if self._colocate:
                self.actor.memory.hold(*_TRAINING)
            try:
                metrics.update(self._train(rollout_id, slices, prepared))
            except UserCodeFailed as error:  # on all ranks, and no weight has moved
                if self._source is not None:
                    self._source.put_back()
                run_state.failed(rollout_id, str(error), what="a rollout could not be trained")
                raise
            verdict = self._judge(rollout_id, prepared) if checked else None
            metrics.update(self._route_metrics())
            if self.evidence is not None and not checked:
                metrics["r3/unchecked"] = True
            if verdict is not None:
                metrics.update(_replay_metrics(verdict))
                self._warn_of_staleness(verdict)
            failed = self._failed_claim(verdict)
            ends = bool(failed or self._loss_error)
            if ends:  # with an error, so the metrics come first
                self._report(rollout_id, metrics)
            if failed == "replay" and verdict is not None:
                verdict.raise_if_failed()
            try:
                run_state.trained(rollout_id, int(metrics["train/skipped_steps"]))
            except FloatingPointError:
                if not ends:
                    self._report(rollout_id, metrics)
                host_barrier()  # rank 0 has dumped the batch, with rows of the other ranks' stores
                if not self._loss_error:
                    raise
            if self._loss_error:  # the rollout's first steps cannot be taken back
                run_state.failed(
                    rollout_id + 1, self._loss_error, what="a rollout was trained in part"
                )
                raise UserCodeFailed(self._loss_error)
            try:
                run_state.learned_nothing(rollout_id, int(metrics["train/low_ess_steps"]))
            except RuntimeError:
                self._report(rollout_id, metrics)
                raise
            if failed == "threshold":  # every route was replayed: the weights are as they should be
                cause = verdict.threshold_error if verdict is not None else ""
                run_state.failed(rollout_id + 1, cause, what="the R3 check failed")
                if verdict is not None:
                    verdict.raise_if_failed()
            trained = time.monotonic()
            self._end_evaluation()
            evaluated = time.monotonic()
            stopping, is_last = run_state.stopping(), rollout_id + 1 == num_rollout
            goes_on = not stopping and not is_last
            if self._colocate:  # what is saved is here until the servers' turn
                run_state.save_due(rollout_id + 1, goes_on=goes_on, now=is_last)
            saved = time.monotonic()
            # the last weights generate nothing; only --check-weight-update-equal compares them
            if not stopping and (not is_last or config.trainer.check_weight_update_equal):
                metrics.update(self._publish(rollout_id + 1))
            if goes_on:
                self._begin_evaluation(rollout_id + 1)
            published = time.monotonic()
            if not self._colocate:
                run_state.save_due(rollout_id + 1, goes_on=goes_on)
            done = time.monotonic()
            metrics.update(self._recovery.counts())
            if prepared is not None:
                lengths = np.array([s.sample.num_tokens for s in prepared.samples])
                metrics.update(self._speed.metrics(lengths, trained - waited))
            metrics.update(
                {
                    "perf/rollout_wait_s": waited - began,
                    "perf/train_s": trained - waited,
                    "perf/publish_s": published - saved,
                    "perf/save_s": done - published + saved - evaluated,
                    "perf/step_s": done - began,
                    "perf/tokens_per_s": metrics.get("rollout/tokens", 0) / (done - began),
                }
            )
            if config.eval_sets:
                metrics["perf/eval_wait_s"] = evaluated - trained
            self._report(rollout_id, metrics)
            if stopping and not is_last:
                run_state.stopped(rollout_id + 1)
                return rollout_id + 1
        if num_rollout > start_rollout_id:
            run_state.save_last(num_rollout)
            # after the save, which an evaluation cannot spoil then
            if config.eval_due(num_rollout) and not stopping:
                if not config.trainer.check_weight_update_equal:
                    self._publish(num_rollout)
                self._begin_evaluation(num_rollout)
        self._end_evaluation()
        self._last_turn()
        host_barrier()
        if self._recovery.fatal is not None:
            raise self._recovery.fatal
        return max(num_rollout, start_rollout_id)

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

    def _report(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        if self.rank_zero is not None:
            self.rank_zero.metrics.write(rollout_id, metrics)
            self.rank_zero.display.step_line({**metrics, "step": rollout_id})

    # -- rollout -----------------------------------------------------------------------------

    def _take_rollout(
        self, rollout_id: int
    ) -> tuple[list[list[RankSlice]], Prepared | None, dict[str, Any]] | None:
        """This rank's slices of each optimizer step; the rollout and its metrics on rank 0.

        None, on all ranks, when rank 0 was told to stop while it waited.
        """
        recovery, plan, failure = self._recovery, None, None
        prepared: Prepared | None = None
        metrics: dict[str, Any] = {}
        with rank_zero_alone():
            if self.rank_zero is not None:
                what = "generation failed"
                try:
                    if recovery.fatal is not None:
                        raise recovery.fatal
                    batch_size = self.config.rollout.rollout_batch_size
                    groups = self.rank_zero.next_groups(self._source, rollout_id, batch_size)
                    if self._colocate:
                        self._end_turn_of_servers()
                    what = "a rollout could not be scored"
                    prepared, metrics = self._prepare(rollout_id, groups)
                    plan = {"microbatches": prepared.counts}
                except StopRequested:
                    plan = {"microbatches": None}
                except recovery.caught as error:
                    failure = error
                except Exception as error:  # noqa: BLE001 - raised when the checkpoint is written
                    if what == "a rollout could not be scored":
                        self._source.put_back()
                    recovery.fatal = error
                    plan = {"failed": str(error), "what": what}
        if self._recovery.needed(failure):
            self._revive(rollout_id)
            if self._colocate:
                self.actor.memory.hold()
            return self._take_rollout(rollout_id)
        plan = broadcast_json(plan)
        if "failed" in plan:
            self._last_turn()
            self.run_state.failed(rollout_id, plan["failed"], plan["what"])
            raise self._recovery.fatal or RuntimeError(f"rank 0 has no rollout: {plan['failed']}")
        counts = plan["microbatches"]
        if counts is None:
            return None
        mine = iter(self.routes.slices(prepared, sum(counts)))
        return [list(islice(mine, count)) for count in counts], prepared, metrics

    def _prepare(
        self, rollout_id: int, groups: list[list[Scored]]
    ) -> tuple[Prepared, dict[str, Any]]:
        """Rank 0: score the rollout, deal it and pack it."""
        before, self._source_stats = self._source_stats, self._source.stats()
        samples, metrics = report_rollout(
            rollout_id, groups, self.config, self.rank_zero.metrics, self._source_stats, before
        )
        prepared = prepare(
            rollout_id,
            samples,
            self.config,
            self.hf,
            self.routes.row_shape,
            self._topologies,
            passes=self.config.replay_passes,
            plant=self._plant,
        )
        return prepared, metrics

    # -- train -------------------------------------------------------------------------------

    def _train(
        self, rollout_id: int, steps: Sequence[list[RankSlice]], prepared: Prepared | None
    ) -> dict[str, Any]:
        """Log-prob passes over the whole rollout, then its optimizer steps.

        Raises UserCodeFailed, on all ranks, for code of the user that fails before the first step.  After a
        later failure the rollout's other steps are skipped, and ``self._loss_error`` says why.
        """
        if self.rank_zero is not None:
            self.rank_zero.display.train_update("training")
        began = time.monotonic()
        everything = [s for step in steps for s in step]
        old = ref = teacher = None
        if not self.config.reuses_log_probs:
            old = self.actor.compute_log_probs(
                everything, "old_log_prob", weight_version=rollout_id
            )
        if self.config.algorithm.needs_reference:
            ref = self.actor.compute_log_probs(
                everything, "ref_log_prob", routing=self.config.algorithm.ref_routing
            )
        if self.config.algorithm.holds_teacher:
            # another model than the one that generated: its own routers choose
            teacher = self.actor.compute_log_probs(everything, None, of_teacher=True)
        log_prob_s = time.monotonic() - began
        paid: dict[str, Any] = {}
        if self.config.algorithm.kl_coef:
            steps, paid = add_kl_to_rewards(
                steps,
                prepared,
                old,
                ref,
                self.config.algorithm,
                self._topologies,
                self.actor.topology.rank,
            )
        reports = []
        for i, step in enumerate(steps):
            version = rollout_id if i == 0 else None
            reports.append(
                self.actor.train_step(step, old, ref, version, teacher_log_probs=teacher)
            )
            if reports[-1]["skipped_steps"] and not self._loss_error:
                errors = chain.from_iterable(gather_json(self.actor.loss_errors))
                self._loss_error = next(errors, "")
                if self._loss_error and i == 0:
                    raise UserCodeFailed(self._loss_error)
        if self.config.trainer.ci_test and rollout_id == 0:
            is_actor = not self.config.lora.lora_adapter_path
            replayed = self.config.algorithm.ref_routing == "replay"
            _check_first_step(reports[0], reference_is_actor=is_actor and replayed)
        drift = self.actor.collect_drift()
        metrics = train_metrics(reports, self.actor.maxima)
        if self.actor.topology.rank == 0 and (text := gap_warning(rollout_id, metrics)):
            logger.warning("%s", text)
        return {
            **metrics,
            **drift,
            **paid,
            "perf/log_prob_s": log_prob_s,
        }

    def _checks(self, rollout_id: int, start_rollout_id: int) -> bool:
        """Tell whether the rollout's replay is proved; the first of a start always is.

        So a start's first verdict tells an audit where the interval of the start before it ends.
        """
        interval = self.config.replay.r3_check_interval
        starts = rollout_id == start_rollout_id
        return self.evidence is not None and (starts or is_checked(rollout_id, interval))

    def _judge(self, rollout_id: int, prepared: Prepared | None) -> StepVerdict | None:
        """Prove the step's replay on all ranks; the verdict is on rank 0 alone."""
        assert self.evidence is not None
        records = self.actor.collect_evidence(rollout_id)
        recorded = self.routes.recorded(prepared)
        rechecked, missed = self._compared(rollout_id, prepared)
        return prove_step(
            self.evidence,
            records,
            prepared.expectation(recorded) if prepared is not None else None,
            self.hf.route_shape,
            passes=self.config.replay_passes,
            mismatch_threshold=self.config.replay.r3_mismatch_threshold,
            check_interval=self.config.replay.r3_check_interval,
            rechecked=rechecked,
            missed=missed,
        )

    def _failed_claim(self, verdict: StepVerdict | None) -> str:
        """ "replay" if it was not exact, "threshold" if only that was exceeded, else ""; on all ranks."""
        if self.evidence is None:
            return ""
        failed = ""
        if verdict is not None and not verdict.passed:
            untrue = verdict.sampling is not None and verdict.sampling.failures
            failed = "replay" if verdict.failures or untrue else "threshold"
        return broadcast_json(failed)

    def _warn_of_staleness(self, verdict: StepVerdict) -> None:
        """Log that stale rows are above the threshold; the terminal hears of it once."""
        if verdict.stale_warning:
            level = logging.INFO if self._warned_of_staleness else logging.WARNING
            logger.log(level, verdict.stale_warning)
            self._warned_of_staleness = True

    def _compared(
        self, rollout_id: int, prepared: Prepared | None
    ) -> tuple[list[RecheckRecord] | None, int]:
        """Rank 0: compare samples with what their servers rechecked; (records, missed)."""
        rechecked = self._source.rechecked() if self._source is not None else None
        if prepared is None or rechecked is None:
            return None, 0
        records = compare_rollout(
            rollout_id,
            rechecked,
            [s.sample for s in prepared.samples],
            self.routes.read,
            self.hf.moe_layer_numbers,
            # a prefill has the log-probs of the whole vocabulary, at temperature 1
            log_probs=self.config.rollout.rollout_temperature == 1
            and not self.config.rollout.replays_sampling_mask,
        )
        # a prompt that was computed under other weights than its answer is not compared
        return records, rechecked.missed + len(rechecked.parts) - len(records)

    def _route_metrics(self) -> dict[str, Any]:
        """The step's route bytes, on rank 0's client and beyond; a collective."""
        metrics = self.routes.metrics()
        if self.rank_zero is not None and self.config.replay.use_rollout_routing_replay:
            now = self.rank_zero.engines.route_wire_bytes()
            metrics["perf/route_wire_bytes_rank0"] = now - self._route_wire_bytes
            self._route_wire_bytes = now
        return metrics

    # -- publish -----------------------------------------------------------------------------

    def _publish(self, weight_version: int) -> dict[str, Any]:
        """Bring all servers to the weights of ``weight_version``; returns metrics on rank 0."""
        if not self.config.has_engines:
            return {}
        if self.rank_zero is not None:
            self.rank_zero.display.train_update("publishing weights")
        quiet: AbstractContextManager[None] = nullcontext()
        if self._source is not None and not self.config.serves_adapters and not self._colocate:
            quiet = self._source.quiesced()
        metrics, failure = self._serve(weight_version, quiet)
        if self._recovery.needed(failure):
            metrics = self._revive(weight_version)
        self._servers_hold_base = not self._colocate
        if self.config.trainer.check_weight_update_equal:
            # after the pause, because a paused server would not answer
            metrics.update(self._check_update(weight_version))
            if self._colocate:
                self.actor.memory.hold()
        return metrics

    def _end_turn_of_servers(self) -> None:
        """Rank 0: let the servers release their memory, once nothing is in flight.

        The last batch waits for another turn where one of them is lost.
        """
        try:
            with ExitStack() as quiet:
                quiet.enter_context(self._source.quiesced())
                self.rank_zero.engines.keep_onloaded()
                self._quiet = quiet.pop_all()
        except BaseException:
            self._source.put_back()
            raise

    def _serve(
        self, weight_version: int, quiet: AbstractContextManager[None]
    ) -> tuple[dict[str, Any], BaseException | None]:
        """Send the weights; with --colocate the servers' turn begins.  Otherwise the same contract as ``_send_weights``.

        The actor's weights leave the device behind the last tensor, and the KV cache follows them.  For
        --check-weight-update-equal they stay until the check has ended.
        """
        if not self._colocate:
            return self._send_weights(weight_version, quiet)
        failure: BaseException | None = None
        with rank_zero_alone():
            if self.rank_zero is not None:
                try:
                    self.rank_zero.engines.keep_onloaded()
                except self._recovery.caught as error:
                    failure = error
        if self._recovery.needed(failure):
            return {}, failure
        self.actor.memory.hold("weights")
        host_barrier()
        metrics, failure = self._send_weights(weight_version, quiet)
        if not self.config.trainer.check_weight_update_equal:
            self.actor.memory.hold()
        host_barrier()
        if self.rank_zero is not None and failure is None and self._recovery.fatal is None:
            try:
                self.rank_zero.engines.keep_onloaded("weights", "kv_cache")
                self._quiet.close()
            except self._recovery.caught as error:
                failure = error
        return metrics, failure

    def _last_turn(self) -> None:
        """End the servers for the actor's memory, which a checkpoint or an export needs at the run's end."""
        if not self._colocate or self.actor.memory.is_whole:
            return
        with rank_zero_alone():
            if self.rank_zero is not None:
                self.rank_zero.engines.stop_servers()
        self.actor.memory.hold(*_TRAINING)

    def _send_weights(
        self, weight_version: int, quiet: AbstractContextManager[None]
    ) -> tuple[dict[str, Any], BaseException | None]:
        """Publish while nothing is generated: rank 0 sends; other ranks join gathers or send their stage's weights.

        Returns metrics, or on rank 0 a failure that a restart of the servers would mend.  Nothing
        is sent if the source has failed meanwhile.  Raises ValueError where the tensors that went out
        are not those of the checkpoint.
        """
        adapters = self.config.serves_adapters
        targets_alone = self._servers_hold_base and self.config.may_send_targets_alone
        if adapters:
            weights = self.actor.adapter_weights()
        else:
            weights = self.actor.hf_weights(targets_alone=targets_alone, of_stage=self._stages_send)
        again = []
        if self.config.trainer.check_weight_update_equal and not adapters:
            # the servers' tensors are compared with a second, whole export
            again = [self.actor.hf_weights()]
        self._held_export = None
        quietly, failure = ExitStack(), None
        with rank_zero_alone():  # requests in flight may take long to end
            if self.rank_zero is not None:
                try:
                    quietly.enter_context(quiet)
                except Exception as error:  # noqa: BLE001 - the other ranks go on first
                    failure = error
        if self.rank_zero is None:
            if self.stage is not None:
                self.stage.send(weights, version=weight_version)
            for _ in chain(weights, *again):
                raise AssertionError("only rank 0 holds whole tensors")
            return {}, None
        engines, published = self.rank_zero.engines, None

        def drain() -> None:
            """Let the other ranks go on, which are sending."""
            if published is None:
                engines.publisher.abandon()
            for _ in chain(weights, *again):
                pass

        try:
            with quietly:
                if failure is not None:
                    raise failure
                if self._colocate:
                    engines.keep_onloaded("weights")
                published = engines.publisher.publish(weights, version=weight_version)
                if not adapters:  # adapters are compared with the checkpoint when they are written
                    self._weight_index.require(
                        published.sent,
                        published.num_bytes,
                        version=weight_version,
                        targets_alone=targets_alone,
                    )
                for export in again:
                    self._held_export = engines.compare_weights(export, weight_version)
                if self._source is not None:
                    self._source.set_version(weight_version)
        except self._recovery.caught as error:
            drain()
            return {}, error
        except Exception as error:
            if self._source is None or error is not self._source.failure:
                raise
            drain()
            self._recovery.fatal = error  # the ranks come together at the next rollout
            return {}, None
        return {
            "perf/published_bytes": published.num_bytes,
            "perf/published_tensors": published.num_tensors,
            "rollout/weight_version": weight_version,
        }, None

    def _revive(self, weight_version: int) -> dict[str, Any]:
        """Restart lost servers and give them the weights of ``weight_version``; all ranks together.

        Raises the cause, after a checkpoint, when there are too many restarts.
        """
        while True:
            if self._colocate:  # a new server takes all of its memory
                self._quiet.pop_all()
                self.actor.memory.hold()
                host_barrier()
            failure = self._recovery.restart()
            if failure is not None:
                self._last_turn()
                self.run_state.save_last(weight_version)
                raise failure
            if self.stage is not None:
                self.stage.reconnect()
            self._servers_hold_base = False  # a new one has the checkpoint's
            # new servers have nothing in flight; waiting requests are sent afterwards
            metrics, failure = self._serve(weight_version, nullcontext())
            if not self._recovery.needed(failure):
                self._servers_hold_base = not self._colocate
                self._recovery.restored(weight_version)
                return metrics

    def _check_update(self, weight_version: int) -> dict[str, float]:
        """--check-weight-update-equal, beyond the servers' checksums; metrics on rank 0.

        The export that the servers were compared with is loaded back and compared bit for bit with the
        parameters of every rank; with adapters there is no such export.  Actor and servers score a
        text.  No server kept that text in its cache from the update before.  Raises AssertionError on
        rank 0.
        """
        update, other = f"weight update {weight_version}", []
        if not self.config.serves_adapters:
            export = broadcast_json(self._held_export and str(self._held_export))
            if export is None:  # the source has failed, and nothing was sent
                return {}
            other = self._unlike(Path(export), update)
        text = weight_probe.probe_tokens(self.hf.vocab_size)
        ours = weight_probe.actor_log_probs(self.actor, self._topologies, text)
        if self.rank_zero is None:
            return {}
        for rank, names in enumerate(other):
            if names:
                raise AssertionError(
                    f"{update}: {len(names)} parameters of rank {rank} are not what was exported,"
                    f" {names[0]} among them"
                )
        engines = self.rank_zero.engines
        # before the probe, which leaves the text in the cache; a prompt may begin like the text
        if (stale := engines.stale_tokens(text)) > len(text) // 2:
            raise AssertionError(
                f"{update}: a server still had {stale} of {len(text)} probe tokens in its cache,"
                " computed with the weights before"
            )
        tolerance = weight_probe.tolerance(self.hf, bf16=self.config.model.bf16)
        gap = max(
            weight_probe.compare(ours, theirs, weight_version, tolerance=tolerance)
            for theirs in engines.probe(text)
        )
        return {"train/weight_probe_gap": gap}

    def _unlike(self, export: Path, update: str) -> list[list[str]]:
        """Names of each rank's parameters that are not what an export holds; a collective."""
        if not export.is_dir():
            raise ValueError(
                f"{update}: this rank does not see {export}: --check-weight-update-equal needs a run"
                " directory that all ranks see"
            )
        other = gather_json(self.actor.parameters_unlike(export))
        if self.rank_zero is not None:
            shutil.rmtree(export, ignore_errors=True)
        return other


def _check_first_step(report: dict[str, float], *, reference_is_actor: bool) -> None:
    """--ci-test: at the first step the actor is the policy that its log-probs came from.

    reference_is_actor: it is the KL reference too.
    """
    others = {"ppo_kl": "old log_probs"} | ({"kl": "ref_log_probs"} if reference_is_actor else {})
    for name, other in others.items():
        if abs(report.get(name, 0.0)) > 1e-8:
            raise AssertionError(
                f"ci-test: first-step log_probs must equal {other}, but {name} is {report[name]:g}"
            )


def _replay_metrics(verdict: StepVerdict) -> dict[str, Any]:
    metrics: dict[str, Any] = {f"r3/{name}": value for name, value in verdict.counts.items()}
    metrics["r3/passed"] = verdict.passed
    if verdict.sampling is not None:
        judged = {PASSED: True, FAILED: False}
        metrics["r3_audit/passed"] = judged.get(verdict.sampling.verdict)
        metrics["r3_audit/parts"] = verdict.sampling.parts
        metrics["r3_audit/missed"] = verdict.sampling.missed
    for name, value in verdict.agreement.items():
        metrics["r3/agreement" if name == "equal" else f"r3/agreement_{name}"] = value
    return metrics
