"""Passes and optimizer steps of a rollout, and what --ci-test compares at the first of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from r3train.loop.train_rollout import train_rollout
from r3train.types import RankTopology
from tests.unit.config.test_config import config

KL_OF_A_REFERENCE = dict(kl_loss_coef=0.1)


def actor(**report: float) -> SimpleNamespace:
    """An actor without a model, whose every step reports these numbers."""
    report = {"skipped_steps": 0, "low_ess_steps": 0, **report}
    return SimpleNamespace(
        topology=RankTopology(rank=1),
        maxima=frozenset(),
        loss_errors=[],
        collect_drift=dict,
        compute_log_probs=lambda *_args, **_how: {},
        train_step=lambda *_args, **_how: report,
    )


def train(rollout_id: int, report: dict[str, float], passes: Any = None, **settings):
    trained = actor(**report)
    if passes is not None:
        trained.compute_log_probs = passes
    taken = SimpleNamespace(steps=[[]], prepared=None)
    return train_rollout(rollout_id, taken, config(**settings), trained, [])


@pytest.mark.parametrize("name", ["kl", "ppo_kl"])
def test_with_ci_test_another_reference_than_the_actor_ends_the_run_at_the_first_step(name):
    ci_test = dict(ci_test=True, **KL_OF_A_REFERENCE)
    with pytest.raises(AssertionError, match=f"{name} is 0.1"):
        train(0, {name: 0.1}, **ci_test)
    assert train(0, {name: 0.0}, **ci_test).first_step_done
    assert train(1, {name: 0.1}, **ci_test).first_step_done, "the actor has moved"
    assert train(0, {name: 0.1}, **KL_OF_A_REFERENCE).first_step_done, "without --ci-test"


def test_a_reference_with_routers_of_its_own_may_differ_at_the_first_step():
    native = dict(ci_test=True, ref_routing="native", **KL_OF_A_REFERENCE)
    assert train(0, {"kl": 0.1}, **native).first_step_done


def test_every_log_prob_pass_leaves_out_the_rows_that_the_train_step_does():
    asked: list[bool] = []

    def passes(*_: Any, loss_rows_only: bool = False, **_how: Any) -> dict:
        asked.append(loss_rows_only)
        return {}

    train(0, {}, passes, global_batch_size=1, **KL_OF_A_REFERENCE)
    assert asked == [True, True]
