"""The worked example at the head of types.py."""

from __future__ import annotations

import doctest

from r3train import types


def test_the_worked_example_of_the_records_is_true():
    outcome = doctest.testmod(types)
    assert outcome.attempted > 10
    assert outcome.failed == 0
