"""An engine without a model: one token a tick, labelled with the weights held at that tick.

It behaves as SGLang does at a pause (frozen requests keep what they have) and at an abort (partial
tokens come back), and it records what it was asked.
"""

from __future__ import annotations

import asyncio

import numpy as np

from r3train.generation.stitch import Segment, begin, extend, rows_known
from r3train.types import Prompt, RouteShape

ROUTES = RouteShape(num_layers=2, topk=2, num_experts=8)


def prompt_for(group: int) -> Prompt:
    return Prompt(f"prompts:{group}", group, "", np.array([group, 1], np.int32), None)


class SimulatedEngine:
    """Implements ``RolloutBackend``; ``length(sample_id)`` tokens a response, ``slow`` in ticks."""

    def __init__(self, *, length=lambda _: 4, slow=lambda _: 1, tick_s=0.001):
        self.version = 0  # the test says which weights are held
        self.length = length
        self.slow = slow
        self.tick_s = tick_s
        self.frozen = asyncio.Event()
        self.frozen.set()
        self.running: set[int] = set()
        self.aborting: set[int] = set()
        self.asked: list[tuple[int, int, int]] = []  # sample id, weight version, tokens resumed
        self.asked_for: list[int] = []  # tokens, of each request
        self.cancelled: list[int] = []
        self.calls: list[str] = []
        self.closed = False

    async def generate(
        self,
        prompt,
        sampling,
        *,
        sample_id,
        group_id,
        weight_version=None,
        exact_version=True,
        resume_from=None,
        turn_limit=None,
    ):
        before = resume_from or begin(prompt, sample_id=sample_id, group_id=group_id, routes=ROUTES)
        self.asked.append((sample_id, weight_version, before.response_len))
        allowed = min(self.length(sample_id), sampling.max_new_tokens)
        left = allowed - before.response_len
        if turn_limit is not None:
            left = min(left, turn_limit)
        versions: list[int] = []
        self.asked_for.append(left)
        reason = "stop" if before.response_len + left == self.length(sample_id) else "length"
        self.running.add(sample_id)
        try:
            while len(versions) < left:
                await asyncio.sleep(self.tick_s * self.slow(sample_id))
                if sample_id in self.aborting:
                    reason = "abort"
                    break
                await self.frozen.wait()
                versions.append(self.version)
        except asyncio.CancelledError:
            self.cancelled.append(sample_id)
            raise
        finally:
            self.running.discard(sample_id)
            self.aborting.discard(sample_id)
        count = len(versions)
        first, last = rows_known(before), before.num_tokens + count - 1
        rows = np.zeros((max(last - first, 0), *ROUTES.row), np.uint8)
        return extend(
            before,
            Segment(
                token_ids=np.full(count, 9, np.int32),
                log_probs=np.full(count, -1.0, np.float32),
                weight_versions=np.array(versions, np.int32),
                rows=rows,
                rows_start=first,
                finish_reason=reason,
            ),
        )

    async def pause_generation(self, mode="in_place"):
        self.calls.append(f"pause {mode}")
        self.frozen.clear()

    async def continue_generation(self):
        self.calls.append("continue")
        self.frozen.set()

    async def abort(self, rid=None):
        self.calls.append("abort")
        self.aborting |= self.running

    async def flush_cache(self):
        self.calls.append("flush")

    async def aclose(self):
        self.closed = True
