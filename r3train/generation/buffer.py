"""Bookkeeping of groups that are in flight, waiting, too old or trained, and their saved state.

Pure: no loop, no clock, no network.  A group is all samples of one prompt; group g is the g-th
prompt sampled.  The staleness of a group at step s is s minus the oldest weight version that
generated any of its tokens.  A version counts completed train steps, so the newest one at step s is
s.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from r3train.algo.reward_stats import zero_variance
from r3train.config.rollout_settings import RolloutSection
from r3train.data.curriculum import pass_rate
from r3train.generation.stitch import oldest_version
from r3train.types import Prompt, Rechecked, RolloutSample, Scored

OUTCOMES_FILE = "outcomes.jsonl"  # one line, an ``Outcome``, for each prompt that was sampled

_LINES_FROM = "lines_from"  # among a saved buffer's facts; without it prompt ids count lines from 0

# after so many dropped batches in a row for one step the run ends: the filter drops everything
_MAX_DROPPED_BATCHES = 64


@dataclass(slots=True, eq=False)
class Group:
    """One attempt at a prompt; ``attempt`` counts up when it is generated again."""

    group_id: int
    prompt: Prompt
    attempt: int = 0
    started_version: int | None = None  # of the servers when its first request was sent
    samples: dict[int, list[Scored]] = field(default_factory=dict)  # place in the group -> samples
    # place -> a sample that waits for the rest of its group, to be scored with it
    unscored: dict[int, RolloutSample] = field(default_factory=dict)
    oldest: int | None = None  # of its tokens, once complete
    complete: bool = False
    rechecked: list[Rechecked] = field(default_factory=list)  # parts of its samples

    def scored(self) -> list[Scored]:
        return [pair for place in sorted(self.samples) for pair in self.samples[place]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The fate of a prompt: ``trained``, ``dropped_<why>``, ``regenerated``, ``unused``, ``put_back``.

    ``put_back`` undoes the ``trained`` before it.
    """

    group_id: int
    prompt_id: str
    outcome: str
    step: int  # the train step that took it, or the next one when it was dropped
    staleness: int | None = None
    pass_rate: float | None = None  # of a group that was trained, or dropped when complete


@dataclass(frozen=True)
class ProducerState:
    """State that a restart needs: the prompt cursor and every group that is not trained yet.

    samples: the finished ones.  facts: JSON-able, ``next_step``, ``next_group`` (the prompt
    cursor) and ``groups``, each with its ``group_id``, ``prompt_id``, ``attempt`` and ``places``
    [[place, samples], ...], whose samples stand in ``samples`` in that order.  A missing
    place is generated again.  ``lines_from`` is the number of a file's first line in prompt ids.
    score_again: another reward has scored the samples.
    """

    samples: list[Scored]
    facts: dict[str, Any]
    score_again: bool = False

    def without_samples(self) -> ProducerState:
        """The same groups, all of which are generated again."""
        groups = [{**group, "places": []} for group in self.facts["groups"]]
        return ProducerState([], {**self.facts, "groups": groups})


