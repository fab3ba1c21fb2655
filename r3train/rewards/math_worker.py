"""Equality of mathematical expressions by math-verify, for a process of its own (``workers``)."""

from __future__ import annotations

import logging
import math
import resource
import time

import math_verify

_MEMORY_BYTES = 4 * 1024**3

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
_bounded = False


def equal(label: str, answer: str, cpu_s: float) -> float:
    """1 where both texts are mathematics of one value, else 0; -1 for a label that is none.

    The process ends by SIGXCPU when the call has had ``cpu_s`` of CPU time, in whole seconds.
    """
    _bound_memory()
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + cpu_s), most))
    # the library's own time-outs need signals of their own: this process has a harder one
    gold = math_verify.parse(_written(label), parsing_timeout=None)
    if not gold:
        return -1.0
    try:
        found = math_verify.parse(_written(answer), parsing_timeout=None)
        return float(math_verify.verify(gold, found, timeout_seconds=None))
    except Exception:  # sympy raises many kinds for an answer that makes no sense
        return 0.0


def _written(text: str) -> str:
    return text if "$" in text else f"\\boxed{{{text}}}"


def _bound_memory() -> None:
    """Bound this process' memory: a nested power may ask for more than the machine has."""
    global _bounded
    if not _bounded:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _bounded = True
