"""Evaluation of one weight version: every prompt of a set is answered, and every answer scored.

An evaluation brings no routes and no log-probs to anybody: its samples are made by the same episodes
and scored by the same rewards as those of a rollout, and end as rows, JSON-able dicts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from r3train.algo.reward_stats import pass_at_k
from r3train.engine.backend import EngineError, RolloutBackend, SamplingParams
from r3train.generation import stitch
from r3train.generation.episode import Episode
from r3train.ids import evaluation_group, evaluation_sample
from r3train.types import Prompt, RolloutSample

Row = dict[str, Any]
# an episode's samples and its own reward, None if it gave none
Answer = tuple[list[RolloutSample], float | None]
# makes what is entered for as long as something is under way
Room = Callable[[], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A set of prompts, ``num_samples`` answers to each, and their reward."""

    name: str
    prompts: Sequence[Prompt]
    num_samples: int
    sampling: SamplingParams
    score: Callable[[Sequence[RolloutSample]], Awaitable[list[float]]]  # of one prompt's samples
    make_episode: Callable[[Prompt], Episode]  # of one sample
    decode: Callable[[Sequence[int]], str]
    segment_len: int | None  # most tokens of one request, as of a rollout's
    samples_per_episode: int  # sample ids that an episode may take


class EvaluationEnded(Exception):
    """An evaluation was given up before it was complete."""


async def evaluate(
    eval_set: EvalSet,
    backend: RolloutBackend,
    version: int | None,
    room: Room,
    on_answer: Callable[[], None] = lambda: None,
    episodes: Room = nullcontext,
) -> list[Row]:
    """Return the rows of a set in order of prompt and sample, all answered by one weight version.

    version: the one that every token must carry; None: any, the same for all.  room: entered for
    each call of an episode, it bounds the requests in flight.  on_answer: called after each episode.
    episodes: entered for each, it bounds how many are under way.
    Raises the first error, and ValueError where versions differ.
    """

    async def answer(place: int, number: int) -> Answer:
        async with episodes():
            samples, reward = await _answer(eval_set, backend, version, room, place, number)
        on_answer()
        return samples, reward

    async def scored(answers: Sequence[asyncio.Task[Answer]]) -> list[Row]:
        done = [await each for each in answers]
        unscored = [samples[-1] for samples, reward in done if reward is None]
        found = iter(await eval_set.score(unscored) if unscored else [])
        rewards = [next(found) if reward is None else reward for _, reward in done]
        return [_row(i, samples, r) for i, ((samples, _), r) in enumerate(zip(done, rewards))]

    rows = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for place in range(len(eval_set.prompts)):
                numbers = range(eval_set.num_samples)
                answers = [tasks.create_task(answer(place, number)) for number in numbers]
                rows.append(tasks.create_task(scored(answers)))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    found = [row for prompt_rows in rows for row in prompt_rows.result()]
    versions = {row["version"] for row in found} - {None}
    if len(versions) > 1:
        raise ValueError(f"answers of several weight versions: {sorted(versions)}")
    if not versions:
        raise ValueError("not one answer has a token, so no weight version was evaluated")
    (only,) = versions
    for row in found:
        row["version"] = only  # of one without a token too
    return found


