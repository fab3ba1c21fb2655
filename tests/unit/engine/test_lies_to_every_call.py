"""One lie to any call that may be repeated costs nothing; a server that lies for ever is an error with its words.

The server keeps a state, as SGLang does, so that a call which was heeded and whose answer was lost is repeated to one
that has heeded it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from aiohttp import web

from r3train.engine import sglang_http
from r3train.engine.backend import EngineBusy, EngineError, EngineUnreachable, Request
from r3train.engine.control import EngineControl
from r3train.engine.sglang_http import HTTPSettings
from r3train.types import RouteShape
from tests.fakes.server import answer_to, client_of, Fake, SAMPLING
from tests.wire_encoding import encode_routed_experts

TEXT = np.array([5, 6, 7, 9], dtype=np.int32)
REQUEST = Request(0, 0, "p", TEXT, 4, SAMPLING, weight_version=0)
SHAPE = RouteShape(2, 2, 8)
ROUTES = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(np.uint8) % 8
LATE_S = 0.4
FOR_EVER = 1 << 20

STATUSES = ("429", "502", "503", "504")
# the connection breaks before the server has heard the call, after it has heeded it, or in the answer
BROKEN = ("reset", "reset_after", "cut", "late", "half")
ABORTS = ("abort", "abort_429", "abort_503", "abort_500", "abort_999")
GETS = ("/server_info", "/model_info")
LIES = (*STATUSES, *BROKEN, "null")


@dataclass
class Server:
    """A server that lies about the next calls to ``path``."""

    path: str
    lie: str
    lies_left: int = 1
    label: str = "0"
    is_open: bool = False
    is_paused: bool = False
    adapters: set[str] = field(default_factory=set)
    cached: dict[str, int] = field(default_factory=dict)  # tokens by cache key
    flushes: int = 0
    told: int = 0

    async def __call__(self, request, body):
        if request.path == "/health":
            return web.json_response({})
        if request.path != self.path or not self.lies_left:
            return self.reply(*self.heed(request.path, body))
        self.lies_left -= 1
        self.told += 1
        if self.lie == "reset":
            request.transport.abort()
            return None
        if self.lie in ("429", "503"):
            return web.json_response({"error": {"message": "busy"}}, status=int(self.lie))
        status, answer = self.heed(request.path, body)
        if self.lie == "reset_after":
            request.transport.abort()
            return None
        if self.lie in STATUSES:
            return web.Response(status=int(self.lie), text="no gateway")
        if self.lie == "late":
            await asyncio.sleep(3 * LATE_S)
        if self.lie.startswith("abort"):
            code = self.lie.removeprefix("abort").removeprefix("_")
            reason = {
                "type": "abort",
                "message": "full",
                "status_code": int(code) if code else None,
            }
            answer["meta_info"]["finish_reason"] = reason
        if self.lie == "null":
            answer = None
        raw = json.dumps(answer).encode()
        if self.lie == "half":
            return web.Response(body=raw[: len(raw) // 2])
        if self.lie == "cut":
            response = web.StreamResponse()
            response.content_length = len(raw)
            await response.prepare(request)
            await response.write(raw[:3])
            request.transport.close()
            return response
        return self.reply(status, answer)

    def reply(self, status, answer):
        return web.json_response(answer, status=status)

    def heed(self, path, body):
        """Do what is asked; returns (status, answer), in SGLang 0.5.23's words where they count."""
        name, refusal = path.removeprefix("/"), None
        if name == "generate":
            return 200, self.generated(body)
        if name == "server_info":
            return 200, {"tp_size": 1, "max_total_num_tokens": 400}
        if name == "model_info":
            return 200, {"weight_version": self.label}
        if name == "weights_checker":
            return 200, {"success": True, "ranks": [{"checksums": {"w": f"of {self.label}"}}]}
        if name == "update_weights_from_disk":
            self.label = body["weight_version"]
        if name == "update_weights_from_distributed":
            self.label = body.get("weight_version", self.label)
        if name == "update_weight_version":
            self.label = body["new_version"]
        if name == "begin_weight_update":
            refusal = "a weight-update session is already open" if self.is_open else None
            self.is_open = True
        if name == "end_weight_update":
            refusal = None if self.is_open else "no weight-update session is open; call begin"
            self.is_open = False
        if name == "load_lora_adapter":
            known = body["lora_name"] in self.adapters
            refusal = (
                "Failed to load LoRA adapter a because it is already loaded" if known else None
            )
            self.adapters.add(body["lora_name"])
        if name == "unload_lora_adapter":
            known = body["lora_name"] in self.adapters
            refusal = None if known else "LoRA with name a does not exist. Loaded LoRAs: []"
            self.adapters.discard(body["lora_name"])
        if name == "flush_cache":
            self.flushes += 1
            self.cached.clear()
        if name in ("pause_generation", "continue_generation"):
            self.is_paused = name == "pause_generation"
        if refusal is not None:
            return 400, {"success": False, "error_message": refusal}
        return 200, {"success": True}

    def generated(self, body):
        if body["sampling_params"]["max_new_tokens"]:
            answer = answer_to(body)
            answer["meta_info"]["routed_experts"] = encode_routed_experts(ROUTES)
            return answer
        start, key = body["logprob_start_len"], body["extra_key"]
        cached = self.cached.get(key, 0) if start else 0
        self.cached[key] = start
        meta = {
            "id": body["rid"],
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": 0,
            "cached_tokens": cached,
            "finish_reason": {"type": "length", "length": 0},
            "weight_version": self.label,
            "input_token_logprobs": [[-0.5, i, None] for i in body["input_ids"][start:]],
            "routed_experts": encode_routed_experts(ROUTES[: len(body["input_ids"]) - 1]),
        }
        return {"output_ids": [], "meta_info": meta}


