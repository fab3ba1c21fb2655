"""Every kind of lie that can be told of one answer, and the word by which the reader refuses it."""

import json
import warnings

import numpy as np
import pytest

from r3train.engine.answer import Sent, read_answer
from r3train.engine.backend import EngineError, Request, SamplingParams
from r3train.engine.score import GivenText, read_scores, rechecked
from r3train.engine.sglang_http import parse_answer
from r3train.types import RouteShape
from tests.fakes.lies import changed, lies
from tests.wire_encoding import encode_routed_experts

SHAPE = RouteShape(2, 2, 8)
IDS = [9, 11, 4]
ROUTES = np.arange(5 * 2 * 2).reshape(5, 2, 2).astype(np.uint8) % 8
STOP, TOKENIZERS_STOP = 1, 2
META = {
    "id": "r.",
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "cached_tokens": 2,
    "num_retractions": 0,
    "finish_reason": {"type": "length", "length": 3},
    "output_token_logprobs": [[-0.5, 9, None], [-1.5, 11, None], [0, 4, None]],
    "weight_versions": [{"version": "4", "start": 0, "end": 3}],
    "routed_experts": encode_routed_experts(ROUTES),
}
KEPT = {
    "output_token_sampling_mask": [[9, 3], [11, 2], [4]],
    "output_token_sampling_logprobs": [-0.25, -1.0, 0.0],
}


def request(**changes):
    sampling = SamplingParams(
        3,
        stop_token_ids=(STOP,),
        may_stop_at=(TOKENIZERS_STOP,),
        ignore_eos=changes.pop("ignore_eos", False),
        mask_vocab=changes.pop("mask_vocab", None),
    )
    base = dict(max_new_tokens=3, sampling=sampling, weight_version=4, exact_version=False)
    return Request(12, 3, "p", np.array([5, 6, 7], np.int32), **base | changes)


def sent(**changes):
    return Sent(**{"rid": "r.", "vocab_size": 12, "newest_version": 5} | changes)


def read(meta=(), ids=None, *, how=request(), of=sent(), **top):
    """Read an answer with these changes of meta_info, as JSON brings it."""
    answer = {"output_ids": IDS if ids is None else ids, "meta_info": {**META, **dict(meta)}, **top}
    answer = parse_answer(json.dumps(answer).encode())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a cast that overflows
        return read_answer(answer, how, of, routes=SHAPE)


def log_probs(*values, ids=IDS):
    return {"output_token_logprobs": [[value, i, None] for value, i in zip(values, ids)]}


def drafts(right, made, verifications):
    return {
        "spec_num_correct_drafts": right,
        "spec_num_proposed_drafts": made,
        "spec_verify_ct": verifications,
    }


def ended(reason, ids):
    """An answer of these ids that ended so; all else fits."""
    count = len(ids)
    return {
        "completion_tokens": count,
        "finish_reason": reason,
        **log_probs(*[-1.0] * count, ids=ids),
        "weight_versions": [{"version": "4", "start": 0, "end": count}],
        "routed_experts": encode_routed_experts(ROUTES[: 2 + count]),
    }


def test_the_truth_is_read():
    segment = read()
    assert segment.token_ids.tolist() == IDS and segment.token_ids.dtype == np.int32
    assert segment.log_probs.tolist() == [-0.5, -1.5, 0] and segment.log_probs.dtype == np.float32
    np.testing.assert_array_equal(segment.rows, ROUTES)
    assert read(log_probs(-0.0, 1e-5, -9e3)).log_probs[0] == 0, "rounding is left as it is"


