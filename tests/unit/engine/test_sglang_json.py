"""Answers parsed with their routes lifted out equal answers parsed whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3train.engine.sglang_http import parse_answer

# JSON's own marks, escapes, and characters of 2, 3 and 4 bytes
TEXT = st.text('aZ0 {}[]:,"\\/\n\x00ü\u2028𝄞', max_size=20) | st.sampled_from(
    ['"routed_experts":"AAAA"', '\\"routed_experts":"']
)
BASE64 = st.text("AZaz09+/=", max_size=40)


def whole(answer):
    """The same answer with its payloads as text."""
    meta = {
        name: str(value, "ascii") if isinstance(value, memoryview) else value
        for name, value in answer["meta_info"].items()
    }
    return {**answer, "meta_info": meta}


@given(TEXT, BASE64, BASE64, TEXT, st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_an_answer_is_what_json_says_with_its_routes_left_in_place(
    text, payload, chosen, key, chosen_first, separators
):
    payloads = [("routed_experts", payload), ("indexer_topk", chosen)]
    first, second = reversed(payloads) if chosen_first else payloads
    meta = {
        "id": text,
        first[0]: first[1],
        key: 1,
        "tokens": [[-0.5, 3, text]],
        second[0]: second[1],
    }
    for fields in (meta, {k: v for k, v in meta.items() if k != "indexer_topk"}):
        raw = json.dumps({"text": text, "meta_info": fields}, separators=separators).encode()
        assert whole(parse_answer(raw)) == json.loads(raw)


def test_the_payloads_are_not_copied_by_the_parser():
    raw = b'{"meta_info": {"routed_experts": "AAAA", "n": 1}}'
    payload = parse_answer(raw)["meta_info"]["routed_experts"]
    assert payload.obj is raw and payload.tobytes() == b"AAAA"
    raw = b'{"meta_info":{"indexer_topk":"b8:BB==","routed_experts":"AAAA","n":1}}'
    meta = parse_answer(raw)["meta_info"]
    assert meta["routed_experts"].obj is raw and meta["n"] == 1
    assert meta["indexer_topk"].tobytes() == b"b8:BB=="


@pytest.mark.parametrize(
    "raw",
    [
        b'{"routed_experts":"AAAA"}',
        b'{"meta_info":{"a":{"routed_experts":"AAAA"}}}',
        b'{"meta_info":{"routed_experts":"AA\\nA"}}',
        b'[{"meta_info":{"routed_experts":"AAAA"}},{"meta_info":{"routed_experts":"AAAB"}}]',
        b'{"meta_info":{"routed_experts":null}}',
        b'{"indexer_topk":"AAAA","meta_info":{}}',
        b'{"indexer_topk":"AAAA","meta_info":{"routed_experts":"AAAA"}}',
        b'{"meta_info":{"indexer_topk":null}}',
        b'{"meta_info":{}}',
    ],
)
def test_an_answer_of_another_form_is_parsed_as_any_json_is(raw):
    assert parse_answer(raw) == json.loads(raw)


@pytest.mark.parametrize("raw", [b'{"meta_info":{"routed_experts":"AAA', b"", b"no json"])
def test_what_is_cut_short_is_no_json(raw):
    with pytest.raises(ValueError):
        parse_answer(raw)
