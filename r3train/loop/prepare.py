"""A rollout made ready for all ranks: advantages, microbatches, and the totals its evidence must match.

Pure, and done by rank 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby

import numpy as np

from r3train.algo.advantages.estimators import token_advantages
from r3train.algo.trajectories import (
    episode_places,
    episode_rewards,
    loss_weights,
    shaped_rewards,
    validate_trajectories,
    without_truncated,
)
from r3train.algo.reward_stats import GroupStats, group_stats
from r3train.config import RunConfig
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.families.checks.settings_checks import replayed_index_topk
from r3train.families.hf_facts import HfModelFacts
from r3train.layout.microbatch import (
    assign_microbatches,
    build_microbatch,
    current_versions,
    pack_bins,
    row_versions,
    rows_never_computed,
    Streams,
)
from r3train.layout.provenance import classes_of_tokens, count_rows
from r3train.loop.recorded import (
    decoded_indexer,
    decoded_rows,
    decoded_sampling_mask,
    Recorded,
)
from r3train.proof.step_verdict import Place, StepExpectation, StreamExpectation, expected_calls
from r3train.routing.layers import layers_with_recomputed, recomputed_moe_layers
from r3train.types import (
    MicroBatch,
    RankTopology,
    INDEXER,
    RolloutSample,
    ROUTES,
    RouteShape,
    RowClass,
    SAMPLING_MASK,
    SAMPLING_MASK_LAYER,
    StreamName,
    Scored,
    TrainSample,
)

# samples of one optimizer step: [data-parallel rank][microbatch][sample]
StepSamples = Sequence[Sequence[Sequence[TrainSample]]]
# (rollout id, samples) -> samples with a deliberate bug, to see a check fail
Plant = Callable[[int, Sequence[TrainSample]], list[TrainSample]]


@dataclass(frozen=True)
class Prepared:
    """A rollout on rank 0, ready to be sent."""

    rollout_id: int
    samples: Sequence[TrainSample]  # as the rollout left them
    steps: Sequence[StepSamples]  # as they are trained
    microbatches: list[list[MicroBatch]]  # [dp][microbatches of all steps]
    counts: list[int]  # microbatches of one data-parallel rank, for each optimizer step
    # with the check on: totals of the recorded routes -> the expected evidence
    expectation: Callable[[Recorded], StepExpectation] | None = None


@dataclass(frozen=True)
class Preparation:
    """Model, topology and rules for which all rollouts of a run are prepared.

    row_shape: the shape of a row of routes, None without R3; topologies: every rank's, by rank;
    passes: those that run the routers.
    """

    config: RunConfig
    hf: HfModelFacts
    row_shape: RouteShape | None
    topologies: Sequence[RankTopology]
    passes: tuple[str, ...]

    @property
    def streams(self) -> Streams:
        """Streams that the samples of a rollout carry besides their tokens."""
        config = self.config
        return Streams(
            self.row_shape,
            fresh_prefixes=config.rollout.fresh_prefixes,
            sampling_mask=config.rollout.replays_sampling_mask,
            teacher=config.algorithm.asks_teacher,
            index_topk=replayed_index_topk(config, self.hf),
        )

    def prepare(
        self, rollout_id: int, samples: Sequence[TrainSample], plant: Plant | None = None
    ) -> Prepared:
        """Deal a rollout's samples to the data-parallel ranks and pack them into microbatches.

        plant: spoils the samples that are trained, while fingerprints are taken of ``samples`` as they are.
        """
        config, place = self.config, self.topologies[0]
        trained = samples if plant is None else plant(rollout_id, samples)
        most = config.rollout.rollout_max_response_len
        microbatches: list[list[MicroBatch]] = [[] for _ in range(place.dp_size)]
        counts: list[int] = []
        steps: list[StepSamples] = []
        share = len(trained) // config.steps_per_rollout
        for start in range(0, share * config.steps_per_rollout, share):
            weighted = weigh(trained[start : start + share], config.algorithm, most)
            dealt = deal_samples(weighted, place, config.trainer.max_tokens_per_gpu)
            built = build_microbatches(dealt, place, self.streams, sum(counts), rollout_id)
            steps.append(dealt)
            counts.append(len(built[0]))
            for rank_microbatches, step_microbatches in zip(microbatches, built, strict=True):
                rank_microbatches += step_microbatches
        prepared = Prepared(rollout_id, samples, steps, microbatches, counts)
        if not config.r3_check_enabled:
            return prepared
        return replace(prepared, expectation=partial(step_expectation, self, prepared))


def train_samples(
    groups: Sequence[Sequence[Scored]], algorithm: AlgorithmSection, max_response_len: int
) -> tuple[list[TrainSample], GroupStats]:
    """Give every token of a rollout its advantage, [groups][samples] -> all samples in order.

    Step-wise samples (one per turn) of an episode share one reward, which counts once.  The statistics
    are those of the rewards as they were given, before penalties for length.
    """
    validate_trajectories([sample for group in groups for sample, _ in group])
    rewards = np.array([episode_rewards(group) for group in groups], dtype=np.float64)
    stats = group_stats(rewards)
    samples = [[sample for sample, _ in group] for group in groups]
    rewards = shaped_rewards(samples, rewards, algorithm, max_response_len)
    if algorithm.mask_truncated:
        samples = without_truncated(samples)
    advantages = token_advantages(samples, rewards, algorithm)
    return [
        TrainSample(sample, group_rewards[place], token_advantage)
        for group, group_rewards, group_advantages in zip(samples, rewards.tolist(), advantages)
        for sample, place, token_advantage in zip(group, episode_places(group), group_advantages)
    ], stats


def advantages_with_kl(
    samples: Sequence[TrainSample],
    algorithm: AlgorithmSection,
    log_ratios: Mapping[int, np.ndarray],
) -> list[TrainSample]:
    """Give a rollout's samples the advantages of rewards that pay for the KL from the reference.

    Each loss token loses ``kl_coef (old - reference)``, the estimate k1 of that KL.
    samples: of ``train_samples``, in its order; log_ratios: {sample_id: old - reference, float32[T]}.
    """
    groups = [list(group) for _, group in groupby(samples, key=lambda s: s.sample.group_id)]
    bare = [[s.sample for s in group] for group in groups]
    rewards = np.array([episode_rewards([(s.sample, s.reward) for s in g]) for g in groups])
    token_rewards = [
        [np.where(s.loss_mask, -algorithm.kl_coef * log_ratios[s.sample_id], 0.0) for s in group]
        for group in bare
    ]
    advantages = token_advantages(bare, rewards, algorithm, token_rewards)
    return [
        replace(s, advantages=token_advantage)
        for s, token_advantage in zip(samples, chain(*advantages), strict=True)
    ]


def weigh(
    samples: Sequence[TrainSample], algorithm: AlgorithmSection, max_response_len: int
) -> list[TrainSample]:
    """Give the samples of an optimizer step the weights of their episodes in its loss (--loss-aggregation)."""
    places = episode_places([s.sample for s in samples])
    lengths = np.zeros(max(places, default=-1) + 1, dtype=np.int64)
    # no row predicts the first token
    np.add.at(lengths, places, [int(s.sample.loss_mask[1:].sum()) for s in samples])
    weights = loss_weights(lengths, algorithm, max_response_len)[places]
    return [replace(s, loss_weight=weight) for s, weight in zip(samples, weights.tolist())]


def deal_samples(
    samples: Sequence[TrainSample], place: RankTopology, max_tokens_per_gpu: int
) -> StepSamples:
    """Deal the samples of an optimizer step to data-parallel ranks and microbatches.

    place: the topology of any rank, for the sizes of the topology.
    """
    lengths = [s.sample.num_tokens for s in samples]
    # an interleaved schedule needs a multiple of the pipeline size
    multiple = place.dp_size * (place.pp_size if place.vpp_size > 1 else 1)
    bins = pack_bins(lengths, max_tokens_per_gpu * place.cp_size, num_bins_multiple=multiple)
    dealt = assign_microbatches(bins, lengths, place.dp_size)
    return [[[samples[i] for i in group] for group in groups] for groups in dealt]


def build_microbatches(
    samples: StepSamples,
    place: RankTopology,
    streams: Streams,
    first_microbatch_id: int = 0,
    rollout_id: int = 0,
) -> list[list[MicroBatch]]:
    """Pack an optimizer step's samples, [dp][microbatches].

    On each data-parallel rank the numbers of microbatches begin at ``first_microbatch_id``.
    """
    tp_size = place.tp_size if place.sequence_parallel else 1
    sizes = {"cp_size": place.cp_size, "tp_size": tp_size, "rollout_id": rollout_id}
    return [
        [
            build_microbatch(number, group, streams, **sizes)
            for number, group in enumerate(groups, first_microbatch_id)
        ]
        for groups in samples
    ]


def _rows_current(
    rollout_id: int, versions: Sequence[np.ndarray], config: RunConfig, passes: Sequence[str]
) -> dict[str, int]:
    """Count for each pass the rows that the actor's own weights computed, with all rows before them.

    versions: those of each sample's rows (``current_versions``).  The actor holds weight version ``rollout_id`` in an
    old-log-prob pass and in the first optimizer step.  After that step it holds weights that no server
    ever held.
    """
    sample_counts = [int((sample_versions == rollout_id).sum()) for sample_versions in versions]
    first_step = len(versions) // config.steps_per_rollout
    counts = {"old_log_prob": sum(sample_counts), "train": sum(sample_counts[:first_step])}
    return {replay_pass: counts.get(replay_pass, 0) for replay_pass in passes}


def data_rank_of_samples(steps: Sequence[StepSamples]) -> dict[int, int]:
    """Map each sample id to the data-parallel rank that trains it."""
    return {
        s.sample.sample_id: data_rank
        for step in steps
        for data_rank, groups in enumerate(step)
        for group in groups
        for s in group
    }


def record_samples(
    samples: Sequence[RolloutSample],
    data_rank_of: Mapping[int, int],
    num_data_ranks: int,
    moe_layers: Sequence[int],
) -> Recorded:
    """Take the fingerprints of samples whose routes are on this rank."""
    recorded = Recorded(num_data_ranks, moe_layers)
    parts: list[list[tuple[int, np.ndarray, int]]] = [[] for _ in range(num_data_ranks)]
    for sample in samples:
        assert sample.routed_experts is not None
        # a sample that nobody trains is counted too, so that the check finds it missing
        rank_rows = parts[data_rank_of.get(sample.sample_id, 0)]
        rank_rows += [(sample.sample_id, rows, position) for position, rows in decoded_rows(sample)]
    for data_rank, rank_rows in enumerate(parts):
        recorded.add(data_rank, rank_rows)
    return recorded


def recorded_sampling_mask(
    samples: Sequence[TrainSample],
    steps: Sequence[StepSamples],
    num_data_ranks: int,
) -> Recorded:
    """Take the fingerprints of the samples' sampling masks."""
    recorded, data_rank_of = Recorded(num_data_ranks, [SAMPLING_MASK_LAYER]), data_rank_of_samples(
        steps
    )
    for sample in (s.sample for s in samples):
        data_rank = data_rank_of.get(sample.sample_id, 0)
        for position, counts, ids in decoded_sampling_mask(sample):
            recorded.add_sampling_mask(data_rank, sample.sample_id, counts, ids, position)
    return recorded