class GroupBuffer:
    """Groups from submission to training; ``start_rollout`` is the first that is trained.

    ``prompt_for(g)`` gives the prompt of group g.
    """

    def __init__(
        self,
        rollout: RolloutSection,
        prompt_for: Callable[[int], Prompt],
        *,
        start_rollout: int = 0,
    ):
        self._rollout = rollout
        self._prompt_for = prompt_for
        self.next_rollout = start_rollout
        self.next_group = start_rollout * rollout.rollout_batch_size
        self.outcomes: Counter[str] = Counter()
        self._groups: dict[int, Group] = {}  # in flight and complete, in no order
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
        r = self._rollout
        last = min(version + r.max_weight_staleness, r.num_rollout - 1)
        rollouts = last - self.next_rollout + 1
        if rollouts <= 0:
            return 0
        allowed = (rollouts - 1) * r.rollout_batch_size + r.groups_per_rollout
        return min(allowed, r.buffer_groups) - self.outstanding

    def submit(self) -> Group:
        """Put the next group in flight: a regenerated one first, else one of the next prompt."""
        if self._again:
            group = self._again.popleft()
        else:
            group = Group(self.next_group, self._prompt_for(self.next_group))
            self.next_group += 1
        self._groups[group.group_id] = group
        return group

    def holds(self, group: Group) -> bool:
        """True if this attempt at a prompt is still wanted."""
        return self._groups.get(group.group_id) is group

    # -- completion --------------------------------------------------------------------------

    def finish(self, group: Group, place: int, scored: Sequence[Scored]) -> None:
        """Add a finished episode to its group, which may be complete then, or dropped."""
        group.samples[place] = list(scored)
        if not self._complete(group):
            return
        if reason := self._filtered(group):
            self.drop(group, reason)
        elif self._too_stale(group, self.next_rollout):
            self._expire(group)

    def drop(self, group: Group, reason: str, why: str = "") -> None:
        """Take out a group that another prompt's is to replace; raises RuntimeError where this would not end.

        why: the cause, for the error.
        """
        self._dropped_in_row += 1
        self._remove(group, f"dropped_{reason}")
        if self._dropped_in_row > _MAX_DROPPED_BATCHES * self._rollout.rollout_batch_size:
            what = "--agent-on-failure" if reason == "agent" else "--rollout-filter"
            raise RuntimeError(
                f"{what} dropped {self._dropped_in_row} groups in a row for step "
                f"{self.next_rollout} ({dict(self.outcomes)}): this would not end{f'; the last: {why}' if why else ''}"
            )

    def _complete(self, group: Group) -> bool:
        """Set ``complete`` and ``oldest`` if all episodes of the group are done."""
        if len(group.samples) == self._rollout.n_samples_per_prompt:
            group.complete = True
            group.oldest = _oldest(group)
        return group.complete

    def _filtered(self, group: Group) -> str | None:
        scored = group.scored()
        if "aborted" in self._rollout.rollout_filter and any(
            sample.finish_reason == "abort" for sample, _ in scored
        ):
            return "aborted"
        if "zero_variance" in self._rollout.rollout_filter:
            if zero_variance(np.array([reward for _, reward in scored])):
                return "zero_variance"
        return None

    # -- staleness ---------------------------------------------------------------------------

    def _too_stale(self, group: Group, step: int) -> bool:
        """True if the group is too stale for ``step``.

        A complete group counts by its oldest token, another by the version that it started with.
        """
        oldest = group.oldest if group.complete else group.started_version
        return oldest is not None and step - oldest > self._rollout.max_weight_staleness

    def expire(self, step: int) -> list[Group]:
        """Take out every group that is too stale for ``step``; returns those still in flight."""
        stale = [group for group in self._groups.values() if self._too_stale(group, step)]
        for group in stale:
            self._expire(group)
        return [group for group in stale if not group.complete]

    def _expire(self, group: Group) -> None:
        if self._rollout.stale_policy == "regenerate":
            self._remove(group, "regenerated")
            self._again.append(Group(group.group_id, group.prompt, group.attempt + 1))
        else:
            self._remove(group, "dropped_stale")

    def _remove(self, group: Group, outcome: str, staleness: int | None = None) -> None:
        del self._groups[group.group_id]
        self._record(group, outcome, staleness)

    def _record(self, group: Group, outcome: str, staleness: int | None = None) -> None:
        self.outcomes[outcome] += 1
        rate = None
        if group.complete and (outcome == "trained" or outcome.startswith("dropped")):
            rate = pass_rate([reward for _, reward in group.scored()])
        name = group.prompt.prompt_id
        self._log.append(Outcome(group.group_id, name, outcome, self.next_rollout, staleness, rate))

    # -- training ----------------------------------------------------------------------------

    def _candidates(self) -> list[Group]:
        """The groups that the next step would train; fewer than a batch while it must wait."""
        batch = self._rollout.rollout_batch_size
        # without oversampling the lowest group ids, however late they complete; with it the oldest first
        if self._rollout.groups_per_rollout == batch:
            first = [self._groups[g] for g in sorted(self._groups)[:batch]]
            return [group for group in first if group.complete]
        complete = [group for group in self._groups.values() if group.complete]
        complete.sort(key=lambda group: (group.oldest or 0, group.group_id))
        return sorted(complete[:batch], key=lambda group: group.group_id)

    def ready(self) -> bool:
        """True once as many groups are complete as the next step trains."""
        return len(self._candidates()) == self._rollout.rollout_batch_size

    def take(self) -> list[Group]:
        """Hand the next step its groups, in order of group id; call it once they are ``ready``."""
        groups = self._candidates()
        assert self.ready(), f"{len(groups)} groups are complete"
        for group in groups:
            staleness = self.next_rollout - (group.oldest or 0)
            assert 0 <= staleness <= self._rollout.max_weight_staleness, (
                f"group {group.group_id} is {staleness} steps old at step {self.next_rollout}, "
                f"max_weight_staleness is {self._rollout.max_weight_staleness}"
            )
            self._remove(group, "trained", staleness)
        self.next_rollout += 1
        self._dropped_in_row = 0
        return groups

    def put_back(self, groups: Sequence[Group]) -> None:
        """Undo the last ``take``, of these groups: they were not trained."""
        self.next_rollout -= 1
        for group in groups:
            self._record(group, "put_back")
            self._groups[group.group_id] = group

    # -- accounts ----------------------------------------------------------------------------

    def close(self) -> None:
        """Record the groups that are left at the end of the run as unused."""
        for group in [*self._groups.values(), *self._again]:
            self._record(group, "unused")
        self._groups.clear()
        self._again.clear()

    def drain_log(self) -> list[Outcome]:
        """Return the outcomes of prompts since the last call."""
        log, self._log = self._log, []
        return log

    # -- over a restart ----------------------------------------------------------------------

    def snapshot(self) -> ProducerState:
        """Return the state with all groups that are neither trained nor dropped, by group id."""
        samples: list[Scored] = []
        groups = []
        for group in sorted([*self._groups.values(), *self._again], key=lambda g: g.group_id):
            places = []
            for place in sorted(group.samples):
                samples += group.samples[place]
                places.append([place, len(group.samples[place])])
            groups.append(
                {
                    "group_id": group.group_id,
                    "prompt_id": group.prompt.prompt_id,
                    "attempt": group.attempt,
                    "places": places,
                }
            )
        facts = {"next_step": self.next_rollout, "next_group": self.next_group, "groups": groups}
        facts[_LINES_FROM] = 1
        return ProducerState(samples, facts)

    def restore(self, state: ProducerState) -> list[Group]:
        """Fill a new buffer from a saved state; return the incomplete groups, in order of group id.

        With ``score_again`` it returns all.  Samples get the prompts of now.  Raises ValueError if the state is
        of another rollout or its prompts have changed.
        """
        facts = state.facts
        if facts["next_step"] != self.next_rollout:
            raise ValueError(
                f"the saved buffer is of step {facts['next_step']}, the run resumes at "
                f"{self.next_rollout}"
            )
        self.next_group = facts["next_group"]
        start = 0
        for saved in facts["groups"]:
            prompt = self._prompt_for(saved["group_id"])
            saved_id = (
                saved["prompt_id"] if _LINES_FROM in facts else _next_line(saved["prompt_id"])
            )
            if prompt.prompt_id != saved_id:
                raise ValueError(
                    f"group {saved['group_id']} is of prompt {saved_id} in the saved "
                    f"buffer, and of {prompt.prompt_id} now"
                )
            group = Group(saved["group_id"], prompt, saved["attempt"])
            for place, count in saved["places"]:
                place_samples = state.samples[start : start + count]
                group.samples[place] = [
                    (replace(sample, prompt=prompt), r) for sample, r in place_samples
                ]
                start += count
            group.started_version = _oldest(group)
            self._groups[group.group_id] = group
            self._complete(group)
        if start != len(state.samples):
            raise ValueError(
                f"the saved buffer holds {len(state.samples)} samples, {start} have a group"
            )
        return [g for g in self._groups.values() if state.score_again or not g.complete]


def _next_line(prompt_id: str) -> str:
    """Return FILE:N+1 for FILE:N."""
    file, _, number = prompt_id.rpartition(":")
    return f"{file}:{int(number) + 1}"


def _oldest(group: Group) -> int | None:
    versions = [oldest_version(sample) for sample, _ in group.scored()]
    known_versions = [version for version in versions if version is not None]
    return min(known_versions) if known_versions else group.started_version
