"""Rewards by name, or by import path."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from r3train.config.data_settings import DataSection
from r3train.user_code import (
    find_user_code,
    running_user_code,
    import_user_code,
    quoted,
)
from r3train.rewards.accepted_words import accepted_words
from r3train.rewards.answers import last_box
from r3train.rewards.reward import Reward
from r3train.rewards.code import CodeReward
from r3train.rewards.exact_match import exact_match
from r3train.rewards.math import MathReward, dapo, gsm8k, wanted_answer
from r3train.rewards.remote import JudgeReward, RemoteReward
from r3train.rewards.text import choices, f1, gpqa
from r3train.rewards.signatures import signature_of
from r3train.rewards.workers import CallFailed, Workers
from r3train.types import Prompt, RolloutSample

BOXED = "boxed_"


class TextReward(Reward):
    """A reward that looks at label and text only and takes no time."""

    needs_label, num_tried = True, 1000

    def __init__(
        self,
        name: str,
        function: Callable[[Prompt, str], float],
        right_answer: Callable[[Prompt], str] | None = None,
    ) -> None:
        self.name, self._function = name, function
        if right_answer is not None:
            self.right_answer = right_answer

    async def __call__(self, sample: RolloutSample) -> float:
        """Score a sample."""
        return self._function(sample.prompt, sample.text)

    def require_label(self, prompt: Prompt) -> None:
        """Score an empty answer, which reads the label."""
        self._function(prompt, "")


class NoReward(Reward):
    """The reward of rows that need none: a teacher teaches there."""

    name, num_tried = "none", 0

    async def __call__(self, sample: RolloutSample) -> float:
        """Score any sample 0."""
        return 0.0


# name -> makes the reward from the settings and the key of the judge
REWARDS: Mapping[str, Callable[[DataSection, str | None], Reward]] = {
    "accepted_words": lambda data, key: TextReward("accepted_words", accepted_words),
    "exact_match": lambda data, key: TextReward("exact_match", exact_match),
    "math": lambda data, key: MathReward(data.reward_timeout_s),
    "gsm8k": lambda data, key: TextReward("gsm8k", gsm8k),
    "dapo": lambda data, key: TextReward(
        "dapo", dapo, lambda prompt: f"Answer: {wanted_answer(prompt, 'dapo')}"
    ),
    "gpqa": lambda data, key: TextReward("gpqa", gpqa, lambda prompt: choices(prompt)[1]),
    "f1": lambda data, key: TextReward("f1", f1),
    "remote_rm": lambda data, key: RemoteReward(data),
    "llm_judge": JudgeReward,
    "code": lambda data, key: CodeReward(data.reward_timeout_s),
}


class BoxedReward(Reward):
    """Another reward, for the content of the last box of the response; "" without one."""

    def __init__(self, inner: Reward) -> None:
        self.name, self.needs_label = BOXED + inner.name, inner.needs_label
        self.num_tried, self.num_checked = inner.num_tried, inner.num_checked
        self.require_label, self.check, self.close = inner.require_label, inner.check, inner.close
        self._inner = inner

    async def __call__(self, sample: RolloutSample) -> Any:
        """Score a sample's box."""
        return await self._inner(replace(sample, text=last_box(sample.text) or ""))

    def right_answer(self, prompt: Prompt) -> str | None:
        """The inner reward's, in a box."""
        text = self._inner.right_answer(prompt)
        return text and f"\\boxed{{{text}}}"


class CustomReward:
    """A function of the user, in a process of its own: one for all calls, so its state is shared.

    It takes what ``signatures`` knows, is async or not, and returns numbers or tables of them.
    """

    num_tried = 8
    right_answer = Reward.right_answer

    def __init__(self, flag: str, name: str, data: DataSection) -> None:
        self.name, self.group = name, data.group_rm
        self._function = import_user_code(flag, name)
        self._signature = signature_of(flag, name, self._function, data, group=self.group)
        self._workers = Workers(name, processes=1, calls=data.reward_concurrency)

    @property
    def place(self) -> str:
        """File and line of the function, as FILE:N; "" where they are not known."""
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        return "" if code is None else f"{os.path.relpath(code.co_filename)}:{code.co_firstlineno}"

    @property
    def code(self) -> str | None:
        """The sha256 of the function's file; None where it is not known."""
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        if code is None or not os.path.isfile(code.co_filename):
            return None
        return hashlib.sha256(Path(code.co_filename).read_bytes()).hexdigest()

    async def __call__(self, samples: list[RolloutSample], timeout_s: float) -> Any:
        """Call the function for one sample, or for a group."""
        sent_samples = [
            replace(
                sample,
                routed_experts=None,
                decoded=(),
                decoded_masks=(),
                indexer_topk=None,
                decoded_indexer=(),
            )
            for sample in samples
        ]
        arguments = self._signature.arguments(sent_samples)
        value = await self._workers.call(arguments, timeout_s=timeout_s)
        if not self._signature.takes_list:
            return value
        if not isinstance(value, list) or len(value) != 1:
            raise CallFailed(
                f"got 1 completion and must return a number for each, got {quoted(value)}"
            )
        return value[0]

    def check(self, prompts: list[Prompt]) -> None:
        """Let the function's attribute ``check`` look at the prompts, if it has one."""
        check_prompts = getattr(self._function, "check", None)
        if check_prompts is None:
            return
        with running_user_code(f"reward {self.name}"):
            check_prompts(prompts)

    def close(self) -> None:
        """End the process."""
        self._workers.close()


def get_reward(
    name: str, data: DataSection, judge_key: str | None = None, flag: str = "--rm-type"
) -> Reward:
    """Return the reward registered as ``name``; ``boxed_`` before it scores the last box only.

    Raises ValueError, naming the flag, for an unknown name.
    """
    if name.startswith(BOXED):
        return BoxedReward(get_reward(name.removeprefix(BOXED), data, judge_key, flag))
    return find_user_code(flag, name, REWARDS)(data, judge_key)
