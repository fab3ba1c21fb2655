"""What a record and a step's verdict must look like before they are judged.

A file may have been cut, edited or written by something else.  Every field is checked for its type
and range here, so that what is judged later cannot surprise the arithmetic; what does not fit
raises ValueError with the key, what was got and what was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from r3train.proof.audit_lines import odd
from r3train.proof.check import COUNTERS, STAGES
from r3train.types import ReplayEvidence

# far above any call's rows, and low enough for sums of millions of calls to fit 64 bits
_MOST = 1 << 40
_MAX_LAYERS = 1 << 12
_MAX_RANKS = 1 << 17
_MAX_PASSES = 8
# of a pass, a stage or an attempt, which findings and notes repeat
_MAX_NAME = 100
_FINGERPRINT = re.compile(r"0x[0-9a-f]{1,16}", re.ASCII)
_LAYER = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)
_PLACES = ("layer_number", "rank", "fingerprint")
_AMOUNTS = tuple(
    f.name for f in fields(ReplayEvidence) if f.type == "int" and f.name not in _PLACES
)
_COUNTED = ("num_calls", "num_calls_expected", *COUNTERS[2:])


def expert_id_sums(num_rows: int, topk: int, num_experts: int) -> tuple[int, int]:
    """The least and the largest sum of the ids 0..num_experts-1 in rows of ``topk`` distinct ones.

    Holds for every row of a replayed call: padding and missing slots are filled with distinct
    experts too.
    """
    low = topk * (topk - 1) // 2
    return num_rows * low, num_rows * (topk * (num_experts - 1) - low)


def check_record(r: Mapping[str, Any], rank: int) -> None:
    """Raise ValueError where ``r`` is no record of a router call of this rank."""
    for key in _AMOUNTS:
        value = r.get(key)
        # bool is an int to isinstance
        if type(value) is not int or not 0 <= value <= _MOST:
            _integer(r, key, 0, _MOST)
    _integer(r, "layer_number", 1, _MAX_LAYERS)
    if _integer(r, "rank", 0, _MAX_RANKS) != rank:
        raise ValueError(f"rank is {r['rank']}, expected {rank}, whose file this is")
    for key in ("replay_pass", "stage"):
        _text(r, key)
    _fingerprint("fingerprint", _get(r, "fingerprint"))
    if type(r.get("counts_tokens", True)) is not bool:
        raise odd("counts_tokens", r["counts_tokens"], "true or false")
    _attempt(r)


def check_step(line: Mapping[str, Any]) -> None:
    """Raise ValueError where ``line`` is no verdict of a step with all that it was judged by."""
    _integer(line, "step", 0, _MOST)
    _attempt(line)
    if type(_get(line, "passed")) is not bool:
        raise odd("passed", line["passed"], "true or false")
    _integer(line, "world_size", 1, _MAX_RANKS)
    _integer(line, "topk", 1, _integer(line, "num_experts", 1, _MOST))
    _number("mismatch_threshold", _get(line, "mismatch_threshold"), 0.0, 1.0)
    passes = _list(line, "passes")
    named = all(isinstance(p, str) and 0 < len(p) <= _MAX_NAME for p in passes)
    distinct = named and len(set(passes)) == len(passes)
    if not distinct or not 0 < len(passes) <= _MAX_PASSES:
        raise odd("passes", passes, f"1 to {_MAX_PASSES} names, each once")
    layers = _fingerprints("expected_fingerprints", _get(line, "expected_fingerprints"))
    for key in ("expected_rows_replayed", "expected_rows_filled"):
        rows = _of_layers(key, _get(line, key), layers)
        if rows.keys() != layers:
            raise odd(key, sorted(rows), f"the layers {sorted(layers, key=int)}")
    calls = _keyed("expected_calls", _get(line, "expected_calls"), passes)
    for replay_pass, stages in calls.items():
        name = f"expected_calls.{replay_pass}"
        for stage, of in _keyed(name, stages, STAGES).items():
            _of_layers(f"{name}.{stage}", of, layers)
    counts = _keyed("counts", _get(line, "counts"), _COUNTED)
    for name in counts:
        _integer(counts, name, 0, _MOST * _MOST)
    for name, value in _mapping("agreement", _get(line, "agreement")).items():
        _number(f"agreement.{name}", value, 0.0, float(_MOST))
    _check_outcome(line, layers)


def _check_outcome(line: Mapping[str, Any], layers: Collection[str]) -> None:
    failures = _list(line, "failures")
    if not all(isinstance(f, dict) for f in failures):
        raise odd("failures", failures, "a list of objects")
    error = _get(line, "threshold_error")
    if error is not None and not isinstance(error, str):
        raise odd("threshold_error", error, "text or null")
    if line["passed"] and (failures or error):
        raise ValueError("passed is true beside failures")
    for place in _list(line, "places") if "places" in line else []:
        ranks = _list(_mapping("places", place), "ranks")
        if not all(type(r) is int and 0 <= r < _MAX_RANKS for r in ranks):
            raise odd("places.ranks", ranks, "ranks")
        _fingerprints("places.fingerprints", _get(place, "fingerprints"))


def _get(of: Mapping[str, Any], key: str) -> Any:
    if key not in of:
        raise ValueError(f"{key} is missing")
    return of[key]


def _integer(of: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = _get(of, key)
    if type(value) is not int or not low <= value <= high:
        raise odd(key, value, f"an integer from {low} to {high}")
    return value


def _number(name: str, value: Any, low: float, high: float) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise odd(name, value, f"a number from {low:g} to {high:g}")


def _text(of: Mapping[str, Any], key: str) -> None:
    value = _get(of, key)
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise odd(key, value, f"text of at most {_MAX_NAME} characters")


def _attempt(of: Mapping[str, Any]) -> None:
    if "attempt" in of:
        _text(of, "attempt")


def _list(of: Mapping[str, Any], key: str) -> list[Any]:
    value = _get(of, key)
    if not isinstance(value, list):
        raise odd(key, value, "a list")
    return value


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise odd(name, value, "an object")
    return value


def _keyed(name: str, value: Any, keys: Collection[str]) -> Mapping[str, Any]:
    if _mapping(name, value).keys() != set(keys):
        raise odd(name, sorted(value), f"the keys {', '.join(keys)}")
    return value


def _of_layers(name: str, value: Any, layers: Collection[str]) -> Mapping[str, Any]:
    """Integers by layer, of layers that have a fingerprint."""
    for layer in _mapping(name, value):
        if layer not in layers:
            raise ValueError(f"{name} has the layer {layer!r:.40}, which has no fingerprint")
        _integer(value, layer, 0, _MOST)
    return value


def _fingerprints(name: str, value: Any) -> Collection[str]:
    for layer, fingerprint in _mapping(name, value).items():
        if not _LAYER.fullmatch(layer) or int(layer) > _MAX_LAYERS:
            raise odd(f"a key of {name}", layer, f"a layer from 1 to {_MAX_LAYERS}")
        _fingerprint(f"{name}.{layer}", fingerprint)
    return value.keys()


def _fingerprint(name: str, value: Any) -> None:
    if not isinstance(value, str) or not _FINGERPRINT.fullmatch(value):
        raise odd(name, value, "64 bits in hexadecimal (0x...)")
