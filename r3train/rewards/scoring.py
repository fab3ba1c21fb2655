"""Score samples on threads beside the event loop, a few at once and each with a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from r3train.rewards.registry import Reward
from r3train.types import RolloutSample

_CONCURRENCY = 4


class Scorer:
    """Scores samples with one reward, in one event loop.

    A call of a custom reward that takes longer than ``timeout_s`` is an error.  The rewards of
    r3train end such a call themselves (``Reward.bounds_its_time``) and score it.
    """

    def __init__(self, reward: Reward, *, timeout_s: float) -> None:
        self._reward = reward
        self._timeout_s = None if reward.bounds_its_time else timeout_s
        self._room = asyncio.Semaphore(_CONCURRENCY)

    async def __call__(self, sample: RolloutSample) -> float:
        """Score a sample's text.

        Raises ValueError naming the prompt and the function if it fails or takes too long.
        """
        prompt, ids = sample.prompt, sample.token_ids[sample.prompt_len :].tolist()
        async with self._room:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await _in_thread(lambda: self._reward(prompt, sample.text, ids))
            except TimeoutError:
                raise ValueError(
                    f"prompt {prompt.prompt_id}: reward {self._reward.name} took longer than"
                    f" reward_timeout_s {self._timeout_s:g} (sample {sample.sample_id})"
                ) from None


def _in_thread(call: Callable[[], float]) -> asyncio.Future[float]:
    """Run ``call`` in a daemon thread: one that never returns must not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[float] = loop.create_future()

    def settle(setter: Callable[[object], None], value: object) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        try:
            outcome = (future.set_result, call())
        except Exception as error:
            outcome = (future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return future
