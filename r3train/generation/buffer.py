"""Which groups are in flight, which wait, which are too old: the bookkeeping of the producer.

Pure: no thread, no clock, no network.  A group is all samples of one prompt; group g is the g-th
prompt drawn.  The staleness of a group at step s is s less the oldest weight version that generated
any of its tokens; a version counts completed train steps, so step s follows version s.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from r3train.generation.stitch import oldest_version
from r3train.types import Prompt, RolloutSample, Scored


# a filter that drops this many batches in a row for one step will not stop at the next
_MAX_DROPPED_BATCHES = 64


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """The numbers that bound the buffer; all counts are groups."""

    batch: int  # trained a step
    samples: int  # a group
    num_rollout: int
    staleness: int  # steps, at most
    over_sampling: int  # submitted for a step, at least batch
    size: int  # in flight and waiting
    stale_policy: str = "drop"  # or regenerate
    filters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, least in (
            ("rollout_batch_size", self.batch, 1),
            ("n_samples_per_prompt", self.samples, 1),
            ("max_weight_staleness", self.staleness, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        if self.over_sampling < self.batch or self.size < self.over_sampling:
            raise ValueError(
                f"rollout_buffer_size {self.size}, over_sampling_batch_size {self.over_sampling}, "
                f"rollout_batch_size {self.batch}: each must be at least the next"
            )

    @property
    def in_order(self) -> bool:
        """Without over-sampling a step trains the next prompts, whichever is complete first."""
        return self.over_sampling == self.batch


@dataclass(slots=True)
class Group:
    """One prompt on its way; ``attempt`` counts up when it is generated again."""

    group_id: int
    prompt: Prompt
    attempt: int = 0
    started_version: int | None = None  # of the servers when its first request was sent
    samples: dict[int, list[Scored]] = field(default_factory=dict)  # place in the group -> samples
    oldest: int | None = None  # of its tokens, once complete
    complete: bool = False

    def scored(self) -> list[Scored]:
        return [pair for place in sorted(self.samples) for pair in self.samples[place]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a prompt: ``trained``, ``dropped_<why>``, ``regenerated``, ``unused``."""

    group_id: int
    prompt_id: str
    outcome: str
    step: int  # the train step that took it, or the next one when it was dropped
    staleness: int | None = None


