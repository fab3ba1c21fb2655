"""Scoring of samples: the one path from a finished answer to its reward."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from r3train.config.data_settings import DataSection
from r3train.user_code import quoted
from r3train.rewards.reward import Reward
from r3train.rewards.weighted_sum import SummedReward
from r3train.rewards.named_rewards import BOXED, CustomReward, NoReward, get_reward
from r3train.rewards.worker import plain
from r3train.rewards.workers import CallFailed, WorkerEnded
from r3train.types import Prompt, RolloutSample


class Scorer:
    """Scores samples in one event loop, ``reward_concurrency`` at once, each within a bound.

    ``rm_type`` (a name, or module:function) takes the place of the section's rm_type and
    custom_rm_path: an evaluation may have its own.  Rows whose ``metadata.rm_type`` names a reward
    are scored by that one, unless the reward is a function of the user.

    A function of the user that takes longer than ``reward_timeout_s``, raises or ends its process is an
    error, which names it and the prompt.  The rewards of r3train end such a call themselves and score
    it.  ``judge_key`` goes to the judge of llm_judge.  ``optional``: where no reward is named the
    score is 0.  With ``weight_of_key`` (--reward-keys) a reward is a ``SummedReward``.  Raises
    ValueError, naming the flag, for a reward that is not there and settings that it lacks.
    """

    def __init__(
        self,
        data: DataSection,
        *,
        rm_type: str | None = None,
        judge_key: str | None = None,
        optional: bool = False,
        weight_of_key: Mapping[str, float] | None = None,
    ) -> None:
        self._data, self._judge_key = data, judge_key
        self._optional = optional
        self._weight_of_key = weight_of_key or {}
        self._timeout_s = data.reward_timeout_s
        self._custom: CustomReward | None = None
        self._named: dict[str, Reward] = {}
        flag, name = "--rm-type", rm_type or data.rm_type
        if rm_type is None and data.custom_rm_path is not None:
            flag, name = "--custom-rm-path", data.custom_rm_path
        self._default = None if name is None or ":" in name else name
        if name is not None and ":" in name:
            self._custom = CustomReward(flag, name, data)
        elif self._default is not None:
            self._reward_named(self._default)
        if data.group_rm and self._custom is None:
            raise ValueError("--group-rm needs --custom-rm-path: a function of all samples")
        self._room = asyncio.Semaphore(data.reward_concurrency)

    @property
    def name(self) -> str:
        """The reward's name, for people."""
        if self._custom is not None:
            return self._custom.name
        return self._default or "metadata.rm_type"

    @property
    def runs_programs(self) -> bool:
        """True if a reward runs programs of the model; those of rows are known after ``check``."""
        return any(name.removeprefix(BOXED) == "code" for name in self._named)

    @property
    def takes_groups(self) -> bool:
        """True if only ``group`` can be called: the reward needs all samples of a prompt (--group-rm)."""
        return self._custom is not None and self._custom.group

    @property
    def is_custom(self) -> bool:
        """True if a function of the user scores."""
        return self._custom is not None

    @property
    def place(self) -> str:
        """File and line of the user's function, for the end of a message; "" where there is none."""
        place = "" if self._custom is None else self._custom.place
        return place and f" ({place})"

    @property
    def code(self) -> str | None:
        """The sha256 of the file of the user's function; None where there is none."""
        return None if self._custom is None else self._custom.code

    def reward_for(self, prompt: Prompt) -> Reward | CustomReward:
        """The reward that scores a prompt; raises ValueError as ``check``."""
        return self._custom or self._reward_for(prompt)

    async def __call__(self, sample: RolloutSample) -> float:
        """Score one sample; raises ValueError naming the prompt, the reward and the sample."""
        assert not self.takes_groups, "a reward of groups was asked for one sample"
        if self._custom is None:
            async with self._room:
                value = await self._reward_for(sample.prompt)(sample)
            return self._number(sample, value)
        return self._number(sample, await self._call_custom([sample]))

    async def group(self, samples: Sequence[RolloutSample]) -> list[float]:
        """Score all samples of one prompt, whatever the reward takes; raises ValueError as above."""
        if not self.takes_groups:
            return list(await asyncio.gather(*(self(sample) for sample in samples)))
        values = await self._call_custom(list(samples))
        if not isinstance(values, list) or len(values) != len(samples):
            got = f"{len(values)} numbers" if isinstance(values, list) else quoted(values)
            raise ValueError(
                f"prompt {samples[0].prompt.prompt_id}: reward {self.name} got {len(samples)} samples"
                f" and must return a number for each, got {got}"
            )
        return [self._number(sample, value) for sample, value in zip(samples, values)]

    async def _call_custom(self, samples: list[RolloutSample]) -> Any:
        first = samples[0]
        about = f"prompt {first.prompt.prompt_id}: reward {self.name}"
        try:
            return await self._custom(samples, self._timeout_s)
        except TimeoutError:
            cause, error = None, f"took longer than reward_timeout_s {self._timeout_s:g}"
        except (CallFailed, WorkerEnded) as failure:
            cause, error = failure, str(failure)
        failed = ValueError(f"{about} {error} (sample {first.sample_id})")
        for sample in samples:  # for a test of the reward
            failed.add_note(f"the response of sample {sample.sample_id}: {sample.text!r}")
        raise failed from cause

    def _number(self, sample: RolloutSample, value: Any) -> float:
        """The reward in what a function returned; raises ValueError if that is no finite number."""
        about = f"prompt {sample.prompt.prompt_id}: reward {self.name}"
        with contextlib.suppress(TypeError, ValueError):
            value = plain(value)
        key = self._data.reward_key
        if self._weight_of_key:
            return self._summed(about, value)
        if isinstance(value, dict):
            if key is None or key not in value:
                named = "--reward-key is not set" if key is None else f"no number at key {key}"
                raise ValueError(f"{about} returned a table, and {named}: {quoted(value)}")
            value = value[key]
        elif key is not None and self._custom is not None:
            raise ValueError(f"{about} must return a table (--reward-key {key}), got {value!r}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise ValueError(f"{about} must be a finite number, got {quoted(value)}")
        return value

    def _summed(self, about: str, value: Any) -> SummedReward:
        keys = ", ".join(self._weight_of_key)
        if not isinstance(value, dict):
            raise ValueError(
                f"{about} must return a table (--reward-keys {keys}), got {quoted(value)}"
            )
        parts = []
        for key in self._weight_of_key:
            number = value.get(key)
            if not isinstance(number, float) or not math.isfinite(number):
                raise ValueError(
                    f"{about} returned a table without a finite number at key {key} (--reward-keys"
                    f" {keys}): {quoted(value)}"
                )
            parts.append(number)
        weights = self._weight_of_key.values()
        summed = SummedReward(sum(w * part for w, part in zip(weights, parts)))
        summed.parts = tuple(parts)
        return summed

    def _reward_named(self, name: str, flag: str = "--rm-type") -> Reward:
        if name not in self._named:
            self._named[name] = get_reward(name, self._data, self._judge_key, flag)
        return self._named[name]

    def _reward_for(self, prompt: Prompt) -> Reward:
        """The reward of a prompt; raises ValueError naming it if there is none or its label lacks."""
        name = prompt.metadata.get("rm_type")
        flag = f"prompt {prompt.prompt_id}: metadata.rm_type"
        if name is None and self._default is None and self._optional:
            return NoReward()
        if name is None and self._default is None:
            raise ValueError(
                f"--rm-type is required: {flag} is missing, and so is --custom-rm-path"
            )
        if name is not None and (not isinstance(name, str) or ":" in name):
            raise ValueError(f"{flag} must be a registered name, got {quoted(name)}")
        reward = self._reward_named(name or self._default, flag if name else "--rm-type")
        if reward.needs_label and prompt.label is None:
            raise ValueError(
                f"prompt {prompt.prompt_id}: {reward.name} needs a label, and key"
                f" {self._data.label_key} is missing or null (--label-key)"
            )
        return reward

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError naming a prompt that cannot be scored: no reward, or a label of no use.

        Reads every label, and ``num_checked`` of each reward more closely.  A custom reward may have
        a ``check`` of its own, as an attribute: a function of the list of prompts that raises
        ValueError.  Not to be called from an event loop.
        """
        if self._custom is not None:
            self._custom.check(list(prompts))
            return
        prompts_by_reward: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            reward = self._reward_for(prompt)
            if reward.needs_label:
                reward.require_label(prompt)
            prompts_by_reward.setdefault(reward.name, []).append(prompt)
        first = [
            prompt
            for found in prompts_by_reward.values()
            for prompt in first_and_some(found, self._reward_for(found[0]).num_checked)
        ]

        async def look() -> list[Any]:
            checks = (self._reward_for(prompt).check(prompt) for prompt in first)
            return await asyncio.gather(*checks, return_exceptions=True)

        try:
            for error in filter(None, asyncio.run(look())):
                raise error
        finally:
            self.close()  # helpers belong to that loop

    def close(self) -> None:
        """End the processes of rewards, from any thread; a later call, in any loop, starts them again."""
        self._room = asyncio.Semaphore(self._data.reward_concurrency)
        for reward in (self._custom, *self._named.values()):
            if reward is not None:
                reward.close()


def first_and_some(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """At most ``count`` prompts: the first half of them, and as many of all others, the same at every start."""
    first, rest = prompts[: (count + 1) // 2], prompts[(count + 1) // 2 :]
    return [*first, *random.Random(0).sample(rest, min(count // 2, len(rest)))]
