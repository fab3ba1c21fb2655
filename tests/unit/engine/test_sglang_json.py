"""Answers parsed with their routes lifted out equal answers parsed whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3train.engine.http import parse_answer

# JSON's own marks, escapes, and characters of 2, 3 and 4 bytes
TEXT = st.text('aZ0 {}[]:,"\\/\n\x00ü\u2028𝄞', max_size=20) | st.sampled_from(
    ['"routed_experts":"AAAA"', '\\"routed_experts":"']
)
BASE64 = st.text("AZaz09+/=", max_size=40)


def whole(answer):
    """The same answer with the payload as text."""
    payload = answer["meta_info"]["routed_experts"]
    return {**answer, "meta_info": {**answer["meta_info"], "routed_experts": str(payload, "ascii")}}


@given(TEXT, BASE64, TEXT, st.sampled_from([(",", ":"), (", ", ": ")]))
def test_an_answer_is_what_json_says_with_its_routes_left_in_place(text, payload, key, separators):
    answer = {
        "text": text,
        "meta_info": {"id": text, "routed_experts": payload, key: 1, "tokens": [[-0.5, 3, text]]},
    }
    raw = json.dumps(answer, separators=separators).encode()
    got = parse_answer(raw)
    if isinstance(got["meta_info"]["routed_experts"], memoryview):
        got = whole(got)
    assert got == json.loads(raw)


def test_the_payload_is_not_copied():
    raw = b'{"meta_info": {"routed_experts": "AAAA", "n": 1}}'
    payload = parse_answer(raw)["meta_info"]["routed_experts"]
    assert payload.obj is raw and payload.tobytes() == b"AAAA"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"routed_experts":"AAAA"}',
        b'{"meta_info":{"a":{"routed_experts":"AAAA"}}}',
        b'{"meta_info":{"routed_experts":"AA\\nA"}}',
        b'[{"meta_info":{"routed_experts":"AAAA"}},{"meta_info":{"routed_experts":"AAAB"}}]',
        b'{"meta_info":{"routed_experts":null}}',
        b'{"meta_info":{}}',
    ],
)
def test_an_answer_of_another_form_is_parsed_as_any_json_is(raw):
    assert parse_answer(raw) == json.loads(raw)


@pytest.mark.parametrize("raw", [b'{"meta_info":{"routed_experts":"AAA', b"", b"no json"])
def test_what_is_cut_short_is_no_json(raw):
    with pytest.raises(ValueError):
        parse_answer(raw)
