"""Routes as SGLang sends them: read as any server sends them, written as SGLang's own does."""

from __future__ import annotations

import numpy as np
import pybase64

from r3train.types import missing_marker


def encode_routed_experts(routes: np.ndarray) -> str:
    """Encode uint8 or uint16 [rows, L, K]; the missing marker becomes -1."""
    ids = routes.astype("<i4")
    ids[routes == missing_marker(routes.dtype)] = -1
    return pybase64.b64encode(ids.tobytes()).decode("ascii")


def sent_ids(text: str) -> np.ndarray:
    """Read the ids of an answer's routes, flat int32: of SGLang itself and of a server of ours."""
    kind, _, encoded = text.rpartition(":")
    raw = pybase64.b64decode(encoded)
    return np.frombuffer(raw, dtype=f"<{kind or 'i4'}").astype("<i4")


def text_of(ids: np.ndarray) -> str:
    """Write flat ids as SGLang itself does."""
    return pybase64.b64encode(ids.astype("<i4").tobytes()).decode("ascii")
