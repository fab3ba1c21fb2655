"""One rollout's samples to every rank's slices, and to what the evidence must show.

Pure, and done by rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from r3train.evidence.check import StepExpectation, expected_calls
from r3train.layout.bins import deal_bins, pack_bins
from r3train.layout.microbatch import build_microbatch, slice_microbatch
from r3train.rl.advantages import GroupStats, group_stats, grpo_advantages, token_advantages
from r3train.rl.trajectories import trajectory_rewards, validate_trajectories
from r3train.routing.fingerprint import recorded_rows, rollout_fingerprint, sample_ids
from r3train.types import RankSlice, RankTopology, RolloutSample, TrainSample

Scored = tuple[RolloutSample, float]


def train_samples(
    groups: Sequence[Sequence[Scored]], *, std_normalization: bool
) -> tuple[list[TrainSample], GroupStats]:
    """Group-relative advantages over the rollout's groups, [groups][n] -> groups * n samples.

    Of step-wise samples (one a turn) a group holds more: each takes the advantage of its episode.
    """
    _check_trajectories([sample for group in groups for sample, _ in group])
    by_episode = [
        trajectory_rewards([_episode(sample) for sample, _ in group], [r for _, r in group])
        for group in groups
    ]
    rewards = np.array([episodes for episodes, _ in by_episode], dtype=np.float64)
    advantages = grpo_advantages(rewards, std_normalization=std_normalization)
    samples = []
    for g, group in enumerate(groups):
        for (sample, reward), i in zip(group, by_episode[g][1]):
            own = token_advantages(float(advantages[g, i]), sample.loss_mask)
            samples.append(TrainSample(sample, reward, own))
    return samples, group_stats(rewards)


def _episode(sample: RolloutSample) -> int:
    return sample.sample_id if sample.trajectory_id is None else sample.trajectory_id


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
    """What rank 0 must know to cut a batch for everybody."""

    topologies: Sequence[RankTopology]
    max_tokens_per_gpu: int
    route_shape: tuple[int, int] | None  # (L, K) under R3
    route_dtype: type


def slices_for_ranks(
    samples: Sequence[TrainSample], packing: Packing, *, first_microbatch_id: int
) -> list[list[RankSlice]]:
    """[world_size][microbatches] slices of one optimizer step's samples.

    Microbatches are numbered from ``first_microbatch_id``, per data-parallel rank alike.
    """
    some = packing.topologies[0]
    lengths = [s.sample.num_tokens for s in samples]
    # an interleaved schedule wants a multiple of the pipeline size
    multiple = some.dp_size * (some.pp_size if some.vpp_size > 1 else 1)
    bins = pack_bins(lengths, packing.max_tokens_per_gpu * some.cp_size, num_bins_multiple=multiple)
    microbatches = [
        [
            build_microbatch(
                first_microbatch_id + j,
                [samples[i] for i in group],
                cp_size=some.cp_size,
                tp_size=some.tp_size if some.sequence_parallel else 1,
                route_shape=packing.route_shape,
                route_dtype=packing.route_dtype,
            )
            for j, group in enumerate(groups)
        ]
        for groups in deal_bins(bins, lengths, some.dp_size)
    ]
    return [[slice_microbatch(m, t) for m in microbatches[t.dp_rank]] for t in packing.topologies]


def step_expectation(
    step: int,
    samples: Sequence[RolloutSample],
    *,
    passes: tuple[str, ...],
    moe_layers: Sequence[int],
    recomputed: Sequence[int],
    num_microbatches: int,
    ranks_per_stage: int,
    ids_of_ranks: dict[tuple[int, ...], set[int]] | None = None,
) -> StepExpectation:
    """What the evidence of a rollout must show, from the bytes that the engine sent.

    ids_of_ranks: see ``ids_of_data_ranks``; with it a failure can be traced to its ranks.
    """
    layers = np.asarray(moe_layers)
    fingerprints = np.zeros(len(layers), dtype=np.uint64)
    whole = np.zeros(len(layers), dtype=np.int64)
    num_rows = 0
    of_ranks = {ranks: np.zeros_like(fingerprints) for ranks in ids_of_ranks or {}}
    for sample in samples:
        assert sample.routed_experts is not None
        own = rollout_fingerprint(sample.sample_id, sample.routed_experts, layers)
        fingerprints += own
        for ranks, ids in (ids_of_ranks or {}).items():
            if sample.sample_id in ids:
                of_ranks[ranks] += own
        whole += recorded_rows(sample.routed_experts, layers)
        num_rows += sample.num_tokens
    return StepExpectation(
        step=step,
        fingerprints=dict(zip(moe_layers, fingerprints.tolist())),
        rows_replayed=dict(zip(moe_layers, whole.tolist())),
        rows_filled=dict(zip(moe_layers, (num_rows - whole).tolist())),
        num_calls=expected_calls(
            passes=passes,
            num_microbatches=num_microbatches,
            ranks_per_stage=ranks_per_stage,
            moe_layers=moe_layers,
            recomputed=recomputed,
        ),
        fingerprints_of_ranks={
            ranks: dict(zip(moe_layers, own.tolist())) for ranks, own in of_ranks.items()
        },
    )


def ids_of_data_ranks(
    slices_of_rank: Sequence[Sequence[RankSlice]], topologies: Sequence[RankTopology]
) -> dict[tuple[int, ...], set[int]]:
    """The sample ids that the ranks of each data-parallel rank hold together."""
    of_data_rank: dict[int, tuple[list[int], set[int]]] = {}
    for topology, slices in zip(topologies, slices_of_rank):
        ranks, ids = of_data_rank.setdefault(topology.dp_rank, ([], set()))
        ranks.append(topology.rank)
        for s in slices:
            ids |= sample_ids(s.route_uids)
    return {tuple(ranks): ids for ranks, ids in of_data_rank.values()}
