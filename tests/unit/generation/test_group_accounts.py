"""Limits of what is generated, groups that are generated again, and the buffer over a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from r3train.generation.buffer import GroupBuffer, ProducerState
from tests.unit.generation.test_group_buffer import (
    buffer_of,
    complete,
    limits,
    prompt,
    sample,
    submit,
)


def test_over_sampling_is_added_once_and_not_for_every_step():
    """Of two steps in reach, 2 and 3 groups: the surplus is of the last one."""
    assert buffer_of(limits(over_sampling=3, size=99)).room(0) == 5
    assert buffer_of(limits(over_sampling=3, size=99, staleness=2)).room(0) == 7


def test_the_buffer_holds_no_more_groups_than_its_size():
    buffer = buffer_of(limits(size=3))
    assert buffer.room(0) == 3
    submit(buffer, 0, 2)
    assert buffer.room(0) == 1


def test_a_step_that_is_taken_ends_a_row_of_dropped_groups():
    buffer = buffer_of(limits(filters=["zero_variance"], num_rollout=99, staleness=0))
    for version in range(3):
        for _ in range(100):
            complete(buffer, submit(buffer, version, 1)[0], (version,), rewards=(0.5, 0.5))
        for group in submit(buffer, version, 2):
            complete(buffer, group, (version,))
        buffer.take()
    assert buffer.outcomes == {"dropped_zero_variance": 300, "trained": 6}


def test_of_more_complete_groups_than_a_step_needs_the_oldest_weights_go_first():
    buffer = buffer_of(limits(over_sampling=4, size=9, staleness=2), start_rollout=1)
    groups = submit(buffer, 0, 4)
    for group, version in zip(groups, (1, 1, 0, 0)):
        complete(buffer, group, versions=(version,))
    assert [g.group_id for g in buffer.take()] == [4, 5]


def again(**changes) -> GroupBuffer:
    """A buffer at step 2: groups 0 and 1 are trained, 2 and 3 wait to be generated again, 4 is new."""
    settings = {"over_sampling": 4, "size": 9, "stale_policy": "regenerate"}
    buffer = buffer_of(limits(**settings | changes))
    groups = submit(buffer, 0, 4)
    for group in groups[:2]:
        complete(buffer, group)
    buffer.take()
    buffer.next_rollout = 2
    buffer.expire(2)
    return buffer


def test_groups_that_wait_to_be_generated_again_have_an_account_at_the_end():
    buffer = again()
    buffer.drain_log()
    buffer.close()
    assert [(o.group_id, o.outcome) for o in buffer.drain_log()] == [(2, "unused"), (3, "unused")]


def test_a_restart_goes_on_with_every_group_that_is_not_trained():
    buffer = again()
    _, complete_group, new = submit(buffer, 2, 3)
    assert (new.group_id, new.attempt, complete_group.attempt) == (4, 0, 1)
    buffer.finish(new, 1, [(sample(4, (1, 2)), 1.0)])
    complete(buffer, complete_group, versions=(2, 2))
    state = buffer.snapshot()
    back = buffer_of(limits(over_sampling=4, size=9, stale_policy="regenerate"), start_rollout=2)
    unfinished = back.restore(state)
    assert [(g.group_id, g.attempt, sorted(g.samples)) for g in unfinished] == [
        (2, 1, []),
        (4, 0, [1]),
    ]
    assert back.next_group == 5 and back.outstanding == 3 and back.complete_groups == 1
    # the sample that is there tells how old its group is
    assert [g.started_version for g in unfinished] == [None, 1]
    assert [g.group_id for g in back.expire(4)] == [4]


def test_groups_that_wait_to_be_generated_again_are_saved():
    state = again().snapshot()
    assert [(g["group_id"], g["attempt"]) for g in state.facts["groups"]] == [(2, 1), (3, 1)]
    back = buffer_of(limits(stale_policy="regenerate"), start_rollout=2)
    assert [g.attempt for g in back.restore(state)] == [1, 1]


def test_a_saved_buffer_of_other_prompts_or_another_step_is_refused():
    state = again().snapshot()
    with pytest.raises(ValueError, match="is of step 2, the run resumes at 1"):
        buffer_of(limits(), start_rollout=1).restore(state)
    another_buffer = GroupBuffer(limits(), lambda group: prompt(group + 1), start_rollout=2)
    with pytest.raises(
        ValueError, match="group 2 is of prompt p:3 in the saved buffer, and of p:4"
    ):
        another_buffer.restore(state)
    state.samples.append((sample(2, (0,)), 1.0))
    with pytest.raises(ValueError, match="holds 1 samples, 0 have a group"):
        buffer_of(limits(), start_rollout=2).restore(state)


def test_a_buffer_that_counted_lines_from_0_goes_on_with_the_same_prompts():
    """Its facts as they were written before ids counted lines from 1."""
    old = replace(sample(3, (1,)), prompt=replace(prompt(3), prompt_id="p:3"))
    facts = {
        "next_step": 1,
        "next_group": 4,
        "groups": [
            {"group_id": 2, "prompt_id": "p:2", "attempt": 0, "places": []},
            {"group_id": 3, "prompt_id": "p:3", "attempt": 1, "places": [[1, 1]]},
        ],
    }
    back = buffer_of(limits(), start_rollout=1)
    groups = back.restore(ProducerState([(old, 1.0)], facts))
    assert [(g.group_id, g.prompt.prompt_id) for g in groups] == [(2, "p:3"), (3, "p:4")]
    assert groups[1].samples[1][0][0].prompt.prompt_id == "p:4"  # as logs will name it
    again = {**back.snapshot().facts, "next_step": 1}
    assert [g["prompt_id"] for g in again["groups"]] == ["p:3", "p:4"]
    buffer_of(limits(), start_rollout=1).restore(ProducerState([(old, 1.0)], again))
    facts["groups"][0]["prompt_id"] = "p:3"
    with pytest.raises(
        ValueError, match="group 2 is of prompt p:4 in the saved buffer, and of p:3"
    ):
        buffer_of(limits(), start_rollout=1).restore(ProducerState([(old, 1.0)], facts))


def test_samples_stand_in_the_order_of_their_places_whichever_ended_first():
    buffer = buffer_of(limits())
    [group] = submit(buffer, 0, 1)
    for place in (1, 0):
        buffer.finish(group, place, [(sample(0, (0,)), float(place))])
    assert [reward for _, reward in group.scored()] == [0.0, 1.0]
    assert [reward for _, reward in buffer.snapshot().samples] == [0.0, 1.0]


def test_a_group_without_a_token_is_as_old_as_its_first_request():
    """Its answers were aborted before their first token."""
    buffer = buffer_of(limits(over_sampling=3, size=5), start_rollout=2)
    early, late = submit(buffer, 0, 1)[0], submit(buffer, 1, 1)[0]
    complete(buffer, early, versions=(), finish_reason="abort")
    complete(buffer, late, versions=(), finish_reason="abort")
    assert buffer.outcomes == {"dropped_stale": 1} and buffer.complete_groups == 1


def test_a_step_that_was_not_trained_is_taken_again():
    buffer = buffer_of(limits())
    for group in submit(buffer, 0, 4):
        complete(buffer, group)
    first = buffer.take()
    buffer.put_back(first)
    assert buffer.next_rollout == 0 and buffer.outstanding == 4
    assert [g.group_id for g in buffer.take()] == [0, 1]
    assert [o.outcome for o in buffer.drain_log()] == ["trained"] * 2 + ["put_back"] * 2 + [
        "trained"
    ] * 2
