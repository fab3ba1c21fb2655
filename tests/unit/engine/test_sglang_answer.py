"""A good answer of /generate, and everything that can be wrong with one."""

import copy

import numpy as np
import pytest

from r3train.engine.backend import EngineError, Request, SamplingParams
from r3train.engine.answer import Sent, read_answer
from r3train.layout.microbatch import build_microbatch, Streams
from r3train.generation import stitch
from r3train.routing.indexer_topk import shortened
from r3train.types import Prompt, RouteShape, TrainSample
from tests.fakes.lies import changed
from tests.wire_encoding import encode_routed_experts, text_of

PROMPT = Prompt("p", 0, "", np.array([5, 6, 7], dtype=np.int32), None)
ROUTES_SHAPE = RouteShape(2, 2, 8)
ROUTES = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(np.uint8) % 8
GOOD = {
    "output_ids": [9, 11],
    "meta_info": {
        "id": "r.",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "num_retractions": 0,
        "cached_tokens": 2,
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 9, None], [-1.5, 11, None]],
        "weight_versions": [
            {"version": "4", "start": 0, "end": 1},
            {"version": "5", "start": 1, "end": 2},
        ],
        "routed_experts": encode_routed_experts(ROUTES),
    },
}


def read(answer, **more):
    """The sample that an answer makes."""
    routes, before = more.pop("routes", RouteShape(2, 2, 8)), more.pop("resume_from", None)
    before = before or stitch.begin(PROMPT, sample_id=12, group_id=3)
    sent = Sent("r.", vocab_size=12, may_abort=more.pop("may_abort", False))
    request = stitch.next_request(before, SamplingParams(8), limit=more.pop("limit", 2), **more)
    return stitch.extend(before, read_answer(answer, request, sent, routes=routes))


def test_a_good_answer_becomes_a_sample_whose_arrays_cover_prompt_and_response():
    sample = read(GOOD)
    assert (sample.sample_id, sample.group_id, sample.finish_reason) == (12, 3, "length")
    assert sample.token_ids.tolist() == [5, 6, 7, 9, 11] and sample.token_ids.dtype == np.int32
    assert (sample.prompt_len, sample.response_len) == (3, 2)
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.rollout_log_probs.tolist() == [0, 0, 0, -0.5, -1.5]
    assert sample.rollout_log_probs.dtype == np.float32
    assert sample.weight_versions.tolist() == [-1, -1, -1, 4, 5]
    np.testing.assert_array_equal(stitch.finished(sample).routed_experts, ROUTES)


def test_without_routes_asked_for_none_are_kept():
    assert read(GOOD, routes=None).routed_experts is None


CHOSEN = np.array([[[0, -1]] * 2, [[0, 1]] * 2, [[2, 0], [1, 0]], [[3, 1], [2, 3]]], "<i4")


def read_choices(answer=GOOD, index_topk=2, start=0, payload=None, routes=ROUTES_SHAPE):
    answer = copy.deepcopy(answer)
    answer["meta_info"] |= {"routed_experts": encode_routed_experts(ROUTES[start:])}
    if payload is not None:
        answer["meta_info"]["indexer_topk"] = payload
    request = Request(12, 3, "p", PROMPT.token_ids, 2, SamplingParams(2), rows_start=start)
    sent = Sent("r.", vocab_size=12, may_abort=True)
    return read_answer(answer, request, sent, routes=routes, index_topk=index_topk).indexer_topk


def test_what_indexers_chose_comes_as_bits_of_the_rows_that_are_not_implied():
    rows = [[[0b101], [0b011]], [[0b1010], [0b1100]]]
    whole = text_of(CHOSEN)
    for payload in (whole, shortened([CHOSEN[2:]], 2, 5), memoryview(whole.encode())):
        chosen = read_choices(payload=payload)
        assert chosen.tolist() == rows and chosen.dtype == np.uint64
    for payload in (whole, shortened([CHOSEN[3:]], 3, 5)):
        assert read_choices(payload=payload, start=3).tolist() == rows[1:]
    assert read_choices(payload=whole, index_topk=None) is None
    assert read_choices(payload=whole, routes=None) is None, "it wants no routes"
    assert read_choices(payload="b8:", index_topk=4).shape == (0, 2, 1), "all are chosen"


def test_an_answer_without_a_token_brings_no_choice():
    assert read_choices(aborted()).shape == (0, 2, 0)
    queued = {"output_ids": [], "meta_info": {"id": "r.", "finish_reason": {"type": "abort"}}}
    assert read_choices(queued).dtype == np.uint64


