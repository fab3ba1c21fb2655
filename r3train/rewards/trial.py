"""A reward tried on the first prompt, before a server starts: its label as the answer, and an empty answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from r3train.rewards.scoring import Scorer
from r3train.types import Prompt, RolloutSample


def reward_of_first(
    scorer: Scorer, prompt: Prompt, tokens_of: Callable[[str], list[int]], group_size: int
) -> str | None:
    """Score two answers to a prompt; returns the rewards as words, None where they would tell nothing.

    A prompt whose label is no text, number or list of these has an empty answer only.  A reward of groups
    gets ``group_size`` samples, of which the first has the label.
    tokens_of: the tokens of an answer, at least one.  Not to be called from an event loop.  Raises
    ValueError naming the prompt and the function, with its file and line, for what training would refuse.
    """
    if not scorer.can_be_tried(prompt):
        return None
    label = _as_answer(prompt.label)
    answers = {"its label": label} if label is not None else {}
    answers["no answer"] = ""
    samples = [_sample(prompt, text, tokens_of(text)) for text in answers.values()]

    async def score() -> list[float]:
        if scorer.takes_groups:
            return await scorer.group((samples + samples[-1:] * group_size)[: max(group_size, 1)])
        return [await scorer(sample) for sample in samples]

    try:
        rewards = asyncio.run(score())
    except ValueError as error:
        raise ValueError(f"{error}{scorer.place}") from None
    finally:
        scorer.close()  # its helpers belong to that loop
    shown = (f"{round(reward, 4)} for {answer}" for answer, reward in zip(answers, rewards))
    return f"reward of the first prompt: {', '.join(shown)}"


def _as_answer(label: Any) -> str | None:
    """A label as a model would write it; of a list (of accepted answers) the first."""
    if isinstance(label, list) and label:
        return _as_answer(label[0])
    is_plain = isinstance(label, (str, int, float)) and not isinstance(label, bool)
    return str(label) if is_plain else None


def _sample(prompt: Prompt, text: str, answer: list[int]) -> RolloutSample:
    tokens = np.array([*prompt.token_ids, *answer], dtype=np.int32)
    is_answer = np.arange(len(tokens)) >= len(prompt.token_ids)
    return RolloutSample(
        sample_id=0,
        group_id=0,
        prompt=prompt,
        token_ids=tokens,
        prompt_len=len(prompt.token_ids),
        loss_mask=is_answer,
        rollout_log_probs=np.zeros(len(tokens), dtype=np.float32),
        routed_experts=None,
        weight_versions=np.where(is_answer, 0, -1).astype(np.int32),
        finish_reason="stop",
        text=text,
    )
