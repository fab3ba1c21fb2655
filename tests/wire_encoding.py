"""Routes as SGLang would send them."""

from __future__ import annotations

import numpy as np
import pybase64

from r3train.types import missing_marker


def encode_routed_experts(routes: np.ndarray) -> str:
    """Encode uint8 or uint16 [rows, L, K]; the missing marker becomes -1."""
    ids = routes.astype("<i4")
    ids[routes == missing_marker(routes.dtype)] = -1
    return pybase64.b64encode(ids.tobytes()).decode("ascii")
