"""One episode: its calls, each with a slot in flight while its requests run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import EngineError, sample_seed, SamplingParams, Segment
from r3train.generation import stitch
from r3train.generation.buffer import Group
from r3train.generation.episode import Episode, generate_once
from r3train.generation.recheck import Rechecking, Unbroken
from r3train.generation.shared import Shared, Slots
from r3train.generation.update_gate import UpdateGate
from r3train.types import Prompt, RolloutSample

# A request that is retracted so often in a row ends the run.  Each time it waits for half of the requests that
# may be in flight: KV pools that retract it even then hold less than half of what all of these need.
_MAX_RETRACTIONS = 3


@dataclass(frozen=True)
class RequestSettings:
    """Settings of the requests for answers.

    segment_len: bounds the tokens of one request: a longer answer takes several requests, and the tokens
    of finished ones survive a lost server.  versions_stay: servers keep a version next to newer ones, so an
    answer ends on the version on which it began.  pool_facts: says how much the servers' KV pools hold and
    how much the requests need, for the error of a request that is retracted again and again.
    """

    sampling: SamplingParams
    segment_len: int | None = None
    versions_stay: bool = False
    pool_facts: str | None = None


async def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Episodes:
    """Settings of the episodes that are made of answers.

    make: makes the ``Episode`` of a prompt; without it an episode is one answer.  decode: gives the text of
    response tokens.  keep_decoded: samples keep the decoded rows of each answer, for the evidence.
    samples: sample ids that an episode may take.  most: episodes at once, and as many of an evaluation, which then hold a slot
    during their calls only; None: an episode begins with a slot.  stats: counts of the episodes so far.  close: ends what they
    share, after the last of them.
    """

    make: Callable[[Prompt], Episode] = lambda prompt: generate_once
    decode: Callable[[Sequence[int]], str] = lambda token_ids: ""
    keep_decoded: bool = False
    samples: int = 1
    most: int | None = None
    stats: Callable[[], Mapping[str, Any]] = dict
    close: Callable[[], Awaitable[None]] = _nothing

    def with_text(self, sample: RolloutSample) -> RolloutSample:
        """The sample with the text of its response, if its episode gave it none."""
        if sample.text:
            return sample
        return replace(sample, text=self.decode(sample.token_ids[sample.prompt_len :].tolist()))


@dataclass(frozen=True)
class Parts:
    """The parts of a producer that its episodes use."""

    rollout: RolloutSection
    request_settings: RequestSettings
    episodes: Episodes
    shared: Shared
    slots: Slots
    gate: UpdateGate
    rechecking: Rechecking


class EpisodeTask:
    """One episode to make or to resume: sample number ``place`` of one attempt at a group.

    It is the ``Generate`` of its episode; each call holds a slot of its own while its requests run.
    """

    def __init__(self, parts: Parts, group: Group, place: int) -> None:
        rollout = parts.rollout
        self._parts = parts
        self.group = group
        self.place = place
        number = group.group_id * rollout.n_samples_per_prompt + place
        self.sample_id = number * parts.episodes.samples
        self.episode = parts.episodes.make(group.prompt)
        self.unbroken: defaultdict[int, Unbroken] = defaultdict(Unbroken)  # by sample id
        self._reserved = False  # a slot, for the first call

    def reserve_slot(self) -> None:
        """Take a free slot for the episode's first call."""
        self._reserved = True
        self._parts.slots.take()

    def release(self) -> None:
        """Give the reserved slot back if no call has taken it over."""
        if self._take_over():
            self._parts.slots.give_back()

    def _take_over(self) -> bool:
        reserved, self._reserved = self._reserved, False
        return reserved

    async def make(self) -> tuple[list[RolloutSample], float | None]:
        """Make the episode; return its samples and its reward, None if it gave none."""
        try:
            return await self.episode(
                self,
                self.group.prompt,
                sampling=self._parts.request_settings.sampling,
                sample_id=self.sample_id,
            )
        finally:
            self.release()

    async def __call__(
        self, resume_from: RolloutSample | None = None, turn_limit: int | None = None
    ) -> RolloutSample:
        """Generate one answer, resumed after every update that aborted it."""
        group = self.group.group_id
        sample = resume_from or stitch.begin(
            self.group.prompt, sample_id=self.sample_id, group_id=group
        )
        sample = replace(sample, group_id=group)  # of one that the episode has begun
        return await _Call(self, self._parts, self._take_over()).answer(sample, turn_limit)

    def to_recheck(self, samples: Sequence[RolloutSample]) -> RolloutSample:
        """Choose the sample to recheck, by the episode's id and the run's seed.

        With a single request the last sample is chosen: it contains all tokens.
        """
        if len(self.unbroken) <= 1:
            return samples[-1]
        seed = self._parts.rollout.rollout_seed
        return samples[sample_seed(seed, self.sample_id) % len(samples)]

    def part_of(self, sample: RolloutSample) -> Unbroken:
        """The last part of a sample that one weight version computed; samples of one turn share the episode's."""
        shares_part = sample.sample_id not in self.unbroken
        return self.unbroken[self.sample_id if shares_part else sample.sample_id]


