"""Rewards that another process computes, over HTTP: a reward server, or a language model as judge."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from r3train.config.data_settings import DataSection
from r3train.rewards.reward import Reward
from r3train.types import RolloutSample

logger = logging.getLogger(__name__)

_BACKOFF_S, _LONGEST_BACKOFF_S = 0.25, 8.0
# of an answer that is quoted in a message
_QUOTED = 300
# of an answer: a judge's completion is the longest
_MOST_BYTES = 16 << 20
_FIELD = re.compile(r"\{(prompt|response|label)\}")


class _HttpReward(Reward):
    """A reward that is asked for over HTTP; the other side judges the label."""

    num_tried = 0

    def __init__(self, url: str, timeout_s: float, key: str | None = None) -> None:
        self._url, self._timeout_s = url, timeout_s
        # a compressed answer could be a thousand times as long as what is received
        self._headers = {"Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._calls = 0  # that use it

    @asynccontextmanager
    async def _connections(self) -> AsyncIterator[aiohttp.ClientSession]:
        """The session of all calls that run at once: the first opens it, and the last closes it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                auto_decompress=False,
            )
        self._calls += 1
        try:
            yield self._session
        finally:
            self._calls -= 1
            if self._calls == 0:
                session, self._session = self._session, None
                await session.close()

    async def _post(self, sample: RolloutSample, body: dict[str, Any]) -> Any:
        """Return the answer to a sample's body, as ``_answer`` does."""
        async with self._connections() as session:
            return await self._answer(session, sample, body)

    async def _answer(
        self, session: aiohttp.ClientSession, sample: RolloutSample, body: dict[str, Any]
    ) -> Any:
        """Post JSON until it is answered; returns the answer's JSON.

        Tries again with growing pauses after a lost connection, a status above 499, 408 or 429.
        Raises ValueError with the last failure after the bound, and for any other status (a redirect is not
        followed) and for an answer that is compressed or longer than 16 MiB.
        """
        about = f"prompt {sample.prompt.prompt_id}: {self.name} {self._url}"
        began, tries, failure = time.monotonic(), 0, "no answer"
        while (seconds_left := self._timeout_s - (time.monotonic() - began)) > 0:
            tries += 1
            try:
                limit = aiohttp.ClientTimeout(total=seconds_left)
                async with session.post(
                    self._url, json=body, allow_redirects=False, timeout=limit
                ) as response:
                    raw = await _body(response)
                    if response.status == 200:
                        return json.loads(raw)
                    text = raw.decode(errors="replace")[:_QUOTED]
                    failure = f"status {response.status}: {text}"
                    if 300 <= response.status < 400:
                        target = response.headers.get("Location", "nowhere")[:_QUOTED]
                        failure = (
                            f"status {response.status}, a redirect to {target!r}, which is not"
                            " followed"
                        )
                    if response.status < 500 and response.status not in (408, 429):
                        break
            except TimeoutError:
                failure = "no answer"
            except (aiohttp.ClientError, OSError) as error:
                failure = f"{type(error).__name__}: {error}"
            except _Refused as error:
                failure = str(error)
                break
            except ValueError as error:  # not JSON
                failure = f"the answer is not JSON: {error}"
                break
            await asyncio.sleep(
                min(_BACKOFF_S * 2 ** (tries - 1), _LONGEST_BACKOFF_S, max(seconds_left, 0))
            )
        raise ValueError(
            f"{about}: {failure} (sample {sample.sample_id}; {tries} tries in"
            f" {time.monotonic() - began:.1f} s, reward_timeout_s {self._timeout_s:g})"
        )


class _Refused(Exception):
    """A body that is not read."""


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Read a body of at most 16 MiB that is not compressed; raises _Refused for another."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise _Refused(
            f"the answer has Content-Encoding {encoding[:100]!r}, and none was asked for"
        )
    parts, num_bytes = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        if (num_bytes := num_bytes + len(part)) > _MOST_BYTES:
            raise _Refused(f"the answer is longer than {_MOST_BYTES} bytes")
    return b"".join(parts)


class RemoteReward(_HttpReward):
    """The number, or the table, that a server answers (--rm-url).

    It is posted ``{"prompt", "response", "label", "metadata"}``, as slime posts it.
    """

    name = "remote_rm"

    def __init__(self, data: DataSection) -> None:
        if data.rm_url is None:
            raise ValueError("--rm-type remote_rm needs --rm-url")
        super().__init__(data.rm_url, data.reward_timeout_s)

    async def __call__(self, sample: RolloutSample) -> Any:
        """Ask the server for a sample's reward."""
        prompt = sample.prompt
        body = {"prompt": prompt.text, "response": sample.text, "label": prompt.label}
        return await self._post(sample, body | {"metadata": prompt.metadata})


class JudgeReward(_HttpReward):
    """The number that a language model gives, at an OpenAI-compatible endpoint (--judge-url).

    The reward is the last match of --judge-pattern in the model's answer, 0 without one.
    """

    name = "llm_judge"

    def __init__(self, data: DataSection, key: str | None) -> None:
        if data.judge_url is None:
            raise ValueError("--rm-type llm_judge needs --judge-url")
        if data.judge_model is None:
            raise ValueError("--rm-type llm_judge needs --judge-model")
        url = data.judge_url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        super().__init__(url, data.reward_timeout_s, key)
        self._data = data

    async def __call__(self, sample: RolloutSample) -> float:
        """Ask the judge for a sample's reward."""
        data, prompt = self._data, sample.prompt
        filled = {"prompt": prompt.text, "response": sample.text, "label": str(prompt.label)}
        # in one pass: a response that contains "{label}" must not be filled in
        content = _FIELD.sub(lambda field: filled[field[1]], data.judge_template)
        answer = await self._post(
            sample,
            {
                "model": data.judge_model,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": data.judge_max_tokens,
            },
        )
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
            if isinstance(text, list):  # of parts
                text = "".join(part["text"] for part in text)
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"prompt {prompt.prompt_id}: llm_judge {self._url}: no completion in the answer"
                f" {str(answer)[:_QUOTED]}"
            ) from None
        found = re.findall(data.judge_pattern, text)
        try:
            number, _, of = found[-1].replace("%", "/100").partition("/")
            return float(number) / float(of or 1)
        except (IndexError, ValueError, ZeroDivisionError):
            is_cut = choice.get("finish_reason") == "length"
            logger.warning(
                "prompt %s: the judge's answer has no score and counts 0%s: ...%r",
                prompt.prompt_id,
                f": it was cut at --judge-max-tokens {data.judge_max_tokens}" if is_cut else "",
                text[-_QUOTED:],
            )
            return 0.0