LONG = {"type": "length", "length": 3}
LIES = {
    "an id past the vocabulary": ({}, [9, 12, 4], "output token 1 is 12, expected 0 to 11"),
    "another request's id": ({"id": "s."}, None, "is to the request 's.', expected 'r.'"),
    "a log-prob of another id": (log_probs(-1, -1, -1, ids=[9, 10, 4]), None, "is of token 10"),
    "a log-prob above 0": (
        log_probs(-1, 0.01, -1),
        None,
        r"logprobs\[1\]\[0\] is 0.01, expected `float` <= 0.0001",
    ),
    "a log-prob past float32": (
        log_probs(-1, -1e300, -1),
        None,
        r"logprobs\[1\]\[0\] is -1e\+300, expected `float` >=",
    ),
    "a log-prob far below": (
        log_probs(-1, -10001, -1),
        None,
        r"logprobs\[1\]\[0\] is -10001, expected `float` >= -10000",
    ),
    "more cached than sent": ({"cached_tokens": 4}, None, "cached_tokens is 4, expected 0 to 2"),
    "more drafts right than made": (
        drafts(4, 3, 1),
        None,
        "spec_num_correct_drafts is 4, expected 0 to 3",
    ),
    "drafts of no verification": (
        drafts(1, 3, 0),
        None,
        "spec_verify_ct is 0, expected `int` >= 1",
    ),
    "a part of the drafts": (
        {"spec_verify_ct": 1},
        None,
        "spec_num_proposed_drafts is None, expected 0 to",
    ),
    "too short": (
        ended({"type": "length", "length": 2}, [9, 11]),
        [9, 11],
        "finish_reason is 'length' after 2 tokens, 3 were asked for",
    ),
    "another length": ({"finish_reason": {"type": "length", "length": 4}}, None, "3 tokens were"),
    "no length": ({"finish_reason": {"type": "length"}}, None, "3 tokens were sent"),
    "an abort of tokens": ({"finish_reason": {"type": "abort"}}, None, "nobody here aborted it"),
    "an empty abort": (ended({"type": "abort"}, []), [], "nobody here aborted it"),
    "a queue's abort": (
        {"prompt_tokens": None, "finish_reason": {"type": "abort"}},
        [],
        "prompt_tokens is None, exp",
    ),
    "a stop without a token": (
        {"finish_reason": {"type": "stop", "matched": 4}},
        None,
        r"last token 4, expected one of the stop tokens \[1, 2\]",
    ),
    "a stop at another token": (
        ended({"type": "stop", "matched": 11}, [9, 11, STOP]),
        [9, 11, STOP],
        "and the last token 1, expected one of the stop tokens",
    ),
    "a stop at a text": (
        ended({"type": "stop", "matched": "NaN happened"}, [9, 11, STOP]),
        [9, 11, STOP],
        "NaN happened.* and the last token 1",
    ),
    "tokens after a stop": (
        ended({"type": "stop", "matched": STOP}, [STOP, 11, STOP]),
        [STOP, 11, STOP],
        "output token 0 is the stop token 1, and 2 follow, with the finish reason 'stop'",
    ),
    "a length after a stop": (
        ended(LONG, [9, STOP, 4]),
        [9, STOP, 4],
        "output token 1 is the stop token 1, and 1 follow, with the finish reason 'length'",
    ),
    "a length at a stop": (
        ended(LONG, [9, 11, STOP]),
        [9, 11, STOP],
        "output token 2 is the stop token 1, and 0 follow",
    ),
    "a version of the future": (
        {"weight_versions": [{"version": "6", "start": 0, "end": 3}]},
        None,
        "a token of weight version 6, the servers were given 5 at most",
    ),
    "a version of the past": (
        {"weight_versions": [{"version": "3", "start": 0, "end": 3}]},
        None,
        "expected rising ones from 4 on",
    ),
    "a version in other digits": (
        {"weight_versions": [{"version": "٤", "start": 0, "end": 3}]},
        None,
        "expected a number",
    ),
    "a version's end below its start": (
        {
            "weight_versions": [
                {"version": "4", "start": 0, "end": 2},
                {"version": "4", "start": 2, "end": 1},
                {"version": "4", "start": 1, "end": 3},
            ]
        },
        None,
        "do not cover 3 output tokens",
    ),
}


def believed(value, read):
    """Lies that ``read`` takes for the truth; every other must be refused with the sample's name."""
    found = []
    for spot, lie in lies(value):
        try:
            read(changed(value, spot, lie))
        except ValueError as error:
            assert str(error).startswith("sample 12 (prompt 'p'): "), (spot, lie, error)
        else:
            found.append((spot, lie))
    return found


