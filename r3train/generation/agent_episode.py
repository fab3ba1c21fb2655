"""An episode that an agent makes: a session of calls of the model, from its opening to its reward."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from r3train.chat.base import AgentFailed, BadReward, ChatAnswer, ChatRequest
from r3train.config.agent_settings import AgentSection
from r3train.engine.backend import SamplingParams
from r3train.generation import stitch
from r3train.generation.episode import EpisodeDropped, Generate
from r3train.generation.sessions import Session, SessionSettings, Unread
from r3train.ids import NO_GROUP
from r3train.types import Prompt, RolloutSample
from r3train.user_code import quoted

logger = logging.getLogger(__name__)

_SAID_FROM = 8  # forks at a stop token that the template does not write

Answer = Callable[[ChatRequest], Awaitable[tuple[ChatAnswer, Callable[[bool], None]]]]

_KEYLESS = "refused_invalid_api_key"
_LAST_LINES, _LAST_BYTES, _CAUSES_KEPT = 10, 1000, 64
# answers that look like calls, for other parsers; and those after which a run is told
_UNREAD_KEPT, _MANY = 4, 16


class ChatEndpoint(Protocol):
    """The chat endpoint of all sessions; ``close`` ends a session, its calls in flight too."""

    async def open(
        self,
        answer: Answer,
        take_reward: Callable[[Any], None] | None = None,
        count: Callable[[ChatRequest], Awaitable[int]] | None = None,
    ) -> Any: ...

    async def close(self, key: str) -> Mapping[str, int]: ...

    def requests(self, key: str) -> list[dict[str, Any]]: ...

    async def stop(self) -> None: ...

    def stats(self) -> Mapping[str, int]: ...


async def _none_of_them(answers: Sequence[Unread]) -> Mapping[str, int]:
    return {}


@dataclass(eq=False)
class Agents:
    """All that the sessions of a run share.

    run: lets the agent work on a prompt, and returns its reward, None if it gives none, and the end of its output
    in the bytes that it got; raises AgentFailed.  name: of the agent in errors.  record: told of each session that
    has ended.  close: ends what reads the answers, after the last of them.  end: ends agents that stay.
    other_parsers: gives the number of answers (text, tools) in which each of SGLang's parsers reads a call.
    """

    settings: AgentSection
    sessions: SessionSettings
    endpoint: ChatEndpoint
    run: Callable[[Any, Prompt, bytearray], Awaitable[Any]]
    name: str
    record: Callable[[Mapping[str, Any]], None] = lambda facts: None
    close: Callable[[], None] = lambda: None
    end: Callable[[], Awaitable[None]] | None = None
    totals: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)  # of failures, in short
    other_parsers: Callable[[Sequence[Unread]], Awaitable[Mapping[str, int]]] = _none_of_them
    unread: list[Unread] = field(default_factory=list)  # a few
    has_told: bool = False

    def stats(self) -> dict[str, Any]:
        """Sums over all sessions that have ended, the longest of them, and the causes of failures."""
        found = self.endpoint.stats().items()
        asked = {k: n for k, n in found if k.startswith(("refused", "retries_joined"))}
        causes = {"session_s_max": self.longest_s, "causes": dict(self.causes)}
        return {"agent": {**self.totals, "retries_joined": 0, **asked, **causes}}

    async def stop(self) -> None:
        """Close the endpoint, and end the agents that stay between sessions."""
        await self.endpoint.stop()
        if self.end is not None:
            await self.end()

    async def tell_of_unread(self, unread: Sequence[Unread]) -> None:
        """Warn once where the parser has read no call in many answers, and others look like calls."""
        self.unread += unread[: _UNREAD_KEPT - len(self.unread)]
        many, read = self.totals["with_tools"], self.totals["tool_calls"]
        if self.has_told or read or many < _MANY or len(self.unread) < _UNREAD_KEPT:
            return
        self.has_told = True
        readers = "none reads them"
        try:
            if found := await self.other_parsers(self.unread):
                most = max(found.values())
                names = [name for name, count in found.items() if count == most][:5]
                readers = f"{' and '.join(names)} can read {most} of {len(self.unread)}"
        except Exception as error:  # a hint ends no run
            readers = f"nothing is known ({error})"
        logger.warning(
            f"none of {many} answers to requests with tools has a call that --agent-tool-call-parser"
            f" {self.settings.agent_tool_call_parser} reads, and {self.totals['unread_calls']} look like"
            f" calls; of SGLang's parsers {readers}"
        )


@dataclass(eq=False)
class AgentEpisode:
    """One episode of an agent (an ``Episode``).

    evaluates: the session is an evaluation's: it is not recorded, and a failure that does not end the run counts
    with --agent-failure-reward.
    """

    agents: Agents
    evaluates: bool = False

    async def __call__(
        self, generate: Generate, prompt: Prompt, *, sampling: SamplingParams, sample_id: int
    ) -> tuple[list[RolloutSample], float | None]:
        """Let the agent work; return the session's samples and its reward, None if it gave none.

        Raises EpisodeDropped, or ValueError naming prompt, sample and agent, as --agent-on-failure says for an agent
        that failed; and the error of the model's side, if there was one.  An agent that was refused its last call
        for --agent-max-calls or a full context has not failed, whatever it makes of that.
        """
        agents, began = self.agents, time.monotonic()
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: BaseException) -> None:
            if not broken.done():
                broken.set_exception(error)

        shared = replace(agents.sessions, sampling=sampling)
        session = Session(shared, generate, prompt, sample_id, fail=fail)
        posted: list[Any] = []
        take = posted.append if agents.settings.agent_reward_post else None
        access = await agents.endpoint.open(session.answer, take, session.count_tokens)
        output, keyless = bytearray(), agents.endpoint.stats().get(_KEYLESS, 0)
        working = asyncio.ensure_future(agents.run(access, prompt, output))
        failure: str | None = None
        reward_given: Any = None
        try:
            await asyncio.wait({working, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                await broken
            try:
                reward_given = await working
            except AgentFailed as error:
                if session.truncated is None or isinstance(error, BadReward):
                    raise
                reward_given = error.reward  # harnesses raise at the end of their calls or context
            if reward_given is None and posted:
                reward_given = posted[-1]
            reward = None if reward_given is None else _finite(reward_given)
        except AgentFailed as error:
            failure = str(error)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            keyless = agents.endpoint.stats().get(_KEYLESS, 0) - keyless
            requests = agents.endpoint.requests(access.key)
            models = await agents.endpoint.close(access.key)
            if broken.done():
                broken.exception()  # seen
        # rows are joined and texts compared: a second, with many long samples
        samples = await asyncio.to_thread(session.samples)
        if failure is None and not samples:
            failure = _without_an_answer(session, requests, keyless)
            if lines := _last_lines(output):
                failure += "; its last lines:\n" + "\n".join(lines)
        if not self.evaluates:
            told = {"models": dict(models), "requests": requests, "last_lines": _last_lines(output)}
            told["truncated"] = session.truncated
            seconds = time.monotonic() - began
            self._tell(session, samples, seconds, reward_given, failure, told)
            await agents.tell_of_unread(session.unread)
        if failure is None:
            return samples, reward
        message = f"prompt {prompt.prompt_id}, sample {sample_id}: {agents.name} failed: {failure}"
        if agents.settings.agent_on_failure == "error":
            raise ValueError(message)
        if self.evaluates:
            nothing = stitch.begin(prompt, sample_id=sample_id, group_id=NO_GROUP)
            return samples or [nothing], agents.settings.agent_failure_reward
        if agents.settings.agent_on_failure == "train" and samples:
            return samples, agents.settings.agent_failure_reward
        raise EpisodeDropped("agent", message)

    def _tell(
        self,
        session: Session,
        samples: list[RolloutSample],
        seconds: float,
        reward: Any,
        failure: str | None,
        told: Mapping[str, Any],
    ) -> None:
        """Count a session that has ended, and record it."""
        agents, begins = self.agents, {c.sample.sample_id: c.begins for c in session.chains}
        again = sum(s.prompt_len for s in samples if s.sample_id != session.sample_id)
        counts = {
            "calls": len(session.calls),
            "chains": len(samples),
            **session.counts,
            "failures": int(failure is not None),
        }
        was_few = agents.totals["stop_token_forks"] < _SAID_FROM
        agents.totals.update(counts)
        agents.totals.update(
            sessions=1,
            **({f"truncated_{session.truncated}": 1} if session.truncated else {}),
            seconds=seconds,
            called_s=session.called_s,
            prompt_again=again,
            tokens=sum(s.num_tokens for s in samples),
        )
        if was_few and (forks := agents.totals["stop_token_forks"]) >= _SAID_FROM:
            logger.warning(
                "the model ends answers with %r, which the chat template does not write behind them: %d of %d calls"
                " began a sample of their own, and %.0f%% of the sessions' tokens are prefilled again for it"
                " (--rollout-stop-token-ids are the tokens that end an answer)",
                session.settings.decode([session.stop_token]),
                forks,
                agents.totals["calls"],
                100 * agents.totals["stop_token_again"] / agents.totals["tokens"],
            )
        agents.longest_s = max(agents.longest_s, seconds)
        if failure is not None:
            first, *rest = failure.splitlines() or [""]
            cause = " ".join(line[:300] for line in (first, *rest[-1:]))
            is_known = cause in agents.causes or len(agents.causes) < _CAUSES_KEPT
            agents.causes[cause if is_known else "others: see sessions.jsonl"] += 1
        agents.record(
            {
                "sample_id": session.sample_id,
                "prompt_id": session.prompt.prompt_id,
                **counts,
                **told,
                "seconds": round(seconds, 3),
                "called_s": round(session.called_s, 3),
                "reward": reward if isinstance(reward, (int, float)) else None,
                "failure": failure,
                "samples": [
                    {
                        "sample_id": s.sample_id,
                        "begins": begins[s.sample_id],
                        "tokens": s.num_tokens,
                        "with_loss": int(s.loss_mask.sum()),
                    }
                    for s in samples
                ],
            }
        )


def _without_an_answer(
    session: Session, requests: Sequence[Mapping[str, Any]], keyless: int
) -> str:
    """Say why a session has no sample: nobody took its answers, or its requests were refused."""
    if session.calls:
        return f"it took none of its {len(session.calls)} answers"
    kinds = [r for r in requests if r["status"] >= 400]
    kinds.sort(key=lambda r: -r["count"])
    texts = [f"{r['request']} {r['status']} ×{r['count']} ({r['first']})" for r in kinds[:3]]
    if keyless:
        texts.append(f"401 ×{keyless} (meanwhile, with a key of no session)")
    count = sum(r["count"] for r in kinds) + keyless
    refused = f": {count} request{'s were' if count > 1 else ' was'} refused: {'; '.join(texts)}"
    return "it never called the model" + refused * bool(count)


def _last_lines(output: bytes) -> list[str]:
    return output[-_LAST_BYTES:].decode(errors="replace").splitlines()[-_LAST_LINES:]


def _finite(reward: Any) -> float:
    """A reward as a number; raises AgentFailed for anything else."""
    try:
        number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
    except Exception:  # of any class: a tensor of two numbers raises RuntimeError
        number = math.nan
    if not math.isfinite(number):
        raise AgentFailed(f"it gave the reward {quoted(reward)}, expected a finite number or None")
    return number