@pytest.mark.parametrize(
    "payload, message",
    [
        (
            None,
            "the answer carries no indexer_topk; is the server started with --enable-return-indexer-topk,"
            " and is no router in front of it",
        ),
        (7, "the answer carries no indexer_topk"),
        ("b8:AAAA", "indexer_topk holds 3 bytes, expected 32 "),
        (encode_routed_experts(ROUTES), "indexer_topk row 2, layer 1 does not choose 2 different"),
    ],
)
def test_choices_that_are_missing_or_cannot_be_name_the_sample(payload, message):
    with pytest.raises(ValueError, match=rf"^sample 12 \(prompt 'p'\): {message}"):
        read_choices(payload=payload)


SPAN = {"version": "4", "start": 0, "end": 2}


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("output_ids",), [9], "completion_tokens is 2, expected 1"),
        (("meta_info", "prompt_tokens"), 4, "prompt_tokens is 4, expected 3"),
        (("meta_info", "output_token_logprobs"), [[-0.5, 9, None]], "1 log-probs"),
        (("meta_info", "output_token_logprobs", 1, 0), float("nan"), r"\[1\]\[0\] is nan"),
        (("meta_info", "weight_versions"), [SPAN | {"end": 1}], "end at 1, expected 2"),
        (("meta_info", "weight_versions"), [SPAN | {"end": 3}], "do not cover 2"),
        (("meta_info", "weight_versions"), [SPAN | {"start": 1}], "do not cover 2"),
        # the last token is always computed: its row gives the first log-prob
        (("meta_info", "cached_tokens"), 3, "cached_tokens is 3, expected 0 to 2"),
    ],
)
def test_an_answer_that_contradicts_itself_names_the_sample(path, value, message):
    with pytest.raises(ValueError, match=rf"sample 12 \(prompt 'p'\): .*{message}"):
        read(changed(GOOD, path, value))


def test_more_tokens_than_asked_for_are_refused():
    with pytest.raises(ValueError, match="2 output tokens, expected at most 1"):
        read(GOOD, limit=1)


def test_another_weight_version_than_the_one_published_is_refused():
    with pytest.raises(ValueError, match=r"weight versions \[4, 5\], expected 5 only"):
        read(GOOD, weight_version=5)


def aborted(**reason):
    answer = copy.deepcopy(GOOD)
    answer["output_ids"] = []
    answer["meta_info"] |= {
        "completion_tokens": 0,
        "finish_reason": {"type": "abort"} | reason,
        "output_token_logprobs": [],
        "weight_versions": [{"version": "4", "start": 0, "end": 0}],
        "routed_experts": encode_routed_experts(ROUTES[:2]),
    }
    return answer


def test_an_aborted_request_may_be_empty_but_no_other():
    sample = read(aborted(message="Abort in waiting queue"), may_abort=True)
    assert (sample.finish_reason, sample.response_len) == ("abort", 0)
    assert sample.routed_experts.shape == (0, 2, 2), "it was never computed"
    assert (stitch.finished(sample).routed_experts == np.full((2, 2, 2), 255)).all()
    answer = aborted()
    answer["meta_info"]["finish_reason"] = {"type": "stop"}
    with pytest.raises(ValueError, match="no output token"):
        read(answer)


def test_an_abort_in_the_engines_queue_comes_without_counts_and_adds_nothing():
    """The whole meta_info of SGLang 0.5.23's ``_handle_abort_req``, under load."""
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"id": "r.", "finish_reason": reason, "weight_version": "5", "completion_tokens": 0}
    sample = read({"text": "", "output_ids": [], "meta_info": meta}, may_abort=True)
    assert (sample.finish_reason, sample.response_len) == ("abort", 0)
    assert sample.routed_experts.shape == (0, 2, 2)
    meta["finish_reason"] = {"type": "length"}
    with pytest.raises(ValueError, match="prompt_tokens is None, expected 3"):
        read({"text": "", "output_ids": [], "meta_info": meta})


def test_a_retracted_request_aborted_in_the_queue_adds_nothing_of_what_it_had_generated():
    """SGLang's ``_handle_abort_req`` sends its tokens and log-probs, without counts and routes."""
    answer = copy.deepcopy(GOOD)
    for key in ("prompt_tokens", "routed_experts"):
        del answer["meta_info"][key]
    answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
    sample = read(answer, may_abort=True)
    assert (sample.finish_reason, sample.response_len) == ("abort", 0)


def test_an_abort_for_an_error_of_the_engine_is_an_engine_error():
    with pytest.raises(EngineError, match=r"sample 12 .*aborted it \(500\): out of memory"):
        read(aborted(status_code=500, message="out of memory"))


def test_versions_may_rise_in_mid_answer_where_an_update_may_land_there():
    assert read(GOOD, weight_version=4, exact_version=False).weight_versions[-1] == 5
    with pytest.raises(ValueError, match=r"\[4, 5\], expected rising ones from 5 on"):
        read(GOOD, weight_version=5, exact_version=False)
    falling = copy.deepcopy(GOOD)
    falling["meta_info"]["weight_versions"][1]["version"] = "3"
    with pytest.raises(ValueError, match="expected rising ones from 3 on"):
        read(falling, weight_version=3, exact_version=False)