def may_be(spot, lie):
    """The text of a token, which nobody reads, a log-prob of -1 or 0, and drafts' verifications without drafts."""
    field, place = spot[1], spot[-1]
    if field == "spec_verify_ct":
        return lie in (1 << 70, KeyError)
    if field == "output_token_sampling_logprobs":
        return lie == -1
    of_a_token = field in ("output_token_logprobs", "input_token_logprobs") and len(spot) == 4
    return of_a_token and (place == 2 or place == 0 and lie in (-1, 0.0))


def test_nonsense_in_any_place_is_refused_with_the_sample():
    """Wrong types, numbers as texts or fractions, what is past its bounds, and what is missing."""
    answer = {"output_ids": IDS, "meta_info": META | KEPT | drafts(1, 3, 1)}
    how = request(mask_vocab=12)

    def read_whole(answer):
        return read_answer(parse_answer(json.dumps(answer).encode()), how, sent(), routes=SHAPE)

    assert not [lie for lie in believed(answer, read_whole) if not may_be(*lie)]


@pytest.mark.parametrize("kind", LIES)
def test_a_lie_is_refused_by_name(kind):
    meta, ids, message = LIES[kind]
    with pytest.raises(ValueError, match=rf"^sample 12 \(prompt 'p'\): .*{message}"):
        read(meta, ids)


def spoiled(change, routes=ROUTES):
    rows = routes.astype(np.int32)
    change(rows)
    return {"routed_experts": encode_routed_experts(rows.astype("<i4"))}


def all_of(value):
    return lambda rows: rows.fill(value)


def first_slot(value):
    return lambda rows: rows.__setitem__((0, 0, 0), value)


@pytest.mark.parametrize(
    "change, message",
    [
        (all_of(-1), "row 0, layer 0, slot 0 holds expert -1, expected 0 to 7"),
        (first_slot(-1), "row 0, layer 0, slot 0 holds expert -1, expected 0 to 7"),
        (first_slot(8), "row 0, layer 0, slot 0 holds expert 8, expected 0 to 7"),
        (all_of(0), "names expert 0 twice"),
    ],
)
def test_a_row_without_its_experts_is_refused(change, message):
    with pytest.raises(ValueError, match=f"^sample 12 .*{message}"):
        read(spoiled(change))


@pytest.mark.parametrize("rows", [ROUTES[:-1], ROUTES[1:], np.concatenate([ROUTES, ROUTES])])
def test_rows_too_few_or_too_many_are_refused(rows):
    with pytest.raises(ValueError, match="^sample 12 .*routed_experts holds .* bytes, expected 80"):
        read({"routed_experts": encode_routed_experts(rows)})


@pytest.mark.parametrize("value", [0.01, -1e30])
def test_log_probs_among_sampling_mask_are_held_to_the_same(value):
    how = request(mask_vocab=12)
    good = {**META, **KEPT}
    assert read(good, how=how).log_probs.tolist() == [-0.25, -1, 0]
    lie = {"output_token_sampling_logprobs": [-0.25, value, 0.0]}
    with pytest.raises(ValueError, match=r"^sample 12 .*output_token_sampling_logprobs\[1\] is"):
        read({**good, **lie}, how=how)


def test_the_ends_that_a_server_may_choose():
    for last in (STOP, TOKENIZERS_STOP):
        stop = ended({"type": "stop", "matched": last}, [9, last])
        assert read(stop, [9, last]).finish_reason == "stop"
    # a token at which only a server with its tokenizer stops
    assert read(ended(LONG, [9, 2, 4]), [9, 2, 4]).finish_reason == "length"
    # aborted while a stop token was on its way
    late = ended({"type": "abort"}, [9, STOP])
    assert read(late, [9, STOP], of=sent(may_abort=True)).finish_reason == "abort"
    with pytest.raises(ValueError, match="output token 0 is the stop token 1, and 1 follow"):
        read(ended({"type": "abort"}, [STOP, 9]), [STOP, 9], of=sent(may_abort=True))
    with pytest.raises(EngineError, match="503"):
        read({"finish_reason": {"type": "abort", "status_code": 503}}, of=sent(may_abort=True))


