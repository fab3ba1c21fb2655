"""Routed experts as they travel from SGLang: base64 of ids in C order, no shape sent.

SGLang itself sends int32.  A server of ours sends the smallest unsigned type that holds every id of the
answer, with its name before the base64: ``u1:`` or ``u2:`` (``shortened`` writes it).
``decode_routed_experts`` reads both; nothing else depends on the format.  A sample of T
tokens carries T-1-start rows of L layers times K experts: row i is the routing of input token
start+i, and the last token, never an input, has none.  -1 is a slot that the engine did not
record: every row of an answer was computed, so an answer with one is refused.

Source: SGLang 0.5.23, ``meta_info.routed_experts`` of ``/generate``.
"""

from __future__ import annotations

import binascii
import math

import numpy as np
import pybase64

from r3train.types import RouteShape

_WIRE_DTYPE = np.dtype("<i4")
_SHORT_DTYPES = {"u1:": np.dtype("u1"), "u2:": np.dtype("<u2")}
_MARK = 3  # characters
# ids decoded at a time, so that their int32 stay in the core's own cache; a multiple of 3 ids is a whole
# number of base64 quads
_BLOCK_IDS = 3 << 14
_CHECKED_ROWS = 1 << 15  # rows of one layer that are searched for repeated experts at a time


