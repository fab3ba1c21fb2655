"""A reward tried on rows of the data before a server starts: on the label as the answer, and on answers without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from r3train.rewards.scoring import first_and_some, Scorer
from r3train.types import Prompt, RolloutSample

_LABEL, _EMPTY, _OTHER, _FORMS = "its label", "no answer", "another row's label", "its label as {}"
# forms of an answer that functions of users look for
_ALL_FORMS = "{0}\n<answer>{0}</answer>\nAnswer: {0}\n#### {0}\n\\boxed{{{0}}}"
_NAMED_ROWS = 3


def try_reward(
    scorer: Scorer,
    prompts: Sequence[Prompt],
    tokens_of: Callable[[str], list[int]],
    group_size: int,
) -> tuple[str | None, list[str]]:
    """Score answers to the first prompts and to a sample of all: the label, none, and the label of another row.

    Returns the rewards of the first prompt as words (None where they would tell nothing), and warnings of labels
    that score no more than an answer without them.  A label that is no text, number or list of these has no answer
    of its own.  A reward of groups gets each among empty answers, ``group_size`` together.
    tokens_of: the tokens of an answer, at least one.  Not to be called from an event loop.  Raises
    ValueError naming the prompt and the function, with its file and line, for what training would refuse.
    """
    by_count: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        by_count.setdefault(scorer.reward_for(prompt).num_tried, []).append(prompt)
    rows = [row for count, found in by_count.items() for row in first_and_some(found, count)]
    if not rows:
        return None, []
    answers = _answers(scorer, rows)
    try:
        tried = asyncio.run(_scored(scorer, rows, answers, tokens_of, group_size))
    except ValueError as error:
        raise ValueError(f"{error}{scorer.place}") from None
    finally:
        scorer.close()  # its helpers belong to that loop
    shown = (
        f"{round(reward, 4)} for {name}" for name, reward in tried[0].items() if name != _FORMS
    )
    first = f"reward of the first prompt: {', '.join(shown)}" if rows[0] is prompts[0] else None
    return first, _warnings(rows, tried)


def _answers(scorer: Scorer, rows: Sequence[Prompt]) -> list[dict[str, str]]:
    """The answers to each row, by what they are."""
    labels = [scorer.reward_for(prompt).right_answer(prompt) for prompt in rows]
    found = []
    for label in labels:
        other = next((text for text in labels if text not in (None, label)), None)
        texts = {_LABEL: label, _EMPTY: "", _OTHER: None if label is None else other}
        if label is not None and scorer.is_custom:
            texts[_FORMS] = _ALL_FORMS.format(label)
        found.append({name: text for name, text in texts.items() if text is not None})
    return found


async def _scored(
    scorer: Scorer,
    rows: Sequence[Prompt],
    answers: Sequence[dict[str, str]],
    tokens_of: Callable[[str], list[int]],
    group_size: int,
) -> list[dict[str, float]]:
    """The rewards of the answers to each row; raises the first row's ValueError."""

    async def score(prompt: Prompt, texts: dict[str, str]) -> dict[str, float]:
        samples = [_sample(prompt, text, tokens_of(text)) for text in texts.values()]
        if scorer.takes_groups:  # each among answers that are empty
            empty = _sample(prompt, "", tokens_of(""))
            groups = [[sample, *[empty] * (group_size - 1)] for sample in samples]
            values = await asyncio.gather(*map(scorer.group, groups))
            return dict(zip(texts, (each[0] for each in values))) | {_EMPTY: values[0][-1]}
        return dict(zip(texts, await asyncio.gather(*map(scorer, samples))))

    found = await asyncio.gather(*map(score, rows, answers), return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def _warnings(rows: Sequence[Prompt], tried: Sequence[dict[str, float]]) -> list[str]:
    """Warnings of labels that score no more than an empty answer, or than those of other rows."""
    for name, less in ((_EMPTY, "an empty answer"), (_OTHER, _OTHER)):
        labelled = [(row, each) for row, each in zip(rows, tried) if {_LABEL, name} <= each.keys()]
        bad = [
            (prompt, each)
            for prompt, each in labelled
            if max(each[_LABEL], each.get(_FORMS, each[_LABEL])) <= each[name]
        ]
        # labels may have words in common, so that one row's is half right for another
        if bad and (name is _EMPTY or 1 < len(bad) == len(labelled)):
            prompt, rewards = bad[0]
            names = ", ".join(prompt.prompt_id for prompt, _ in bad[:_NAMED_ROWS])
            more = " and more" if len(bad) > _NAMED_ROWS else ""
            return [
                f"{len(bad)} of {len(labelled)} rows tried: the label scores no more than {less} ({names}{more};"
                f" of the first, {repr(prompt.label)[:100]}, {rewards[_LABEL]:g} and {rewards[name]:g})"
            ]
    return []


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
