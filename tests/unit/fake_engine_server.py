"""A tiny HTTP server that answers as SGLang does, for what is about the client only."""

import contextlib

import numpy as np
from aiohttp import web

from r3train.engine.backend import SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.members import Members
from r3train.types import Prompt
from tests import whole_samples
from tests.http_serving import serving


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


@contextlib.asynccontextmanager
async def client_of(*fakes, versions=None, changes=False, **options):
    """A client of these servers; versions: that it knows them to hold; changes: they may leave."""
    async with contextlib.AsyncExitStack() as stack:
        addrs = [await stack.enter_async_context(fake.running()) for fake in fakes]
        servers = addrs if versions is None else Members(addrs, versions, changes=changes)
        client = SGLangClient(servers, **options)
        try:
            yield client
        finally:
            await client.aclose()


# the fake's only token ends its answers
SAMPLING = SamplingParams(4, may_stop_at=(9,))


def one(client, sample_id=0, group_id=0, sampling=SAMPLING):
    return whole_samples.generate(client, PROMPT, sampling, sample_id=sample_id, group_id=group_id)