def decode_routed_experts(
    payload_b64: str | bytes | memoryview,
    route_shape: RouteShape,
    *,
    num_tokens: int,
    start: int = 0,
    sample: str,
) -> np.ndarray:
    """Decode one sample's routes into ``route_shape.dtype`` [num_tokens-1-start, L, K].

    Raises ValueError naming ``sample``: bytes got and expected, the row, layer and slot of an id
    outside [0, num_experts), or the row and layer of an expert that is named twice (dense layers
    apart, whose rows are zeros).
    """
    rows = num_tokens - 1 - start
    if rows < 0:
        raise ValueError(
            f"sample {sample}: routed_experts_start {start} lies past the last row of "
            f"{num_tokens} tokens"
        )
    shape = rows, *route_shape.row
    num_ids = math.prod(shape)
    payload_b64, dtype = _without_mark(payload_b64)
    num_bytes = num_ids * dtype.itemsize
    if len(payload_b64) != -(-num_bytes // 3) * 4:
        got = len(_decoded(payload_b64, sample))
        raise _wrong_size(got, dtype, shape, sample)
    if isinstance(payload_b64, bytes):
        payload_b64 = memoryview(payload_b64)  # its parts are no copies
    routes = np.empty(num_ids, dtype=route_shape.dtype)
    quads = _BLOCK_IDS * dtype.itemsize // 3 * 4
    at = 0
    for first in range(0, len(payload_b64), quads):
        raw = _decoded(payload_b64[first : first + quads], sample)
        if len(raw) != min(num_ids - at, _BLOCK_IDS) * dtype.itemsize:
            got = at * dtype.itemsize + len(raw)
            raise _wrong_size(got, dtype, shape, sample)
        ids = np.frombuffer(raw, dtype=dtype)
        # as unsigned numbers, negative ids are huge: one comparison for both ends
        numbers, num_experts = ids.view(f"<u{dtype.itemsize}"), route_shape.num_experts
        if numbers.max() >= num_experts:
            bad = int(np.argmax(numbers >= num_experts))
            row, layer, slot = np.unravel_index(at + bad, shape)
            raise ValueError(
                f"sample {sample}: routed_experts row {int(row) + start}, layer {int(layer)}, slot "
                f"{int(slot)} holds expert {int(ids[bad])}, "
                f"expected 0 to {num_experts - 1}"
            )
        routes[at : at + ids.size] = ids
        at += ids.size
    routes = routes.reshape(shape)
    _refuse_repeats(routes, route_shape, start, sample)
    return routes


def shortened(ids: np.ndarray) -> str | None:
    """Write int32 ids [T, L, K] in the smallest unsigned type that holds them; None where none does.

    -1, a slot that was not recorded, is held by none: the answer goes as SGLang sends it.
    """
    # as unsigned numbers, negative ids are huge
    largest = int(np.ascontiguousarray(ids).view("<u4").max(initial=0))
    for mark, dtype in _SHORT_DTYPES.items():
        if largest <= np.iinfo(dtype).max:
            return mark + pybase64.b64encode_as_string(ids.astype(dtype))
    return None


def _without_mark(
    payload: str | bytes | memoryview,
) -> tuple[str | bytes | memoryview, np.dtype]:
    """Split a text of routes into its base64 and the type of its ids."""
    mark = payload[:_MARK] if isinstance(payload, str) else str(payload[:_MARK], "latin-1")
    dtype = _SHORT_DTYPES.get(mark)
    return (payload, _WIRE_DTYPE) if dtype is None else (payload[_MARK:], dtype)


def _refuse_repeats(routes: np.ndarray, route_shape: RouteShape, start: int, sample: str) -> None:
    """Raise ValueError for an MoE layer's row that names an expert twice: no router chooses so.

    Rows of nothing but zeros are such rows.  They come from a server that did not record the layer.
    """
    layer_ids = [i for i in range(route_shape.num_layers) if i not in route_shape.dense_layer_ids]
    if route_shape.topk == 1 or not layer_ids:
        return
    step = max(1, _CHECKED_ROWS // len(layer_ids))
    spare_bit = route_shape.missing // 2 + 1
    tags = None
    if route_shape.num_experts <= spare_bit:
        pair = np.repeat(np.array([0, spare_bit], routes.dtype), route_shape.topk)
        num_rows = min(step, len(routes)) * len(layer_ids)
        tags = np.tile(pair, num_rows // 2 + 1).reshape(-1, route_shape.topk)
    for first in range(0, len(routes), step):
        chunk = routes[first : first + step]
        if route_shape.dense_layer_ids:
            chunk = chunk[:, layer_ids]
        rows = chunk.reshape(-1, route_shape.topk)
        if not _may_repeat(rows, None if tags is None else tags[: len(rows)]):
            continue
        ordered = np.sort(chunk, axis=-1)
        twice = ordered[..., 1:] == ordered[..., :-1]
        if twice.any():
            row, layer, slot = np.argwhere(twice)[0].tolist()
            raise ValueError(
                f"sample {sample}: routed_experts row {first + row + start}, layer "
                f"{layer_ids[layer]} names expert {ordered[row, layer, slot]} twice, "
                f"expected {route_shape.topk} different experts"
            )


def _may_repeat(rows: np.ndarray, tags: np.ndarray | None) -> bool:
    """Tell whether a row [n, K] of ids may hold a number twice; False is certain.

    Long arrays are compared, not rows: the ids with those of the next slot, of the next but one, and so
    on.  Tags, [n, K], make the ids of neighbouring rows different.  Without them each slot is moved to an
    array of its own first, which costs as much as the comparisons.
    """
    num_rows, topk = rows.shape
    if tags is not None:
        ids, pace = (rows ^ tags).reshape(-1), 1
    else:
        ids, pace = rows.T.reshape(-1), num_rows
    moved = range(pace, topk * pace, pace)
    return any((ids[by:] ^ ids[:-by]).min() == 0 for by in moved)


def _decoded(chars: str | bytes | memoryview, sample: str) -> bytes:
    try:
        return pybase64.b64decode(chars, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"sample {sample}: routed_experts is not base64: {error}") from None


def _wrong_size(got: int, dtype: np.dtype, shape: tuple[int, int, int], sample: str) -> ValueError:
    rows, layers, topk = shape
    size = dtype.itemsize
    return ValueError(
        f"sample {sample}: routed_experts holds {got} bytes, expected {math.prod(shape) * size} "
        f"({rows} rows x {layers} layers x {topk} experts x {size} bytes)"
    )
