"""What the trainer asks of a rollout engine, and how an engine fails.

The producer and the loop see these protocols alone; ``sglang_client`` is the one implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from r3train.types import Prompt, RolloutSample


class EngineError(RuntimeError):
    """An engine refused a call, answered something malformed, or could not be reached."""


class EngineDied(EngineError):
    """An engine process that this job owns has ended; the message holds its log's tail."""


class EngineUnreachable(EngineError):
    """No connection to an engine, a connection that broke, or no answer in time."""


class AnswerLate(EngineUnreachable):
    """No answer within the time that a request has."""


class AnswerCutShort(EngineUnreachable):
    """An answer whose connection ended before it did."""


class BadAnswer(ValueError):
    """An answer that contradicts itself or the request, ended early or never came: it is not used."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is drawn; the same for every sample of a run.

    ``max_context_len`` bounds prompt plus response, ``seed`` is the run's seed: each sample draws
    with its own seed made from it (see ``sample_seed``).  ``ignore_eos`` also disables
    ``stop_token_ids`` in SGLang.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_context_len: int | None = None
    seed: int = 42

    def response_budget(self, prompt_len: int, prompt_id: str) -> int:
        """Tokens that may follow a prompt, those of an environment included.

        Raises ValueError when the prompt alone fills the context.
        """
        if self.max_context_len is None:
            return self.max_new_tokens
        left = self.max_context_len - prompt_len
        if left < 1:
            raise ValueError(
                f"prompt {prompt_id!r} has {prompt_len} tokens: rollout_max_context_len "
                f"{self.max_context_len} leaves no room for a response"
            )
        return min(self.max_new_tokens, left)


_MASK64 = (1 << 64) - 1


def sample_seed(run_seed: int, sample_id: int) -> int:
    """A 31-bit seed of one sample: splitmix64 of (run seed, sample id).

    31 bits, because SGLang hashes the seed with 32-bit arithmetic on some devices.
    """
    x = (run_seed * 0x9E3779B97F4A7C15 + sample_id * 0xD1B54A32D192ED03 + 1) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (x ^ (x >> 31)) & 0x7FFFFFFF


@runtime_checkable
class RolloutBackend(Protocol):
    """Generation, and the few control calls that generation needs around a weight update."""

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        sample_id: int,
        group_id: int,
        weight_version: int | None = None,
        exact_version: bool = True,
        resume_from: RolloutSample | None = None,
        turn_limit: int | None = None,
    ) -> RolloutSample:
        """Draw one response, or the rest of one.

        ``weight_version`` is the version that every new token must carry; with ``exact_version``
        False an update may land in mid-generation, and it is the oldest one.  ``resume_from``
        holds all tokens so far; what comes is added to it.  ``turn_limit`` bounds the new tokens
        below what the whole response may still take.  Raises EngineError or ValueError naming the
        sample.
        """
        ...

    async def pause_generation(self, mode: str = "in_place") -> None: ...

    async def continue_generation(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def abort(self, rid: str | None = None) -> None:
        """Abort one request, or all of them when ``rid`` is None."""
        ...

    async def aclose(self) -> None: ...
