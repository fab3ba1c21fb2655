"""The worked examples at the head of files, which are true."""

from __future__ import annotations

import doctest

import pytest

from r3train import ids, types
from r3train.generation import stitch
from r3train.layout import microbatch
from r3train.loop import weight_update


def test_the_worked_example_of_the_records_is_true():
    outcome = doctest.testmod(types)
    assert outcome.attempted > 10
    assert outcome.failed == 0


def test_the_examples_of_the_number_spaces_are_true():
    outcome = doctest.testmod(ids)
    assert (outcome.attempted, outcome.failed) == (2, 0)


@pytest.mark.parametrize("module, examples", [(stitch, 5), (microbatch, 5), (weight_update, 1)])
def test_the_example_of_a_hard_function_is_true(module, examples):
    outcome = doctest.testmod(module)
    assert outcome.attempted >= examples and outcome.failed == 0


def test_no_sample_of_one_kind_has_the_id_of_another():
    evaluation = ids.evaluation_sample("a set", 0)
    assert ids.is_of_rollout(0) and ids.is_of_rollout((1 << 39) - 1)
    assert not ids.is_of_rollout(ids.NOISE_SAMPLES) and not ids.is_of_rollout(evaluation)
    assert ids.NOISE_SAMPLES + (1 << 39) < evaluation < evaluation + (1 << 32) < 1 << 63
    assert ids.evaluation_group(0) < ids.NO_GROUP < 0
