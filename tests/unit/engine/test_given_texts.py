"""A good answer about a text that was given to a server, and everything that can be wrong with one."""

import copy

import numpy as np
import pytest

from r3train.engine.answer import read_given
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


def read(answer, start=2):
    return read_given(answer, TEXT, start, "r.", routes=RouteShape(2, 2, 8))


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
        ({"cached_tokens": 5}, r"cached_tokens is 5, expected 0\.\.4"),
        ({"cached_tokens": None}, "cached_tokens is None"),
        ({"cached_tokens": True}, "cached_tokens is True"),
        ({"input_token_logprobs": [[None, 7, None], [-0.5, 9, None]]}, "2 log-probs for 3 tokens"),
        ({"input_token_logprobs": [[None, 7, 0], [-0.5, 8, 0], [-1, 11, 0]]}, "is of token 8"),
        ({"input_token_logprobs": [[None, 7, 0], [0.5, 9, 0], [-1, 11, 0]]}, "log-prob"),
        ({"input_token_logprobs": 7}, "log-probs"),
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
