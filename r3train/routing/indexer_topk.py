"""Tokens that an indexer chose (sparse attention), as bits: from SGLang's wire, packed, and as a fingerprint.

A sample of T tokens has a row for each input token, as it has routes.  A row at position p chooses K of the
p + 1 tokens up to its own.  Up to position K - 1 those are all tokens: such rows are implied, and nowhere kept.  The rows
after them are uint64[R, L, W]: R = max(0, T - 1 - K) rows, L layers, W = ceil((T - 1) / 64) words.  Token t is bit
t % 64 of word t // 64.

>>> rows = to_bits(np.array([[[3, 0]], [[1, 3]]]), 1)  # K = 2, rows 3 and 4 of one layer
>>> [[f"{word:05b}" for word in row[0].tolist()] for row in rows]
[['01001'], ['01010']]

SGLang sends int32 ids of all rows, [T - 1, L, K], filled with -1: 500 KB a token of DeepSeek-V3.2.  A server of ours sends
the bits of the rows that the request asked for, marked ``b8:``.

Source: SGLang 0.5.23, ``meta_info.indexer_topk`` of ``/generate``.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Iterable, Sequence

import numpy as np
import pybase64

_MARK = "b8:"
_WORD = 64
# bytes of one array while ids become bits, so that it stays in the core's own cache
_BLOCK_BYTES = 1 << 18


def num_words(num_tokens: int) -> int:
    """W of a sample of T tokens."""
    return -(-max(num_tokens - 1, 0) // _WORD)


def num_rows(num_tokens: int, topk: int, start: int = 0) -> int:
    """Return the rows of a sample from row ``start`` on that are not implied."""
    return max(0, num_tokens - 1 - max(start, topk))


def to_bits(ids: np.ndarray, width: int) -> np.ndarray:
    """Pack ids, int[R, L, K], below 64 * width, into uint64[R, L, width]; an id twice is one bit."""
    rows, layers, _ = ids.shape
    bits = np.zeros((rows, layers, width), dtype="<u8")
    step = max(1, _BLOCK_BYTES // max(1, layers * width * _WORD))
    for first in range(0, rows, step):
        block = ids[first : first + step]
        flags = np.zeros((*block.shape[:2], width * _WORD), dtype=np.uint8)
        # one axis of places: np.put_along_axis takes three times as long
        begins = np.arange(0, flags.size, width * _WORD).reshape(*block.shape[:2], 1)
        flags.reshape(-1)[(block + begins).reshape(-1)] = 1
        packed = np.packbits(flags, axis=2, bitorder="little")
        bits[first : first + step] = packed.view("<u8")
    return bits


def widened(bits: np.ndarray, width: int) -> np.ndarray:
    """Add words without a bit to rows [R, L, W], up to ``width``."""
    if bits.shape[2] == width:
        return bits
    return np.pad(bits, ((0, 0), (0, 0), (0, width - bits.shape[2])))


def joined(
    parts: Sequence[tuple[int, np.ndarray]], num_tokens: int, topk: int, num_layers: int
) -> np.ndarray:
    """Put parts of rows, each with the position of its first, at their places: all rows of a sample.

    Rows of no part have no bit.
    """
    width = num_words(num_tokens)
    if len(parts) == 1 and parts[0][1].shape == (
        num_rows(num_tokens, topk),
        num_layers,
        width,
    ):
        return parts[0][1]
    bits = np.zeros((num_rows(num_tokens, topk), num_layers, width), dtype="<u8")
    for first, part in parts:
        if len(part):
            bits[first - topk : first - topk + len(part), :, : part.shape[2]] = part
    return bits


def flaw(bits: np.ndarray | None, num_tokens: int, topk: int, num_layers: int) -> str | None:
    """Say what is wrong with the rows of a sample that was read from a file; None if nothing is.

    A row without any bit is one that no server computed.
    """
    rows = num_rows(num_tokens, topk)
    if bits is None:
        return None if not rows else f"has no indexer_topk, expected {rows} rows"
    expected = rows, num_layers, num_words(num_tokens)
    if bits.shape != expected or bits.dtype != np.uint64:
        return f"has indexer_topk {bits.shape} {bits.dtype}, expected {expected} uint64"
    wrong = _not_chosen(bits, topk, topk) & bits.any(axis=2)
    if wrong.any():
        row, layer = np.argwhere(wrong)[0].tolist()
        return f"has indexer_topk whose {_complaint(topk + row, layer, topk)}"
    return None


def _complaint(row: int, layer: int, topk: int) -> str:
    return f"row {row}, layer {layer} does not choose {topk} different tokens of 0 to {row}"


def shortened(blocks: Iterable[np.ndarray], start: int, num_tokens: int) -> str | None:
    """Write rows of a sample of T tokens, from row ``start`` on, as bits; blocks: ids int32[R, L, K], in order.

    None where a row does not name K different tokens up to its own.
    """
    parts = []
    for ids in blocks:
        bits = _checked_bits(ids, start, num_words(num_tokens))
        if bits is None:
            return None
        parts.append(bits)
        start += len(ids)
    return _MARK + (pybase64.b64encode_as_string(np.concatenate(parts)) if parts else "")


def decode(
    payload: str | bytes | memoryview,
    *,
    num_tokens: int,
    num_layers: int,
    topk: int,
    start: int = 0,
    sample: str,
) -> np.ndarray:
    """Decode the rows of an answer from row max(start, topk) on: uint64[R, L, W].

    Raises ValueError naming ``sample``: bytes got and expected, or the row and layer of a choice of other than
    ``topk`` different tokens up to the row's own.
    """
    first = max(start, topk)
    rows, width = num_rows(num_tokens, topk, start), num_words(num_tokens)
    mark = payload[: len(_MARK)]
    if (mark if isinstance(mark, str) else str(mark, "latin-1")) == _MARK:
        shape, dtype = (rows, num_layers, width), np.dtype("<u8")
        payload = payload[len(_MARK) :]
    else:
        shape, dtype = (num_tokens - 1, num_layers, topk), np.dtype("<i4")
    try:
        raw = pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"sample {sample}: indexer_topk is not base64: {error}") from None
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"sample {sample}: indexer_topk holds {len(raw)} bytes, expected"
            f" {math.prod(shape) * dtype.itemsize} ({shape[0]} rows x {num_layers} layers x {shape[2]} x"
            f" {dtype.itemsize} bytes)"
        )
    content = np.frombuffer(raw, dtype=dtype).reshape(shape)
    bits: np.ndarray | None = content
    if dtype.itemsize == 4:
        content = content[first:]
        bits = _checked_bits(content, first, width)
    if bits is None or (wrong := _not_chosen(bits, first, topk)).any():
        at = _misses_tokens(content, first) if bits is None else wrong
        row, layer = np.argwhere(at)[0].tolist()
        raise ValueError(f"sample {sample}: indexer_topk {_complaint(first + row, layer, topk)}")
    return bits


def _checked_bits(ids: np.ndarray, first: int, width: int) -> np.ndarray | None:
    """Pack rows of ids from row ``first`` on; None where one names a token that is not there, or one twice."""
    positions = np.arange(first, first + len(ids))[:, None]
    if ids.size and (ids.min() < 0 or (ids.max(axis=2) > positions).any()):
        return None
    bits = to_bits(ids, width)
    return None if _not_chosen(bits, first, ids.shape[2]).any() else bits


def _misses_tokens(ids: np.ndarray, first: int) -> np.ndarray:
    """bool[R, L]: rows that name a token that is not there, or one twice."""
    positions = np.arange(first, first + len(ids))[:, None]
    if not len(ids):
        return np.zeros(ids.shape[:2], dtype=bool)
    ordered = np.sort(ids, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
    return twice | (ordered[..., 0] < 0) | (ordered[..., -1] > positions)


def _not_chosen(bits: np.ndarray, first: int, topk: int) -> np.ndarray:
    """bool[R, L]: rows whose bits are other than ``topk`` tokens up to their own."""
    rows, _, width = bits.shape
    after = (
        np.arange(first, first + rows)[:, None] + 1 - np.arange(width) * _WORD
    )  # tokens of each word
    inside = np.where(
        after >= _WORD,
        np.uint64(0xFFFFFFFFFFFFFFFF),
        (np.uint64(1) << after.clip(0, _WORD - 1).astype(np.uint64)) - np.uint64(1),
    )
    outside = (bits & ~inside[:, None]).any(axis=2)
    return outside | (np.bitwise_count(bits).sum(axis=2, dtype=np.int64) != topk)