def canary(control):
    reading = control.score_canary(TEXT, "key", server=0, routes=SHAPE, halves=True)
    return control.begin(reading)()


def read_as_it_is(scores):
    """The first reading of a half took nothing from the cache, and the second all that there was."""
    early, warm, whole = scores.early, scores.warm, scores.whole
    return (early.cached_tokens, warm.cached_tokens, whole.cached_tokens) == (0, 2, 0) and (
        whole.log_probs.tolist() == [0, -0.5, -0.5, -0.5] and (whole.rows == ROUTES[:3]).all()
    )


def update_in_parts(control):
    control.begin_weight_update()
    control.update_weights_from_distributed(names=[], weight_version=7).result(60)
    control.end_weight_update()
    return control.members.all()


def update_from_disk(control):
    control.update_weights_from_disk("v7", weight_version=7)
    return control.members.all()


def adapters(control):
    control.load_adapter("a", "path")
    control.load_adapter("b", "path")
    control.unload_adapter("a")


# path, call of EngineControl, what holds of its result and of the server then
CONTROL = {
    "canary": ("/generate", canary, lambda found, _: read_as_it_is(found)),
    "server_info": ("/server_info", lambda c: c.pool_tokens(), lambda found, _: found == 400),
    "model_info": (
        "/model_info",
        lambda c: c.weight_versions(),
        lambda found, _: found == {0: "0"},
    ),
    "checksums": (
        "/weights_checker",
        lambda c: c.weight_checksums(),
        lambda found, _: found == {0: {"rank 0 w": "of 0"}},
    ),
    "disk": ("/update_weights_from_disk", update_from_disk, lambda found, s: found == [7]),
    "its label": ("/model_info", update_from_disk, lambda found, s: found == [7]),
    "begin": (
        "/begin_weight_update",
        update_in_parts,
        lambda found, s: found == [7] and not s.is_open,
    ),
    "end": ("/end_weight_update", update_in_parts, lambda found, s: found == [7] and not s.is_open),
    "relabel": (
        "/update_weight_version",
        lambda c: c.update_weight_version(5),
        lambda _, s: s.label == "5",
    ),
    "load": ("/load_lora_adapter", adapters, lambda _, s: s.adapters == {"b"}),
    "unload": ("/unload_lora_adapter", adapters, lambda _, s: s.adapters == {"b"}),
    "flush": ("/flush_cache", lambda c: c.keep_onloaded(), lambda _, s: s.flushes >= 1),
}
CLIENT = {
    "sample": (
        "/generate",
        lambda c: c.generate(REQUEST),
        lambda found, _: found.token_ids.tolist() == [9],
    ),
    "recheck": (
        "/generate",
        lambda c: c.recheck(REQUEST, "whole"),
        lambda found, _: (found.rows == ROUTES[:3]).all() and found.held_version == 0,
    ),
    "sample and recheck": (
        "/generate",
        lambda c: c.score_twice(REQUEST, 0),
        lambda found, _: found[0].token_ids.tolist() == [9] and (found[1].rows == ROUTES).all(),
    ),
    "pause": (
        "/pause_generation",
        lambda c: c.pause_generation("retract"),
        lambda _, s: s.is_paused,
    ),
    "continue": (
        "/continue_generation",
        lambda c: c.continue_generation(),
        lambda _, s: not s.is_paused,
    ),
    "abort": ("/abort_request", lambda c: c.abort(), lambda *_: True),
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(sglang_http, "BUSY_S", 0.01)


@contextlib.asynccontextmanager
async def asked(server, kind, *, lies_counted):
    """Make a call of this kind; yields its result."""
    count = lambda: lies_counted.append(1)  # noqa: E731
    waits_s = LATE_S if server.lie == "late" or server.lies_left > 1 else 60.0
    settings = HTTPSettings(request_timeout_s=waits_s, max_bad_answers=3, on_failed_try=count)
    async with contextlib.AsyncExitStack() as stack:
        if kind in CONTROL:
            addr = await stack.enter_async_context(Fake(server).running())
            control = stack.enter_context(EngineControl([addr], settings))
            yield await asyncio.to_thread(CONTROL[kind][1], control)
        else:
            client = await stack.enter_async_context(
                client_of(Fake(server), routes=SHAPE, **vars(settings))
            )
            yield await CLIENT[kind][1](client)


CASES = [
    (kind, lie)
    for kind, (path, *_) in (CONTROL | CLIENT).items()
    for lie in (*LIES, *(ABORTS if path == "/generate" else ()))
]


@pytest.mark.parametrize("kind, lie", CASES)
async def test_one_lie_costs_nothing(kind, lie):
    path, _, holds = (CONTROL | CLIENT)[kind]
    server, counted = Server(path, lie), []
    async with asked(server, kind, lies_counted=counted) as found:
        assert holds(found, server)
    assert server.told == 1
    # commands say nothing that could be missing or halved; aiohttp repeats a GET that was reset by itself
    tells = path in (*GETS, "/generate", "/weights_checker")
    if tells if lie in ("null", "half") else not (path in GETS and lie.startswith("reset")):
        assert len(counted) == 1


@pytest.mark.parametrize(
    "kind, lie", [case for case in CASES if case[1] in ("503", "reset", "abort_500", "abort_503")]
)
async def test_a_server_that_lies_for_ever_is_an_error_with_its_words(kind, lie):
    server, counted = Server((CONTROL | CLIENT)[kind][0], lie, FOR_EVER), []
    with pytest.raises(EngineError) as error:
        async with asked(server, kind, lies_counted=counted):
            pytest.fail("it was believed")
    busy = lie.endswith("503")
    assert isinstance(error.value, EngineBusy) == busy
    assert isinstance(error.value, EngineUnreachable) == (lie == "reset")
    words = {"503": "busy", "reset": "broke", "abort_500": "full", "abort_503": "full"}[lie]
    assert words in str(error.value)
    assert len(counted) > 3 if busy else len(counted) == 3
    assert server.told >= len(counted)


async def test_a_broadcast_and_a_release_of_memory_are_never_made_twice():
    for path, call in {
        "/update_weights_from_distributed": update_in_parts,
        "/release_memory_occupation": lambda c: c.keep_onloaded(),
    }.items():
        server = Server(path, "reset_after", FOR_EVER)
        async with Fake(server).running() as addr:
            with EngineControl([addr], HTTPSettings(max_bad_answers=3)) as control:
                with pytest.raises(EngineUnreachable):
                    await asyncio.to_thread(call, control)
        assert server.told == 1, path


async def test_a_server_that_closes_waiting_connections_when_it_wakes_loses_no_call():
    """uvicorn does after a stop; a call on such a connection would meet its end."""
    connections = set()

    async def remember(request, body):
        connections.add(request.transport)
        return web.json_response({"success": True, "weight_version": "7"})

    async with Fake(remember).running() as addr:
        with EngineControl([addr]) as control:
            for _ in range(3):
                await asyncio.to_thread(control.begin_weight_update)
                for transport in list(connections):
                    transport.abort()
