"""JSON of SGLang's answers, with the routes lifted out before it is parsed.

Nearly all of an answer is one base64 string.  A JSON parser copies it through a buffer and checks
it for escapes; base64 has none, so it is cut out where it stands and the small rest is parsed.
"""

from __future__ import annotations

from typing import Any

import orjson

_FIELD = "routed_experts"
_KEYS = tuple(f'"{_FIELD}":{space}"'.encode() for space in ("", " "))


def loads(raw: bytes) -> Any:
    """Parse an answer; ``meta_info.routed_experts`` becomes a memoryview into ``raw``.

    An answer of another form (several of the field, or the field elsewhere) is parsed as any JSON is.
    Raises orjson.JSONDecodeError.
    """
    found = _payload(raw)
    if found is None:
        return orjson.loads(raw)
    start, end = found
    answer = orjson.loads(b"".join((raw[:start], raw[end:])))
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or meta.get(_FIELD) != "":
        return orjson.loads(raw)
    meta[_FIELD] = memoryview(raw)[start:end]
    return answer


def _payload(raw: bytes) -> tuple[int, int] | None:
    """Where the string of the one such field lies.

    Inside another string its quotes would be escaped, and it would not be found.
    """
    for key in _KEYS:
        at = raw.find(key)
        if at < 0:
            continue
        start = at + len(key)
        end = raw.find(b'"', start)
        # a backslash would have to be undone: that is no base64, and the decoder will say so
        if end < 0 or raw.find(key, end) >= 0 or raw.find(b"\\", start, end) >= 0:
            return None
        return start, end
    return None
