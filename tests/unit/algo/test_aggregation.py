"""Weights of samples in the loss, compared with the means that they stand for."""

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.algo.rollouts import sample

from r3train.algo.trajectories import loss_weights
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.layout.microbatch import Streams
from r3train.loop.prepare import build_microbatches, weigh
from r3train.types import RankTopology, TrainSample

LENGTHS, LONGEST = [1, 4, 0, 3], 10


def test_the_weights_of_an_optimizer_step_count_its_loss_tokens():
    samples = [TrainSample(sample(i, 1 + n), 0.0, np.zeros(1 + n)) for i, n in enumerate([1, 3])]
    algorithm = AlgorithmSection(loss_aggregation="seq-mean-token-mean")
    assert [s.loss_weight for s in weigh(samples, algorithm, LONGEST)] == [2.0, 4 / 6]
    assert [s.loss_weight for s in weigh(samples, AlgorithmSection(), LONGEST)] == [1.0, 1.0]


def test_samples_without_a_loss_token_have_finite_weights():
    algorithm = AlgorithmSection(loss_aggregation="seq-mean-token-mean")
    assert loss_weights(np.zeros(3, np.int64), algorithm, LONGEST).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        ("token-mean", [1.0] * 4),
        # episodes of 2 + 4, 3 and 3 tokens: each has a third of the loss of 12
        ("seq-mean-token-mean", [12 / (3 * 6)] * 2 + [12 / (3 * 3)] * 2),
        ("seq-mean-token-sum", [12 / 3] * 4),
        ("constant", [12 / (3 * LONGEST)] * 4),
    ],
)
def test_an_episode_of_many_samples_weighs_as_much_as_one_of_one(aggregation, expected):
    """The turns of an episode (--environment-samples turn) share its weight."""
    lengths, episodes = [2, 4, 3, 3], [0, 0, 2, 3]
    turns = [
        sample(i, 1 + n, trajectory_id=episode, is_last_step=i > 0)
        for i, (n, episode) in enumerate(zip(lengths, episodes))
    ]
    samples = [TrainSample(s, 0.0, np.zeros(s.num_tokens, np.float32)) for s in turns]
    weighed = weigh(samples, AlgorithmSection(loss_aggregation=aggregation), LONGEST)
    assert [s.loss_weight for s in weighed] == pytest.approx(expected)


@pytest.mark.parametrize(
    "aggregation, shares",
    [("seq-mean-token-mean", [0.5, 0.5]), ("seq-mean-token-sum", [1.0, 2.0])],
)
def test_a_first_token_that_is_trained_has_no_row_and_does_not_count(aggregation, shares):
    """A conversation may begin with the assistant's words; no row predicts the first of them."""
    whole = [sample(0, 3), sample(1, 5)]
    whole[0] = replace(whole[0], loss_mask=np.ones(3, bool), prompt_len=0)
    samples = [TrainSample(s, 0.0, np.zeros(s.num_tokens, np.float32)) for s in whole]
    algorithm = AlgorithmSection(loss_aggregation=aggregation)
    weighed = weigh(samples, algorithm, LONGEST)
    [[batch]] = build_microbatches([[weighed]], RankTopology(), Streams())
    sample_of = np.repeat([0, 1], batch.layout.lengths)
    rows = np.bincount(sample_of[batch.loss_mask])
    assert rows.tolist() == [2, 4]
    # of losses of 1 everywhere, the trainer's sum over rows divided by their number
    assert (batch.loss_weights * rows / rows.sum()).tolist() == pytest.approx(shares)
