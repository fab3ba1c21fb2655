"""The course of one episode: one turn, or a conversation with an environment."""

from __future__ import annotations

from typing import Protocol

from r3train.generation import stitch
from r3train.engine.backend import SamplingParams
from r3train.types import Prompt, RolloutSample


class Generate(Protocol):
    """Generates one answer of the engine, resumed after each weight update that interrupts it."""

    async def __call__(
        self, resume_from: RolloutSample | None = None, turn_limit: int | None = None
    ) -> RolloutSample: ...


class Episode(Protocol):
    """Makes one episode: its samples and its reward, None if the text is to be scored."""

    async def __call__(
        self, generate: Generate, prompt: Prompt, *, sampling: SamplingParams, sample_id: int
    ) -> tuple[list[RolloutSample], float | None]: ...


class EpisodeDropped(Exception):
    """An episode that cannot be trained: its group is replaced.  reason: the end of the outcome dropped_REASON."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


async def generate_once(
    generate: Generate, prompt: Prompt, *, sampling: SamplingParams, sample_id: int
) -> tuple[list[RolloutSample], float | None]:
    """Make an episode of one turn."""
    return [stitch.finished(await generate())], None
