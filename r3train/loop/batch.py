"""One rollout's samples to all data-parallel ranks' microbatches, and to what its evidence must show.

Pure, and done by rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from r3train.proof.check import StepExpectation, expected_calls
from r3train.layout.bins import deal_bins, pack_bins
from r3train.layout.microbatch import build_microbatch
from r3train.loop.recorded import Recorded, decoded_rows
from r3train.algo.advantages.registry import token_advantages
from r3train.algo.reward_stats import GroupStats, group_stats
from r3train.algo.trajectories import episode_rewards, validate_trajectories
from r3train.config.algorithm import AlgorithmSection
from r3train.types import MicroBatch, RankTopology, RolloutSample, RouteShape, Scored, TrainSample

# the samples of an optimizer step, [data-parallel rank][microbatch][sample]
Dealt = Sequence[Sequence[Sequence[TrainSample]]]


def train_samples(
    groups: Sequence[Sequence[Scored]], algorithm: AlgorithmSection
) -> tuple[list[TrainSample], GroupStats]:
    """Give every token of a rollout its advantage, [groups][samples] -> all samples in order.

    Step-wise samples (one a turn) of an episode share one reward, which counts once.
    """
    _check_trajectories([sample for group in groups for sample, _ in group])
    rewards = np.array([episode_rewards(group) for group in groups], dtype=np.float64)
    stats = group_stats(rewards)
    samples = [[sample for sample, _ in group] for group in groups]
    advantages = token_advantages(samples, rewards, algorithm)
    return [
        TrainSample(sample, reward, own)
        for group, of_group in zip(groups, advantages)
        for (sample, reward), own in zip(group, of_group)
    ], stats


def _check_trajectories(samples: Sequence[RolloutSample]) -> None:
    """Step-wise samples are told by having either field; a batch is all of them or none."""
    if any(s.trajectory_id is not None or s.is_last_step is not None for s in samples):
        validate_trajectories(
            [s.sample_id for s in samples],
            [s.trajectory_id for s in samples],
            [s.is_last_step for s in samples],
        )


@dataclass(frozen=True)
class Packing:
    """What rank 0 must know to deal a batch and build its microbatches."""

    topologies: Sequence[RankTopology]
    max_tokens_per_gpu: int
    route_shape: RouteShape | None  # where rank 0 has the routes


def deal_samples(samples: Sequence[TrainSample], packing: Packing) -> Dealt:
    """Which samples of one optimizer step share a microbatch, and which data rank trains them."""
    some = packing.topologies[0]
    lengths = [s.sample.num_tokens for s in samples]
    # an interleaved schedule wants a multiple of the pipeline size
    multiple = some.dp_size * (some.pp_size if some.vpp_size > 1 else 1)
    bins = pack_bins(lengths, packing.max_tokens_per_gpu * some.cp_size, num_bins_multiple=multiple)
    dealt = deal_bins(bins, lengths, some.dp_size)
    return [[[samples[i] for i in group] for group in groups] for groups in dealt]


def build_microbatches(
    dealt: Dealt, packing: Packing, *, first_microbatch_id: int
) -> list[list[MicroBatch]]:
    """[dp][microbatches] of one optimizer step's samples.

    Microbatches are numbered from ``first_microbatch_id``, per data-parallel rank alike.
    """
    some = packing.topologies[0]
    return [
        [
            build_microbatch(
                first_microbatch_id + j,
                group,
                cp_size=some.cp_size,
                tp_size=some.tp_size if some.sequence_parallel else 1,
                route_shape=packing.route_shape,
            )
            for j, group in enumerate(groups)
        ]
        for groups in dealt
    ]


def data_rank_of_samples(dealt_of_steps: Sequence[Dealt]) -> dict[int, int]:
    """Sample id -> the data-parallel rank that trains it."""
    return {
        s.sample.sample_id: data_rank
        for dealt in dealt_of_steps
        for data_rank, groups in enumerate(dealt)
        for group in groups
        for s in group
    }


def record_samples(
    samples: Sequence[RolloutSample],
    data_rank_of: Mapping[int, int],
    num_data_ranks: int,
    moe_layers: Sequence[int],
) -> Recorded:
    """What the rollout recorded of samples whose routes are on this rank."""
    recorded = Recorded(num_data_ranks, moe_layers)
    for sample in samples:
        assert sample.routed_experts is not None
        # a sample that nobody trains counts too: the check must miss it
        data_rank = data_rank_of.get(sample.sample_id, 0)
        for position, rows in decoded_rows(sample):
            recorded.add(data_rank, sample.sample_id, rows, first_position=position)
    return recorded


def step_expectation(
    step: int,
    recorded: Recorded,
    *,
    num_rows: int,
    passes: tuple[str, ...],
    moe_layers: Sequence[int],
    recomputed: Sequence[int],
    num_microbatches: int,
    topologies: Sequence[RankTopology],
) -> StepExpectation:
    """What the evidence of a rollout must show, from the bytes that the engine sent.

    num_rows: tokens of all samples; num_microbatches: of one rank, over all optimizer steps.
    """
    whole = recorded.whole_rows.sum(axis=0)
    return StepExpectation(
        step=step,
        fingerprints=dict(zip(moe_layers, recorded.fingerprints.sum(axis=0).tolist())),
        rows_replayed=dict(zip(moe_layers, whole.tolist())),
        rows_filled=dict(zip(moe_layers, (num_rows - whole).tolist())),
        num_calls=expected_calls(
            passes=passes,
            num_microbatches=num_microbatches,
            ranks_per_stage=len(topologies) // topologies[0].pp_size,
            moe_layers=moe_layers,
            recomputed=recomputed,
        ),
        fingerprints_of_ranks={
            tuple(t.rank for t in topologies if t.dp_rank == data_rank): dict(
                zip(moe_layers, own.tolist())
            )
            for data_rank, own in enumerate(recorded.fingerprints)
        },
    )
