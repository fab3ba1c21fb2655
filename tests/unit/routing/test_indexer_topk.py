"""Choices of an indexer on the wire: both forms hold the same, and every way a payload can be wrong."""

from __future__ import annotations

import numpy as np
import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3train.routing.indexer_topk import (
    decode,
    num_rows,
    num_words,
    shortened,
    to_bits,
    widened,
)


def chosen(num_tokens: int, num_layers: int, topk: int, seed: int = 0) -> np.ndarray:
    """All rows as SGLang sends them, int32[T - 1, L, K]; what was chosen in no order."""
    random = np.random.default_rng(seed)
    ids = np.full((max(0, num_tokens - 1), num_layers, topk), -1, dtype="<i4")
    for row, layer in np.ndindex(*ids.shape[:2]):
        row_tokens = random.permutation(row + 1)[:topk]
        ids[row, layer, : len(row_tokens)] = row_tokens
    return ids


def text_of(ids: np.ndarray) -> str:
    return pybase64.b64encode(np.ascontiguousarray(ids).tobytes()).decode()


def blocks(ids: np.ndarray, size: int) -> list[np.ndarray]:
    return [ids[first : first + size] for first in range(0, len(ids), size)]


@given(
    st.integers(1, 150),
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(0, 160),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_both_forms_decode_to_the_bits_of_the_rows_that_are_not_implied(
    num_tokens, num_layers, topk, start, size, seed
):
    ids = chosen(num_tokens, num_layers, topk, seed)
    first = max(start, topk)
    arguments = dict(
        num_tokens=num_tokens, num_layers=num_layers, topk=topk, start=start, sample="7"
    )
    short = shortened(blocks(ids[first:], size), first, num_tokens)
    bits = decode(short, **arguments)
    assert short.startswith("b8:")
    rows = num_rows(num_tokens, topk, start)
    assert bits.shape == (rows, num_layers, num_words(num_tokens)) and bits.dtype == np.uint64
    assert rows == len(ids[first:])
    for row, layer in np.ndindex(*bits.shape[:2]):
        word, bit = np.divmod(np.sort(ids[first + row, layer]), 64)
        wanted = np.zeros(bits.shape[2], dtype=np.uint64)
        np.bitwise_or.at(wanted, word, np.uint64(1) << bit.astype(np.uint64))
        assert bits[row, layer].tolist() == wanted.tolist()
    for payload in (text_of(ids), text_of(ids).encode(), memoryview(short.encode())):
        np.testing.assert_array_equal(decode(payload, **arguments), bits)


def test_many_rows_are_packed_as_few_are():
    ids = chosen(700, 3, 40)[40:]
    bits = to_bits(ids, 20)  # several blocks
    for row in (0, 200, len(ids) - 1):
        np.testing.assert_array_equal(bits[row], to_bits(ids[row : row + 1], 20)[0])


@pytest.mark.parametrize("tokens, words", [(0, 0), (1, 0), (2, 1), (65, 1), (66, 2), (129, 2)])
def test_a_word_holds_64_input_tokens(tokens, words):
    assert num_words(tokens) == words


def test_rows_are_widened_by_words_without_a_bit():
    bits = to_bits(chosen(20, 2, 3)[3:], 1)
    wide = widened(bits, 4)
    assert wide.shape == (16, 2, 4) and not wide[:, :, 1:].any()
    np.testing.assert_array_equal(wide[:, :, :1], bits)
    assert widened(bits, 1) is bits


def wrong(row: int, layer: int, slot: int, token: int) -> np.ndarray:
    """All rows of 9 tokens, 2 layers, 3 of them chosen; rows 3 to 7 are not implied."""
    ids = chosen(9, 2, 3)
    ids[row, layer, slot] = token
    return ids


TWICE = chosen(9, 2, 3)
TWICE[5, 1, 2] = TWICE[5, 1, 0]
OF_NINE = dict(num_tokens=9, num_layers=2, topk=3, sample="7 (prompt 'p')")


@pytest.mark.parametrize(
    "ids, row, layer",
    [
        (wrong(3, 0, 1, -1), 3, 0),
        (wrong(7, 1, 2, 8), 7, 1),
        (wrong(4, 1, 0, 5), 4, 1),
        (wrong(4, 1, 0, 2**31 - 1), 4, 1),
        (TWICE, 5, 1),
        (np.zeros((8, 2, 3), "<i4"), 3, 0),  # of a server that recorded nothing
    ],
)
def test_a_choice_that_no_indexer_makes_names_the_sample_row_and_layer(ids, row, layer):
    message = (
        rf"^sample 7 \(prompt 'p'\): indexer_topk row {row}, layer {layer} does not choose 3"
        rf" different tokens of 0 to {row}$"
    )
    with pytest.raises(ValueError, match=message):
        decode(text_of(ids), **OF_NINE)
    assert shortened([ids[3:]], 3, 9) is None
    assert decode(text_of(ids), start=8, **OF_NINE).shape == (0, 2, 1), "nobody asked for it"


@pytest.mark.parametrize("word", [0b0011, 0b11110, 0b100011, 1 << 63 | 0b11])
def test_bits_that_no_indexer_sets_name_the_sample_row_and_layer(word):
    bits = to_bits(chosen(9, 2, 3)[3:], 1)
    bits[1, 1, 0] = word
    message = (
        r"^sample 7 .*: indexer_topk row 4, layer 1 does not choose 3 different tokens of 0 to 4$"
    )
    with pytest.raises(ValueError, match=message):
        decode("b8:" + text_of(bits), **OF_NINE)


def test_implied_rows_may_hold_anything():
    np.testing.assert_array_equal(
        decode(text_of(wrong(1, 0, 0, 99)), **OF_NINE), decode(text_of(chosen(9, 2, 3)), **OF_NINE)
    )


@pytest.mark.parametrize(
    "payload, words",
    [
        (text_of(chosen(8, 2, 3)), r"holds 168 bytes, expected 192 \(8 rows x 2 layers x 3 x 4"),
        ("", r"holds 0 bytes, expected 192 \(8 rows x 2 layers x 3 x 4 bytes\)"),
        ("b8:", r"holds 0 bytes, expected 80 \(5 rows x 2 layers x 1 x 8 bytes\)"),
        ("b8:" + text_of(np.zeros(11)), r"holds 88 bytes, expected 80 \(5 rows x 2 layers x 1 x 8"),
        ("u1:AAAA", "is not base64: "),
        ("b8:AA", "is not base64: "),
        ("AA\\nA", "is not base64: "),
    ],
)
def test_a_payload_of_another_size_or_form_names_the_sample(payload, words):
    for encoded in (payload, payload.encode(), memoryview(payload.encode())):
        with pytest.raises(ValueError, match=rf"^sample 7 \(prompt 'p'\): indexer_topk {words}"):
            decode(encoded, **OF_NINE)


def test_where_all_tokens_are_chosen_a_server_of_ours_sends_no_row():
    assert shortened([], 3, 4) == "b8:"
    few = OF_NINE | {"num_tokens": 4}
    assert decode("b8:", **few).shape == (0, 2, 1)
    assert decode(text_of(chosen(4, 2, 3)), **few).shape == (0, 2, 1)
