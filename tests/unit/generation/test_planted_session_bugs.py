"""Bugs that other frameworks had, planted in sessions: the custody check or the comparison with one prefill says each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.generation.session_play import assert_sound, Play, user

from r3train.generation import sessions, stitch


async def play_it() -> Play:
    """Two turns; then, at once, two requests behind the first answer; then another history."""
    play = Play(seed=9)
    first = [user("go")]
    answer = await play.ask(first)
    second = [*first, answer, user("on")]
    await play.ask([*second, await play.ask(second), user("on")])
    play.engine.gates = {3: asyncio.Event(), 4: asyncio.Event()}
    asked = [asyncio.create_task(play.ask([*first, answer, user(word)])) for word in ("a", "b")]
    await asyncio.sleep(0)
    for gate in (4, 3):
        play.engine.gates[gate].set()
        await asyncio.sleep(0)
    await asyncio.gather(*asked)
    await play.ask([user("in short")])
    return play


def copied_row(extend: Callable) -> Callable:
    """The row of an answer's last token is a copy of the row before (prime-rl)."""

    def wrong(sample, segment):
        known, done = stitch.rows_known(sample), extend(sample, segment)
        if known == 0:
            return done
        *before, (at, rows) = done.decoded
        rows = rows.copy()
        rows[0] = before[-1][1][-1]
        return replace(done, decoded=(*before, (at, rows)))

    return wrong


def rows_of_a_sibling(forked: Callable) -> Callable:
    """A fork keeps the rows of what its sibling went on with, as many as it has tokens."""

    def wrong(sample, end, token_ids, *, sample_id):
        done = forked(sample, end, token_ids, sample_id=sample_id)
        return replace(done, decoded=stitch.cut(sample, done.num_tokens).decoded)

    return wrong


def loss_twice(forked: Callable) -> Callable:
    """A fork trains its prefix too."""

    def wrong(sample, end, token_ids, *, sample_id):
        done, mask = forked(sample, end, token_ids, sample_id=sample_id), sample.loss_mask[:end]
        return replace(done, loss_mask=np.append(mask, np.zeros(len(token_ids), bool)))

    return wrong


def text_tokenised_again(observe: Callable) -> Callable:
    """The model's text is tokenised anew before the next turn."""
    words = Play().words

    def wrong(sample, token_ids):
        ids = words.encode(words.decode(sample.token_ids, skip_special_tokens=False))
        padded = np.resize(np.array(ids, np.int32), sample.num_tokens)
        return observe(replace(sample, token_ids=padded), token_ids)

    return wrong


def loss_on_what_follows(observe: Callable) -> Callable:
    """The closing of an answer and what a tool said have loss."""

    def wrong(sample, token_ids):
        done = observe(sample, token_ids)
        return replace(
            done, loss_mask=done.loss_mask | (np.arange(done.num_tokens) >= sample.num_tokens)
        )

    return wrong


def lost_fork(samples: Callable) -> Callable:
    """A chain that is no longer the newest is forgotten (skipping state update)."""

    def wrong(self):
        del self.chains[1]
        return samples(self)

    return wrong


PLANTED = {
    "copied row": (stitch, "extend", copied_row),
    "rows of a sibling": (stitch, "forked", rows_of_a_sibling),
    "loss twice": (stitch, "forked", loss_twice),
    "text tokenised again": (stitch, "observe", text_tokenised_again),
    "loss on what follows": (stitch, "observe", loss_on_what_follows),
    "lost fork": (sessions.Session, "samples", lost_fork),
}


def judged() -> None:
    samples = asyncio.run(play_it()).session.samples()
    assert_sound(samples)
    assert len(samples) == 4


def test_a_session_without_a_planted_bug_is_sound():
    judged()


@pytest.mark.parametrize("place, name, plant", PLANTED.values(), ids=PLANTED)
def test_a_planted_bug_is_caught(place, name, plant, monkeypatch):
    monkeypatch.setattr(place, name, plant(getattr(place, name)))
    with pytest.raises((AssertionError, ValueError)):
        judged()


@pytest.mark.parametrize(
    "place, name, plant, said",
    [
        (*PLANTED["loss twice"], "sample 641: tokens .* were sampled and delivered, .* have loss"),
        (*PLANTED["text tokenised again"], "does not begin with the .* tokens of a call's request"),
        (*PLANTED["loss on what follows"], "tokens .* were sampled and delivered, .* have loss"),
    ],
)
def test_the_custody_check_names_what_is_wrong(place, name, plant, said, monkeypatch):
    monkeypatch.setattr(place, name, plant(getattr(place, name)))
    with pytest.raises(AssertionError, match=said):
        asyncio.run(play_it()).session.samples()
