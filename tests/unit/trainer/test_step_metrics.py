"""Metrics of a step from the reports of its microbatches."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from r3train.algo.corrections import NUM_GAP_BINS
from r3train.algo.losses.policy_losses import get_policy_loss
from r3train.algo.policy_loss import metric_names
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.host_group import join_ranks, leave_ranks
from r3train.trainer.megatron.forward_step import reduce_metrics
from r3train.types import RankTopology


@pytest.fixture(autouse=True)
def one_rank():
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


def test_a_maximum_of_a_users_loss_may_be_below_0():
    sums, maxima = metric_names(get_policy_loss("ppo"), AlgorithmSection())
    reports = [
        {
            "sums": dict.fromkeys(sums, torch.ones(())),
            "maxima": dict.fromkeys(maxima, torch.zeros(())) | {"users": torch.tensor(largest)},
            "gaps": torch.zeros(NUM_GAP_BINS),
        }
        for largest in (-3.0, -2.0)
    ]
    names = sums, (*maxima, "users")
    found = reduce_metrics(reports, RankTopology(), names, torch.device("cpu"))
    assert (found["users"], found["num_loss_tokens"]) == (-2.0, 2.0)
