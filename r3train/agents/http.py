"""The chat endpoint of all sessions, on aiohttp in the producer's event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import orjson
from aiohttp import web

from r3train.agents.harness_reward import Reward, read_reward
from r3train.chat import anthropic, openai
from r3train.chat.base import ChatAnswer, ChatRefused, ChatRequest
from r3train.chat.openai import ChatCall

logger = logging.getLogger(__name__)

# An answer, and what is told once whether the client got it.
Answer = Callable[[ChatRequest], Awaitable[tuple[ChatAnswer, Callable[[bool], None]]]]

_BODY_BYTES = 64 << 20
_KEY_BYTES = 24
_OVER_KEPT = 4096  # keys of ended sessions that are told so; older ones are unknown
_MODELS = {"object": "list", "data": [{"id": "r3train", "object": "model", "owned_by": "r3train"}]}


class _Dialect(Protocol):
    """A module of ``r3train.chat`` that reads and writes one API."""

    def read_request(self, body: bytes, retry_header: str | None) -> ChatCall: ...
    def answer_json(self, answer: ChatAnswer, call: ChatCall) -> bytes: ...
    def answer_events(self, answer: ChatAnswer, call: ChatCall) -> bytes: ...
    def error_json(self, refused: ChatRefused) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Access:
    """A way to the model for a harness: OpenAI's base_url, and the key of its session."""

    base_url: str
    key: str


@dataclass(eq=False, slots=True)
class _Call:
    """One call of the model; it goes on when its client is gone, for the client's retry.

    Of one that is settled only the answer is kept, for a retry too: each client's request holds its body, which is the
    whole history, and a garbage collection looks at all that a task holds.
    """

    task: asyncio.Task[tuple[bytes, str, Callable[[bool], None]]] | None  # body, type, commit
    clients: tuple[web.Request, ...] = ()
    answer: tuple[bytes, str] | None = None  # of a settled one: body, type

    @property
    def settled(self) -> bool:
        """True once it was told what became of the answer."""
        return self.task is None

    @property
    def is_abandoned(self) -> bool:
        """True while nobody has the answer and nobody waits for it."""
        return not self.settled and not any(map(_is_connected, self.clients))

    def settle(self, delivered: bool) -> None:
        """Tell once what became of the answer."""
        if not self.settled:
            body, kind, commit = self.task.result()
            self.task, self.answer, self.clients = None, (body, kind), ()
            commit(delivered)


@dataclass(eq=False, slots=True)
class _Session:
    answer: Answer
    take_reward: Callable[[Reward], None] | None
    slots: asyncio.Semaphore  # of its requests at once; another waits, its body unread
    # by digest; failed ones are not kept
    calls: dict[bytes, list[_Call]] = field(default_factory=dict)
    is_over: bool = False

    def to_join(self, digest: bytes) -> _Call | None:
        """The call whose answer a marked retry gets: one that its client has left, else the latest."""
        calls = self.calls.get(digest, [])
        abandoned = (call for call in calls if call.is_abandoned)
        return next(abandoned, calls[-1] if calls else None)


