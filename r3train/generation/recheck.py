"""Random samples rechecked by the servers, while these still hold the samples' weights.

A sample is chosen before it is generated.  When its answer is complete it goes back to its server as a
prompt, in the background: no request for tokens ever waits for it.  At a weight update it may go on
while tokens are generated, and on servers that stand idle for a share of the time, which is that
of the samples.  What is not done by then is missed.  A request that an update freezes (in_place) ends with
the rows of two versions, which nobody can compute again afterwards; its prompt is therefore rechecked
 when it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, KW_ONLY, replace
from functools import lru_cache

import numpy as np

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import EngineError, Request, RolloutBackend, SamplingParams, Segment
from r3train.generation import stitch
from r3train.generation.buffer import Group
from r3train.generation.shared import Counts
from r3train.ids import NO_GROUP, NOISE_SAMPLES
from r3train.types import Prompt, Rechecked, RecheckPart, RecheckedRollout, RolloutSample

logger = logging.getLogger(__name__)

# samples of which each server's rounding is measured, and their tokens
_NOISE_SAMPLES, _NOISE_TOKENS = 8, 64
_LATEST = 8 * _NOISE_SAMPLES  # of 8 servers
# at a weight update, and when a rollout is judged
AWAITED_S = 5.0


class Unbroken:
    """The last part of an episode that one weight version computed from its first request on."""

    def __init__(self) -> None:
        self.first: Request | None = None
        self.server = 0

    def answered(self, request: Request, segment: Segment) -> None:
        """Note an answer.  One that carries other versions than it was sent under breaks the part."""
        if len(segment.token_ids) == 0:
            return
        if (segment.weight_versions != request.weight_version).any():
            self.first = None
        elif self.first is None or self.first.weight_version != request.weight_version:
            self.first = request
        self.server = segment.server


@dataclass(eq=False)
class Rechecking:
    """Computes a ``share`` of the samples again; for the producer's event loop.

    Samples are numbered in blocks of ``rollout_batch_size`` groups, which are the rollouts unless
    groups are filtered.  Of each block at least one is chosen, by the block's number and the run's
    seed; none without a share.  ``versions_stay``: servers can compute with an older version next to the newest.
    ``samples_per_episode``: sample ids that each of these samples may take.
    """

    rollout: RolloutSection
    share: float
    counts: Counts
    _: KW_ONLY
    versions_stay: bool = False
    samples_per_episode: int = 1

    def __post_init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], Group] = {}
        self._closed = False
        self._opened = time.monotonic()
        self._noise: list[tuple[RolloutSample, Rechecked]] = []
        self._measured: set[int] = set()  # servers
        self._chosen = lru_cache(maxsize=64)(self._chosen_of_block)

    def _chosen_of_block(self, block: int) -> frozenset[int]:
        samples = self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt
        count = max(1, round(self.share * samples)) if self.share else 0
        random = np.random.default_rng([self.rollout.rollout_seed, block])
        return frozenset(random.choice(samples, count, replace=False).tolist())

    def chosen(self, group_id: int) -> list[int]:
        """The places of a group whose samples are rechecked."""
        block, at = divmod(group_id, self.rollout.rollout_batch_size)
        first = at * self.rollout.n_samples_per_prompt
        places = range(self.rollout.n_samples_per_prompt)
        return [place for place in places if first + place in self._chosen(block)]

    async def open(
        self,
        backend: RolloutBackend,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        version: int,
    ) -> None:
        """Measure the rounding of every server by samples taken there and rechecked; before anything else.

        One that joins later is measured before it first rechecks a sample.
        """
        self._backend, self._prompts = backend, prompts
        # the log-probs of a prefill are those of the whole vocabulary
        self._sampling = replace(sampling, mask_vocab=None)
        servers = backend.servers()
        self._turn = asyncio.Semaphore(max(1, len(servers)))
        await asyncio.gather(*(self._measure(server, version) for server in servers))

    async def _measure(self, server: int, version: int) -> None:
        """Measure a server, once: its noise is that of its first weights here."""
        if server in self._measured:
            return
        self._measured.add(server)
        # of those that have left the latest stay: samples of theirs may still be to be judged
        present, latest = {server, *self._backend.servers()}, self._noise[-_LATEST:]
        earlier = [pair for pair in self._noise[:-_LATEST] if pair[1].server in present]
        self._noise = earlier + latest
        self._measured &= present  # one that is out of use for a while is measured again
        numbers = range(_NOISE_SAMPLES)
        calls = [self._sampled_twice(version, server, number) for number in numbers]
        try:
            results = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:
            self._measured.discard(server)
            raise
        for done in results:
            if isinstance(done, (EngineError, ValueError)):
                logger.warning("the noise between decode and prefill was not measured: %s", done)
            elif isinstance(done, BaseException):
                raise done
            else:
                self._noise.append(done)

    async def _sampled_twice(
        self, version: int, server: int, number: int
    ) -> tuple[RolloutSample, Rechecked]:
        prompt = self._prompts[number % len(self._prompts)]
        sample = stitch.begin(prompt, sample_id=NOISE_SAMPLES + number, group_id=NO_GROUP)
        request = stitch.next_request(
            sample, self._sampling, limit=_NOISE_TOKENS, weight_version=version
        )
        segment, again = await self._backend.score_twice(request, server)
        return stitch.finished(stitch.extend(sample, segment)), again

    def sent(self, group: Group, place: int, request: Request) -> None:
        """Compute the prompt of a request again that an update may freeze."""
        if place in self.chosen(group.group_id):
            self._start(group, replace(request, rows_start=0), "prompt", None)

    def finished(
        self, group: Group, place: int, sample: RolloutSample, part: Unbroken, version: int
    ) -> None:
        """Compute a complete sample again, or its last part, if the servers hold its version.

        sample: of an episode's samples one that holds all tokens of the part's request.
        """
        first = part.first
        if first is None or (first.weight_version != version and not self.versions_stay):
            return
        if first.rows_start >= sample.num_tokens - 1:  # of an agent's sample that was cut before it
            return
        if place in self.chosen(group.group_id):
            request = replace(first, sample_id=sample.sample_id, token_ids=sample.token_ids)
            name: RecheckPart = "last" if first.rows_start else "whole"
            self._start(group, request, name, part.server)

    def _start(self, group: Group, request: Request, part: RecheckPart, server: int | None) -> None:
        if self._closed:
            return
        request = replace(request, max_new_tokens=0)
        task = asyncio.get_running_loop().create_task(
            self._recheck_part(group, request, part, server)
        )
        self._tasks[task] = group
        task.add_done_callback(self._tasks.pop)

    async def _recheck_part(
        self, group: Group, request: Request, part: RecheckPart, server: int | None
    ) -> None:
        try:
            async with self._turn:
                if server is not None:
                    await self._measure(server, request.weight_version)
                group.rechecked.append(await self._backend.recheck(request, part, server))
            self.counts.recheck_tokens += len(request.token_ids)
        except (EngineError, ValueError) as error:
            logger.warning("sample %s was not rechecked: %s", request.name, error)

    @property
    def under_way(self) -> list[asyncio.Task[None]]:
        """Tasks that compute a text again, or wait for their turn."""
        return list(self._tasks)

    async def close(self, *, idle: bool = False) -> None:
        """Cancel what is under way; nothing more begins.

        idle: no token is generated.  Then servers may compute on for ``share`` of the time since they
        last changed their weights, and for 5 seconds at most.
        """
        self._closed = True
        if idle and self._tasks:
            since = time.monotonic() - self._opened
            await asyncio.wait(self._tasks, timeout=min(AWAITED_S, self.share * since))
        late = self.under_way
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def reopen(self) -> None:
        """Begin again after a weight update."""
        self._closed = False
        self._opened = time.monotonic()

    async def rechecked_rollout(self, groups: Sequence[Group]) -> RecheckedRollout:
        """All that was rechecked of these groups; waits a little for what is under way."""
        if group_tasks := [task for task, group in self._tasks.items() if group in groups]:
            await asyncio.wait(group_tasks, timeout=AWAITED_S)
        parts = [part for group in groups for part in group.rechecked]
        chosen = sum(len(self.chosen(group.group_id)) for group in groups)
        done = {part.sample_id // self.samples_per_episode for part in parts}
        return RecheckedRollout(parts, chosen - len(done), self._noise)
