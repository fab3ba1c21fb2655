"""Bugs of agents' sessions: ``tests.oracle.verify_planted --mutations`` plants each in a session and must see it caught.

The session is the production one.  Its model is arithmetic: rows and log-probs are a function of all tokens before,
as a prefill's are, so that the recheck is exact.  The bugs are those that other frameworks had; custody must say
them, or the claim *recheck* (docs/r3.md).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from r3train.chat.base import ChatRequest, Message, Parsed
from r3train.chat.token_ledger import session_ledgers
from r3train.data.templates import Behind
from r3train.engine.backend import SamplingParams, Segment
from r3train.generation import stitch
from r3train.generation.sessions import Session, SessionSettings
from r3train.proof.custody_verdict import judge_custody
from r3train.proof.recheck_verdict import compare, judge_recheck, Noise, RowsApart
from r3train.proof.suspicion import Suspicions
from r3train.proof.verdicts import FAILED
from r3train.types import Prompt, Rechecked, RolloutSample
from r3train.verify.mutations import planted_by, replaces

SESSIONS = "tests/oracle/test_session_bugs.py"
CUSTODY, RECHECK = "custody", "recheck"
# bug -> what must fail
FAILS = {
    "session_row_copied": RECHECK,
    "fork_takes_the_whole_chain": CUSTODY,
    "fork_trains_again": CUSTODY,
    "retried_answer_dropped": CUSTODY,
}

_LAYERS, _TOPK, _EXPERTS = 3, 2, 128
_END = 0  # ends an answer
_TURNS = 8  # of 7 wrong rows a recheck tells more than rounding


# -- the session -------------------------------------------------------------------------------


def _hash(tokens: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, np.int32))


def _rows(tokens: np.ndarray, first: int) -> np.ndarray:
    """Rows first..T-2 of T tokens, uint8[., L, K]; each depends on all tokens up to its own."""
    seen = [_hash(tokens[: t + 1]) for t in range(first, len(tokens) - 1)]
    one = np.array([[h >> 8 * layer for layer in range(_LAYERS)] for h in seen]) % _EXPERTS
    rows = np.stack([one, (one + 1) % _EXPERTS], axis=-1)
    return rows.reshape(-1, _LAYERS, _TOPK).astype(np.uint8)


def _log_probs(tokens: np.ndarray, first: int) -> np.ndarray:
    """Log-probs of tokens first..T-1, float32."""
    return np.array(
        [-(_hash(tokens[: t + 1]) % 1000) / 100 for t in range(first, len(tokens))], np.float32
    )


@dataclass(eq=False)
class _Model:
    """A ``Generate``: five tokens and the one that ends an answer.  gates: hold back the calls of these numbers."""

    gates: dict[int, asyncio.Event]
    random: np.random.Generator
    asked: int = 0

    async def __call__(
        self, resume_from: RolloutSample | None = None, turn_limit: int | None = None
    ) -> RolloutSample:
        assert resume_from is not None
        number, self.asked = self.asked, self.asked + 1
        if number in self.gates:
            await self.gates[number].wait()
        answer = [*self.random.integers(1, 256, 5), _END]
        start, known = resume_from.num_tokens, stitch.rows_known(resume_from)
        tokens = np.append(resume_from.token_ids, answer).astype(np.int32)
        segment = Segment(
            token_ids=tokens[start:],
            log_probs=_log_probs(tokens, start),
            weight_versions=np.zeros(len(answer), np.int32),
            rows=_rows(tokens, known),
            rows_start=known,
            finish_reason="stop",
        )
        return stitch.extend(resume_from, segment)


class _Template:
    """A chat template of bytes: each message and ``_END``, and a word that asks for an answer."""

    chat = SimpleNamespace(encode=lambda text: list(text.encode("latin-1")))

    def whole(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        return [*(i for m in messages for i in (*str(m["content"]).encode(), _END)), *b"?"]

    def whole_text(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        return bytes(self.whole(messages, tools)).decode("latin-1")

    def special_in(self, messages: Sequence[Message]) -> int:
        return 0

    def behind(
        self, answer: Message, new: Sequence[Message], tools: Sequence[Any], last: int
    ) -> Behind:
        return Behind(self.whole(new, tools), True)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


async def _played() -> Session:
    """Eight turns; two requests at once behind the first answer, one of them asked again; another beginning."""

    def fail(error: BaseException) -> None:
        raise error

    model = _Model({}, np.random.default_rng(0))

    async def read(text: str, tools: Any) -> Parsed:
        return Parsed(text)

    settings = SessionSettings(
        template=_Template(),  # type: ignore[arg-type]
        read=read,
        decode=lambda ids: bytes(ids).decode("latin-1"),
        sampling=SamplingParams(4000),
        max_context_len=4000,
        history="append",
        max_calls=64,
        max_answer_len=None,
    )
    prompt = Prompt("session", 0, "", np.zeros(1, np.int32), None)
    session = Session(settings, model, prompt, 64, fail=fail)

    async def ask(*messages: Message) -> Message:
        answer, commit = await session.answer(ChatRequest(list(messages), b""))
        commit(True)
        return answer.message

    messages = [_user("go")]
    for turn in range(_TURNS):
        messages += [await ask(*messages), _user(f"on {turn}")]
    first = messages[:2]
    model.gates = {_TURNS: asyncio.Event()}
    waiting = asyncio.ensure_future(ask(*first, _user("or this")))
    await asyncio.sleep(0)
    await ask(*first, _user("that"))
    model.gates[_TURNS].set()
    await waiting
    await ask(*first, _user("that"))
    await ask(_user("in short"))
    return session


# -- the judgement -----------------------------------------------------------------------------


def finding() -> tuple[str, str]:
    """Play a session, and judge it as a run does: the claim that fails and its words; two empty ones where none does."""
    session = asyncio.run(_played())
    try:
        samples = session.samples()
    except AssertionError as error:
        return CUSTODY, str(error)
    custody = judge_custody(session_ledgers(samples))
    if custody is not None and custody.verdict == FAILED:
        return CUSTODY, custody.failures[0]
    none = RowsApart(1000, dict.fromkeys(range(1, _LAYERS + 1), 0))
    exact = Noise(none, none, 1000, 0.0, 1e-6)
    records = [
        compare(0, sample, _again(sample), exact, range(1, _LAYERS + 1), log_probs=True)
        for sample in samples
    ]
    verdict = judge_recheck(records, 0, Suspicions(1.0, calibrating=0))
    return (RECHECK, str(verdict)) if verdict.verdict == FAILED else ("", "")


def _again(sample: RolloutSample) -> Rechecked:
    """A sample's text as one prefill computes it."""
    tokens = sample.token_ids
    return Rechecked(
        sample_id=sample.sample_id,
        part="whole",
        server=0,
        weight_version=0,
        held_version=0,
        token_ids=tokens,
        first_row=0,
        rows=_rows(tokens, 0),
        log_probs=_log_probs(tokens, 1),
    )