async def _answer(
    eval_set: EvalSet,
    backend: RolloutBackend,
    version: int | None,
    room: Room,
    place: int,
    number: int,
) -> tuple[list[RolloutSample], float | None]:
    """Play one episode; returns its samples and its own reward, None if it gave none."""
    prompt = eval_set.prompts[place]
    episode_number = place * eval_set.num_samples + number
    sample_id = evaluation_sample(eval_set.name, episode_number * eval_set.samples_per_episode)
    group_id = evaluation_group(place)

    async def generate(
        resume_from: RolloutSample | None = None, turn_limit: int | None = None
    ) -> RolloutSample:
        async with room():
            return await in_segments(resume_from, turn_limit)

    async def in_segments(
        resume_from: RolloutSample | None, turn_limit: int | None
    ) -> RolloutSample:
        sample = resume_from or stitch.begin(prompt, sample_id=sample_id, group_id=group_id)
        sample = replace(sample, group_id=group_id)  # of one that the episode has begun
        while True:
            limit = stitch.shortest(turn_limit, eval_set.segment_len)
            request = stitch.next_request(
                sample, eval_set.sampling, limit=limit, weight_version=version, wants_routes=False
            )
            # the prompts of a set are the same every time: with --no-flush-cache-on-update servers
            # keep them
            segment = await backend.generate(replace(request, fresh_prefix=True))
            if segment.finish_reason == "abort":
                raise EngineError(f"sample {request.name} was aborted")
            if version is not None and (segment.weight_versions != version).any():
                found = sorted(set(segment.weight_versions.tolist()))
                raise ValueError(
                    f"sample {request.name} has weight versions {found}, not {version}"
                )
            sample = stitch.extend(sample, segment)
            if turn_limit is not None:
                turn_limit -= len(segment.token_ids)
            tokens_left = stitch.shortest(stitch.tokens_left(sample, eval_set.sampling), turn_limit)
            if not stitch.is_cut(segment, limit, tokens_left):
                return sample

    episode = eval_set.make_episode(prompt)
    samples, reward = await episode(
        generate, prompt, sampling=eval_set.sampling, sample_id=sample_id
    )
    if not samples[-1].text:
        ids = samples[-1].token_ids[samples[-1].prompt_len :]
        samples[-1] = replace(samples[-1], text=eval_set.decode(ids.tolist()))
    return samples, reward


def _row(number: int, samples: Sequence[RolloutSample], reward: float) -> Row:
    """A row of a whole episode: its last sample has the answer.  The version of one without a token is None."""
    sample = samples[-1]
    versions = sorted({v for s in samples for v in s.weight_versions[s.loss_mask].tolist()})
    if len(versions) > 1:
        raise ValueError(f"sample {sample.sample_id} spans weight versions {versions}")
    return {
        "prompt_id": sample.prompt.prompt_id,
        "sample": number,
        "prompt": sample.prompt.text,
        "label": sample.prompt.label,
        "answer": sample.text,
        "reward": reward,
        "version": versions[0] if versions else None,
        "response_len": sum(int(s.loss_mask.sum()) for s in samples),
        "finish_reason": sample.finish_reason,
    }


def evaluation_metrics(rows: Sequence[Mapping[str, Any]], num_samples: int) -> dict[str, Any]:
    """The numbers of an evaluation, from its rows in order: ``num_samples`` of each prompt.

    The standard error is that of the mean over prompts: answers to one prompt are no independent
    draws.  None with one prompt.  Source: E. Miller, arXiv 2411.00640, clustered standard errors.

    >>> rows = [{"reward": r, "response_len": 4, "finish_reason": "stop"} for r in (1, 0, 1, 1)]
    >>> numbers = evaluation_metrics(rows, 2)
    >>> numbers["mean"], numbers["standard_error"], numbers["pass_at_1"], numbers["pass_at_2"]
    (0.75, 0.25, 0.75, 1.0)
    """
    rewards = np.array([row["reward"] for row in rows], np.float64).reshape(-1, num_samples)
    lengths = np.array([row["response_len"] for row in rows])
    prompt_means = rewards.mean(axis=1)
    spread = (
        prompt_means.std(ddof=1) / np.sqrt(len(prompt_means)) if len(prompt_means) > 1 else None
    )
    return {
        "mean": float(rewards.mean()),
        "standard_error": None if spread is None else float(spread),
        **{f"pass_at_{k}": share for k, share in pass_at_k(rewards).items()},
        "truncated_share": float(np.mean([row["finish_reason"] == "length" for row in rows])),
        "response_len_mean": float(lengths.mean()),
        "response_len_max": int(lengths.max()),
        "num_prompts": len(prompt_means),
        "num_samples": len(rows),
    }
