"""Weights of samples in the loss, held against the means that they stand for."""

import numpy as np
import pytest
from tests.unit.algo.rollouts import sample

from r3train.algo.aggregation import loss_weights
from r3train.config.algorithm import AlgorithmSection
from r3train.loop.prepare import weigh
from r3train.types import TrainSample

LENGTHS, LONGEST = [1, 4, 0, 3], 10
LOSSES = [np.array(rows) for rows in ([2.0], [1.0, 3.0, -1.0, 5.0], [], [4.0, 0.5, 7.0])]
TRAINED = [rows for rows in LOSSES if len(rows)]


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        ("token-mean", np.concatenate(LOSSES).mean()),
        ("seq-mean-token-mean", np.mean([rows.mean() for rows in TRAINED])),
        ("seq-mean-token-sum", np.mean([rows.sum() for rows in TRAINED])),
        ("constant", np.mean([rows.sum() / LONGEST for rows in TRAINED])),
    ],
)
def test_the_weighted_mean_over_tokens_is_the_named_mean(aggregation, expected):
    algorithm = AlgorithmSection(loss_aggregation=aggregation)
    weights = loss_weights(np.array(LENGTHS), algorithm, LONGEST)
    total = sum(weight * rows.sum() for weight, rows in zip(weights, LOSSES))
    assert total / sum(LENGTHS) == pytest.approx(expected)


def test_the_weights_of_an_optimizer_step_count_its_loss_tokens():
    samples = [TrainSample(sample(i, 1 + n), 0.0, np.zeros(1 + n)) for i, n in enumerate([1, 3])]
    algorithm = AlgorithmSection(loss_aggregation="seq-mean-token-mean")
    assert [s.loss_weight for s in weigh(samples, algorithm, LONGEST)] == [2.0, 4 / 6]
    assert [s.loss_weight for s in weigh(samples, AlgorithmSection(), LONGEST)] == [1.0, 1.0]


def test_samples_without_a_loss_token_have_finite_weights():
    algorithm = AlgorithmSection(loss_aggregation="seq-mean-token-mean")
    assert loss_weights(np.zeros(3, np.int64), algorithm, LONGEST).tolist() == [0, 0, 0]
