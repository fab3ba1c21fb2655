"""The words of a weight table."""

from __future__ import annotations

import doctest

import pytest

from r3train.families import weights
from r3train.families.weights import DiskTensor, ModelWeights, Table, Weight, number


def test_the_examples_of_the_vocabulary_hold():
    result = doctest.testmod(weights)
    assert result.attempted > 3 and not result.failed


def test_a_size_that_config_json_lacks_is_not_guessed():
    sizes = {"heads": 4, "rope": 3}
    assert number("heads*rope+2", sizes) == 14
    with pytest.raises(KeyError, match="head"):
        number("heads*head+rope", sizes)


@pytest.mark.parametrize("parts", [("gate",), ("gate", "gate"), ("gate", "down")])
def test_a_row_whose_tensors_do_not_hold_its_parts_once_each_is_refused(parts):
    tensors = tuple(DiskTensor(f"mlp.{part}.weight", (part,)) for part in parts)
    with pytest.raises(AssertionError, match="on disk"):
        Weight("mlp.linear_fc1.weight", tensors, {"gate": "mlp", "up": "mlp"}, ("hidden",))


def test_a_row_for_layers_that_no_model_has_is_refused():
    with pytest.raises(AssertionError, match=r"mlp.router.weight: layers \{'sparce'\}, there are"):
        Weight("mlp.router.weight", (), {}, layers=("sparce",))


def test_a_size_that_is_not_there_names_its_row():
    def missing(size: str) -> int:
        raise ValueError(f"config.json: key {size} is missing")

    class Sizes(dict):
        __missing__ = staticmethod(missing)

    row = Weight("mlp.router.weight", (DiskTensor("mlp.gate.weight"),), {"rows": "expertz"})
    with pytest.raises(ValueError, match="key expertz is missing, a size of mlp.router.weight"):
        ModelWeights(Table((row,)), Sizes(vocab=8, hidden=4), (frozenset(),), tied=False).shapes()