class GroupBuffer:
    """Groups from submission to training.  Not thread-safe: the producer holds its lock."""

    def __init__(self, limits: BufferLimits, *, start_step: int = 0, next_group: int = 0):
        self.limits = limits
        self.next_step = start_step
        self.next_group = next_group
        self.outcomes: Counter[str] = Counter()
        self._groups: dict[int, Group] = {}  # in flight and complete, in order of group id
        self._again: deque[Group] = deque()  # to be generated again, before new prompts
        self._log: list[Outcome] = []
        self._dropped_in_row = 0

    # -- submission --------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Groups in flight and waiting."""
        return len(self._groups)

    @property
    def complete_groups(self) -> int:
        return sum(group.complete for group in self._groups.values())

    def room(self, version: int) -> int:
        """Groups that may be submitted while the servers hold ``version``."""
        lim = self.limits
        last = min(version + lim.staleness, lim.num_rollout - 1)
        steps = last - self.next_step + 1
        if steps <= 0:
            return 0
        allowed = steps * lim.batch + lim.over_sampling - lim.batch
        return min(allowed, lim.size) - self.outstanding

    def wants_prompt(self) -> bool:
        """Whether the next group to submit is a new one (``submit`` needs its prompt)."""
        return not self._again

    def submit(self, prompt: Prompt | None) -> Group:
        """Put the next group in flight: a regenerated one first, else a new one of ``prompt``."""
        if self._again:
            group = self._again.popleft()
        else:
            assert prompt is not None
            group = Group(self.next_group, prompt)
            self.next_group += 1
        self._groups[group.group_id] = group
        return group

    def restore(self, group: Group) -> None:
        """Put back a group that an earlier run had in its buffer, complete or not."""
        self._groups[group.group_id] = group
        if len(group.samples) == self.limits.samples:
            group.complete = True
            group.oldest = _oldest(group)

    def current(self, group_id: int, attempt: int) -> Group | None:
        """The group while this attempt at it is still wanted."""
        group = self._groups.get(group_id)
        return group if group is not None and group.attempt == attempt else None

    # -- completion --------------------------------------------------------------------------

    def finish(self, group: Group, place: int, scored: Sequence[Scored]) -> bool:
        """One of the group's rollouts is done; True when that made the group complete or gone."""
        group.samples[place] = list(scored)
        if len(group.samples) < self.limits.samples:
            return False
        group.complete = True
        group.oldest = _oldest(group)
        reason = self._filtered(group)
        if reason is not None:
            self._dropped_in_row += 1
            self._remove(group, f"dropped_{reason}")
            if self._dropped_in_row > _MAX_DROPPED_BATCHES * self.limits.batch:
                raise RuntimeError(
                    f"--rollout-filter dropped {self._dropped_in_row} groups in a row for step "
                    f"{self.next_step} ({dict(self.outcomes)}): this would not end"
                )
        elif self._too_stale(group, self.next_step):
            self._expire(group)
        return True

    def _filtered(self, group: Group) -> str | None:
        scored = group.scored()
        if "aborted" in self.limits.filters and any(
            sample.finish_reason == "abort" for sample, _ in scored
        ):
            return "aborted"
        if "zero_variance" in self.limits.filters:
            rewards = {reward for _, reward in scored}
            if len(rewards) == 1:
                return "zero_variance"
        return None

    # -- staleness ---------------------------------------------------------------------------

    def _too_stale(self, group: Group, step: int) -> bool:
        """At ``step`` or later; by its tokens when complete, else by what it may hold already."""
        oldest = group.oldest if group.complete else group.started_version
        return oldest is not None and step - oldest > self.limits.staleness

    def expire(self, step: int) -> list[Group]:
        """Take out every group that is too stale for ``step``; returns those still in flight."""
        stale = [group for group in self._groups.values() if self._too_stale(group, step)]
        for group in stale:
            self._expire(group)
        return [group for group in stale if not group.complete]

    def _expire(self, group: Group) -> None:
        if self.limits.stale_policy == "regenerate":
            self._remove(group, "regenerated")
            self._again.append(Group(group.group_id, group.prompt, group.attempt + 1))
        else:
            self._remove(group, "dropped_stale")

    def _remove(self, group: Group, outcome: str, staleness: int | None = None) -> None:
        del self._groups[group.group_id]
        self._record(group, outcome, staleness)

    def _record(self, group: Group, outcome: str, staleness: int | None = None) -> None:
        self.outcomes[outcome] += 1
        self._log.append(
            Outcome(group.group_id, group.prompt.prompt_id, outcome, self.next_step, staleness)
        )

    # -- training ----------------------------------------------------------------------------

    def _candidates(self) -> list[Group]:
        """The groups that the next step would train, fewer than a batch while it must wait."""
        batch = self.limits.batch
        if self.limits.in_order:
            first = [self._groups[g] for g in sorted(self._groups)[:batch]]
            return [group for group in first if group.complete]
        complete = [group for group in self._groups.values() if group.complete]
        complete.sort(key=lambda group: (group.oldest or 0, group.group_id))
        return sorted(complete[:batch], key=lambda group: group.group_id)

    def ready(self) -> int:
        """How many groups of the next step are complete."""
        return len(self._candidates())

    def take(self) -> list[Group]:
        """Hand the next step its groups, in order of group id; call once ``ready`` is a batch."""
        groups = self._candidates()
        assert len(groups) == self.limits.batch, f"{len(groups)} groups are complete"
        for group in groups:
            staleness = self.next_step - (group.oldest or 0)
            assert 0 <= staleness <= self.limits.staleness, (
                f"group {group.group_id} is {staleness} steps old at step {self.next_step}, "
                f"max_weight_staleness is {self.limits.staleness}"
            )
            self._remove(group, "trained", staleness)
        self.next_step += 1
        self._dropped_in_row = 0
        return groups

    # -- accounts ----------------------------------------------------------------------------

    def close(self) -> None:
        """Account for what is left when the run ends."""
        for group in [*self._groups.values(), *self._again]:
            self._record(group, "unused")
        self._groups.clear()
        self._again.clear()

    def drain_log(self) -> list[Outcome]:
        """What became of prompts since the last call."""
        log, self._log = self._log, []
        return log

    def untrained(self) -> list[Group]:
        """Groups in flight, to be generated again, and waiting, in order of group id."""
        return sorted([*self._groups.values(), *self._again], key=lambda group: group.group_id)


def _oldest(group: Group) -> int | None:
    versions = [oldest_version(sample) for sample, _ in group.scored()]
    known = [version for version in versions if version is not None]
    return min(known) if known else group.started_version