def survivors() -> list[str]:
    """Judge the session as it is, and with each bug: a line for each that is not judged as ``FAILS`` has it."""
    lines = []
    if (found := finding()) != ("", ""):
        lines.append(f"a session without a bug: {': '.join(found)}")
    for bug in planted_by(SESSIONS):
        with bug.patch(None, None):
            failed, words = finding()
        if failed != FAILS[bug.name]:
            lines.append(
                f"{bug.name}: {FAILS[bug.name]} must fail, got {failed or 'nothing'} {words}"
            )
    return lines


# -- the bugs ----------------------------------------------------------------------------------


@replaces(stitch, "extend", caught_by=SESSIONS)
def session_row_copied(original, sample, segment):
    """The row of an answer's last token is a copy of the row before it."""
    done = original(sample, segment)
    if not sample.decoded:
        return done
    at, rows = done.decoded[-1]
    rows = np.concatenate([sample.decoded[-1][1][-1:], rows[1:]])
    return replace(done, decoded=(*done.decoded[:-1], (at, rows)))


@replaces(stitch, "forked", caught_by=SESSIONS)
def fork_takes_the_whole_chain(original, sample, end, token_ids, *, sample_id):
    """A fork begins with all of the chain that it forks from, not with the part that its request shows."""
    return original(sample, sample.num_tokens, token_ids, sample_id=sample_id)


@replaces(stitch, "forked", caught_by=SESSIONS)
def fork_trains_again(original, sample, end, token_ids, *, sample_id):
    """A fork trains what the chain before it has sampled, a second time."""
    fork = original(sample, end, token_ids, sample_id=sample_id)
    mask = np.append(sample.loss_mask[:end], np.zeros(len(token_ids), bool))
    return replace(fork, loss_mask=mask)


@replaces(Session, "samples", caught_by=SESSIONS)
def retried_answer_dropped(original, self):
    """Of two answers to one request the first is left out."""
    latest = {(call.parent, call.at, call.start): call for call in self.calls}
    self.chains = [chain for chain in self.chains if chain.tip in latest.values()]
    return original(self)