def recorded_indexer(
    samples: Sequence[TrainSample],
    steps: Sequence[StepSamples],
    num_data_ranks: int,
    num_layers: int,
) -> Recorded:
    """Take the fingerprints of the choices of the samples' indexers."""
    layers = range(1, num_layers + 1)
    recorded, data_rank_of = Recorded(num_data_ranks, layers), data_rank_of_samples(steps)
    for sample in (s.sample for s in samples):
        data_rank = data_rank_of.get(sample.sample_id, 0)
        for position, bits in decoded_indexer(sample):
            if len(bits):
                recorded.add_indexer(data_rank, sample.sample_id, bits, position)
    return recorded


def _counted_versions(sample: RolloutSample, versions: np.ndarray, config: RunConfig) -> np.ndarray:
    """The versions of a sample's rows in the counts by class, int32[T]; versions: as evidence has them.

    Without a flush only cached rows are of nobody knows which weights; an update in_place may come between
    two chunks of a prefill.
    """
    if config.rollout.fresh_prefixes or config.rollout.pause_generation_mode == "in_place":
        return versions
    cached = classes_of_tokens(sample) == RowClass.CACHED
    return np.where(cached, versions, row_versions(sample))


def step_expectation(
    preparation: Preparation, prepared: Prepared, recorded: Recorded
) -> StepExpectation:
    """The totals that a rollout's evidence must match, from the bytes that the engine sent."""
    config, hf, passes = preparation.config, preparation.hf, preparation.passes
    topologies, rollout_id = preparation.topologies, prepared.rollout_id
    samples, steps = prepared.samples, prepared.steps
    bare = [scored.sample for scored in samples]
    num_rows = sum(sample.num_tokens for sample in bare)
    fresh = config.rollout.fresh_prefixes
    versions = [row_versions(s, fresh_prefixes=fresh) for s in bare]
    current = [current_versions(s, fresh_prefixes=fresh) for s in bare]
    unknown = [rows_never_computed(sample) for sample in bare]
    num_ranks = topologies[0].dp_size
    # a layer is called once per microbatch on each rank of its stage
    num_calls = sum(prepared.counts) * (len(topologies) // topologies[0].pp_size)
    streams: dict[StreamName, StreamExpectation] = {}
    by_rank: list[dict[StreamName, dict[int, int]]] = [{} for _ in range(num_ranks)]

    def expect(
        stream: StreamName,
        found: Recorded,
        versions: Sequence[np.ndarray],
        rows_without_choice: int | None,
        recomputed: Collection[int] = (),
    ) -> None:
        layers, whole = found.layers.tolist(), found.whole_rows.sum(axis=0)
        streams[stream] = StreamExpectation(
            fingerprints=dict(zip(layers, found.fingerprints.sum(axis=0).tolist())),
            rows_replayed=dict(zip(layers, whole.tolist())),
            rows_filled=dict(zip(layers, (num_rows - whole).tolist())),
            rows_without_choice=rows_without_choice,
            rows_current=_rows_current(rollout_id, versions, config, passes),
            calls=expected_calls(layers, num_calls, passes, recomputed),
        )
        for fingerprints, local in zip(by_rank, found.fingerprints, strict=True):
            fingerprints[stream] = dict(zip(layers, local.tolist()))

    recomputed = recomputed_moe_layers(config.parallel, config.model, hf)
    expect(ROUTES, recorded, current, sum(unknown), set(recomputed))
    if config.rollout.replays_sampling_mask:
        sampled = [v[:-1][s.mask_counts[1:] > 0] for v, s in zip(current, bare)]
        expect(SAMPLING_MASK, recorded_sampling_mask(samples, steps, num_ranks), sampled, None)
    if (topk := replayed_index_topk(config, hf)) is not None:
        chosen = recorded_indexer(samples, steps, num_ranks, hf.num_hidden_layers)
        # rows 0..K-1, of which every token is chosen, and rows that were never computed
        implied = sum(min(topk, s.num_tokens - n) + n for s, n in zip(bare, unknown))
        again = layers_with_recomputed("core_attn", config.parallel, config.model, hf)
        expect(INDEXER, chosen, current, implied, set(again))
    return StepExpectation(
        step=rollout_id,
        streams=streams,
        rows_by_class=count_rows(
            bare, [_counted_versions(s, known, config) for s, known in zip(bare, versions)]
        ),
        places=[
            Place([t.rank for t in topologies if t.dp_rank == data_rank], fingerprints)
            for data_rank, fingerprints in enumerate(by_rank)
        ],
    )
