"""Rollouts of several turns: the model, then the environment, on one growing list of tokens.

Token-in, token-out: the model's tokens are sent back unchanged, and only the environment's
observations are tokenised, or written by the chat template.  Each turn asks the engine for the rows
that the sample lacks.  After each turn the rows must have no gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, KW_ONLY, replace
from typing import Any

import numpy as np

from r3train.config.rollout_settings import RolloutSection
from r3train.data.messages import read_messages
from r3train.environments.environment import Environment, StepResult, Turn
from r3train.generation import stitch
from r3train.engine.backend import SamplingParams
from r3train.generation.episode import Generate
from r3train.generation.environment_loop import EnvironmentLoop
from r3train.routing.indexer_topk import num_words
from r3train.user_code import running_user_code, quoted
from r3train.types import Prompt, RolloutSample


@dataclass(eq=False)
class Conversation:
    """One episode with an environment (an ``Episode``), within the limits of ``rollout``.

    begin: makes the environment; it and the steps run in ``environments``.  reply: writes messages after a
    turn that ends with the given token; None without --apply-chat-template.
    """

    begin: Callable[[], Environment]
    rollout: RolloutSection
    environments: EnvironmentLoop
    _: KW_ONLY
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    reply: Callable[[list[dict[str, Any]], int], list[int]] | None = None

    async def __call__(
        self, generate: Generate, prompt: Prompt, *, sampling: SamplingParams, sample_id: int
    ) -> tuple[list[RolloutSample], float | None]:
        """Play the episode; return its samples and its reward, None if no step gave one.

        Raises ValueError naming prompt, sample, turn and environment for a reward that is no finite
        number, and for an observation that is neither text nor tokens nor messages.
        """
        rollout = self.rollout
        beginning = (
            f"prompt {prompt.prompt_id}, sample {sample_id}: --environment {rollout.environment}"
        )
        limit_s = rollout.environment_timeout_s
        environment = await self.environments.ask(self.begin, beginning, limit_s)
        budget = sampling.response_budget(len(prompt.token_ids), prompt.prompt_id)
        sample: RolloutSample | None = None
        # for each turn: the begin and end of its own tokens, and the number of answers so far
        ends: list[tuple[int, int, int]] = []
        rewards: list[float] = []
        for index in range(rollout.environment_max_turns):
            start = sample.num_tokens if sample is not None else len(prompt.token_ids)
            sample = await generate(sample, rollout.environment_max_turn_len)
            ends.append((start, sample.num_tokens, len(sample.decoded)))
            left = budget - sample.response_len
            last = (
                index + 1 == rollout.environment_max_turns
                or left < 2
                or sample.finish_reason == "abort"
            )
            ids = sample.token_ids[start:].tolist()
            turn = Turn(index, ids, self.decode(ids), last)
            step = (
                f"prompt {prompt.prompt_id}, sample {sample_id}, turn {index}: the step of"
                f" --environment {rollout.environment}"
            )
            result = await self._step(environment, turn, step)
            if result.reward is not None:
                rewards.append(_finite(result.reward, step))
            observed = self._observed(result, step, int(sample.token_ids[-1]))
            if result.done or last:
                break
            if len(observed) >= left:  # the environment would have gone on: the episode is cut
                sample = replace(sample, finish_reason="length")
                break
            sample = stitch.observe(sample, observed)
        reward = sum(rewards) if rewards else None
        sample = stitch.finished(sample)
        if rollout.environment_samples == "trajectory":
            return [sample], reward
        if reward is None:
            raise ValueError(
                f"prompt {prompt.prompt_id}, sample {sample_id}: --environment"
                f" {rollout.environment} gave no reward, and one sample a turn needs the episode's"
            )
        steps = [
            one_turn(sample, i, *ends[i], is_last=i + 1 == len(ends)) for i in range(len(ends))
        ]
        texts = [self.decode(sample.token_ids[a:b].tolist()) for a, b, _ in ends]
        return [replace(step, text=text) for step, text in zip(steps, texts)], reward

    async def _step(self, environment: Environment, turn: Turn, step: str) -> StepResult:
        """Ask the environment, within its time-out; any misbehaviour is a ValueError, the producer's failure.

        Raises ValueError beginning with ``step`` for one that takes too long, raises, exits or returns
        anything but a StepResult.
        """
        limit_s = self.rollout.environment_timeout_s
        result = await self.environments.ask(lambda: environment.step(turn), step, limit_s)
        if not isinstance(result, StepResult):
            kind = type(result).__name__
            raise ValueError(f"{step} returned {kind}, expected a StepResult")
        return result

    def _observed(self, result: StepResult, step: str, last: int) -> list[int]:
        """The tokens of an observation; last: the turn's last token."""
        observation = result.observation
        if isinstance(observation, str):
            return self.encode(observation)
        if isinstance(observation, Sequence) and all(isinstance(i, int) for i in observation):
            return list(observation)
        gave = f"{step} gave the observation {quoted(observation)}"
        try:
            messages, _ = read_messages(observation, lambda key: True)
        except ValueError as error:
            raise ValueError(
                f"{gave}, which is no text, no tokens and no messages: {error}"
            ) from None
        if self.reply is None:
            raise ValueError(f"{step} answers with messages, which need --apply-chat-template")
        with running_user_code(gave):
            return self.reply(messages, last)


def _finite(reward: float, step: str) -> float:
    try:
        number = math.nan if isinstance(reward, str) else float(reward)
    except Exception:  # of any class: a tensor of two numbers raises RuntimeError
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{step} gave the reward {quoted(reward)}, expected a finite number")
    return number


def one_turn(
    sample: RolloutSample, index: int, start: int, end: int, num_answers: int, *, is_last: bool
) -> RolloutSample:
    """Cut out one turn as a sample whose prompt is all that precedes the turn."""
    turn_mask = np.zeros(end, dtype=bool)
    turn_mask[start:] = True
    routes, kept, chosen = sample.routed_experts, sample.mask_counts, sample.indexer_topk
    if chosen is not None:
        # the rows are the sample's last
        first = sample.num_tokens - 1 - len(chosen)
        chosen = chosen[: max(end - 1 - first, 0), :, : num_words(end)]
    return replace(
        sample,
        sample_id=sample.sample_id + index,
        token_ids=sample.token_ids[:end],
        prompt_len=start,
        loss_mask=turn_mask,
        rollout_log_probs=np.where(turn_mask, sample.rollout_log_probs[:end], np.float32(0)),
        routed_experts=None if routes is None else routes[: end - 1],
        weight_versions=sample.weight_versions[:end],  # of the earlier turns too: rows have them
        finish_reason=sample.finish_reason if is_last else "stop",
        trajectory_id=sample.sample_id,
        is_last_step=is_last,
        decoded=sample.decoded[:num_answers],
        # of the earlier turns too, like routes: they are applied to rows without loss
        mask_counts=None if kept is None else kept[:end],
        mask_ids=None if kept is None else sample.mask_ids[: int(kept[:end].sum())],
        decoded_masks=tuple(part for part in sample.decoded_masks if part[0] < end),
        indexer_topk=chosen,
        decoded_indexer=stitch.indexer_parts_until(sample, end),
        row_classes=stitch.classes_until(sample, end),
    )
