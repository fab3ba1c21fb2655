"""Reward for a mathematical answer of the right value."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence

from r3train.types import Prompt


# a label takes the child some milliseconds
_CHECKED = 200


def _require_text(prompt: Prompt) -> None:
    if isinstance(prompt.label, bool) or not isinstance(prompt.label, (str, int, float)):
        raise ValueError(
            f"prompt {prompt.prompt_id}: math needs a label of text, got {prompt.label!r}"
        )


class MathReward:
    """1 where math-verify finds the response's answer equal to the label, else 0.

    The comparison runs in a child process, so that any thread may call it.  An answer that cannot
    be evaluated in ``timeout_s`` (9^9^9^9) costs that time and scores 0.  The child starts with the
    first call and ends with ``close`` or with its owner.
    """

    def __init__(self, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None

    def __call__(self, prompt: Prompt, response_text: str, response_ids: list[int]) -> float:
        """Score one response; ValueError names the prompt of a label that is no mathematics."""
        _require_text(prompt)
        request = {
            "label": str(prompt.label),
            "response": response_text,
            "timeout_s": self._timeout_s,
        }
        with self._lock:
            answer = self._ask(request)
        if answer is None:
            return 0.0
        if answer.get("bad_label"):
            raise ValueError(
                f"prompt {prompt.prompt_id}: math cannot read the label {prompt.label!r}"
            )
        return float(answer["equal"])

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for the first label that is no text, or of the first 200 no mathematics."""
        for prompt in prompts:
            _require_text(prompt)
        for prompt in prompts[:_CHECKED]:
            self(prompt, "", [])

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._stop()

    def _ask(self, request: dict[str, str | float]) -> dict[str, bool] | None:
        """The child's answer, or None if the kernel ended the child, out of time or memory."""
        worker = self._worker or self._start()
        try:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        code = worker.wait()
        self._stop()
        if code >= 0:
            raise RuntimeError(f"the math process ended with code {code}")
        return None

    def _start(self) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-m", "r3train.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if not worker.stdout.readline():
            raise ValueError(
                f"rm_type math: its process ended with code {worker.wait()} at start;"
                " is math-verify installed?"
            )
        self._worker = worker
        return worker

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        worker.communicate()
