"""A session with an engine whose every row and log-prob say which tokens they were computed from."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tests.unit.data.test_replies import tokenizer
from tests.unit.data.test_session_templates import CHATML

from r3train.chat.base import ChatRequest, Parsed
from r3train.config.data_settings import DataSection
from r3train.data.templates import ChatTemplate, SessionTemplate
from r3train.engine.backend import Segment, SamplingParams
from r3train.generation import stitch
from r3train.generation.sessions import Session, SessionSettings
from r3train.types import Prompt, RolloutSample

PROMPT = Prompt("p:1", 0, "", np.zeros(1, np.int32), label="x")
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def row_of(tokens: np.ndarray) -> np.ndarray:
    """The row of the last of these tokens, uint8[2, 3]: it depends on all of them."""
    seen = zlib.crc32(np.ascontiguousarray(tokens, np.int32))
    return np.array([(seen >> shift) % 251 for shift in (0, 5, 9, 13, 17, 21)], np.uint8).reshape(
        2, 3
    )


def log_prob_of(tokens: np.ndarray) -> float:
    return np.float32(-(zlib.crc32(np.ascontiguousarray(tokens, np.int32)) % 1000) / 100)


class Engine:
    """Answers with the tokens that it is told, else with noise; a ``Generate``.

    answers: texts of the next answers.  gates: events that requests wait for, by the number of the request.
    """

    def __init__(self, words, seed: int = 0, most: int = 9) -> None:
        self.words, self.random, self.most = words, np.random.default_rng(seed), most
        self.answers: list[str] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.errors: dict[int, BaseException] = {}
        self.asked: list[tuple[np.ndarray, int | None]] = []
        self.version = 0
        self.rest_of_answer: list[int] = []  # of an answer that is asked for in pieces
        self.end = words.encode("<|end|>")[0]

    async def __call__(
        self, resume_from: RolloutSample | None = None, turn_limit: int | None = None
    ) -> RolloutSample:
        number, before = len(self.asked), resume_from
        self.asked.append((before.token_ids, turn_limit))
        if gate := self.gates.get(number):
            await gate.wait()
        if number in self.errors:
            raise self.errors[number]
        answer_tokens = self.rest_of_answer or self._answer()
        answer_tokens, self.rest_of_answer = answer_tokens[:turn_limit], answer_tokens[turn_limit:]
        return stitch.extend(before, self.segment(before, answer_tokens))

    def _answer(self) -> list[int]:
        if self.answers:
            return self.words.encode(self.answers.pop(0))
        answer_tokens = self.random.integers(0, 256, self.random.integers(1, self.most)).tolist()
        return answer_tokens + [self.end] * int(self.random.integers(0, 4) > 0)

    def segment(self, before: RolloutSample, answer_tokens: list[int]) -> Segment:
        tokens = np.concatenate([before.token_ids, answer_tokens]).astype(np.int32)
        first, start = stitch.rows_known(before), before.num_tokens
        rows = [row_of(tokens[: t + 1]) for t in range(first, len(tokens) - 1)]
        return Segment(
            token_ids=tokens[start:],
            log_probs=np.array(
                [log_prob_of(tokens[:t]) for t in range(start, len(tokens))], np.float32
            ),
            weight_versions=np.full(len(answer_tokens), self.version, np.int32),
            rows=np.stack(rows),
            rows_start=first,
            finish_reason="stop" if answer_tokens[-1] == self.end else "length",
        )


async def read(text: str, tools: Sequence[dict]) -> Parsed:
    """(thought) words [name {json}] as thoughts, words and one call."""
    reasoning = None
    if text.startswith("(") and ")" in text:
        reasoning, _, text = text[1:].partition(")")
    if tools and text.endswith("]") and "[" in text:
        words, _, call = text[:-1].rpartition("[")
        name, _, arguments = call.partition(" ")
        try:
            json.loads(arguments)
        except ValueError:
            return Parsed(text, reasoning)
        return Parsed(words, reasoning, ({"name": name, "arguments": arguments},))
    return Parsed(text, reasoning)


class Play:
    """A session under test."""

    def __init__(self, template: str = CHATML, seed: int = 0, **settings) -> None:
        self.words = tokenizer(template)
        chat = ChatTemplate(self.words, DataSection(prompt_data="p.jsonl"))
        self.engine = Engine(self.words, seed)
        self.failures: list[BaseException] = []
        self.settings = SessionSettings(
            **{
                "template": SessionTemplate.of(chat),
                "read": read,
                "decode": lambda ids: self.words.decode(ids, skip_special_tokens=False),
                "sampling": SamplingParams(max_new_tokens=4000),
                "max_context_len": 5000,
                "history": "append",
                "max_calls": 64,
                "max_answer_len": None,
            }
            | settings
        )
        self.session = Session(self.settings, self.engine, PROMPT, 640, fail=self.failures.append)

    async def ask(self, messages: list[dict], *, tools=(), delivered=True, **more) -> dict:
        """The answer's message; delivered None leaves it open."""
        request = ChatRequest(messages, b"", tools=tools, **more)
        answer, commit = await self.session.answer(request)
        if delivered is not None:
            commit(delivered)
        return answer.message

    def text(self, tokens) -> str:
        return self.words.decode(tokens)


def assert_sound(samples: Sequence[RolloutSample]) -> None:
    """Every row and every log-prob is that of one prefill of the sample's final tokens."""
    for sample in samples:
        tokens = sample.token_ids
        expected = np.stack([row_of(tokens[: t + 1]) for t in range(len(tokens) - 1)])
        np.testing.assert_array_equal(sample.routed_experts, expected)
        np.testing.assert_array_equal(np.concatenate([r for _, r in sample.decoded]), expected)
        for t in np.flatnonzero(sample.loss_mask):
            assert sample.rollout_log_probs[t] == log_prob_of(tokens[:t])


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def without(message: dict, *names: str) -> dict:
    return {key: value for key, value in message.items() if key not in names}


__all__ = ["Engine", "Play", "TOOLS", "assert_sound", "replace", "user", "without"]
