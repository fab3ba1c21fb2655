"""The class of every route row: how the server came to it, through answers that are joined, cut and forked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from r3train.engine.backend import Segment
from r3train.generation import stitch
from r3train.generation.conversation import one_turn
from r3train.layout.provenance import classes_of_tokens, count_rows
from r3train.types import Prompt, RolloutSample, RouteShape, RowClass

SHAPE = RouteShape(num_layers=2, topk=3, num_experts=8)
LETTERS = "dpacf"  # in the order of RowClass


def begun(length: int = 4) -> RolloutSample:
    prompt = Prompt("p", 0, "", np.arange(length, dtype=np.int32), None)
    return stitch.begin(prompt, sample_id=7, group_id=1)


def answered(
    sample: RolloutSample,
    count: int,
    version: int | list[int] = 0,
    cached: int = 0,
    retracted: int = 0,
) -> RolloutSample:
    """version: of all tokens, or of each."""
    first = stitch.rows_known(sample)
    rows = sample.num_tokens + count - 1 - first if count else 0
    segment = Segment(
        token_ids=np.full(count, 9, np.int32),
        log_probs=np.full(count, -1, np.float32),
        weight_versions=np.full(count, version, np.int32),
        rows=np.zeros((rows, *SHAPE.row), SHAPE.dtype),
        rows_start=first,
        finish_reason="abort",
        num_retractions=retracted,
        cached_tokens=cached,
    )
    return stitch.extend(sample, segment)


def letters(sample: RolloutSample) -> str:
    return "".join(LETTERS[row_class] for row_class in sample.row_classes)


def test_a_prompt_is_cached_up_to_a_token_and_prefilled_from_there_and_an_answer_is_decoded():
    assert letters(answered(begun(), 3)) == "ppppddf"
    assert letters(answered(begun(), 3, cached=3)) == "cccpddf"
    assert letters(answered(begun(), 1, cached=2)) == "ccppf"


def test_a_request_that_went_on_under_newer_weights_prefills_again_and_known_rows_stay():
    resumed = answered(answered(begun(), 3), 2, version=1, cached=5)
    # row 6 is that of the token at which the first answer was aborted
    assert letters(resumed) == "ppppdd" + "a" + "d" + "f"
    # the same weights: a longer answer in two requests is no update
    assert letters(answered(answered(begun(), 3), 2, version=0, cached=6)) == "ppppdd" + "p" + "df"


def test_an_answer_that_an_update_froze_half_way_prefilled_under_the_weights_it_began_with():
    frozen = answered(answered(begun(), 3), 2, version=[0, 1], cached=6)
    assert letters(frozen) == "ppppdd" + "p" + "df"


def test_an_answer_that_was_retracted_does_not_say_which_rows_were_computed_again():
    assert letters(answered(begun(), 3, cached=2, retracted=1)) == "aaaaaaf"
    # earlier answers of the sample stay
    assert letters(answered(answered(begun(), 2), 2, cached=2, retracted=1)) == "ppppd" + "aa" + "f"


def test_rows_of_an_environments_tokens_are_filled_until_an_answer_brings_them():
    turn = stitch.observe(answered(begun(), 2), [1, 2, 3])
    assert letters(turn) == "ppppd" + "f" + "fff"
    # of another sample of the group the server had the conversation up to token 7
    assert letters(answered(turn, 2, cached=7)) == "ppppd" + "cc" + "pp" + "d" + "f"
    assert letters(answered(turn, 2, version=3)) == "ppppd" + "aaaa" + "d" + "f"


def test_an_answer_without_a_token_leaves_every_row_filled():
    assert letters(answered(begun(), 0)) == "ffff"
    assert stitch.finished(begun()).row_classes is None


def test_a_cut_ends_before_the_row_of_its_last_token_and_a_fork_goes_on_from_there():
    whole = answered(stitch.observe(answered(begun(), 2), [1, 2]), 3, cached=6)
    assert letters(whole) == "ppppd" + "c" + "pp" + "dd" + "f"
    assert letters(stitch.cut(whole, 6)) == "ppppdf"
    forked = stitch.forked(whole, 5, [8, 8], sample_id=8)
    assert letters(forked) == "ppppfff"
    assert letters(answered(forked, 1)) == "pppp" + "ppp" + "f"
    first = one_turn(stitch.finished(whole), 0, 4, 6, 1, is_last=False)
    assert letters(first) == "ppppdf"


def test_every_row_is_counted_once_under_its_class_and_version():
    sample = answered(answered(begun(), 3), 2, version=1, cached=5)
    versions = np.array([0, 0, 0, 0, 0, 0, 1, 1, -1], np.int32)
    counts = count_rows([sample, sample], [versions, versions])
    assert counts == {
        "decoded": {0: 4, 1: 2},
        "prefilled": {0: 8},
        "prefilled_again": {1: 2},
        "cached": {},
        "filled": {-1: 2},
    }
    # of a file that an earlier version wrote nothing is known
    old = replace(sample, row_classes=None)
    assert count_rows([sample, old], [versions, versions]) is None
    assert set(classes_of_tokens(old).tolist()) == {255}


@pytest.mark.parametrize(
    "classes, message",
    [
        (np.zeros(3, np.uint8), r"classes of rows \(3,\) uint8, expected \(7,\) uint8"),
        (np.zeros(7, np.int32), r"classes of rows \(7,\) int32, expected \(7,\) uint8"),
        (np.full(7, 5, np.uint8), "row 0 has class 5, expected 0 to 4"),
    ],
)
def test_classes_that_are_none_are_refused_by_name(classes, message):
    sample = replace(answered(begun(), 3), row_classes=classes)
    with pytest.raises(ValueError, match=rf"sample 7 \(prompt p\).*{message}"):
        classes_of_tokens(sample)


def test_the_classes_are_those_of_the_enumeration():
    assert [c.label for c in RowClass] == [
        "decoded",
        "prefilled",
        "prefilled_again",
        "cached",
        "filled",
    ]
