"""Routed experts as they travel from SGLang: base64 of int32, C order, no shape sent.

SGLang writes, ``decode_routed_experts`` reads; nothing else depends on the format.  A sample of T
tokens carries T-1-start rows of L layers times K experts: row i is the routing of input token
start+i, and the last token, never an input, has none.  -1 is a slot that the engine did not
record.

Source: SGLang 0.5.23, ``meta_info.routed_experts`` of ``/generate``.
"""

from __future__ import annotations

import binascii

import numpy as np
import pybase64

from r3train.types import missing_marker, route_dtype

_WIRE_DTYPE = np.dtype("<i4")


def decode_routed_experts(
    payload_b64: str | bytes,
    *,
    num_tokens: int,
    num_layers: int,
    topk: int,
    num_experts: int,
    start: int = 0,
    sample: str,
) -> np.ndarray:
    """Decode one sample's routes into uint8 or uint16 [num_tokens-1-start, num_layers, topk].

    -1 becomes ``missing_marker`` of the dtype that ``route_dtype(num_experts)`` names.
    Raises ValueError naming ``sample``: bytes got and expected, or the row, layer and slot of an
    id outside [-1, num_experts).
    """
    rows = num_tokens - 1 - start
    if rows < 0:
        raise ValueError(
            f"sample {sample}: routed_experts_start {start} lies past the last row of "
            f"{num_tokens} tokens"
        )
    try:
        raw = pybase64.b64decode(payload_b64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"sample {sample}: routed_experts is not base64: {error}") from None
    expected = rows * num_layers * topk * _WIRE_DTYPE.itemsize
    if len(raw) != expected:
        raise ValueError(
            f"sample {sample}: routed_experts holds {len(raw)} bytes, expected {expected} "
            f"({rows} rows x {num_layers} layers x {topk} experts x 4 bytes)"
        )
    ids = np.frombuffer(raw, dtype=_WIRE_DTYPE)
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= num_experts):
        flat = int(np.argmax((ids < -1) | (ids >= num_experts)))
        row, layer, slot = np.unravel_index(flat, (rows, num_layers, topk))
        raise ValueError(
            f"sample {sample}: routed_experts row {int(row) + start}, layer {int(layer)}, slot "
            f"{int(slot)} holds expert {int(ids[flat])}, expected -1 to {num_experts - 1}"
        )
    # The cast wraps -1 to the largest value of the unsigned dtype, which is the missing marker.
    return ids.astype(route_dtype(num_experts), casting="unsafe").reshape(rows, num_layers, topk)


def encode_routed_experts(routes: np.ndarray) -> str:
    """Encode uint8 or uint16 [rows, L, K] as SGLang would; the missing marker becomes -1.

    Raises ValueError for another dtype or number of axes.
    """
    if routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3:
        raise ValueError(
            f"routes are {routes.dtype} with {routes.ndim} axes, expected uint8 or uint16 [rows, L, K]"
        )
    ids = routes.astype(_WIRE_DTYPE)
    ids[routes == missing_marker(routes.dtype)] = -1
    return pybase64.b64encode(ids.tobytes()).decode("ascii")
