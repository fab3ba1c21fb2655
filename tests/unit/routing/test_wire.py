"""Routed experts on the wire: round trips, and every way a payload can be wrong."""

import re

import numpy as np
import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3train.routing.wire import decode_routed_experts, shortened
from r3train.types import RouteShape
from tests.wire_encoding import encode_routed_experts


def payload(ids) -> str:
    return pybase64.b64encode(np.asarray(ids, dtype="<i4").tobytes()).decode()


def different(rng, experts, shape):
    """Random rows of different experts."""
    return np.argsort(rng.random((*shape[:2], experts)), axis=-1)[..., : shape[2]]


def decode(text, tokens=3, layers=1, topk=2, experts=8, **more):
    return decode_routed_experts(text, RouteShape(layers, topk, experts), num_tokens=tokens, **more)


@given(st.integers(0, 6), st.integers(1, 3), st.integers(1, 4), st.integers(4, 700), st.data())
def test_what_is_encoded_decodes_to_itself(rows, layers, topk, experts, data):
    dtype = RouteShape(layers, topk, experts).dtype
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    routes = different(rng, experts, (rows, layers, topk)).astype(dtype)
    got = decode(encode_routed_experts(routes), rows + 1, layers, topk, experts, sample="7")
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, routes)


@pytest.mark.parametrize("experts, dtype", [(255, np.uint8), (256, np.uint16)])
def test_the_largest_id_survives_and_a_slot_that_was_not_recorded_is_refused(experts, dtype):
    got = decode(payload([1, experts - 1, 0, 1]), experts=experts, sample="7")
    assert got.dtype == dtype
    assert got.ravel().tolist() == [1, experts - 1, 0, 1]
    with pytest.raises(ValueError, match="row 1, layer 0, slot 0 holds expert -1, expected 0 to"):
        decode(payload([1, experts - 1, -1, 1]), experts=experts, sample="7")


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 1, 2, 3, 4, 5], []])
def test_a_wrong_byte_count_names_the_sample_got_and_expected(ids):
    message = f"sample 41: .* holds {4 * len(ids)} bytes, expected 16 .2 rows x 1 layers x 2"
    with pytest.raises(ValueError, match=message):
        decode(payload(ids), sample="41")


def test_a_count_that_matches_another_shape_is_still_wrong():
    """12 ids fit 3 rows x 2 layers x 2 and 2 x 3 x 2: only the expected one passes."""
    ids = payload(range(12))
    assert decode(ids, 4, 2, 2, 16, sample="7").shape == (3, 2, 2)
    with pytest.raises(ValueError, match="48 bytes, expected 32"):
        decode(ids, 3, 2, 2, 16, sample="7")


