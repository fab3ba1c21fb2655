"""What a producer must keep over a restart: its cursor, and every group that nobody trained yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r3train.generation.buffer import Group, GroupBuffer
from r3train.generation.stitch import oldest_version
from r3train.types import Prompt, Scored


@dataclass(frozen=True)
class ProducerState:
    """Complete samples of untrained groups, and JSON-able facts that say where they belong.

    facts: ``next_step``, ``next_group`` (the prompt cursor) and ``groups``, each with its
    ``group_id``, ``prompt_id``, ``attempt`` and ``places`` [[place, samples], ...], whose samples
    stand in ``samples`` in that order.  A place that is missing is generated again.
    """

    samples: list[Scored]
    facts: dict[str, Any]


def pack(buffer: GroupBuffer) -> ProducerState:
    """The state of a buffer."""
    samples: list[Scored] = []
    groups = []
    for group in buffer.untrained():
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
    facts = {"next_step": buffer.next_step, "next_group": buffer.next_group, "groups": groups}
    return ProducerState(samples, facts)


def unpack(
    buffer: GroupBuffer, state: ProducerState, prompt_for: Callable[[int], Prompt]
) -> list[Group]:
    """Fill a new buffer; returns its groups, in order of group id.

    Raises ValueError where the state is of another step or its prompts are others now.
    """
    facts = state.facts
    if facts["next_step"] != buffer.next_step:
        raise ValueError(
            f"the saved buffer is of step {facts['next_step']}, the run resumes at "
            f"{buffer.next_step}"
        )
    buffer.next_group = facts["next_group"]
    groups, start = [], 0
    for saved in facts["groups"]:
        prompt = prompt_for(saved["group_id"])
        if prompt.prompt_id != saved["prompt_id"]:
            raise ValueError(
                f"group {saved['group_id']} is of prompt {saved['prompt_id']} in the saved buffer, "
                f"and of {prompt.prompt_id} now"
            )
        group = Group(saved["group_id"], prompt, saved["attempt"])
        for place, count in saved["places"]:
            group.samples[place] = list(state.samples[start : start + count])
            start += count
        versions = [oldest_version(sample) for sample, _ in group.scored()]
        group.started_version = min((v for v in versions if v is not None), default=None)
        buffer.restore(group)
        groups.append(group)
    if start != len(state.samples):
        raise ValueError(
            f"the saved buffer holds {len(state.samples)} samples, {start} have a group"
        )
    return groups
