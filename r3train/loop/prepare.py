"""One rollout made ready for all ranks: dealt, packed, and what its evidence must show.

Done by rank 0 alone.  With --route-stores the samples hold references to their routes, the
microbatches hold none (``route_exchange`` brings them), and the leaders find what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from r3train.proof.check import StepExpectation
from r3train.loop.batch import (
    Dealt,
    Packing,
    build_microbatches,
    data_rank_of_samples,
    deal_samples,
    record_samples,
    step_expectation,
)
from r3train.loop.parts import ReplayPlan
from r3train.loop.recorded import Recorded
from r3train.types import MicroBatch, RankTopology, TrainSample

# (rollout id, samples) -> samples with a deliberate bug, to see a check fail
Plant = Callable[[int, Sequence[TrainSample]], list[TrainSample]]


@dataclass(frozen=True)
class Expected:
    """What the evidence must show, but for what was recorded where that is found by the leaders."""

    of_recorded: Callable[[Recorded], StepExpectation]
    recorded: Recorded | None  # where the routes are on this rank

    def with_recorded(self, recorded: Recorded | None) -> StepExpectation:
        """The whole expectation; ``recorded`` is the leaders', or None."""
        found = self.recorded if recorded is None else recorded
        assert found is not None
        return self.of_recorded(found)


@dataclass(frozen=True)
class Prepared:
    """A rollout on rank 0, ready to be sent."""

    samples: Sequence[TrainSample]  # as the rollout left them
    dealt_of_steps: Sequence[Dealt]  # as they are trained
    microbatches: list[list[MicroBatch]]  # [dp][microbatches of all steps]
    counts: list[int]  # of one data-parallel rank, for each optimizer step
    expected: Expected | None  # with the check on


def prepare(
    rollout_id: int,
    samples: Sequence[TrainSample],
    replay: ReplayPlan | None,
    topologies: Sequence[RankTopology],
    *,
    passes: tuple[str, ...],
    steps_per_rollout: int,
    max_tokens_per_gpu: int,
    adopt: Callable[[Sequence[TrainSample]], list[TrainSample]] | None = None,
    plant: Plant | None = None,
) -> Prepared:
    """Deal and pack a rollout's samples; ``adopt`` (with --route-stores) makes routes references."""
    if adopt is not None:
        samples = adopt(samples)
    trained = samples
    if plant is not None:
        trained = plant(rollout_id, samples)
        if adopt is not None:
            trained = adopt(trained)
    packing = Packing(
        topologies=topologies,
        max_tokens_per_gpu=max_tokens_per_gpu,
        route_shape=replay.route_shape if replay and adopt is None else None,
    )
    microbatches: list[list[MicroBatch]] = [[] for _ in range(topologies[0].dp_size)]
    counts: list[int] = []
    dealt_of_steps = []
    share = len(trained) // steps_per_rollout
    for step in range(steps_per_rollout):
        dealt = deal_samples(trained[step * share : (step + 1) * share], packing)
        built = build_microbatches(dealt, packing, first_microbatch_id=sum(counts))
        dealt_of_steps.append(dealt)
        counts.append(len(built[0]))
        for all_steps, own in zip(microbatches, built, strict=True):
            all_steps += own
    expected = None
    if replay is not None and replay.check:
        recorded = None
        of_recorded = partial(
            step_expectation,
            rollout_id,
            num_rows=sum(s.sample.num_tokens for s in samples),
            passes=passes,
            moe_layers=replay.moe_layers,
            recomputed=replay.recomputed,
            num_microbatches=sum(counts),
            topologies=topologies,
        )
        if adopt is None:
            recorded = record_samples(
                [s.sample for s in samples],
                data_rank_of_samples(dealt_of_steps),
                topologies[0].dp_size,
                replay.moe_layers,
            )
        expected = Expected(of_recorded, recorded)
    return Prepared(samples, dealt_of_steps, microbatches, counts, expected)
