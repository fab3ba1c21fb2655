"""JSON of a server as a type: each refusal says the place, the value got and the value expected."""

import doctest
from typing import Annotated

import msgspec
import pytest

from r3train.engine import typed as typed_module
from r3train.engine.typed import typed


class Part(msgspec.Struct):
    checksums: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    pair: tuple[int, float] | None = None
    digits: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,9}\Z")] = "0"


class Whole(msgspec.Struct):
    parts: list[Part]


def test_the_example_holds():
    assert doctest.testmod(typed_module) == (0, 1)


def test_fields_that_nobody_asked_for_are_left():
    whole = typed({"parts": [{"checksums": {"w": "a"}, "more": 1}], "more": 2}, Whole, "it")
    assert whole.parts[0].checksums == {"w": "a"} and whole.parts[0].pair is None


def part(**changes):
    return {"parts": [{"checksums": {"w": "a"}}, {"checksums": {"w": "a"}, **changes}]}


@pytest.mark.parametrize(
    "value, words",
    [
        (None, "the answer is None, expected `object`, got `null`"),
        ("no gateway", "the answer is 'no gateway', expected `object`, got `str`"),
        ({}, "the answer is {}, object missing required field `parts`"),
        ({"parts": [7]}, "parts[0] is 7, expected `object`, got `int`"),
        (part(checksums={}), "parts[1].checksums is {}, expected `object` of length >= 1"),
        (part(checksums={"w": 1}), "parts[1].checksums[...] is {'w': 1}, expected `str`"),
        (part(pair=[1, True]), "parts[1].pair[1] is True, expected `float`, got `bool`"),
        (part(pair=[1.0, 2]), "parts[1].pair[0] is 1.0, expected `int`, got `float`"),
        (part(pair=[1]), "parts[1].pair is [1], expected `array` of length 2, got 1"),
        (part(pair=[0, 10**400]), "parts[1].pair[1] is 1000"),
        (part(digits="4\n"), "parts[1].digits is '4\\n', expected `str` matching regex"),
        (part(digits="٤"), "parts[1].digits is '٤', expected `str` matching regex"),
        (part(digits=None), "parts[1].digits is None, expected `str`, got `null`"),
        (part(digits="\ud800"), "parts[1].digits is '\\ud800', expected"),
    ],
)
def test_what_is_not_of_the_type_is_refused_by_its_place(value, words):
    with pytest.raises(ValueError) as error:
        typed(value, Whole, "engine x")
    assert str(error.value).startswith("engine x: ") and words in str(error.value)