class ChatEndpoint:
    """Chat endpoint at ``host:port`` for all sessions of a run, each with a key of its own.

    ``max_parallel`` bounds the requests of one session that are answered at once; more wait.  A connection on which no
    whole request comes for ``idle_s`` seconds is closed, and connections above a quarter of the limit of open files are
    refused: whoever reaches the port needs no key to open one.  All methods belong to one event loop.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, max_parallel: int = 8, idle_s: float = 30.0
    ) -> None:
        self._host, self._port = host, port
        self._max_parallel, self._idle_s = max_parallel, idle_s
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._sessions: dict[str, _Session] = {}
        self._over: dict[str, None] = {}  # in the order of their ends
        self._counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Listen, unless it does already; raises ValueError where that fails."""
        async with self._starting:
            if self._runner is None:
                self._runner = await self._listening()

    async def _listening(self) -> web.AppRunner:
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", partial(self._guarded, openai, self._chat))
        app.router.add_post("/v1/messages", partial(self._guarded, anthropic, self._chat))
        app.router.add_get("/v1/models", partial(self._guarded, openai, self._models))
        app.router.add_post("/v1/r3train/reward", partial(self._guarded, openai, self._reward))
        app.router.add_route("*", "/{path:.*}", partial(self._guarded, openai, self._nothing))
        waits = {"shutdown_timeout": 1.0, "keepalive_timeout": self._idle_s}
        runner = web.AppRunner(app, access_log=None, **waits)
        await runner.setup()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4

        def accepted() -> asyncio.Protocol:
            return runner.server() if len(runner.server.connections) < most else _Refused()

        try:
            self._listener = await asyncio.get_running_loop().create_server(
                accepted, self._host, self._port, backlog=min(1024, most)
            )
        except OSError as error:
            await runner.cleanup()
            raise ValueError(
                f"--agent-host {self._host} --agent-port {self._port}: cannot listen there: {error}"
            ) from error
        return runner

    async def stop(self) -> None:
        """End all sessions and stop to listen."""
        for key in list(self._sessions):
            await self.close(key)
        if self._runner is not None:
            self._listener.close()
            await self._runner.cleanup()
            self._runner = None

    async def open(
        self, answer: Answer, take_reward: Callable[[Reward], None] | None = None
    ) -> Access:
        """Begin a session whose requests ``answer`` answers; raises what refuses one as ChatRefused.

        take_reward: gets each reward that the session posts; without it none is taken.
        """
        await self.start()
        host, port = self._listener.sockets[0].getsockname()[:2]
        key = f"sk-r3train-{secrets.token_hex(_KEY_BYTES)}"
        self._sessions[key] = _Session(answer, take_reward, asyncio.Semaphore(self._max_parallel))
        return Access(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", key)

    async def close(self, key: str) -> None:
        """End a session: its key dies, its calls in flight are cancelled, answers that nobody took are told so."""
        session = self._sessions.pop(key)
        session.is_over = True
        self._over[key] = None
        while len(self._over) > _OVER_KEPT:
            del self._over[next(iter(self._over))]
        calls = [call for same in session.calls.values() for call in same]
        running = [call.task for call in calls if call.task and not call.task.done()]
        for task in running:
            task.cancel()
        try:
            if running:
                await asyncio.wait(running)
        finally:
            for call in calls:
                if not call.settled and _succeeded(call.task):
                    self._counts["undelivered"] += 1
                    call.settle(False)

    def stats(self) -> dict[str, int]:
        """Counts since the start: answers, refused, retries_joined, undelivered, and ignored_FIELD of requests."""
        return dict(self._counts)

    async def _guarded(
        self,
        dialect: _Dialect,
        handler: Callable[[_Dialect, web.Request], Awaitable[web.StreamResponse]],
        request: web.Request,
    ) -> web.StreamResponse:
        """Return what the handler answers, or its refusal in the dialect's form."""
        try:
            return await handler(dialect, request)
        except ChatRefused as error:
            refused = error
        except web.HTTPRequestEntityTooLarge:
            text = f"the body has more than {_BODY_BYTES} bytes"
            refused = ChatRefused(413, "invalid_request_error", text)
        except (ConnectionError, web.RequestPayloadError) as error:
            text = f"the body cannot be read: {error}"
            refused = ChatRefused(400, "invalid_request_error", text)
        self._counts["refused"] += 1
        return web.Response(
            body=dialect.error_json(refused), status=refused.status, content_type="application/json"
        )

    def _session_of(self, request: web.Request) -> _Session:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if key in self._over:
            raise _session_over()
        if key not in self._sessions:
            raise ChatRefused(401, "invalid_api_key", "no session has this key")
        return self._sessions[key]

    async def _chat(self, dialect: _Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        await session.slots.acquire()
        call = None
        try:
            if not _is_connected(request):
                raise ConnectionError("its client is gone")
            retries = request.headers.get("x-stainless-retry-count")
            chat_call = dialect.read_request(await request.read(), retries)
            if session.is_over:
                raise _session_over()
            call = session.to_join(chat_call.request.digest) if chat_call.request.retry else None
            if call is not None:
                self._counts["retries_joined"] += 1
                session.slots.release()
            else:
                call = self._begin(session, dialect, chat_call)
        finally:
            if call is None:
                session.slots.release()
        if not call.settled:
            call.clients += (request,)
        try:
            body, kind = call.answer or (await call.task)[:2]
        except asyncio.CancelledError:
            raise _session_over() from None
        response = web.Response(body=body, content_type=kind)
        await response.prepare(request)  # sends nothing yet
        if session.is_over:
            raise _session_over()
        if _is_connected(request):
            # before the bytes are in the socket's buffer the client cannot ask on: nothing is awaited between
            call.settle(True)
            await response.write_eof()
        return response

    def _begin(self, session: _Session, dialect: _Dialect, chat_call: ChatCall) -> _Call:
        """Start a call of the model, which holds a slot of its session until it ends."""
        self._counts.update(f"ignored_{name}" for name in chat_call.request.ignored)
        call = _Call(asyncio.create_task(_answered(session.answer, dialect, chat_call)))
        same = session.calls.setdefault(chat_call.request.digest, [])
        same.append(call)

        def ended(task: asyncio.Task) -> None:
            session.slots.release()
            if _succeeded(task):
                self._counts["answers"] += 1
            else:  # a retry asks again
                same.remove(call)

        call.task.add_done_callback(ended)
        return call

    async def _models(self, dialect: _Dialect, request: web.Request) -> web.StreamResponse:
        self._session_of(request)
        return web.Response(body=orjson.dumps(_MODELS), content_type="application/json")

    async def _reward(self, dialect: _Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        if session.take_reward is None:
            raise ChatRefused(
                404, "not_found", "this run takes no posted reward (--agent-reward-post)"
            )
        try:
            reward = read_reward(await request.read())
        except ValueError as error:
            raise ChatRefused(400, "invalid_request_error", str(error)) from None
        if session.is_over:
            raise _session_over()
        session.take_reward(reward)
        return web.Response(body=b"{}", content_type="application/json")

    async def _nothing(self, dialect: _Dialect, request: web.Request) -> web.StreamResponse:
        raise ChatRefused(
            404,
            "not_found",
            f"{request.method} {request.path[:200]}: there is POST /v1/chat/completions, POST /v1/messages"
            " and GET /v1/models",
        )


class _Refused(asyncio.Protocol):
    """A connection above the bound, which ends at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        logger.warning(
            "the chat endpoint refuses a connection: a quarter of the open files are others"
        )
        transport.abort()


async def _answered(
    answer: Answer, dialect: _Dialect, chat_call: ChatCall
) -> tuple[bytes, str, Callable[[bool], None]]:
    """The body of an answer, its type, and what is told whether the client got it; raises ChatRefused.

    What else fails is in the log: the client is told so with a status that it does not retry.
    """
    try:
        chat_answer, commit = await answer(chat_call.request)
        if chat_call.stream:
            return dialect.answer_events(chat_answer, chat_call), "text/event-stream", commit
        return dialect.answer_json(chat_answer, chat_call), "application/json", commit
    except ChatRefused:
        raise
    except Exception as error:
        logger.exception("an answer failed")
        text = f"the answer failed: {type(error).__name__}; the run's log says more"
        raise ChatRefused(400, "answer_failed", text) from None


def _succeeded(task: asyncio.Task) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _session_over() -> ChatRefused:
    return ChatRefused(403, "session_over", "the session of this key is over")
