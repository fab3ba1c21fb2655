"""Samples straight from a client, without a producer."""

from __future__ import annotations

from typing import Any

from r3train.engine.backend import RolloutBackend, SamplingParams
from r3train.generation import stitch
from r3train.types import Prompt, RolloutSample


async def generate(
    backend: RolloutBackend,
    prompt: Prompt,
    sampling: SamplingParams,
    *,
    sample_id: int = 0,
    group_id: int = 0,
    resume_from: RolloutSample | None = None,
    **options: Any,
) -> RolloutSample:
    """One answer as a sample, or added to ``resume_from``; options are those of a request."""
    before = resume_from or stitch.begin(prompt, sample_id=sample_id, group_id=group_id)
    answer = await backend.generate(stitch.next_request(before, sampling, **options))
    return stitch.finished(stitch.extend(before, answer))