class _Call:
    """One answer of an episode: its slot in flight, and how often servers retracted it in a row."""

    def __init__(self, task: EpisodeTask, parts: Parts, has_slot: bool) -> None:
        self._task = task
        self._parts = parts
        self._has_slot = has_slot
        self._retracted = 0

    async def answer(self, sample: RolloutSample, turn_limit: int | None) -> RolloutSample:
        """Generate until the answer ends, in as many requests as updates and segments cut it into.

        Under R3 the answer to a request that a server retracted is thrown away, and the same tokens
        are asked for again.  Earlier answers of the episode came with their own rows and stay.  The slot
        is kept between the segments of an answer; it is given back where an update aborts the answer, or has frozen
        the servers when the request was retracted.
        """
        try:
            return await self._requests(sample, turn_limit)
        finally:
            self._release()

    async def _requests(self, sample: RolloutSample, turn_limit: int | None) -> RolloutSample:
        settings, shared, gate = self._parts.request_settings, self._parts.shared, self._parts.gate
        version = shared.version
        while True:
            await self._wait_for_slot()
            if not settings.versions_stay:
                version = shared.version
            limit = stitch.shortest(turn_limit, settings.segment_len)
            request = stitch.next_request(
                sample,
                settings.sampling,
                limit=limit,
                weight_version=version,
                exact_version=not gate.mode_freezes,
            )
            if gate.mode_freezes and request.rows_start == 0:  # no row is of an earlier version
                self._parts.rechecking.sent(self._task.group, self._task.place, request)
            continues, began = False, time.monotonic()
            try:
                segment = await shared.backend.generate(request)
                self._check_newest(segment.weight_versions.max(initial=-1))
                shared.counts.add(segment.drafts)
                again = self._is_retracted(segment)
                count = 0 if again else len(segment.token_ids)
                if not again:
                    self._task.unbroken[sample.sample_id].answered(request, segment)
                    sample = stitch.extend(sample, segment)
                waited_s = sample.generation_s + time.monotonic() - began
                sample = replace(sample, generation_s=waited_s)
                if turn_limit is not None:
                    turn_limit -= count
                tokens_left = stitch.shortest(
                    stitch.tokens_left(sample, settings.sampling), turn_limit
                )
                unfinished = again or stitch.is_cut(segment, limit, tokens_left)
                # checked while the slot is held: once it is given back, the update may end
                interrupted = gate.aborting and (unfinished or segment.finish_reason == "abort")
                # a retracted answer is computed afresh, which a frozen server would do with older weights; a cut one
                # goes on as the mode means it
                interrupted |= gate.frozen and again
                continues = unfinished and not interrupted
            finally:
                if not continues:
                    self._release()
            shared.counts.generated_tokens += count
            shared.counts.resumed_episodes += interrupted and not again
            if not (interrupted or continues):
                return sample
            if tokens_left <= 0:
                return replace(sample, finish_reason="length")

    async def _wait_for_slot(self) -> None:
        slots, gate = self._parts.slots, self._parts.gate
        if not self._has_slot:
            await slots.wait_for_free_slot(lambda: gate.open)
            self._has_slot = True
            slots.take()
        if self._retracted:
            await slots.memory_for_retracted(lambda: not gate.frozen)

    def _release(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._parts.slots.give_back()

    def _is_retracted(self, segment: Segment) -> bool:
        """Count an answer that a server retracted; True if it must not be kept.

        Its rows come from the forwards that computed the request again, its log-probs from the first.
        Raises EngineError after too many in a row.
        """
        parts, task = self._parts, self._task
        parts.shared.counts.retracted_answers += segment.num_retractions > 0
        if segment.num_retractions == 0 or segment.rows is None:
            self._retracted = 0
            return False
        if parts.rollout.retraction_policy == "accept":
            return False
        self._retracted += 1
        if self._retracted == _MAX_RETRACTIONS:
            facts = (
                f": {parts.request_settings.pool_facts}"
                if parts.request_settings.pool_facts
                else ""
            )
            raise EngineError(
                f"sample {task.sample_id} (prompt {task.group.prompt.prompt_id!r}) was retracted by"
                f" its server {_MAX_RETRACTIONS} times in a row{facts}; lower"
                " --rollout-max-concurrency, or give the servers more memory"
                " (--sglang-mem-fraction-static, --sglang-max-total-tokens)"
            )
        return True

    def _check_newest(self, newest: int) -> None:
        newest_version = self._parts.shared.version
        if newest > newest_version:
            raise ValueError(
                f"sample {self._task.sample_id}: a token of weight version {newest}, the servers "
                f"were given {newest_version} at most"
            )
