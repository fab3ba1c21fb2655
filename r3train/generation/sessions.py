"""The session of one agent: its calls of the model, as growing samples.

A call is one answer.  Its parent is the deepest call whose messages begin the request's.  A chain is one sample: a
call that goes on from the tip of a chain extends it, with the tokens that the chat template writes behind the
answer.  Any other call begins a chain: a fork, whose prompt is cut from its parent's chain token for token, or a
root, whose messages are rendered whole.  What the model sampled has loss in the chain that sampled it, and nowhere
else; it is never tokenised again.

A session belongs to one event loop.  Nothing of it changes before an answer is complete, apart from a chain that
is busy meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, KW_ONLY, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import orjson

from r3train.chat.base import ChatAnswer, ChatRefused, ChatRequest, Message, Parsed, Read
from r3train.chat.messages import looks_like_call, message_key, shown
from r3train.chat.token_ledger import ledger_entry, ledger_problems, LedgerEntry, session_ledger
from r3train.data.templates import SessionTemplate
from r3train.engine.backend import SamplingParams
from r3train.generation import stitch
from r3train.generation.episode import Generate
from r3train.ids import NO_GROUP
from r3train.types import Prompt, RolloutSample

# Servers have no tokenizer: an answer with stop texts is asked for in pieces of so many tokens.
_STOP_PIECE = 32
# Texts of more characters are rendered on a thread: the event loop is that of all sessions.
_RENDERED_AT_ONCE = 32768
# A text of fewer characters for each token of the context is tried; of longer ones the tokens are counted, in pieces.
_MOST_CHARACTERS = 8
_COUNTED_AT_ONCE = 65536
# codes of refusals with which a session is at its end, and no failure
_LIMITS = {"session_over": "calls", "context_length_exceeded": "context"}

Delivered = Callable[[bool], None]
# an answer without its thoughts, and its request's tools
Unread = tuple[str, Sequence[dict[str, Any]]]


@dataclass(frozen=True)
class SessionSettings:
    """All that the sessions of a run have in common.

    read: gives what an answer's text holds.  decode: the text of tokens, with special ones.  history: append, or template, which continues a chain only
    where the rendering of the whole request begins with the chain's text.  max_calls: also the sample ids that a
    session may take.  max_answer_len: most tokens of one answer.
    """

    template: SessionTemplate
    read: Read
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    max_context_len: int
    history: Literal["append", "template"]
    max_calls: int
    max_answer_len: int | None


@dataclass(eq=False)
class Chain:
    """One growing sample.

    first_prompt: tokens of the request that it, or what it forked from, began with.  request: messages and tools of
    its last call as JSON, in which a garbage collection has nothing to look at.
    """

    sample: RolloutSample
    begins: Literal["root", "fork"]
    first_prompt: int
    calls: list[Call] = field(default_factory=list)
    request: bytes = b""
    busy: bool = False

    @property
    def tip(self) -> Call | None:
        """The last of the chain's calls."""
        return self.calls[-1] if self.calls else None


@dataclass(eq=False, slots=True)
class Call:
    """One complete answer: tokens start..end of its chain, behind ``at`` messages.

    follows: tokens before it that follow its parent's answer; all of the request without a parent.  ended: its
    last token is one at which the model stops.  delivered: None until it is known whether the agent got it.
    """

    number: int
    chain: Chain
    parent: Call | None
    at: int
    answer_json: bytes
    start: int
    end: int
    follows: int
    ended: bool
    entry: LedgerEntry
    finish_reason: str
    delivered: bool | None = None

    @property
    def answer(self) -> Message:
        """The answer's message; between calls it is JSON, in which a garbage collection has nothing to look at."""
        return orjson.loads(self.answer_json)


