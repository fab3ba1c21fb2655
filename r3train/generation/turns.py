"""One answer of the engine for a rollout, gone on with after every update that aborted it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from r3train.engine.backend import RolloutBackend, SamplingParams
from r3train.generation import stitch
from r3train.generation.flight import Flight
from r3train.generation.rates import Rates
from r3train.types import Prompt, RolloutSample


@dataclass(frozen=True)
class Sending:
    """What every turn of a producer shares.  ``version`` is of the servers; ``aborting`` says
    whether an update is aborting requests; ``left`` is called when a place in flight was given
    back.  ``exact_version``: no update lands in mid-answer.  ``segment_len``: tokens asked for at once;
    a longer answer comes in several, and those that came outlive their server."""

    backend: RolloutBackend
    sampling: SamplingParams
    flight: Flight
    rates: Rates
    changed: threading.Condition
    version: Callable[[], int]
    aborting: Callable[[], bool]
    left: Callable[[], None]
    exact_version: bool
    segment_len: int | None = None
    decode: Callable[[RolloutSample], str] = lambda sample: ""


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
        """One answer.  While an update is under way the place in flight is given back, and between
        the segments of an answer it is kept."""
        s = self._sending
        while True:
            if not self._held:
                await s.flight.place_to_go_on()
                self._held = True
            before = resume_from or stitch.begin(
                self._prompt, sample_id=self._sample_id, group_id=self._group_id
            )
            asked, goes_on = self._at_once(turn_limit), False
            began = time.monotonic()
            request = stitch.next_request(
                before,
                s.sampling,
                limit=asked,
                weight_version=s.version(),
                exact_version=s.exact_version,
            )
            try:
                sample = stitch.extend(before, await s.backend.generate(request))
                waited_s = before.generation_s + time.monotonic() - began
                sample = replace(sample, generation_s=waited_s, text=s.decode(sample))
                count = sample.num_tokens - before.num_tokens
                if turn_limit is not None:
                    turn_limit -= count
                unfinished = (
                    sample.finish_reason == "length"
                    and count == asked
                    and self._left(sample, turn_limit) > 0
                )
                # asked while it is still in flight: afterwards the update may be over
                interrupted = s.aborting() and (unfinished or sample.finish_reason == "abort")
                self._check_newest(sample)
                goes_on = unfinished and not interrupted
            finally:
                if not goes_on:
                    self.release()
            with s.changed:
                s.rates.tokens(count)
                s.rates.resumed += interrupted
            if not (interrupted or goes_on):
                return sample
            if self._left(sample, turn_limit) <= 0:
                return replace(sample, finish_reason="length")
            resume_from = sample

    def _at_once(self, turn_limit: int | None) -> int | None:
        """How many tokens the next request asks for; None is all that may follow."""
        limits = [n for n in (turn_limit, self._sending.segment_len) if n is not None]
        return min(limits, default=None)

    def _left(self, sample: RolloutSample, turn_limit: int | None) -> int:
        """Tokens that may still follow in this answer."""
        left = stitch.tokens_left(sample, self._sending.sampling)
        return left if turn_limit is None else min(left, turn_limit)

    def _check_newest(self, sample: RolloutSample) -> None:
        newest, given = int(sample.weight_versions.max(initial=-1)), self._sending.version()
        if newest > given:
            raise ValueError(
                f"sample {sample.sample_id}: a token of weight version {newest}, the servers were "
                f"given {given} at most"
            )
