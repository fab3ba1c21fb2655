"""One answer of the engine for a rollout, gone on with after every update that aborted it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from r3train.rollout.backend import RolloutBackend, SamplingParams
from r3train.rollout.flight import Flight
from r3train.rollout.rates import Rates
from r3train.types import Prompt, RolloutSample


@dataclass(frozen=True)
class Sending:
    """What every turn of a producer shares.  ``version`` is of the servers; ``aborting`` says
    whether an update is aborting requests; ``left`` is called when a place in flight was given
    back.  ``exact_version``: no update lands in mid-answer."""

    backend: RolloutBackend
    sampling: SamplingParams
    flight: Flight
    rates: Rates
    changed: threading.Condition
    version: Callable[[], int]
    aborting: Callable[[], bool]
    left: Callable[[], None]
    exact_version: bool


class Turns:
    """The turns of one rollout (a ``Generate``); made with its first place in flight taken."""

    def __init__(self, sending: Sending, prompt: Prompt, sample_id: int, group_id: int) -> None:
        self._sending = sending
        self._prompt = prompt
        self._sample_id = sample_id
        self._group_id = group_id
        self._held = True

    def release(self) -> None:
        """Give the place in flight back, where it is still held."""
        if self._held:
            self._held = False
            self._sending.left()

    async def __call__(
        self, resume_from: RolloutSample | None = None, turn_limit: int | None = None
    ) -> RolloutSample:
        """One answer.  While an update is under way the place in flight is given back."""
        s = self._sending
        while True:
            if not self._held:
                await s.flight.place_to_go_on()
                self._held = True
            try:
                sample = await s.backend.generate(
                    self._prompt,
                    s.sampling,
                    sample_id=self._sample_id,
                    group_id=self._group_id,
                    weight_version=s.version(),
                    exact_version=s.exact_version,
                    resume_from=resume_from,
                    turn_limit=turn_limit,
                )
                # asked while it is still in flight: afterwards the update may be over
                interrupted = sample.finish_reason == "abort" and s.aborting()
                self._check_newest(sample)
            finally:
                self.release()
            before = resume_from.num_tokens if resume_from else sample.prompt_len
            count = sample.num_tokens - before
            with s.changed:
                s.rates.tokens(count)
                s.rates.resumed += interrupted
            if not interrupted:
                return sample
            if turn_limit is not None:
                turn_limit -= count
            budget = s.sampling.response_budget(sample.prompt_len, self._prompt.prompt_id)
            if budget <= sample.response_len or turn_limit == 0:
                return replace(sample, finish_reason="length")
            resume_from = sample

    def _check_newest(self, sample: RolloutSample) -> None:
        newest, given = int(sample.weight_versions.max(initial=-1)), self._sending.version()
        if newest > given:
            raise ValueError(
                f"sample {sample.sample_id}: a token of weight version {newest}, the servers were "
                f"given {given} at most"
            )