@pytest.mark.parametrize("bad", [8, 255, 256, -1, -2, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range_names_sample_row_layer_and_slot(bad):
    ids = np.zeros((2, 3, 2), dtype=np.int64)
    ids[1, 2, 1] = bad
    message = re.escape(f"sample 9: routed_experts row 1, layer 2, slot 1 holds expert {bad}")
    with pytest.raises(ValueError, match=message):
        decode(payload(ids), 3, 3, 2, 8, sample="9")


def test_a_payload_of_several_blocks_keeps_its_order_and_names_the_place_of_a_wrong_id():
    rng = np.random.default_rng(0)
    ids = different(rng, 300, (1500, 12, 8))  # 3 blocks, the last one ragged
    got = decode(payload(ids), 1501, 12, 8, 300, sample="7")
    np.testing.assert_array_equal(got, ids)
    ids[1400, 7, 3] = 300
    with pytest.raises(ValueError, match="sample 7: .* row 1400, layer 7, slot 3 holds expert 300"):
        decode(payload(ids), 1501, 12, 8, 300, sample="7")
    with pytest.raises(ValueError, match="holds 576000 bytes, expected 576384"):
        decode(payload(ids), 1502, 12, 8, 301, sample="7")


def test_a_late_start_sends_fewer_rows_and_counts_rows_from_the_sample():
    assert decode(payload([1, 2, 3, 4]), 5, start=2, sample="7").shape == (2, 1, 2)
    with pytest.raises(ValueError, match="row 3, layer 0, slot 1 holds expert 99"):
        decode(payload([1, 2, 3, 99]), 5, start=2, sample="7")
    with pytest.raises(ValueError, match="sample 7: .*start 5 lies past"):
        decode(payload([]), 5, start=5, sample="7")


@pytest.mark.parametrize("topk, experts", [(2, 8), (3, 300), (8, 128), (8, 129), (4, 255)])
def test_an_expert_twice_in_a_row_names_sample_row_and_layer(topk, experts):
    """In any two slots, and in a row of zeros only."""
    rng = np.random.default_rng(1)
    ids = different(rng, experts, (9000, 3, topk))
    ids[8000] = different(rng, experts, (1, 3, topk))
    shape = RouteShape(3, topk, experts)
    decode_routed_experts(payload(ids), shape, num_tokens=9006, start=5, sample="7")
    for slot in range(topk):
        for earlier_slot in range(slot):
            bad = ids.copy()
            bad[8000, 1, slot] = bad[8000, 1, earlier_slot]
            message = f"sample 7: routed_experts row 8005, layer 1 names expert {bad[8000, 1, slot]} twice"
            with pytest.raises(ValueError, match=message):
                decode_routed_experts(payload(bad), shape, num_tokens=9006, start=5, sample="7")
    ids[8000, 1] = 0
    with pytest.raises(
        ValueError, match=f"names expert 0 twice, expected {topk} different experts"
    ):
        decode_routed_experts(payload(ids), shape, num_tokens=9006, start=5, sample="7")


def test_dense_layers_have_rows_of_zeros_and_the_others_must_not():
    """The checkpoint says which layers are dense, not the row."""
    ids = different(np.random.default_rng(2), 8, (4, 4, 2))
    ids[:, [0, 2]] = 0
    shape = RouteShape(4, 2, 8, dense_layer_ids=(0, 2))
    got = decode_routed_experts(payload(ids), shape, num_tokens=5, sample="7")
    np.testing.assert_array_equal(got, ids)
    ids[3, 3] = 0
    with pytest.raises(ValueError, match="row 3, layer 3 names expert 0 twice"):
        decode_routed_experts(payload(ids), shape, num_tokens=5, sample="7")
    with pytest.raises(ValueError, match="row 0, layer 0 names expert 0 twice"):
        decode(payload(ids), 5, 4, 2, 8, sample="7")


def test_a_single_expert_of_a_token_cannot_repeat():
    assert decode(payload([0, 0, 0]), 4, 1, 1, 8, sample="7").ravel().tolist() == [0, 0, 0]


@pytest.mark.parametrize("text", ["!!!!", "AAA", "AAAA AAAA"])
def test_what_is_not_base64_is_said_to_be_so(text):
    with pytest.raises(ValueError, match="sample 7: routed_experts is not base64"):
        decode(text, sample="7")


def test_a_single_token_has_no_row():
    assert decode("", 1, sample="7").shape == (0, 1, 2)


@pytest.mark.parametrize(
    "experts, mark", [(8, "u1:"), (255, "u1:"), (256, "u1:"), (257, "u2:"), (4095, "u2:")]
)
def test_a_short_text_is_read_as_the_long_one_is(experts, mark):
    """Of several blocks, the last one ragged."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, experts, (20_011, 3, 1)).astype("<i4")
    ids[7, 1, 0] = experts - 1
    text = shortened(ids)
    assert text.startswith(mark) and len(text) < len(payload(ids)) / 2 + 9
    for sent in (text, text.encode(), memoryview(text.encode())):
        got = decode(sent, 20_012, 3, 1, experts, sample="7")
        assert got.dtype == RouteShape(3, 1, experts).dtype
        np.testing.assert_array_equal(got, ids)


def test_an_id_that_no_short_type_holds_leaves_the_text_long():
    assert shortened(np.array([[[-1]]], "<i4")) is None
    assert shortened(np.array([[[1 << 16]]], "<i4")) is None
    assert shortened(np.zeros((0, 2, 2), "<i4")) == "u1:"


def test_what_a_server_says_in_short_is_checked_as_strictly():
    short = shortened(np.array([[[1, 2]], [[3, 9]]], "<i4"))
    with pytest.raises(ValueError, match="sample 7: .* row 1, layer 0, slot 1 holds expert 9, exp"):
        decode(short, sample="7")
    with pytest.raises(ValueError, match=r"holds 4 bytes, expected 6 \(3 rows .* x 1 bytes\)"):
        decode(short, 4, experts=16, sample="7")
    with pytest.raises(ValueError, match="layer 0 names expert 3 twice"):
        decode(shortened(np.array([[[1, 2]], [[3, 3]]], "<i4")), sample="7")
    with pytest.raises(ValueError, match="is not base64"):
        decode("u4:" + short[3:], sample="7")
    # the bytes of an answer in int32 with a quarter of the rows
    with pytest.raises(ValueError, match="holds 8 bytes, expected 32"):
        decode(payload([1, 2]), 5, sample="7")
