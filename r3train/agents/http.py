"""The chat endpoint of all sessions, on aiohttp in the producer's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import aiohttp
import msgspec
import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from r3train.agents.harness_reward import Reward, read_reward
from r3train.chat import anthropic, openai, responses
from r3train.chat.base import ChatAnswer, ChatRefused, ChatRequest
from r3train.chat.openai import ChatCall
from r3train.config.agent_settings import AgentSection

logger = logging.getLogger(__name__)

# An answer, and what is told once whether the client got it.
Answer = Callable[[ChatRequest], Awaitable[tuple[ChatAnswer, Callable[[bool], None]]]]

_BODY_BYTES = 64 << 20
_KEY_BYTES = 24
_OVER_KEPT = 4096  # keys of ended sessions that are told so; older ones are unknown
_MODEL = "r3train"
# Names that are of models which nobody trains here: a judge's, a simulated user's, one for titles.
_OTHERS = re.compile(
    r"(.*/)?(gpt-(?!oss)|chatgpt|codex-|o[134](-|$)|text-embedding-|claude|gemini-|grok-|sonar|command-"
    r"|deepseek-(chat|reasoner)$|qwen-(max|plus|turbo|flash)|qwen3-(max|coder-plus)|moonshot-|kimi-latest"
    r"|mistral-(large|medium|small)-(latest|\d)|codestral|nova-|jamba-)",
    re.IGNORECASE,
)
_HEADERS_S = 1.0  # a refusal is known by then
_PING_S = 15.0
_NAMES_KEPT = 32
# longer bodies are read on a thread: the event loop is that of all sessions
_READ_AT_ONCE = 1 << 20


class _Dialect(Protocol):
    """A module of ``r3train.chat`` that reads and writes one API."""

    PING: bytes

    def read_request(self, body: bytes, retry_header: str | None, strict: bool) -> ChatCall: ...
    def answer_json(self, answer: ChatAnswer, call: ChatCall) -> bytes: ...
    def begin_events(self, call: ChatCall) -> bytes: ...
    def answer_events(self, answer: ChatAnswer, call: ChatCall) -> bytes: ...
    def error_event(self, refused: ChatRefused, call: ChatCall) -> bytes: ...
    def error_json(self, refused: ChatRefused) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Access:
    """A way to the model for a harness: OpenAI's base_url, the key of its session, and the model's name."""

    base_url: str
    key: str
    model: str = _MODEL

    @property
    def session_url(self) -> str:
        """A base_url that needs no key: its path has it."""
        return f"{self.base_url.removesuffix('/v1')}/s/{self.key}/v1"


@dataclass(eq=False, slots=True)
class _Call:
    """One call of the model; it goes on when its client is gone, for the client's retry.

    Of one that is settled only the answer is kept, for a retry too: each client's request holds its body, which is the
    whole history, and a garbage collection looks at all that a task holds.
    """

    task: asyncio.Task[tuple[ChatAnswer, Callable[[bool], None]]] | None  # the answer, commit
    number: str  # of the answer's id
    created: int
    begun: asyncio.Event | None  # it is not refused any more
    clients: tuple[web.Request, ...] = ()
    answer_json: bytes = b""  # of a settled one

    @property
    def settled(self) -> bool:
        """True once it was told what became of the answer."""
        return self.task is None

    @property
    def is_abandoned(self) -> bool:
        """True while nobody has the answer and nobody waits for it."""
        return not self.settled and not any(map(_is_connected, self.clients))

    @property
    def answer(self) -> ChatAnswer | None:
        """The answer of a settled one."""
        return msgspec.json.decode(self.answer_json, type=ChatAnswer) if self.settled else None

    def settle(self, delivered: bool) -> None:
        """Tell once what became of the answer."""
        if not self.settled:
            answer, commit = self.task.result()
            self.answer_json = msgspec.json.encode(answer)
            self.task, self.clients, self.begun = None, (), None
            commit(delivered)


@dataclass(eq=False, slots=True)
class _Session:
    answer: Answer
    take_reward: Callable[[Reward], None] | None
    count: Callable[[ChatRequest], Awaitable[int]] | None
    slots: asyncio.Semaphore  # of its requests at once; another waits, its body unread
    models: Counter[str] = field(default_factory=Counter)  # requests by the name they gave
    # by method and path, status and reason; of each the count, and the first refusal in words
    requests: dict[tuple[str, int, str], list[Any]] = field(default_factory=dict)
    # by digest; failed ones are not kept
    calls: dict[bytes, list[_Call]] = field(default_factory=dict)
    is_over: bool = False

    def answered(self, number: str) -> ChatAnswer | None:
        """The answer of the call with this number, None while there is none."""
        calls = (call for same in self.calls.values() for call in same)
        return next((call.answer for call in calls if call.number == number), None)

    def to_join(self, request: ChatRequest) -> _Call | None:
        """The call whose answer an equal request gets: one that its client has left; else, if it is marked, the latest.

        Clients that wait for 300 s ask again without a mark.
        """
        calls = self.calls.get(request.digest, [])
        abandoned = (call for call in calls if call.is_abandoned)
        return next(abandoned, calls[-1] if calls and request.retry else None)


class ChatEndpoint:
    """Chat endpoint of all sessions of a run, each with a key of its own.

    A connection on which no whole request comes for ``idle_s`` seconds is closed, and connections above a quarter of the
    limit of open files are refused: whoever reaches the port needs no key to open one.  ``other_key`` is that of the
    endpoint of other models.  ``max_model_len``: tokens of a context, as ``/v1/models`` tells them.  All methods belong to
    one event loop.
    """

    def __init__(
        self,
        settings: AgentSection = AgentSection(),
        *,
        idle_s: float = 30.0,
        other_key: str | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self._settings, self._idle_s, self._max_model_len = settings, idle_s, max_model_len
        self._model = settings.agent_model
        self._other, self._other_key = settings.agent_other_base_url, other_key
        self._client: aiohttp.ClientSession | None = None
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
        for before in ("/s/{key}", ""):  # a session is named by its path, too
            for method, path, dialect, handler in (
                ("POST", "/v1/chat/completions", openai, self._chat),
                ("POST", "/v1/responses", responses, self._chat),
                ("POST", "/v1/messages", anthropic, self._chat),
                ("POST", "/v1/messages/count_tokens", anthropic, self._count),
                ("GET", "/v1/models", openai, self._models),
                ("POST", "/v1/r3train/reward", openai, self._reward),
                ("*", "/{path:.*}", openai, self._nothing),
            ):
                guarded = partial(self._guarded, dialect, handler)
                app.router.add_route(method, before + path, guarded)
        waits = {"shutdown_timeout": 1.0, "keepalive_timeout": self._idle_s}
        waits["lingering_time"] = min(10.0, self._idle_s)  # for the rest of a body that was refused
        logging.getLogger("aiohttp.server").addFilter(_on_one_line)
        runner = web.AppRunner(app, access_log=None, **waits)
        await runner.setup()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        host, port = self._settings.agent_host, self._settings.agent_port

        def accepted() -> asyncio.Protocol:
            return runner.server() if len(runner.server.connections) < most else _Refused()

        try:
            self._listener = await asyncio.get_running_loop().create_server(
                accepted, host, port, backlog=min(1024, most)
            )
        except OSError as error:
            await runner.cleanup()
            raise ValueError(
                f"--agent-host {host} --agent-port {port}: cannot listen there: {error}"
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
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def open(
        self,
        answer: Answer,
        take_reward: Callable[[Reward], None] | None = None,
        count: Callable[[ChatRequest], Awaitable[int]] | None = None,
    ) -> Access:
        """Begin a session whose requests ``answer`` answers; raises what refuses one as ChatRefused.

        take_reward: gets each reward that the session posts; without it none is taken.  count: gives a request's
        tokens to count_tokens.
        """
        await self.start()
        host, port = self._listener.sockets[0].getsockname()[:2]
        key = f"sk-r3train-{secrets.token_hex(_KEY_BYTES)}"
        slots = asyncio.Semaphore(self._settings.agent_max_parallel)
        self._sessions[key] = _Session(answer, take_reward, count, slots)
        local_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        base_url = (self._settings.agent_base_url or local_url).rstrip("/").removesuffix("/v1")
        return Access(f"{base_url}/v1", key, self._model or _MODEL)

    async def close(self, key: str) -> dict[str, int]:
        """End a session: its key dies, its calls in flight are cancelled, answers that nobody took are told so.

        Returns the number of its requests by the name of the model, those of no policy too.
        """
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
        return dict(session.models)

    def requests(self, key: str) -> list[dict[str, Any]]:
        """Requests of a session so far by path, status and reason, with their count and the first refusal's words."""
        found = self._sessions[key].requests.items()
        names = ("request", "status", "reason", "count", "first")
        return [dict(zip(names, (*kind, *told))) for kind, told in found]

    def stats(self) -> dict[str, int]:
        """Counts since the start: answers, refused, refused_REASON, retries_joined, undelivered, and ignored_FIELD."""
        return dict(self._counts)

    def _tell(self, request: web.Request, status: int, refused: ChatRefused | None = None) -> None:
        """Count a request by its path and what became of it, in its session if it has one."""
        reason = "" if refused is None else _reason(refused)
        if refused is not None:
            self._counts.update(("refused", f"refused_{reason}"))
        with contextlib.suppress(ChatRefused):
            requests = self._session_of(request).requests
            kind = (f"{request.method} {_path(request)[:100]}", status, reason)
            if kind not in requests and len(requests) >= _NAMES_KEPT:
                kind = ("others", status, reason)
            requests.setdefault(kind, [0, str(refused or "")[:300]])[0] += 1

    async def _guarded(
        self,
        dialect: _Dialect,
        handler: Callable[[_Dialect, web.Request], Awaitable[web.StreamResponse]],
        request: web.Request,
    ) -> web.StreamResponse:
        """Return what the handler answers, or its refusal in the dialect's form."""
        try:
            response = await handler(dialect, request)
            self._tell(request, response.status)
            return response
        except ChatRefused as error:
            refused = error
        except web.HTTPRequestEntityTooLarge:
            text = f"the body has more than {_BODY_BYTES} bytes"
            refused = ChatRefused(413, "invalid_request_error", text)
        except (ConnectionError, web.RequestPayloadError) as error:
            text = f"the body cannot be read: {error}"
            refused = ChatRefused(400, "invalid_request_error", text)
        self._tell(request, refused.status, refused)
        return web.Response(
            body=dialect.error_json(refused), status=refused.status, content_type="application/json"
        )

    def _session_of(self, request: web.Request) -> _Session:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        key = request.match_info.get("key", key)
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
            body = await self._body_of(request)
            if self._other is not None:
                read = partial(openai.json_object, body)
                fields = await asyncio.to_thread(read) if len(body) > _READ_AT_ONCE else read()
                if not self._is_policy(session, str(fields.get("model") or _MODEL)):
                    return await self._elsewhere(request, body)
            chat_call = await self._asked(dialect, request, session)
            if session.is_over:
                raise _session_over()
            call = session.to_join(chat_call.request)
            if call is not None:
                self._counts["retries_joined"] += 1
                session.slots.release()
            else:
                call = self._begin(session, chat_call)
        finally:
            if call is None:
                session.slots.release()
        # an equal request may ask for another form: a client that gives up a stream asks for JSON
        chat_call = replace(chat_call, number=call.number, created=call.created)
        if (task := call.task) is not None:
            call.clients += (request,)
            if chat_call.stream and not await _is_soon_done(task, call.begun):
                return await self._streamed(dialect, request, session, call, chat_call)
        try:
            answer = call.answer or (await call.task)[0]
        except asyncio.CancelledError:
            raise _session_over() from None
        response = web.Response(body=_body(dialect, answer, chat_call))
        response.content_type = "text/event-stream" if chat_call.stream else "application/json"
        await response.prepare(request)  # sends nothing yet
        if session.is_over:
            raise _session_over()
        if _is_connected(request):
            # before the bytes are in the socket's buffer the client cannot ask on: nothing is awaited between
            call.settle(True)
            await response.write_eof()
        return response

    async def _streamed(
        self,
        dialect: _Dialect,
        request: web.Request,
        session: _Session,
        call: _Call,
        chat_call: ChatCall,
    ) -> web.StreamResponse:
        """Send the headers of a stream at once, pings while the model answers, and then the answer."""
        task, events = call.task, web.StreamResponse(headers={"Cache-Control": "no-cache"})
        events.content_type = "text/event-stream"
        with contextlib.suppress(ConnectionError):  # the call goes on for the client's retry
            await events.prepare(request)
            await events.write(begins := dialect.begin_events(chat_call))
            while not task.done() and _is_connected(request):
                await events.write(dialect.PING)
                await asyncio.wait({task}, timeout=_PING_S)
            if not _is_connected(request):
                return events
            try:
                rest = _body(dialect, (await task)[0], chat_call).removeprefix(begins)
                if session.is_over:
                    raise _session_over()
                call.settle(True)
            except asyncio.CancelledError:
                rest = dialect.error_event(_session_over(), chat_call)
            except ChatRefused as refused:
                self._tell(request, refused.status, refused)
                rest = dialect.error_event(refused, chat_call)
            await events.write(rest)
            await events.write_eof()
        return events

    async def _body_of(self, request: web.Request) -> bytes:
        """The whole body of a request; raises ChatRefused where it does not come in time."""
        try:
            async with asyncio.timeout(self._idle_s):
                return await request.read()
        except TimeoutError:
            text = f"the body was not there within {self._idle_s:g} s"
            raise ChatRefused(408, "late_body", text) from None

    async def _asked(self, dialect: _Dialect, request: web.Request, session: _Session) -> ChatCall:
        """Read a request of the policy; raises ChatRefused, for one of another model too."""
        body, retries = await self._body_of(request), request.headers.get("x-stainless-retry-count")
        read = partial(dialect.read_request, body, retries, self._settings.agent_strict)
        if dialect is responses:
            read = partial(read, answered=session.answered)
        call = await asyncio.to_thread(read) if len(body) > _READ_AT_ONCE else read()
        if self._other is None and not self._is_policy(session, call.model):
            raise ChatRefused(
                404,
                "model_not_found",
                f"the model {call.model[:100]!r} is not the one that is trained, {self._model or _MODEL}:"
                " --agent-model says that it is, --agent-other-base-url where it is",
            )
        return call

    def _is_policy(self, session: _Session, name: str) -> bool:
        """Tell by a request's name whether it is the policy's, and count it."""
        is_known = name in session.models or len(session.models) < _NAMES_KEPT
        session.models[name[:100] if is_known else "others"] += 1
        if self._model is not None:
            return name in (self._model, _MODEL)
        return _OTHERS.match(name) is None

    async def _elsewhere(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Give a request to the endpoint of other models; nothing of it is trained."""
        self._client = self._client or aiohttp.ClientSession(timeout=aiohttp.ClientTimeout())
        names = ("Content-Type", "anthropic-version", "anthropic-beta")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        if self._other_key:
            headers |= {"Authorization": f"Bearer {self._other_key}", "x-api-key": self._other_key}
        url = self._other.rstrip("/") + _path(request).removeprefix("/v1")
        try:
            async with self._client.post(url, data=body, headers=headers) as found:
                kind = found.headers.get("Content-Type", "application/json")
                answer = web.StreamResponse(status=found.status, headers={"Content-Type": kind})
                await answer.prepare(request)
                async for part in found.content.iter_any():
                    await answer.write(part)
                await answer.write_eof()
                return answer
        except aiohttp.ClientConnectionError as error:
            text = f"--agent-other-base-url {self._other}: {error}"
            raise ChatRefused(502, "other_model", text) from None

    async def _count(self, dialect: _Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        async with session.slots:
            call = await self._asked(dialect, request, session)
            if session.count is None:
                raise ChatRefused(404, "not_found", "this session counts no tokens")
            body = anthropic.count_json(await session.count(call.request))
        return web.Response(body=body, content_type="application/json")

    def _begin(self, session: _Session, chat_call: ChatCall) -> _Call:
        """Start a call of the model, which holds a slot of its session until it ends."""
        self._counts.update(f"ignored_{name}" for name in chat_call.request.ignored)
        begun = asyncio.Event()
        request = replace(chat_call.request, begun=begun.set)
        task = asyncio.create_task(_answered(session.answer, request))
        call = _Call(task, chat_call.number, chat_call.created, begun)
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
        model = {"id": self._model or _MODEL, "object": "model", "owned_by": "r3train"}
        if self._max_model_len is not None:
            model["max_model_len"] = self._max_model_len
        models = {"object": "list", "data": [model]}
        return web.Response(body=orjson.dumps(models), content_type="application/json")

    async def _reward(self, dialect: _Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        if session.take_reward is None:
            raise ChatRefused(
                404, "not_found", "this run takes no posted reward (--agent-reward-post)"
            )
        try:
            reward = read_reward(await self._body_of(request))
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
            f"{request.method} {_path(request)[:200]}: there is POST /v1/chat/completions, POST /v1/responses,"
            " POST /v1/messages, POST /v1/messages/count_tokens and GET /v1/models",
        )


class _Refused(asyncio.Protocol):
    """A connection above the bound, which ends at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        logger.warning(
            "the chat endpoint refuses a connection: a quarter of the open files are others"
        )
        transport.abort()


async def _answered(
    answer: Answer, request: ChatRequest
) -> tuple[ChatAnswer, Callable[[bool], None]]:
    """An answer, and what is told whether the client got it; raises ChatRefused.

    What else fails is in the log: the client is told so with a status that it does not retry.
    """
    try:
        return await answer(request)
    except ChatRefused:
        raise
    except Exception as error:
        logger.exception("an answer failed")
        text = f"the answer failed: {type(error).__name__}; the run's log says more"
        raise ChatRefused(400, "answer_failed", text) from None


def _reason(refused: ChatRefused) -> str:
    """The code of a refusal, or of a request that cannot be read the field, with which its words begin."""
    named = re.match(r"(?:the |a )?(\w+)", str(refused))
    return named[1] if named and refused.code == "invalid_request_error" else refused.code


def _body(dialect: _Dialect, answer: ChatAnswer, chat_call: ChatCall) -> bytes:
    write = dialect.answer_events if chat_call.stream else dialect.answer_json
    return write(answer, chat_call)


async def _is_soon_done(task: asyncio.Task, begun: asyncio.Event) -> bool:
    """Wait until a call can not be refused any more, a second at most; tell whether it is done then."""
    waits = asyncio.ensure_future(begun.wait())
    try:
        await asyncio.wait({task, waits}, timeout=_HEADERS_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waits.cancel()
    return task.done()


def _succeeded(task: asyncio.Task) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _path(request: web.Request) -> str:
    """The path of a request without the session's key."""
    return request.path.removeprefix(f"/s/{request.match_info.get('key')}")


def _on_one_line(record: logging.LogRecord) -> bool:
    """Make one line of a malformed request's record: the frames that found it tell nothing."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        why = " ".join(error.message.split())[:200]
        record.msg, record.args = f"{record.getMessage()}: {why}", ()
        record.exc_info = None
    return True


def _session_over() -> ChatRefused:
    return ChatRefused(403, "session_over", "the session of this key is over")
