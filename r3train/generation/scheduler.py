"""The order in which episodes are sent, how each is scored, and its outcome."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from r3train.engine.backend import Teacher
from r3train.generation.buffer import Group, GroupBuffer, Outcome, ProducerState
from r3train.generation.episode import EpisodeDropped
from r3train.generation.episode_task import Parts, EpisodeTask
from r3train.rewards.weighted_sum import scored
from r3train.types import RolloutSample, Scored


async def _no_reward(sample: RolloutSample) -> float:
    return 0.0


@dataclass(frozen=True)
class GroupScorer:
    """Scores the samples of finished episodes.

    score: gives a sample's reward if its episode gave none.  score_group, in its place: gives the rewards
    of all samples of a group at once.  teacher: adds its log-probs to each sample before the reward.
    """

    score: Callable[[RolloutSample], Awaitable[float]] = _no_reward
    score_group: Callable[[Sequence[RolloutSample]], Awaitable[list[float]]] | None = None
    teacher: Teacher | None = None

    async def __call__(
        self,
        group: Group,
        place: int,
        samples: list[RolloutSample],
        episode_reward: float | None,
        size: int,
    ) -> dict[int, list[Scored]]:
        """Score an episode's samples; return the scored samples of each place of its group.

        place: the episode's number in the group; episode_reward: the reward that its episode gave, or None; size:
        episodes of a group.  With ``score_group`` the result is empty until the group's last episode, which
        brings all places.
        """
        if self.teacher is not None:
            samples = list(await asyncio.gather(*map(self.teacher, samples)))
        if self.score_group is None:
            # the samples of an episode share the reward of its end
            reward = episode_reward if episode_reward is not None else await self.score(samples[-1])
            rewards = [reward] * len(samples)
            return {place: list(map(scored, samples, rewards))}
        assert (
            episode_reward is None and len(samples) == 1
        ), "environments have rewards of their own"
        group.unscored[place] = samples[0]
        if len(group.unscored) + len(group.samples) < size:
            return {}
        # also samples that an earlier run has scored
        earlier = {number: before[0][0] for number, before in group.samples.items()}
        samples_by_place = dict(sorted((earlier | group.unscored).items()))
        rewards = await self.score_group(list(samples_by_place.values()))
        places = {
            p: [scored(s, reward)] for (p, s), reward in zip(samples_by_place.items(), rewards)
        }
        group.samples.clear()
        return places


logger = logging.getLogger(__name__)


class Scheduler:
    """Sends the buffer's episodes as slots become free, scores them, and drops what is too stale.

    on_outcome: called with the outcome of each prompt.  state: of an earlier run, whose groups go on.
    """

    def __init__(
        self,
        parts: Parts,
        buffer: GroupBuffer,
        scorer: GroupScorer,
        on_outcome: Callable[[Outcome], None],
        state: ProducerState | None,
    ) -> None:
        self._parts = parts
        self._shared = parts.shared
        self.buffer = buffer
        self._scorer = scorer
        self._on_outcome = on_outcome
        self._unsent: deque[EpisodeTask] = deque()
        self._tasks: dict[asyncio.Task[None], Group] = {}
        self._unscored: list[tuple[Group, int, list[Scored]]] = []  # of another reward
        self.scoring: set[int] = set()  # ids of episodes that lack only teacher and reward
        if state is not None:
            for group in buffer.restore(state):
                self._add(group)
                if state.score_again:  # until then they count as not generated
                    self._unscored += [(group, *place) for place in group.samples.items()]
                    group.samples, group.complete = {}, False
        self._shared.on_change = self.send

    def send(self) -> None:
        """Send all episodes that may be sent."""
        while (episode := self._next_unsent()) is not None:
            if self._parts.episodes.most is None:
                episode.reserve_slot()
            name = f"sample {episode.sample_id} of prompt {episode.group.prompt.prompt_id}"
            task = self._shared.loop.create_task(self._run_episode(episode), name=name)
            self._tasks[task] = episode.group
            task.add_done_callback(partial(self._forget, episode))

    async def score_again(self) -> None:
        """Score the samples that another reward has scored; raises the reward's error."""

        async def score(group: Group, place: int, before: list[Scored]) -> None:
            size, samples = self._parts.rollout.n_samples_per_prompt, [s for s, _ in before]
            self._finish(group, await self._scorer(group, place, samples, None, size))

        await asyncio.gather(*(score(*one) for one in self._unscored))

    def take(self) -> list[Group]:
        """Take the groups of the next train step's batch, which are ready."""
        groups = self.buffer.take()
        self.expire()
        if self.is_over:
            self._unsent.clear()
            for task in self._tasks:
                task.cancel()
        self.log_outcomes()
        self._shared.changed()
        return groups

    def expire(self) -> None:
        """Drop or regenerate the groups that would be too stale for the next rollout."""
        stale = self.buffer.expire(self.buffer.next_rollout)
        for task, group in self._tasks.items():
            if group in stale:
                task.cancel()
        self.log_outcomes()

    @property
    def is_over(self) -> bool:
        """True when no episode is left to generate."""
        return self.buffer.next_rollout == self._parts.rollout.num_rollout

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of episodes under way."""
        return list(self._tasks)

    def log_outcomes(self) -> None:
        """Tell ``on_outcome`` what became of prompts since the last call."""
        for outcome in self.buffer.drain_log():
            self._on_outcome(outcome)

    def _next_unsent(self) -> EpisodeTask | None:
        """The next episode that was never sent; None while it must wait."""
        parts = self._parts
        if not (self._shared.sends_new_episodes and parts.gate.open and self._has_room):
            return None
        while self._unsent or self._submit_group():
            episode = self._unsent.popleft()
            if self.buffer.holds(episode.group):
                if episode.group.started_version is None:
                    episode.group.started_version = self._shared.version
                return episode
        return None

    @property
    def _has_room(self) -> bool:
        """True if one more episode may begin."""
        most = self._parts.episodes.most
        return self._parts.slots.for_new_episodes if most is None else len(self._tasks) < most

    def _submit_group(self) -> bool:
        if self.buffer.room(self._shared.version) <= 0:
            return False
        self._add(self.buffer.submit())
        return True

    def _add(self, group: Group) -> None:
        places = range(self._parts.rollout.n_samples_per_prompt)
        self._unsent += [
            EpisodeTask(self._parts, group, p) for p in places if p not in group.samples
        ]

    async def _run_episode(self, episode: EpisodeTask) -> None:
        """Make one episode, score it, and put it into its group; an error becomes the failure."""
        try:
            self._finish(episode.group, await self._scored(episode))
        except EpisodeDropped as dropped:
            self._drop(episode.group, dropped)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self._shared.fail(error)

    def _finish(self, group: Group, samples_by_place: dict[int, list[Scored]]) -> None:
        for place, samples in samples_by_place.items():
            if self.buffer.holds(group):
                self.buffer.finish(group, place, samples)
        self.log_outcomes()

    def _drop(self, group: Group, dropped: EpisodeDropped) -> None:
        """Replace a group one of whose episodes cannot be trained; its others end."""
        logger.warning("the group of prompt %s is dropped: %s", group.prompt.prompt_id, dropped)
        try:
            if self.buffer.holds(group):
                self.buffer.drop(group, dropped.reason, str(dropped))
        except RuntimeError as error:
            self._shared.fail(error)
        for task, other in self._tasks.items():
            if other is group and task is not asyncio.current_task():
                task.cancel()
        self.log_outcomes()

    async def _scored(self, episode: EpisodeTask) -> dict[int, list[Scored]]:
        """Make an episode and score it; return the scored samples by their place in the group."""
        parts, shared, group = self._parts, self._shared, episode.group
        samples, reward = await episode.make()
        checked = episode.to_recheck(samples)
        parts.rechecking.finished(
            group, episode.place, checked, episode.part_of(checked), shared.version
        )
        if not parts.episodes.keep_decoded:
            samples = [
                replace(sample, decoded=(), decoded_masks=(), decoded_indexer=())
                for sample in samples
            ]
        shared.counts.finished_samples += len(samples)
        self.scoring.add(episode.sample_id)
        # of a long answer it takes tens of milliseconds; from here on an update cannot be in its way
        with_text = parts.episodes.with_text
        samples = [await shared.aside(with_text, sample) for sample in samples]
        size = parts.rollout.n_samples_per_prompt
        return await self._scorer(group, episode.place, samples, reward, size)

    def _forget(self, episode: EpisodeTask, task: asyncio.Task[None]) -> None:
        episode.release()  # a task that was cancelled before it began still holds its slot
        self.scoring.discard(episode.sample_id)
        del self._tasks[task]
        self._shared.changed()
