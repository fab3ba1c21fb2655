"""Samples, routes and answers of any shape, for benchmarks that need their sizes alone."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pybase64

from r3train.types import Prompt, RolloutSample, TrainSample


def route_payload(num_rows: int, num_layers: int, topk: int, num_experts: int) -> bytes:
    """Routes of ``num_rows`` tokens as SGLang sends them: base64 of int32[num_rows, L, K]."""
    generator = np.random.default_rng(0)
    first = generator.integers(0, num_experts, (num_rows, num_layers, 1))
    ids = ((first + np.arange(topk)) % num_experts).astype("<i4")  # different ones, as a router's
    return pybase64.b64encode(ids.tobytes())


def sample_of_routes(
    sample_id: int, routes: np.ndarray, *, prompt_len: int = 1, vocab_size: int = 64
) -> TrainSample:
    """A sample of T random tokens with these routes, uint8/uint16 [T-1, L, K].

    All tokens after the prompt are trained; their log-probs are -6 and they share one advantage.
    """
    num_tokens = len(routes) + 1
    generator = np.random.default_rng(sample_id)
    trained = np.arange(num_tokens) >= prompt_len
    sample = RolloutSample(
        sample_id=sample_id,
        group_id=sample_id,
        prompt=Prompt("p", sample_id, "", np.zeros(prompt_len, np.int32), None),
        token_ids=generator.integers(3, vocab_size, num_tokens).astype(np.int32),
        prompt_len=prompt_len,
        loss_mask=trained,
        rollout_log_probs=np.where(trained, -6.0, 0).astype(np.float32),
        routed_experts=routes,
        weight_versions=np.zeros(num_tokens, np.int32),
        finish_reason="stop",
    )
    advantages = np.where(trained, generator.standard_normal(), 0).astype(np.float32)
    return TrainSample(sample, reward=0.0, advantages=advantages)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """host:port of a process that stands for SGLang and gives one and the same answer."""
    context = multiprocessing.get_context("spawn")
    ports = context.SimpleQueue()
    server = context.Process(target=_answer_always, args=(answer, ports), daemon=True)
    server.start()
    try:
        yield f"127.0.0.1:{ports.get()}"
    finally:
        server.kill()
        server.join()


def _answer_always(answer: bytes, ports: Any) -> None:
    from aiohttp import web

    async def reply(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/", reply)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())
