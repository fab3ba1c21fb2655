"""Servers without a model, in process and over HTTP.

The one in process says one token a tick, labelled with the weights held at that tick.  It behaves as SGLang does
at a pause (frozen requests keep what they have) and at an abort (partial tokens come back), and it records what it
was asked.  The one over HTTP gives one token an answer, or what its handler says.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import fields
from typing import Any

import numpy as np
from aiohttp import web

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import Drafts, EngineDied, Request, SamplingParams, Segment
from r3train.engine.client import SGLangClient
from r3train.engine.control import EngineControl
from r3train.engine.members import Members
from r3train.engine.sglang_http import HTTPSettings
from r3train.types import Prompt, RouteShape
from tests import whole_samples
from tests.http_serving import serving

ROUTES = RouteShape(num_layers=2, topk=2, num_experts=8)
PROMPT_LEN = 2
RETRACTED = 7  # token of answers that were retracted
EVAL_IDS = 1 << 62  # sample ids of evaluations are above it


def rollout_section(**changes: Any) -> RolloutSection:
    """A section with small numbers."""
    base = {"num_rollout": 4, "rollout_batch_size": 2, "n_samples_per_prompt": 2}
    return RolloutSection(**{**base, "rollout_max_response_len": 64, **changes})


def prompt_for(group: int) -> Prompt:
    return Prompt(f"prompts:{group}", group, "", np.array([group, 1], np.int32), None)


class SimulatedEngine:
    """Implements ``RolloutBackend``; ``length(sample_id)`` tokens a response, ``slow`` in ticks.

    version: the weights that are held, for the test to set; None: those that each request expects.
    fail_at: the sample whose request meets a dead engine.

    ``retracted(n)`` is True for answers, counted from 0, that say that they were retracted: their
    tokens are RETRACTED.
    """

    def __init__(
        self,
        *,
        length=lambda _: 4,
        slow=lambda _: 1,
        tick_s=0.001,
        retracted=lambda n: False,
        version: int | None = 0,
        fail_at: int | None = None,
    ):
        self.version = version
        self.fail_at = fail_at
        self.length = length
        self.slow = slow
        self.tick_s = tick_s
        self.retracted = retracted
        self.answered = 0
        self.frozen = asyncio.Event()
        self.frozen.set()
        self.running: set[int] = set()
        self.most = self.most_evaluated = 0  # requests at once, and those of evaluations
        self.requests: list[Request] = []
        self.aborting: set[int] = set()
        self.asked: list[tuple[int, int, int]] = []  # sample id, weight version, tokens resumed
        self.asked_for: list[int] = []  # tokens, of each request
        self.cancelled: list[int] = []
        self.calls: list[str] = []
        self.closed = False

    async def generate(self, request: Request) -> Segment:
        sample_id = request.sample_id
        before = len(request.token_ids) - PROMPT_LEN  # of the response
        self.requests.append(request)
        self.asked.append((sample_id, request.weight_version, before))
        left = min(self.length(sample_id) - before, request.max_new_tokens)
        versions: list[int] = []
        self.asked_for.append(left)
        reason = "stop" if before + left == self.length(sample_id) else "length"
        self._begun(sample_id)
        try:
            while len(versions) < left:
                await asyncio.sleep(self.tick_s * self.slow(sample_id))
                if sample_id in self.aborting:
                    reason = "abort"
                    break
                await self.frozen.wait()
                held = request.weight_version if self.version is None else self.version
                versions.append(held)
        except asyncio.CancelledError:
            self.cancelled.append(sample_id)
            raise
        finally:
            self.running.discard(sample_id)
            self.aborting.discard(sample_id)
        if sample_id == self.fail_at:
            raise EngineDied(f"sample {sample_id} met a dead engine")
        count = len(versions)
        first, last = request.rows_start, len(request.token_ids) + count - 1
        retracted = self.retracted(self.answered)
        self.answered += 1
        return Segment(
            token_ids=np.full(count, RETRACTED if retracted else 9, np.int32),
            log_probs=np.full(count, -1.0, np.float32),
            weight_versions=np.array(versions, np.int32),
            rows=(
                np.zeros((last - first if count else 0, *ROUTES.row), ROUTES.dtype)
                if request.wants_routes
                else None
            ),
            rows_start=first,
            finish_reason=reason,
            num_retractions=int(retracted),
            drafts=Drafts(3 * count, count, count),
        )

    def _begun(self, sample_id: int) -> None:
        self.running.add(sample_id)
        self.most = max(self.most, len(self.running))
        evaluated = sum(running >= EVAL_IDS for running in self.running)
        self.most_evaluated = max(self.most_evaluated, evaluated)

    async def pause_generation(self, mode="in_place"):
        self.calls.append(f"pause {mode}")
        self.frozen.clear()

    async def continue_generation(self):
        self.calls.append("continue")
        self.frozen.set()

    async def abort(self):
        self.calls.append("abort")
        self.aborting |= self.running

    async def flush_cache(self):
        self.calls.append("flush")

    async def aclose(self):
        self.closed = True


PROMPT = Prompt("p", 0, "", np.array([5, 6, 7], dtype=np.int32), None)


def answer_to(body):
    if "input_ids" not in body:
        return {"success": True, "message": "done"}
    return {
        "output_ids": [9],
        "meta_info": {
            "id": body.get("rid"),
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": 1,
            "finish_reason": {"type": "stop", "matched": 9},
            "output_token_logprobs": [[-0.5, 9, None]],
            "num_retractions": 0,
            "cached_tokens": 0,
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        },
    }


async def refuse(_request, _body):
    """A handler: every request is too long."""
    return web.json_response({"error": {"message": "too long"}}, status=400)


async def hang_up(request, _body):
    """A handler that breaks the connection."""
    request.transport.abort()


class Fake:
    """One HTTP server that records what it is asked."""

    def __init__(self, handler=None):
        self.bodies = []
        self.paths = []
        self.headers = []
        self.handler = handler

    async def handle(self, request):
        body = await request.json() if request.can_read_body else {}
        self.bodies.append(body)
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        if self.handler is not None:
            return await self.handler(request, body)
        return web.json_response(answer_to(body))

    def running(self):
        return serving(self.handle)


def client_to(servers, **options):
    """A client of these servers; options: of the client, and of its ``HTTPSettings``."""
    names = {field.name for field in fields(HTTPSettings)} & set(options)
    settings = HTTPSettings(**{name: options.pop(name) for name in names})
    return SGLangClient(servers, settings, **options)


@contextlib.asynccontextmanager
async def client_of(*fakes, versions=None, changes=False, **options):
    """A client of these servers; versions: that it knows them to hold; changes: they may leave."""
    async with contextlib.AsyncExitStack() as stack:
        addrs = [await stack.enter_async_context(fake.running()) for fake in fakes]
        servers = addrs if versions is None else Members(addrs, versions, changes=changes)
        client = client_to(servers, **options)
        try:
            yield client
        finally:
            await client.aclose()


# the fake's only token ends its answers
SAMPLING = SamplingParams(4, may_stop_at=(9,))


def one(client, sample_id=0, group_id=0, sampling=SAMPLING):
    return whole_samples.generate(client, PROMPT, sampling, sample_id=sample_id, group_id=group_id)


@contextlib.asynccontextmanager
async def control_of(*fakes, **options):
    async with contextlib.AsyncExitStack() as stack:
        addrs = [await stack.enter_async_context(fake.running()) for fake in fakes]
        with EngineControl(addrs, **options) as control:
            yield control
