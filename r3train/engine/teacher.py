"""A teacher that SGLang serves: log-probs of samples (--opd-type sglang)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from r3train.engine.backend import EngineError
from r3train.engine.score import GivenText, score
from r3train.engine.sglang_http import HTTPSettings, SGLangHTTP
from r3train.types import RolloutSample

logger = logging.getLogger(__name__)

# environment variable with the key of --opd-teacher-url
TEACHER_KEY = "R3TRAIN_TEACHER_API_KEY"
PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
# ids of one question about the vocabulary
_IDS = 16384


class ServedTeacher:
    """Scores samples, ``max_concurrency`` at once (implements ``Teacher``); for one event loop.

    A request that fails, is late or has a bad answer is sent again after a growing pause, until
    ``max_tries`` have failed.  Raises ValueError for a URL without a port.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        request_timeout_s: float,
        max_concurrency: int,
        max_tries: int,
    ) -> None:
        settings = HTTPSettings(api_key=api_key, request_timeout_s=request_timeout_s)
        self._http = SGLangHTTP([url], settings, key_variable=TEACHER_KEY)
        self._slots = asyncio.Semaphore(max_concurrency)
        self._max_tries = max_tries
        self._requests = itertools.count()
        self._name = f"r3train-teacher-{secrets.token_hex(4)}"

    async def __call__(self, sample: RolloutSample) -> RolloutSample:
        """Return the sample with the teacher's log-probs, at temperature 1, of its loss tokens.

        The text before the first of them may come from the server's prefix cache.  Raises RuntimeError
        naming teacher and sample.
        """
        log_probs = np.zeros(sample.num_tokens, np.float32)
        response = np.flatnonzero(sample.loss_mask)
        if len(response):
            start = int(response[0]) - 1  # its row predicts the first
            assert start >= 0, f"sample {sample.sample_id} begins with a token of the model"
            scored = await self._scored(sample, start)
            log_probs[start:] = np.where(sample.loss_mask[start:], scored, 0)
        return replace(sample, teacher_log_probs=log_probs)

    async def _scored(self, sample: RolloutSample, start: int) -> np.ndarray:
        """Log-probs of tokens ``start``.. of the sample, float32[T - start]; 0 for the first of them."""
        name = f"{sample.sample_id} (prompt {sample.prompt.prompt_id!r})"
        text = GivenText(sample.token_ids, name, log_probs_from=start)
        for count in range(1, self._max_tries + 1):
            try:
                rid = f"{self._name}-{sample.sample_id}-{next(self._requests)}."
                async with self._slots:
                    return (await score(self._http, 0, text, rid)).log_probs
            except (EngineError, ValueError) as error:
                words = f"teacher {self._http.urls[0]}: {error} (try {count} of {self._max_tries})"
                if count == self._max_tries:
                    # no EngineError: a restart of the run's local servers would not fix it
                    raise RuntimeError(words) from error
                logger.warning("asked again: %s", words)
            await asyncio.sleep(min(PAUSE_S * 2 ** (count - 1), _LONGEST_PAUSE_S))
        raise AssertionError("max_tries is below 1")

    async def check_vocabulary(
        self, decode: Callable[[Sequence[int]], str], vocabulary: Sequence[int]
    ) -> None:
        """Raise ValueError unless the teacher's tokenizer decodes every id as ``decode`` does.

        vocabulary: the ids.  Raises EngineError where the server does not answer as SGLang would.
        """
        for first in range(0, len(vocabulary), _IDS):
            ids = [[int(token)] for token in vocabulary[first : first + _IDS]]
            body = {"model": "", "tokens": ids, "skip_special_tokens": False}
            answer = await self._http.call(0, "/detokenize", body, what="detokenize")
            texts = answer.get("text") if isinstance(answer, Mapping) else None
            if not isinstance(texts, list) or len(texts) != len(ids):
                raise EngineError(
                    f"detokenize: {str(answer)[:200]!r}, expected {len(ids)} texts; a teacher must be"
                    " started with its tokenizer"
                )
            for (token,), teacher_text in zip(ids, texts):
                if (student_text := decode([token])) != teacher_text:
                    raise ValueError(
                        f"teacher {self._http.urls[0]}: its tokenizer is another one: token {token} is"
                        f" {teacher_text!r} there and {student_text!r} here"
                    )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()
