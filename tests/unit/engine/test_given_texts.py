"""A good answer about a text that was given to a server, and everything that can be wrong with one."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from r3train.engine.score import GivenText, read_scores
from r3train.types import RouteShape
from tests.wire_encoding import encode_routed_experts

TEXT = np.array([5, 6, 7, 9, 11], dtype=np.int32)
ROUTES = np.stack([np.full((4, 2), 3), np.full((4, 2), 5)], axis=-1).astype(np.uint8)
GOOD = {
    "output_ids": [],
    "meta_info": {
        "id": "r.",
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "cached_tokens": 2,
        "finish_reason": {"type": "length", "length": 0},
        # SGLang says 0 for the last id of its vocabulary
        "input_token_logprobs": [[None, 7, None], [-0.5, 9, None], [-1.5, 0, None]],
        "routed_experts": encode_routed_experts(ROUTES),
    },
}


SHAPE = RouteShape(2, 2, 8)
ASKED = GivenText(TEXT, "of a canary", log_probs_from=2, rows_from=0)
# the same text, after which two tokens were drawn
ASKED_ON = replace(ASKED, new_tokens=2)
ROUTES_ON = np.concatenate([ROUTES, ROUTES[:2]])
DRAWN = {
    "completion_tokens": 2,
    "finish_reason": {"type": "length", "length": 2},
    "output_token_logprobs": [[-0.25, 3, None], [-2.5, 0, None]],
    "routed_experts": encode_routed_experts(ROUTES_ON),
}
GOOD_ON = {"output_ids": [3, 0], "meta_info": GOOD["meta_info"] | DRAWN}


def read(answer, text=ASKED):
    return read_scores(answer, text, "r.", routes=SHAPE)


def test_drawn_tokens_have_log_probs_and_rows_like_the_given_ones():
    scores = read(GOOD_ON, ASKED_ON)
    assert scores.sampled.tolist() == [3, 0] and scores.sampled.dtype == np.int32
    assert scores.log_probs.tolist() == [0, -0.5, -1.5, -0.25, -2.5]
    np.testing.assert_array_equal(scores.rows, ROUTES_ON)
    later = read_scores(GOOD_ON, replace(ASKED_ON, rows_from=None), "r.")
    assert later.rows.shape == (6, 0, 0)


def test_the_log_prob_that_sglang_may_say_of_a_token_that_was_not_asked_for_is_left():
    answer = copy.deepcopy(GOOD)
    answer["meta_info"]["output_token_logprobs"] = [[-3.5, 8, None]]
    scores = read(answer)
    assert scores.log_probs.tolist() == [0, -0.5, -1.5] and len(scores.sampled) == 0


def test_a_request_asks_for_what_is_read():
    body = replace(ASKED_ON, rows_from=3, cache_key="mine", adapter="a").body("r.")
    params = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    assert body["sampling_params"] == params and body["input_ids"] == TEXT.tolist()
    assert (body["rid"], body["logprob_start_len"], body["routed_experts_start_len"]) == (
        "r.",
        2,
        3,
    )
    assert (body["extra_key"], body["lora_path"]) == ("mine", "a")
    plain = GivenText(TEXT, "t").body("r.")
    assert plain["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert not plain.keys() & {"extra_key", "lora_path", "routed_experts_start_len"}
    assert (
        ASKED_ON.most_bytes(SHAPE) > ASKED.most_bytes(SHAPE) > GivenText(TEXT, "t").most_bytes(None)
    )


@pytest.mark.parametrize(
    "output_ids, changes, words",
    [
        ([3], {}, "1 output_ids, expected 2"),
        ([3, 0, 1], {"completion_tokens": 3}, "completion_tokens is 3, expected 2"),
        ([3, 0], {"completion_tokens": 1}, "completion_tokens is 1, expected 2"),
        ([3, True], {}, r"output_ids\[1\] is True, expected `int`"),
        (None, {}, "output_ids is None, expected `array`"),
        ([3, -1], {}, r"output_ids\[1\] is -1"),
        ([3, 0], {"finish_reason": {"type": "stop", "matched": 0}}, "'stop'.*, expected length 2"),
        (
            [3, 0],
            {"finish_reason": {"type": "length", "length": 3}},
            "length=3.*, expected length 2",
        ),
        ([3, 0], {"finish_reason": {"type": "abort"}}, "aborted"),
        ([3, 0], {"output_token_logprobs": []}, "0 log-probs for 2 tokens"),
        (
            [3, 0],
            {"output_token_logprobs": [[-1, 3, None], [-1, 4, None]]},
            "log-prob 1 is of token 4",
        ),
        ([3, 0], {"output_token_logprobs": [[-1, 3, None], [0.5, 0, None]]}, r"\[1\]\[0\] is 0.5"),
        ([3, 0], {"routed_experts": encode_routed_experts(ROUTES)}, "64 bytes, expected 96"),
    ],
)
def test_drawn_tokens_that_do_not_fit_are_refused(output_ids, changes, words):
    answer = copy.deepcopy(GOOD_ON) | {"output_ids": output_ids}
    answer["meta_info"].update(changes)
    with pytest.raises(ValueError, match=f"^sample of a canary.*{words}"):
        read(answer, ASKED_ON)


def test_log_probs_begin_at_the_asked_token_and_rows_at_the_first():
    reading = read(GOOD)
    assert reading.log_probs.tolist() == [0, -0.5, -1.5] and reading.cached_tokens == 2
    np.testing.assert_array_equal(reading.rows, ROUTES)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"id": "another."}, "expected 'r.'"),
        ({"finish_reason": {"type": "abort"}}, "aborted"),
        ({"prompt_tokens": 4}, "prompt_tokens is 4, expected 5"),
        ({"completion_tokens": 1}, "completion_tokens is 1, expected 0"),
        ({"cached_tokens": 5}, "cached_tokens is 5, expected 0 to 4"),
        ({"cached_tokens": None}, "cached_tokens is None"),
        ({"cached_tokens": True}, "cached_tokens is True"),
        ({"input_token_logprobs": [[None, 7, None], [-0.5, 9, None]]}, "2 log-probs for 3 tokens"),
        ({"input_token_logprobs": [[None, 7, 0], [-0.5, 8, 0], [-1, 11, 0]]}, "is of token 8"),
        ({"input_token_logprobs": [[None, 7, 0], [0.5, 9, 0], [-1, 11, 0]]}, r"\[1\]\[0\] is 0.5"),
        ({"input_token_logprobs": 7}, "input_token_logprobs is 7, expected `array`"),
        ({"routed_experts": None}, "carries no routed_experts"),
        ({"routed_experts": encode_routed_experts(ROUTES[:3])}, "of a canary"),
    ],
)
def test_anything_else_is_refused_by_name(changes, words):
    answer = copy.deepcopy(GOOD)
    answer["meta_info"].update(changes)
    with pytest.raises(ValueError, match=words):
        read(answer)


@pytest.mark.parametrize("answer", [None, {}, {"meta_info": 3}, [GOOD]])
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises(ValueError, match="sample of a canary"):
        read(answer)
