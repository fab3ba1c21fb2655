"""Rewards for mathematical answers of the right value."""

from __future__ import annotations

import logging
import os
import re
import tomllib
from importlib.resources import files

from r3train.rewards.answers import after_mark, final_answer, last_box, number_of
from r3train.rewards.answers import quantity_of, written
from r3train.rewards.reward import Reward, bad_label
from r3train.rewards.workers import CallFailed, WorkerEnded, Workers
from r3train.types import Prompt, RolloutSample

logger = logging.getLogger(__name__)

# CPU time: expressions of a kind that the library answers at all are answered in a fraction of this
_CALL_S = 3.0
# wall time, of a process that gets no CPU
_STUCK_S = 60.0
_PROCESSES = 4
_DAPO_TAIL, _DAPO_BOX_TAIL = 300, 100
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
# the steps by which verl takes away what does not count in DAPO's answers
_DAPO = tomllib.loads(files("r3train.rewards").joinpath("dapo.toml").read_text(encoding="utf-8"))


class MathReward(Reward):
    """1 where the final answer of the response (``answers.final_answer``) equals the label, else 0.

    The label is a number or text; of a whole solution its own box or ``####`` counts.  Two plain
    numbers are compared at once, all else by math-verify in processes of their own: an answer that
    cannot be evaluated in 3 s of CPU time (9^9^9^9), or that ends the process, scores 0.
    """

    name, needs_label = "math", True

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._stuck_s = min(timeout_s, _CALL_S), max(timeout_s, _STUCK_S)
        self._count = 0  # of answers that ended their process
        processes = min(_PROCESSES, os.cpu_count() or 1)
        function = "r3train.rewards.math_worker:equal"
        self._workers = Workers(function, processes=processes, calls=1)

    async def __call__(self, sample: RolloutSample) -> float:
        """Score one response; ValueError names the prompt of a label that is no mathematics."""
        answer = final_answer(sample.text)
        return 0.0 if not answer else await self._equal(sample.prompt, answer)

    def require_label(self, prompt: Prompt) -> None:
        """Raise ValueError for a label that is neither text nor a number."""
        label_text(prompt, self.name)

    def right_answer(self, prompt: Prompt) -> str:
        """The label's answer, in a box."""
        return f"\\boxed{{{wanted_answer(prompt, self.name)}}}"

    async def check(self, prompt: Prompt) -> None:
        """Raise ValueError for a label that is no mathematics."""
        label = wanted_answer(prompt, self.name)
        if number_of(label) is None and await self._equal(prompt, label) != 1.0:
            raise ValueError(
                f"prompt {prompt.prompt_id}: math cannot read the label {prompt.label!r}:"
                " an answer that equals it letter by letter scores 0"
            )

    async def _equal(self, prompt: Prompt, answer: str, again: bool = False) -> float:
        label = wanted_answer(prompt, self.name)
        if (same := _same_number(label, answer)) is not None:
            return float(same)
        try:
            arguments = label, answer, self._timeout_s
            equal = await self._workers.call(arguments, timeout_s=self._stuck_s)
        except WorkerEnded as error:
            if "SIGKILL" in str(error) and not again:  # by the machine, which lacks memory
                return await self._equal(prompt, answer, again=True)
            self._count += 1
            if self._count in (1, 10, 100, 1000):
                told = "prompt %s: the answer %r %s and scores 0, as %d so far"
                logger.warning(told, prompt.prompt_id, answer[:200], error, self._count)
            return 0.0
        except TimeoutError:
            lack = f"the process of math got no CPU time for {self._stuck_s:g} s: run fewer on this machine"
            raise ValueError(f"prompt {prompt.prompt_id}: {lack}") from None
        except CallFailed as error:
            raise ValueError(
                f"prompt {prompt.prompt_id}: math cannot compare {answer!r} with the label"
                f" {prompt.label!r}: {error}"
            ) from None
        if equal < 0:
            raise ValueError(
                f"prompt {prompt.prompt_id}: math cannot read the label {prompt.label!r}"
            )
        return equal

    def close(self) -> None:
        """End the processes."""
        self._workers.close()


def label_text(prompt: Prompt, name: str) -> str:
    """The label as text; raises ValueError for one that is neither text nor a number."""
    text = written(prompt.label)
    if text is None:
        raise bad_label(prompt, f"{name} needs a label of text or a number")
    return text


def wanted_answer(prompt: Prompt, name: str) -> str:
    """The answer that a label asks for: its last box, else what follows ####, else all of it.

    A number with an exponent, which mathematics reads as a product, comes without.
    """
    label = label_text(prompt, name)
    found = next(filter(None, (find(label) for find in (last_box, after_mark))), label.strip())
    number = number_of(found) if "e" in found.lower() else None
    return found if number is None else f"{number:f}"


def gsm8k(prompt: Prompt, text: str) -> float:
    """1 where the response's final answer is the label's number, else 0; reads no other mathematics.

    The label is a number, or a solution of the data set, which ends in ``#### number``.  Units, a percent sign and
    ``x =`` do not count.
    """
    label = quantity_of(wanted_answer(prompt, "gsm8k"))
    if label is None:
        raise bad_label(prompt, "gsm8k needs a label that is a number or ends in '#### number'")
    return float(quantity_of(final_answer(text) or "") == label)


def dapo(prompt: Prompt, text: str) -> float:
    """1 where the last line ``Answer: ...`` of the response is the label, else -1.

    Reads the last 300 characters; without such a line a box in the last 100 is the answer, letter by letter.
    Articles, units, dollar signs, a box and white space do not count.
    Source: DAPO (arXiv 2503.14476), and ``compute_score`` of verl's math_dapo.
    """
    label = wanted_answer(prompt, "dapo")
    tail = text[-_DAPO_TAIL:]
    if lines := _ANSWER.findall(tail):
        is_right = _normal(lines[-1]) == _normal(label)
    else:
        is_right = last_box(tail[-_DAPO_BOX_TAIL:]) == label
    return 1.0 if is_right else -1.0


def _same_number(label: str, answer: str) -> bool | None:
    """True if two numbers are equal; None where one of the two is no plain number."""
    wanted, found = number_of(label), number_of(answer)
    return None if wanted is None or found is None else wanted == found


def _normal(answer: str) -> str:
    """A final answer as verl's ``normalize_final_answer`` writes it, step by step in its order."""
    answer = answer.split("=")[-1]
    for before, after in _DAPO["replaced"]:
        answer = answer.replace(before, after)
    for text in _DAPO["removed"]:
        answer = answer.replace(text, "")
    for pattern, after in _DAPO["rewritten"]:
        answer = re.sub(pattern, after, answer)
    answer = answer.replace("$", "")
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer.strip()
