"""A rollout that an agent makes: a session of calls of the model, from its opening to its reward."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from r3train.chat.base import AgentFailed, ChatAnswer, ChatRequest
from r3train.config.agent_settings import AgentSection
from r3train.engine.backend import SamplingParams
from r3train.generation import stitch
from r3train.generation.episode import EpisodeDropped, Generate
from r3train.generation.sessions import Session, SessionSettings
from r3train.ids import NO_GROUP
from r3train.types import Prompt, RolloutSample
from r3train.user_code import quoted

logger = logging.getLogger(__name__)

_SAID_FROM = 8  # forks at a stop token that the template does not write

Answer = Callable[[ChatRequest], Awaitable[tuple[ChatAnswer, Callable[[bool], None]]]]


class ChatEndpoint(Protocol):
    """The chat endpoint of all sessions; ``close`` ends a session, its calls in flight too."""

    async def open(
        self,
        answer: Answer,
        take_reward: Callable[[Any], None] | None = None,
        count: Callable[[ChatRequest], Awaitable[int]] | None = None,
    ) -> Any: ...

    async def close(self, key: str) -> Mapping[str, int]: ...

    async def stop(self) -> None: ...

    def stats(self) -> Mapping[str, int]: ...


@dataclass(eq=False)
class Agents:
    """All that the sessions of a run share.

    run: lets the agent work on a prompt, and returns its reward, None if it gives none;
    raises AgentFailed.  name: of the agent in errors.  record: told of each session that has ended.  close: ends
    what reads the answers, after the last of them.
    """

    settings: AgentSection
    sessions: SessionSettings
    endpoint: ChatEndpoint
    run: Callable[[Any, Prompt], Awaitable[Any]]
    name: str
    record: Callable[[Mapping[str, Any]], None] = lambda facts: None
    close: Callable[[], None] = lambda: None
    totals: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    def stats(self) -> dict[str, Any]:
        """Sums over all sessions that have ended, and the longest of them."""
        joined = self.endpoint.stats().get("retries_joined", 0)
        return {
            "agent": {
                **self.totals,
                "retries_joined": joined,
                "session_s_max": self.longest_s,
            }
        }


@dataclass(eq=False)
class AgentEpisode:
    """One rollout of an agent (an ``Episode``).

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
        that failed; and the error of the model's side, if there was one.
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
        working = asyncio.ensure_future(agents.run(access, prompt))
        failure: str | None = None
        reward_given: Any = None
        try:
            await asyncio.wait({working, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                await broken
            reward_given = await working
            if reward_given is None and posted:
                reward_given = posted[-1]
            reward = None if reward_given is None else _finite(reward_given)
        except AgentFailed as error:
            failure = str(error)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            models = await agents.endpoint.close(access.key)
            if broken.done():
                broken.exception()  # seen
        # rows are joined and texts compared: a second, with many long samples
        samples = await asyncio.to_thread(session.samples)
        if failure is None and not samples:
            failure = "it never called the model"
        if not self.evaluates:
            seconds = time.monotonic() - began
            self._tell(session, samples, seconds, reward_given, failure, models)
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
        models: Mapping[str, int],
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
        agents.record(
            {
                "sample_id": session.sample_id,
                "prompt_id": session.prompt.prompt_id,
                **counts,
                "models": dict(models),
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


def _finite(reward: Any) -> float:
    """A reward as a number; raises AgentFailed for anything else."""
    try:
        number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
    except Exception:  # of any class: a tensor of two numbers raises RuntimeError
        number = math.nan
    if not math.isfinite(number):
        raise AgentFailed(f"it gave the reward {quoted(reward)}, expected a finite number or None")
    return number