def test_the_rest_of_a_sample_is_added_behind_its_own_rows():
    first = read(GOOD)
    rest = copy.deepcopy(GOOD)
    rest["meta_info"]["prompt_tokens"] = 5
    rest["meta_info"]["routed_experts"] = encode_routed_experts(ROUTES[2:])
    whole = read(rest, resume_from=first)
    assert whole.token_ids.tolist() == [5, 6, 7, 9, 11, 9, 11] and whole.prompt_len == 3
    np.testing.assert_array_equal(
        stitch.finished(whole).routed_experts, np.concatenate([ROUTES, ROUTES[2:]])
    )
    assert whole.weight_versions.tolist() == [-1, -1, -1, 4, 5, 4, 5]
    whole_again = copy.deepcopy(rest)
    whole_again["meta_info"]["routed_experts"] = encode_routed_experts(
        np.zeros((6, 2, 2), np.uint8)
    )
    with pytest.raises(ValueError, match="sample 12 .*expected 32 "):
        read(whole_again, resume_from=first)  # a prefix sent twice


KEPT = copy.deepcopy(GOOD)
KEPT["meta_info"] |= {
    "output_token_sampling_mask": [[9, 3], [11]],
    "output_token_sampling_logprobs": [-0.25, 0.0],
}


def read_kept(answer):
    before = stitch.begin(PROMPT, sample_id=12, group_id=3)
    request = stitch.next_request(before, SamplingParams(2, top_k=20, mask_vocab=12))
    sent = Sent("r.", vocab_size=12, may_abort=True)
    return stitch.extend(before, read_answer(answer, request, sent, routes=RouteShape(2, 2, 8)))


def test_sampling_mask_come_with_the_log_probs_among_them():
    sample = read_kept(KEPT)
    assert sample.mask_counts.tolist() == [0, 0, 0, 2, 1] and sample.mask_counts.dtype == np.int32
    assert sample.mask_ids.tolist() == [9, 3, 11] and sample.mask_ids.dtype == np.int32
    assert sample.rollout_log_probs.tolist() == [0, 0, 0, -0.25, 0]


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("mask", [[9, 3]], "output_token_sampling_mask has 1 rows, expected 2"),
        ("mask", [[9, 3], []], "output token 1 is 11, which is none of the 0 tokens"),
        (
            "mask",
            [[3, 4], [11]],
            "output token 0 is 9, which is none of the 2 tokens that sampling",
        ),
        ("mask", [[9, 12], [11]], "sampling mask: token 1 is 12, expected 0 to 11"),
        ("mask", [[9, 9], [11]], "names a token twice in a row"),
        ("mask", [[9, 3, 9], [11]], "names a token twice in a row"),
        ("logprobs", None, "output_token_sampling_logprobs has no rows, expected 2"),
        ("logprobs", [-0.25], "output_token_sampling_logprobs has 1 rows, expected 2"),
        ("logprobs", [-0.25, float("nan")], r"logprobs\[1\] is nan"),
        (
            "logprobs",
            [-0.75, 0.0],
            "log-prob 0 within the sampling mask is -0.75, expected at least -0.5",
        ),
        ("logprobs", [-0.25, -0.125], "log-prob 1 is -0.125 where one token was kept"),
    ],
)
def test_sampling_mask_that_cannot_be_are_refused(name, value, message):
    answer = copy.deepcopy(KEPT)
    answer["meta_info"][f"output_token_sampling_{name}"] = value
    with pytest.raises(ValueError, match=f"^sample 12 .*{message}"):
        read_kept(answer)


def test_a_request_that_was_aborted_in_its_queue_has_no_sampling_mask_and_is_trained():
    answer = {"output_ids": [], "meta_info": {"id": "r.", "finish_reason": {"type": "abort"}}}
    sample = read_kept(answer)
    assert sample.mask_counts.tolist() == [0, 0, 0] and len(sample.mask_ids) == 0
    # a group may be over with it: it has no token in the loss, and a place in its microbatch
    train = TrainSample(stitch.finished(sample), 0.0, np.zeros(3, np.float32))
    batch = build_microbatch(
        0, [train], Streams(RouteShape(2, 2, 8), sampling_mask=True), cp_size=1, tp_size=1
    )
    assert batch.mask_counts.tolist() == [0, 0, 0] and len(batch.mask_ids) == 0
    # what follows begins as if nothing had been asked
    again = stitch.next_request(sample, SamplingParams(2, top_k=20, mask_vocab=12))
    sent = Sent("r.", vocab_size=12)
    done = stitch.extend(sample, read_answer(KEPT, again, sent, routes=RouteShape(2, 2, 8)))
    assert done.mask_counts.tolist() == [0, 0, 0, 2, 1]
