"""The child process behind the math reward: one JSON request a line, one JSON answer a line.

Run as ``python -m r3train.rewards.math_worker``.  A request {"label", "response", "timeout_s"} is
answered by {"equal": bool} or {"bad_label": true}.  If a request runs over its time, the kernel
ends this process, even inside C code, and the caller notices its end.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys

MEMORY_BYTES = 4 * 1024**3
PARENT_CHECK_S = 1.0


def main() -> None:
    """Serve until the caller closes stdin or is gone."""
    # a nested power may ask for more memory than the machine has
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parent = os.getppid()
    print(json.dumps({"ready": True}), flush=True)
    while os.getppid() == parent:
        if not select.select([sys.stdin], [], [], PARENT_CHECK_S)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        answer = judge(math_verify, request["label"], request["response"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


def judge(math_verify, label: str, response: str) -> dict[str, bool]:
    """Compare the response's answer with the label, by value rather than by letters."""
    written = label if "\\boxed" in label or "$" in label else f"\\boxed{{{label}}}"
    # the library's own timeouts need signals of their own: this process has a harder one
    gold = math_verify.parse(written, parsing_timeout=None)
    if not gold:
        return {"bad_label": True}
    try:
        answer = math_verify.parse(response, parsing_timeout=None)
        return {"equal": bool(math_verify.verify(gold, answer, timeout_seconds=None))}
    except Exception:  # sympy raises many kinds for an answer that makes no sense
        return {"equal": False}


if __name__ == "__main__":
    main()
