"""Rewards of many responses without holding up the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from r3train.rewards.registry import Reward
from r3train.types import Prompt


async def score_batch(
    reward: Reward,
    responses: Sequence[tuple[Prompt, str, list[int]]],
    *,
    timeout_s: float,
    concurrency: int = 8,
) -> list[float]:
    """Rewards of (prompt, response_text, response_ids) triples, in their order.

    Calls run in threads, ``concurrency`` at once.  Raises ValueError naming the prompt for the
    first bad reward, or for a custom one that takes longer than ``timeout_s``.
    """
    room = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt, text: str, ids: list[int]) -> float:
        async with room:
            call = _in_thread(lambda: reward(prompt, text, ids))
            if reward.bounds_its_time:
                return await call
            try:
                return await asyncio.wait_for(call, timeout_s)
            except TimeoutError:
                raise ValueError(
                    f"prompt {prompt.prompt_id}: reward {reward.name} took longer than"
                    f" reward_timeout_s {timeout_s:g}"
                ) from None

    tasks = [asyncio.create_task(one(*response)) for response in responses]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _in_thread(call: Callable[[], float]) -> asyncio.Future[float]:
    """Run ``call`` in a daemon thread: one that never returns must not keep the job alive."""
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
