"""Take a rollout: rank 0 waits for its groups, prepares and packs them, and every rank gets its slices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.host_group import rank_zero_alone
from r3train.loop.distribute import broadcast_json
from r3train.loop.rank_zero import RankZero
from r3train.loop.prepare import Plant, Preparation, Prepared, train_samples
from r3train.loop.rollout_source import RolloutSource
from r3train.loop.route_transport import Routes
from r3train.loop.run_state import RunState
from r3train.loop.step_metrics import report_rollout
from r3train.loop.stop import StopRequested
from r3train.loop.weight_update import WeightUpdate
from r3train.types import RankSlice, RankTopology, Scored


@dataclass(frozen=True)
class Taken:
    """A rollout as one rank trains it.

    steps: this rank's slices of each optimizer step; prepared: the whole rollout, on rank 0 only;
    metrics: of the rollout, on rank 0 only.
    """

    steps: list[list[RankSlice]]
    prepared: Prepared | None
    metrics: dict[str, Any]


@dataclass(eq=False)
class Intake:
    """Takes rollouts from the source on rank 0; all ranks call ``take`` together.

    update: restarts lost servers; plant: spoils a rollout's samples on purpose; topologies: of all ranks.
    """

    config: RunConfig
    hf: HfModelFacts
    rank_zero: RankZero | None
    routes: Routes
    run_state: RunState
    update: WeightUpdate
    topologies: list[RankTopology]
    plant: Plant | None

    def __post_init__(self) -> None:
        self._source: RolloutSource | None = None
        self._source_stats: dict[str, Any] = {}

    def set_source(self, source: RolloutSource) -> None:
        """Rank 0: from now on rollouts come from ``source``."""
        self._source = source

    def take(self, rollout_id: int) -> Taken | None:
        """Return this rank's part of a rollout; None, on all ranks, when told to stop while waiting.

        Saves a checkpoint, then raises errors that restarting servers cannot fix.
        """
        recovery, turns = self.update.recovery, self.update.turns
        plan, prepared, metrics, failure = None, None, {}, None
        with rank_zero_alone():
            if self.rank_zero is not None:
                try:
                    plan, prepared, metrics = self._plan(rollout_id)
                except recovery.caught as error:
                    failure = error
        if recovery.rank_zero_failed(failure):
            self.update.revive(rollout_id, failure)
            turns.actor_offloads()
            return self.take(rollout_id)
        plan = broadcast_json(plan)
        if "failed" in plan:
            turns.end()
            self.run_state.save_failed(rollout_id, plan["failed"], plan["what"])
            raise recovery.fatal or RuntimeError(f"rank 0 has no rollout: {plan['failed']}")
        counts = plan["microbatches"]
        if counts is None:
            return None
        mine = iter(self.routes.slices(prepared, sum(counts)))
        return Taken([list(islice(mine, count)) for count in counts], prepared, metrics)

    def _plan(self, rollout_id: int) -> tuple[dict[str, Any], Prepared | None, dict[str, Any]]:
        """Rank 0: wait for a rollout and prepare it; tell the other ranks what comes.

        Returns (plan, prepared, metrics); plan: microbatches of each optimizer step, None for a stop; or
        the error that all ranks end with, after a checkpoint.  Raises ``recovery.caught``.
        """
        recovery, taken = self.update.recovery, False
        try:
            if recovery.fatal is not None:
                raise recovery.fatal
            batch_size = self.config.rollout.rollout_batch_size
            # before a rollout is taken, which a failure would lose
            if self.update.canaries is not None:
                self.update.canaries.wait()
            groups = self.rank_zero.next_groups(self._source, rollout_id, batch_size)
            self.update.turns.servers_offload(self._source)
            taken = True
            prepared, metrics = self._prepare(rollout_id, groups)
            return {"microbatches": prepared.counts}, prepared, metrics
        except StopRequested:
            return {"microbatches": None}, None, {}
        except recovery.caught:
            raise
        except Exception as error:  # noqa: BLE001 - raised when the checkpoint is written
            if taken:  # servers_offload puts back by itself
                self._source.put_back()
            recovery.fatal = error
            what = "a rollout could not be scored" if taken else "generation failed"
            return {"failed": str(error), "what": what}, None, {}

    def _prepare(
        self, rollout_id: int, groups: list[list[Scored]]
    ) -> tuple[Prepared, dict[str, Any]]:
        """Rank 0: give the rollout's tokens their advantages, distribute it over the ranks and pack it."""
        before, self._source_stats = self._source_stats, self._source.stats()
        most = self.config.rollout.rollout_max_response_len
        samples, groups_stats = train_samples(groups, self.config.algorithm, most)
        writer, stats = self.rank_zero.metrics, self._source_stats
        metrics = report_rollout(
            rollout_id, samples, groups_stats, self.config, writer, stats, before
        )
        preparation = Preparation(
            self.config,
            self.hf,
            self.routes.row_shape,
            self.topologies,
            self.config.replay_passes,
        )
        return preparation.prepare(rollout_id, samples, self.plant), metrics
