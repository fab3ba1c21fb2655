"""Every way in which a session's tokens can be trained twice, not at all, or on another history is said."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.unit.generation.session_play import Play, user

from r3train.algo.trajectories import without_truncated
from r3train.audit.evidence_schema import SESSIONS
from r3train.chat.token_ledger import session_ledgers, ledger_problems
from r3train.loop.rollout_file import read_samples, write_samples
from r3train.proof.custody_verdict import CustodyRecord, judge_custody
from r3train.proof.step_verdict import StepVerdict
from r3train.types import RolloutSample


def session() -> list[RolloutSample]:
    """Two samples: an answer with one behind it, and a fork of the first."""
    play = Play(seed=4)
    first = [user("go")]
    answer = asyncio.run(play.ask(first))
    for text in ("a", "b"):
        asyncio.run(play.ask([*first, answer, user(text)]))
    return play.session.samples()


def changed(samples, place: int, **fields) -> list[RolloutSample]:
    return [replace(s, **fields) if i == place else s for i, s in enumerate(samples)]


def with_mask(samples, place: int, change) -> list[RolloutSample]:
    mask = samples[place].loss_mask.copy()
    change(mask, samples[place])
    return changed(samples, place, loss_mask=mask)


def train_prefix_too(mask: np.ndarray, sample: RolloutSample) -> None:
    mask |= sample.weight_versions >= 0  # a fork trains what its prefix sampled


def other_token(samples) -> list[RolloutSample]:
    ids = samples[1].token_ids.copy()
    ids[3] += 1
    return changed(samples, 1, token_ids=ids)


def other_rows(samples) -> list[RolloutSample]:
    return changed(samples, 0, routed_experts=samples[0].routed_experts[:-1])


def row_that_never_came(samples) -> list[RolloutSample]:
    rows = samples[0].routed_experts.copy()
    rows[2] = 255
    return changed(samples, 0, routed_experts=rows)


def twice_in_the_ledger(samples) -> list[RolloutSample]:
    return changed(samples, 1, token_ledger=(*samples[1].token_ledger, samples[1].token_ledger[-1]))


def left_out_of_the_ledger(samples) -> list[RolloutSample]:
    return changed(samples, 1, token_ledger=samples[1].token_ledger[:-1])


def cut_session() -> list[RolloutSample]:
    """A chain whose middle answer was cut, and a fork behind the first answer that was cut."""
    play = Play(seed=4)
    play.engine.answers = ["one<|end|>", "two is", "three<|end|>", "four is"]
    first = [user("go")]
    first.append(asyncio.run(play.ask(first)))
    second = [*first, user("a")]
    second.append(asyncio.run(play.ask(second)))
    for messages in (second, first):
        asyncio.run(play.ask([*messages, user("b")]))
    return play.session.samples()


def masked_by_the_last_answer(samples) -> list[RolloutSample]:
    """As if each sample were one answer."""
    return [replace(s, loss_mask=s.loss_mask & (s.finish_reason != "length")) for s in samples]


def nothing_left(samples) -> list[RolloutSample]:
    return [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples]


PLANTED = {
    "a token without its loss": (
        lambda s: with_mask(s, 0, lambda m, _: np.put(m, np.flatnonzero(m)[0], False)),
        "sample 640: tokens .* were sampled and delivered, .* have loss",
    ),
    "loss on as many other tokens": (
        lambda s: with_mask(s, 0, lambda m, _: np.copyto(m, np.roll(m, -1))),
        "sample 640: tokens .* were sampled and delivered, .* have loss",
    ),
    "loss on what follows an answer": (
        lambda s: with_mask(s, 0, lambda m, x: np.put(m, np.flatnonzero(~m)[-1], True)),
        "sample 640: tokens .* were sampled",
    ),
    "a fork trains its prefix too": (
        lambda s: with_mask(s, 1, train_prefix_too),
        "sample 641: tokens",
    ),
    "another history": (other_token, "sample 641 does not begin with the .* tokens of a call"),
    "a lost fork": (lambda s: s[1:], "sample 640 is not there, and .* tokens"),
    "two samples of one id": (
        lambda s: changed(s, 0, sample_id=641),
        "session 640: two of its samples have one id",
    ),
    "a call that is counted twice": (twice_in_the_ledger, "sample 641: two calls sampled tokens"),
    "a call that nobody delivered": (left_out_of_the_ledger, "tokens none were sampled"),
    "a row that is not there": (other_rows, "sample 640: 1 rows are not there"),
    "a row that never came": (row_that_never_came, "sample 640: 1 rows are not there"),
}


def test_a_sound_session_has_no_problem_and_its_record_is_read_again():
    [ledger] = session_ledgers(session())
    assert list(ledger_problems(ledger)) == []
    record = CustodyRecord(ledger.session, ledger.calls, ledger.samples, 3)
    line = msgspec.json.encode({"attempt": "x", **msgspec.to_builtins(record)})
    assert list(ledger_problems(SESSIONS.decode(line))) == []
    verdict = judge_custody([record])
    assert (verdict.verdict, verdict.sessions, verdict.tokens) == ("passed", 1, ledger.num_tokens)
    assert judge_custody([]) is None


@pytest.mark.parametrize("plant, message", PLANTED.values(), ids=PLANTED)
def test_a_planted_bug_is_said(plant, message):
    [ledger] = session_ledgers(plant(session()))
    found = list(ledger_problems(ledger))
    assert found and any(re.search(message, text) for text in found), found
    assert judge_custody([ledger]).verdict == "failed"


def test_samples_of_no_session_have_no_ledger():
    samples = [replace(s, token_ledger=None) for s in session()]
    assert session_ledgers(samples) == []


def test_a_step_whose_custody_failed_has_failed_and_says_so():
    [ledger] = session_ledgers(PLANTED["a fork trains its prefix too"][0](session()))
    verdict = StepVerdict(3, [], [], None, {}, custody=judge_custody([ledger]))
    assert not verdict.passed
    kind, text = verdict.failed_claim()
    assert kind == "claim" and "R3 check failed at step 3:\n  custody: sample 641: tokens" in text
    assert replace(verdict, custody=None).passed


def test_the_ledger_of_a_session_survives_a_file(tmp_path):
    write_samples(tmp_path / "s", [(sample, 1.0) for sample in session()], {})
    assert b"custody" in (tmp_path / "s").read_bytes()  # the field's name in files of all versions
    samples = [sample for sample, _ in read_samples(tmp_path / "s")[0]]
    [ledger] = session_ledgers(samples)
    assert list(ledger_problems(ledger)) == [] and len(ledger.calls) == 3


def test_mask_truncated_takes_the_loss_of_the_answers_that_were_cut_and_custody_expects_it(
    tmp_path,
):
    samples = cut_session()
    write_samples(tmp_path / "s", [(sample, 1.0) for sample in samples], {})
    for whole in (samples, [s for s, _ in read_samples(tmp_path / "s")[0]]):
        [masked] = without_truncated([whole])
        words = [Play().text(s.token_ids[s.loss_mask]) for s in masked]
        assert words == ["one<|end|>three<|end|>", ""]
        [ledger] = session_ledgers(masked, mask_truncated=True)
        assert list(ledger_problems(ledger)) == [] and ledger.num_tokens == 23
        assert judge_custody([ledger]).verdict == "passed"
        line = msgspec.json.encode(
            msgspec.to_builtins(CustodyRecord(ledger.session, ledger.calls, ledger.samples, 3))
        )
        assert list(ledger_problems(SESSIONS.decode(line))) == []


@pytest.mark.parametrize(
    "masked, expects",
    [
        (lambda samples: without_truncated([samples])[0], False),
        (lambda samples: samples, True),
        (masked_by_the_last_answer, True),
        (nothing_left, True),
    ],
    ids=["the setting is off", "nothing masked", "by the last answer", "complete ones too"],
)
def test_another_mask_than_that_of_mask_truncated_is_said(masked, expects):
    [ledger] = session_ledgers(masked(cut_session()), mask_truncated=expects)
    assert judge_custody([ledger]).verdict == "failed"


def test_ledgers_of_earlier_versions_are_read():
    samples = session()
    earlier = [entry[:4] for entry in samples[-1].token_ledger]
    samples = changed(samples, len(samples) - 1, token_ledger=earlier)
    [masked] = without_truncated([samples])
    [ledger] = session_ledgers(masked, mask_truncated=True)
    assert list(ledger_problems(ledger)) == []
    line = msgspec.to_builtins(CustodyRecord(ledger.session, ledger.calls, ledger.samples, 3))
    for call in line["calls"]:
        del call["masked"]
    assert list(ledger_problems(SESSIONS.decode(msgspec.json.encode(line)))) == []