def test_with_ignore_eos_stop_tokens_are_tokens_like_others():
    how = request(ignore_eos=True)
    assert read(ended(LONG, [STOP, 2, STOP]), [STOP, 2, STOP], how=how).finish_reason == "length"
    for last in (STOP, TOKENIZERS_STOP):
        stop = ended({"type": "stop", "matched": last}, [9, last])
        with pytest.raises(ValueError, match=rf"last token {last}, expected one of .* \[\]"):
            read(stop, [9, last], how=how)


@pytest.mark.parametrize(
    "ends_at, fits", [(range(5, 6), True), (range(6, 7), False), (None, False)]
)
def test_a_server_ends_a_text_where_its_room_ends_and_nowhere_else(ends_at, fits):
    short = ended({"type": "length", "length": 2}, [9, 11])
    if fits:
        assert read(short, [9, 11], of=sent(ends_at=ends_at)).finish_reason == "length"
        return
    with pytest.raises(ValueError, match="'length' after 2 tokens, 3 were asked for"):
        read(short, [9, 11], of=sent(ends_at=ends_at))


def test_without_a_known_vocabulary_an_id_still_fits_32_bits():
    assert read(of=sent(vocab_size=None)).token_ids.tolist() == IDS
    with pytest.raises(ValueError, match=r"output_ids\[1\] is 2147483648"):
        read(ids=[9, 1 << 31, 4], of=sent(vocab_size=None))


AGAIN = {
    "id": "r.",
    "prompt_tokens": 3,
    "completion_tokens": 0,
    "cached_tokens": 0,
    "weight_version": "4",
    "finish_reason": {"type": "length", "length": 0},
    "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-1.5, 7, None]],
    "routed_experts": encode_routed_experts(ROUTES[:2]),
}


def again(log_prob, *ids):
    """Entries of a text of three tokens, the second with this log-prob."""
    return [[None, 5, None], [log_prob, ids[0], None], [-1.5, ids[1], None]]


def read_again_of(answer, names_adapter=False):
    how = request(max_new_tokens=0)
    text = GivenText(how.token_ids, how.name, rows_from=how.rows_start)
    scores = read_scores(answer, text, "r.", routes=SHAPE)
    return rechecked(scores, how, "whole", 0, names_adapter=names_adapter)


def read_again(names_adapter=False, **changes):
    return read_again_of({"meta_info": AGAIN | changes}, names_adapter)


def test_a_text_that_was_computed_again_is_read():
    again = read_again()
    assert again.log_probs.tolist() == [-0.5, -1.5] and again.held_version == 4
    # a server of adapters says the version of its base
    assert read_again(names_adapter=True, weight_version="0").held_version == 4
    with pytest.raises(ValueError, match="base has weight version 4, expected 0"):
        read_again(names_adapter=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cached_tokens": 1}, "cached_tokens is 1, expected 0"),
        ({"completion_tokens": 1}, "completion_tokens is 1, expected 0"),
        ({"weight_version": "default"}, "weight version 'default', expected a number"),
        ({"finish_reason": {"type": "abort"}}, "aborted"),
        ({"input_token_logprobs": again(0.7, 6, 7)}, r"logprobs\[1\]\[0\] is 0.7"),
        ({"input_token_logprobs": again(-1e30, 6, 7)}, r"logprobs\[1\]\[0\] is -1e"),
        ({"input_token_logprobs": again(-1, 7, 6)}, "is of token 7, token 1 is 6"),
        ({"input_token_logprobs": again(None, 6, 7)}, "log-prob 1 is None, expected a number"),
        ({"routed_experts": spoiled(all_of(-1), ROUTES[:2])["routed_experts"]}, "expert -1"),
    ],
)
def test_a_recheck_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"^sample 12 .*{message}"):
        read_again(**changes)


def test_nonsense_in_any_place_of_a_recheck_is_refused_with_the_sample():
    assert not [lie for lie in believed({"meta_info": AGAIN}, read_again_of) if not may_be(*lie)]


@pytest.mark.parametrize(
    "text", ["NaN}}", "Infinity}}", "-Infinity}}", "1}} and more", "1", "<html>"]
)
def test_what_is_no_json_is_no_answer(text):
    with pytest.raises(ValueError):
        parse_answer(json.dumps({"meta_info": {"x": 1}}).replace("1}}", text).encode())
    with pytest.raises(ValueError):
        parse_answer(b"")