@dataclass(eq=False)
class _Place:
    """The place where a request goes on: its chain, and the sample with the request's tokens."""

    request: ChatRequest
    parent: Call | None
    prefix: bytes  # digest of tools and messages
    chain: Chain
    sample: RolloutSample
    follows: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The tokens of a request: behind its parent's answer, or all without one.  keeps_last: the answer's last token."""

    parent: Call | None
    tokens: list[int]
    keeps_last: bool = True

    @property
    def end(self) -> int:
        """The place of the first of them in the chain."""
        # a stop token that the template would not write: the chain keeps and trains it, a fork has it not
        parent = self.parent
        return 0 if parent is None else parent.end - (parent.ended and not self.keeps_last)


@dataclass(eq=False)
class Session:
    """The calls of one agent; ``answer`` is what a chat endpoint calls.

    generate: gives one answer to a sample's tokens.  fail: told of errors that end the run; the agent's request is
    refused then.
    """

    settings: SessionSettings
    generate: Generate
    prompt: Prompt
    sample_id: int
    _: KW_ONLY
    fail: Callable[[BaseException], None]

    def __post_init__(self) -> None:
        self.chains: list[Chain] = []
        self.calls: list[Call] = []
        self.counts: Counter[str] = Counter()
        self.unread: list[Unread] = []  # the first answer that looks like a call and is none
        # the limit at which the last request was refused, or the last answer cut
        self.truncated: Literal["calls", "context"] | None = None
        self.called_s = 0.0  # time with a call in flight
        # one that ended an answer, which the template does not write
        self.stop_token: int | None = None
        self._called = 0.0
        self._in_flight = 0
        # numbers of calls by the digest of all messages up to the answer; garbage collections do not look at them
        self._ends: dict[bytes, tuple[int, ...]] = {}

    # ---- a request ---------------------------------------------------------------------------------

    async def answer(self, request: ChatRequest) -> tuple[ChatAnswer, Delivered]:
        """Answer a request; returns the answer, and what is to be told whether the agent got it.

        Raises ChatRefused: nothing has changed then.
        """
        try:
            await self._check_length(request)
            prefixes = _prefixes(request)
            place = self._place(request, prefixes, await self._rendered(request, prefixes))
        except ChatRefused as refused:
            self.truncated = _LIMITS.get(refused.code, self.truncated)
            raise
        self.truncated = None
        request.begun()
        if self._in_flight == 0:
            self._called = time.monotonic()
        self._in_flight += 1
        place.chain.busy = True
        try:
            before = place.sample.num_tokens
            sample, text, stop_text = await self._sampled(place)
            readable = request.tools if request.readable is None else request.readable
            parsed = await self.settings.read(text, readable)
            call, answer = self._complete(place, sample, parsed)
            self._count_calls(text, parsed, readable)
        except ChatRefused:
            raise
        except Exception as error:  # of servers, or the user's parser: the run ends with it
            self.fail(error)
            raise ChatRefused(400, "engine_error", "the run has failed: see its log") from error
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self.called_s += time.monotonic() - self._called
            place.chain.busy = False
            if place.chain.tip is None:
                self.chains.remove(place.chain)
        if call.finish_reason == "length" and call.end - before == self._room(place):
            self.truncated = "context"
        self.counts.update(f"ignored_{name}" for name in request.ignored)
        reason = _finish(call.finish_reason)
        is_cut = reason == "length" and call.end - call.start == request.max_tokens
        self.counts["cut_by_client"] += is_cut
        new = request.messages[0 if place.parent is None else place.parent.at + 1 :]
        self.counts["special_in_text"] += self.settings.template.special_in(new)
        return (
            ChatAnswer(
                answer,
                "tool_calls" if reason == "stop" and "tool_calls" in answer else reason,
                prompt_tokens=before,
                completion_tokens=call.end - call.start,
                stop_text=stop_text,
            ),
            partial(self._settle, call),
        )

    def _settle(self, call: Call, delivered: bool) -> None:
        if call.delivered is None:
            call.delivered = delivered

    async def count_tokens(self, request: ChatRequest) -> int:
        """The tokens that a request would have here; raises ChatRefused."""
        await self._check_length(request)
        rendered = await self._rendered(request, _prefixes(request))
        return rendered.end + len(rendered.tokens)

    async def _check_length(self, request: ChatRequest) -> None:
        """Raise ChatRefused for what no context could hold, before anything is rendered."""
        texts = [orjson.dumps(list(request.tools)).decode()]
        for message in request.messages:
            texts += [message.get("content") or "", message.get("reasoning_content") or ""]
            calls = message.get("tool_calls") or ()
            texts += [str(call["function"].get("arguments") or "") for call in calls]
        most = self.settings.max_context_len
        if sum(map(len, texts)) <= _MOST_CHARACTERS * most:
            return

        def is_longer() -> bool:
            tokens = 0
            for text in texts:
                for at in range(0, len(text), _COUNTED_AT_ONCE):
                    piece = text[at : at + _COUNTED_AT_ONCE]
                    tokens += len(self.settings.template.chat.encode(piece))
                    if tokens > most + at // 1024:  # less what the cuts may add
                        return True
            return False

        if await asyncio.to_thread(is_longer):
            raise _too_long(most, f"more than {most}")

    async def _rendered(self, request: ChatRequest, prefixes: Sequence[bytes]) -> _Rendered:
        """Render a request behind the deepest call that it repeats; raises ChatRefused."""
        parent, at = self._parent(request.messages, prefixes)
        while True:
            whole = parent is None or self.settings.history == "template"
            new = request.messages if whole or request.template_values else request.messages[at:]
            render = partial(self._render, request, parent, at)
            try:
                if sum(len(m.get("content") or "") for m in new) > _RENDERED_AT_ONCE:
                    rendered = await asyncio.to_thread(render)
                else:
                    rendered = render()
            except ValueError as error:
                raise ChatRefused(400, "invalid_request_error", str(error)) from None
            found, at = self._parent(request.messages, prefixes)
            if found is parent:
                return rendered
            parent = found  # a call that was complete meanwhile

    def _render(self, request: ChatRequest, parent: Call | None, at: int) -> _Rendered:
        """Render a request behind a call, whole where only a root can go on (--agent-history template)."""
        template = self.settings.template
        if request.template_values:
            template.check_values(request.messages, request.tools, request.template_values)
        if parent is not None and self.settings.history == "append":
            # -1: no token of an answer that was cut is one that ends it
            stop = int(parent.chain.sample.token_ids[parent.end - 1]) if parent.ended else -1
            new = request.messages[at:]
            return _Rendered(parent, *template.behind(parent.answer, new, request.tools, stop))
        text = template.whole_text(request.messages, request.tools)
        if parent is not None:
            tokens = parent.chain.sample.token_ids[: parent.end].tolist()
            for keeps_last in (True, False) if parent.ended else (True,):
                before = self.settings.decode(tokens if keeps_last else tokens[:-1])
                if text.startswith(before):
                    behind = template.chat.encode(text[len(before) :])
                    return _Rendered(parent, behind, keeps_last)
        return _Rendered(None, template.chat.encode(text))

    def _place(
        self, request: ChatRequest, prefixes: Sequence[bytes], rendered: _Rendered
    ) -> _Place:
        """Find where a request goes on; a new chain takes its id at once."""
        if len(self.calls) + self._in_flight >= self.settings.max_calls:
            raise ChatRefused(
                403, "session_over", f"the session has had its {self.settings.max_calls} calls"
            )
        parent, tokens = rendered.parent, rendered.tokens
        is_new = True
        if parent is None:
            prompt = replace(self.prompt, token_ids=np.asarray(tokens, dtype=np.int32))
            sample = stitch.begin(prompt, sample_id=self._free_id(), group_id=NO_GROUP)
            # the row of the data, as rewards and files know it
            chain = Chain(replace(sample, prompt=self.prompt), "root", len(tokens))
            sample = chain.sample
        elif (
            (chain := parent.chain).tip is parent and not chain.busy and rendered.end == parent.end
        ):
            sample, is_new = stitch.observe(chain.sample, tokens), False
        else:
            if chain.tip is parent and not chain.busy:  # the template does not write its last token
                self.stop_token = int(chain.sample.token_ids[rendered.end])
                self.counts["stop_token_forks"] += 1
                self.counts["stop_token_again"] += rendered.end
            sample = stitch.forked(chain.sample, rendered.end, tokens, sample_id=self._free_id())
            chain = Chain(sample, "fork", chain.first_prompt)
        place = _Place(request, parent, prefixes[-1], chain, sample, len(tokens), is_new)
        self._room(place)
        if is_new:
            self.chains.append(chain)
        if (shown := self._parent(request.messages, prefixes)[0]) is not None:
            shown.delivered = True  # the agent has it
        return place

    def _parent(
        self, messages: Sequence[Message], prefixes: Sequence[bytes]
    ) -> tuple[Call | None, int]:
        """The deepest call whose messages begin the request's, the latest of equals; and their number."""
        for at in range(len(messages) - 1, 0, -1):
            for number in reversed(self._ends.get(prefixes[at], ())):
                if _same_reasoning(self.calls[number], messages):
                    return self.calls[number], at
        return None, 0

    def _free_id(self) -> int:
        ids_in_use = {chain.sample.sample_id for chain in self.chains}
        ids = range(self.sample_id, self.sample_id + self.settings.max_calls)
        return next(number for number in ids if number not in ids_in_use)

    def _room(self, place: _Place) -> int:
        """Tokens that the context has left for an answer; raises ChatRefused where none fits."""
        tokens, most = place.sample.num_tokens, self.settings.max_context_len
        response = self.settings.sampling.max_new_tokens
        behind_first = tokens - place.chain.first_prompt
        room = min(most - tokens, response - behind_first)
        if room < 1:
            limit = min(most, place.chain.first_prompt + response)
            raise _too_long(limit, str(tokens))
        return room

    # ---- an answer ---------------------------------------------------------------------------------

    async def _sampled(self, place: _Place) -> tuple[RolloutSample, str, str | None]:
        """Generate the answer; returns the chain's sample with it, its text without what ended it, and a stop text."""
        sample, start, stops = place.sample, place.sample.num_tokens, place.request.stop
        limits = self._room(place), place.request.max_tokens, self.settings.max_answer_len
        tokens_left = min(filter(None, limits))
        while True:
            piece = min(tokens_left, _STOP_PIECE) if stops else tokens_left
            before = sample.num_tokens
            sample = await self.generate(sample, piece)
            if sample.finish_reason == "abort" or sample.num_tokens == start:
                raise ChatRefused(503, "aborted", "the server aborted the answer: ask again")
            tokens_left -= sample.num_tokens - before
            answer_tokens = sample.token_ids[start:].tolist()
            ended = sample.finish_reason == "stop"
            text = self.settings.decode(answer_tokens[:-1] if ended else answer_tokens)
            if (found := _first_stop(text, stops)) is not None:
                stop_text = next(stop for stop in stops if text.startswith(stop, found))
                return self._cut(sample, start, stops), text[:found], stop_text
            if ended or tokens_left == 0 or sample.num_tokens - before < piece:
                return sample, text, None

    def _cut(self, sample: RolloutSample, start: int, stops: Sequence[str]) -> RolloutSample:
        """Cut an answer behind the token that completes a stop text."""
        answer_tokens = sample.token_ids[start:].tolist()
        count = next(
            n
            for n in range(1, len(answer_tokens) + 1)
            if _first_stop(self.settings.decode(answer_tokens[:n]), stops) is not None
        )
        self.counts["cut_tokens"] += len(answer_tokens) - count
        return replace(stitch.cut(sample, start + count), finish_reason=_AT_STOP_TEXT)

    def _complete(
        self, place: _Place, sample: RolloutSample, parsed: Parsed
    ) -> tuple[Call, Message]:
        """Take an answer into its chain."""
        answer: Message = {"role": "assistant", "content": parsed.content or None}
        if not parsed.calls:
            answer["content"] = parsed.content
        if parsed.reasoning:
            answer["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            earlier = sum(len(m.get("tool_calls") or ()) for m in place.request.messages)
            ids = parsed.ids or "call_{random}"
            answer["tool_calls"] = [
                {
                    "id": ids.format(name=call["name"], index=index, random=secrets.token_hex(12)),
                    "type": "function",
                    "function": dict(call),
                }
                for index, call in enumerate(parsed.calls, earlier)
            ]
        chain, start = place.chain, place.sample.num_tokens
        if not chain.calls:
            chain_start = {"root": "roots", "fork": "forks"}[chain.begins]
            self.counts[chain_start] += 1
        call = Call(
            number=len(self.calls),
            chain=chain,
            parent=place.parent,
            at=len(place.request.messages),
            answer_json=orjson.dumps(answer),
            start=start,
            end=sample.num_tokens,
            follows=place.follows,
            ended=sample.finish_reason == "stop",
            entry=ledger_entry(sample, start),
            finish_reason=sample.finish_reason,
        )
        chain.sample = sample
        chain.request = orjson.dumps([list(place.request.messages), list(place.request.tools)])
        chain.calls.append(call)
        self.calls.append(call)
        # some harnesses drop the text next to calls: the calls' ids say whose message it is
        for text in {parsed.content, ""} if parsed.calls else {parsed.content}:
            message = answer | {"content": text}
            end = _behind(place.prefix, message)
            self._ends[end] = (*self._ends.get(end, ()), call.number)
        return call, answer

    def _count_calls(self, text: str, parsed: Parsed, tools: Sequence[dict[str, Any]]) -> None:
        """Count the calls that were read in an answer, and an answer that looks like a call and is none."""
        if parsed.reasoning:
            text = text.rpartition(parsed.reasoning)[2]
        unread = not parsed.calls and looks_like_call(text, tools)
        self.counts.update(
            with_tools=int(bool(tools)), tool_calls=len(parsed.calls), unread_calls=int(unread)
        )
        if unread and not self.unread:
            self.unread.append((text, tools))

    # ---- the end -----------------------------------------------------------------------------------

    def samples(self) -> list[RolloutSample]:
        """The session's samples, in the order of their last calls; the text of each is its last call's.

        Answers that nobody took are left out: they can only be the last of their chains.  Raises AssertionError
        where a token that was sampled and delivered is not trained exactly once, and where a request does not
        begin with what it goes on from.
        """
        made = []
        for chain in self.chains:
            delivered = [call for call in chain.calls if call.delivered]
            lost = chain.calls[len(delivered) :]
            self.counts["undelivered"] += len(lost)
            self.counts["undelivered_tokens"] += sum(call.end - call.start for call in lost)
            if delivered:
                made.append((delivered[-1], chain))
                self.counts["template_differs"] += self._template_differs(chain)
        made.sort(key=lambda pair: pair[0].number)
        samples = [self._finished(last, chain) for last, chain in made]
        ledger = [call.entry for call in self.calls if call.delivered]
        samples = [
            replace(sample, trajectory_id=self.sample_id, is_last_step=False) for sample in samples
        ]
        if samples:
            samples[-1] = replace(samples[-1], is_last_step=True, token_ledger=tuple(ledger))
        wrong = list(ledger_problems(session_ledger(self.sample_id, samples, ledger)))
        wrong += filter(None, map(_misplaced, self.calls))
        assert not wrong, f"custody of session {self.sample_id}: {'; '.join(wrong)}"
        return samples

    def _template_differs(self, chain: Chain) -> bool:
        """True where the template writes the last request of a chain otherwise than the chain's tokens say it."""
        request_tokens = chain.sample.token_ids[: chain.tip.start].tolist()
        try:
            rendered = self.settings.template.whole_text(*orjson.loads(chain.request))
        except ValueError:
            return True
        return rendered != self.settings.decode(request_tokens)

    def _finished(self, last: Call, chain: Chain) -> RolloutSample:
        sample = chain.sample
        if last is not chain.tip:
            sample = stitch.cut(sample, last.end)
        reason = _finish(last.finish_reason)
        return replace(
            stitch.finished(sample),
            finish_reason=reason,
            text=self._text(last),
            conversation=self._conversation(last, chain),
        )

    def _conversation(self, last: Call, chain: Chain) -> tuple[str, ...]:
        """The messages up to a call's answer as people read them, the answers as the model gave them."""
        messages = [*orjson.loads(chain.request)[0][: last.at], None]
        call: Call | None = last
        while call is not None:
            messages[call.at] = call.answer
            call = call.parent
        return tuple(shown(messages))

    def _text(self, call: Call) -> str:
        answer_tokens = call.chain.sample.token_ids[call.start : call.end].tolist()
        return self.settings.decode(answer_tokens[:-1] if call.ended else answer_tokens)


# the finish reason of a sample that was cut at a stop text, while its session lives
_AT_STOP_TEXT = "stop text"


def _misplaced(call: Call) -> str | None:
    """Tell how a call's request begins otherwise than its parent's tokens; None where it does not.

    The parent's last token may be left out: it ended the answer, and the template ends answers otherwise.
    """
    parent, kept = call.parent, call.start - call.follows
    if parent is None:
        return None
    call_tokens, parent_tokens = (owner.chain.sample.token_ids[:kept] for owner in (call, parent))
    if parent.end - parent.ended <= kept <= parent.end and np.array_equal(
        call_tokens, parent_tokens
    ):
        return None
    return (
        f"sample {call.chain.sample.sample_id} has another beginning than the {parent.end} tokens of the answer"
        f" that its request of {call.start} goes on from"
    )


def _finish(reason: str) -> Any:
    return "stop" if reason == _AT_STOP_TEXT else reason


def _too_long(most: int, tokens: str) -> ChatRefused:
    return ChatRefused(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {most} tokens. However, your messages resulted in"
        f" {tokens} tokens. Please reduce the length of the messages.",
    )


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """The place of the first stop text, None without any."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _same_reasoning(call: Call, messages: Sequence[Message]) -> bool:
    """True unless a message shows other reasoning than its call gave; most agents show none."""
    parent: Call | None = call
    while parent is not None:
        shown = messages[parent.at].get("reasoning_content")
        if shown and shown != parent.answer.get("reasoning_content"):
            return False
        parent = parent.parent
    return True


def _prefixes(request: ChatRequest) -> list[bytes]:
    """Digests of the tools with the first 0, 1, ... messages: a conversation with other tools is another one."""
    digest = hashlib.blake2b(
        json.dumps(list(request.tools), sort_keys=True).encode(), digest_size=16
    )
    made = [digest.digest()]
    for message in request.messages:
        made.append(_behind(made[-1], message))
    return made


def _behind(prefix: bytes, message: Message) -> bytes:
    return hashlib.blake2b(prefix + message_key(message), digest_size=16).digest()
