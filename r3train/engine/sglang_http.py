"""HTTP to a set of SGLang servers: one session, errors that name the call and the server, and further tries."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from r3train.engine.backend import (
    BUSY,
    AnswerCutShort,
    AnswerLate,
    AnswerRefused,
    BadAnswer,
    EngineBusy,
    EngineError,
    EngineUnreachable,
    GroupBroken,
    ServerLeft,
)
from r3train.engine.key import ENGINE_KEY_VARIABLE
from r3train.engine.members import Members
from r3train.engine.typed import typed
from r3train.types import RouteShape

logger = logging.getLogger(__name__)

T = TypeVar("T")

# errors after which a request is made again; reading a malformed answer raises ValueError
ASKED_AGAIN = (EngineBusy, AnswerCutShort, AnswerLate, AnswerRefused, ValueError)
# between requests to a server that is busy, unless its Retry-After says more
BUSY_S, LONGEST_BUSY_S = 1.0, 30.0

# uvicorn closes an idle connection after 5 s.  Close it earlier, or a request may meet its close.
_KEEPALIVE_S = 2.0
CONNECT_S = 10.0
CONNECT_RETRIES_S = (0.1, 0.4, 1.0)
# Time for a dead engine's guard to end the rest of its tree and report an exit code.
DEATH_REPORT_S = 6.0
# Bytes of an answer to a call about the server itself; one of checksums has 200 for each tensor.
_MOST_BYTES = 64 << 20
_BYTES_PER_TOKEN = 1024  # of an answer: id, log-prob, their numbers' digits
ID_BYTES = 5.4  # in base64 of an id of an expert or of a token that was chosen, which is an int32
_CHUNK_BYTES = 1 << 18
# Parsing more than this in the event loop would hold the other requests up.
_INLINE_PARSE_BYTES = 1 << 20
# calls that change the base; with adapters of experts SGLang skips these and says that it succeeded
_BASE_UPDATES = (
    "init_weights_update_group",
    "begin_weight_update",
    "update_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weight_version",
)
# SGLang's words where a part of a broadcast's group was lost, in a broadcast and before the first
_BROKEN = ("Failed to receive weights", "Failed to initialize custom process group")
# names of the long strings of an answer
_PAYLOADS = ("routed_experts", "indexer_topk")


def bound_of_texts(tokens: int) -> int:
    """Return the bytes that an answer about so many tokens never has, routes apart."""
    return tokens * _BYTES_PER_TOKEN + (1 << 20)


def bound_of_routes(tokens: int, routes: RouteShape) -> int:
    """Return the bytes in base64 that the rows of so many tokens never have."""
    return int(tokens * routes.num_layers * routes.topk * ID_BYTES)


@dataclass(frozen=True)
class HTTPSettings:
    """Settings of a run's calls to its servers, whichever part of it calls."""

    api_key: str | None = None
    # for one answer; also from a busy server's first refusal to the last try
    request_timeout_s: float = 300.0
    # raises EngineDied when a process of this job has ended; called after every connection failure
    check_alive: Callable[[], None] | None = None
    # of one request, see ``Tries``
    max_bad_answers: int = 1
    # called for each bad answer and each busy server
    on_failed_try: Callable[[], None] = lambda: None


@dataclass(eq=False)
class SGLangHTTP:
    """Requests to one or all servers of a run, from one event loop."""

    members: Members | Sequence[str]  # or the addresses of servers that stay
    settings: HTTPSettings = HTTPSettings()
    _: KW_ONLY
    # the environment variable that errors name
    key_variable: str = ENGINE_KEY_VARIABLE
    # no call changes the base, and no request goes out that names no adapter
    adapters_alone: bool = False
    # without it each request has a connection of its own: a server that stood still for some seconds closes those that waited
    keeps_alive: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.members, Members):
            if not self.members:
                raise ValueError("no engine address was given")
            self.members = Members(self.members)
        self.members.on_leave.append(self._end_calls)
        self.urls = self.members.urls
        self._calls: defaultdict[int, set[asyncio.Timeout]] = defaultdict(set)  # by server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = (
                {"Authorization": f"Bearer {self.settings.api_key}"}
                if self.settings.api_key
                else {}
            )
            idle = (
                {"keepalive_timeout": _KEEPALIVE_S} if self.keeps_alive else {"force_close": True}
            )
            self._session = aiohttp.ClientSession(
                # No limit here: the client and the producer bound what is in flight.
                connector=aiohttp.TCPConnector(limit=0, **idle),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                # a compressed answer could be a thousand times as long as what is received
                headers={**key, "Accept-Encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    async def call(
        self,
        server: int,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        what: str,
        method: str = "POST",
        timeout_s: float | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> Any:
        """Make one request; return the parsed JSON, or the text of an answer that is not JSON.

        It retries only if no connection was made, so that nothing runs twice.  Raises EngineDied,
        EngineUnreachable without a connection, AnswerLate without an answer in time, AnswerCutShort
        for a connection that broke, AnswerRefused for a body that is compressed or longer than
        ``most_bytes``, EngineBusy for a status that says to ask later, and EngineError for another status of
        300 and above (a redirect is not followed), a JSON answer with ``success: false``, and where no
        descriptor is left for a connection.  Every message begins with ``what``, the name of the call.
        """
        if self.adapters_alone:
            name = path.strip("/").partition("?")[0]
            assert name not in _BASE_UPDATES, f"{what}: the base of a server of adapters is updated"
            named = name != "generate" or (body or {}).get("lora_path")
            assert named, f"{what}: a request that names no adapter would sample the base"
        url = self.urls[server]
        timeout_s = timeout_s or self.settings.request_timeout_s
        for delay_s in (*CONNECT_RETRIES_S, None):
            try:
                status, headers, raw = await asyncio.wait_for(
                    self._send(method, url + path, body, most_bytes, what), timeout_s
                )
                break
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                number = getattr(error, "errno", None)
                if delay_s is None and number in (errno.EMFILE, errno.ENFILE):
                    raise EngineError(  # the server is well
                        f"{what}: no file descriptor is left for a connection to {url} ({os.strerror(number)};"
                        f" limit of this process {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}):"
                        " raise it (ulimit -Hn), or lower --rollout-max-concurrency"
                    ) from error
                if delay_s is None:
                    await self.raise_if_dead()
                    raise EngineUnreachable(f"{what}: cannot connect to {url}: {error}") from error
                if self.settings.check_alive is not None:
                    self.settings.check_alive()
                await asyncio.sleep(delay_s)
            except aiohttp.ClientError as error:
                await self.raise_if_dead()
                raise AnswerCutShort(
                    f"{what}: connection to {url} broke: {type(error).__name__}: {error}"
                ) from error
            except TimeoutError as error:
                raise AnswerLate(
                    f"{what}: no answer from {url}{path} within {timeout_s:g} s"
                ) from error
        if 300 <= status < 400:
            target = headers.get("Location", "nowhere")[:200]
            raise EngineError(
                f"{what}: {url}{path} answered {status}, a redirect to {target!r}, which is not"
                " followed: give the server's own address"
            )
        return await self._parse(status, headers, raw, url=url + path, what=what)

    async def ask(
        self,
        server: int,
        name: str,
        body: Mapping[str, Any] | None = None,
        *,
        method: str = "POST",
        kind: Any = Any,
        done: str = "",
    ) -> Any:
        """Make SGLang's call of this name, which may be repeated, until its answer is of this kind.

        kind: a type for ``typed``; done: see ``Tries.answer``.
        """

        async def once() -> Any:
            answer = await self.call(server, f"/{name}", body, what=name, method=method)
            return typed(answer, kind, f"{name}: {self.urls[server]}/{name} answered")

        return await Tries(self, name).answer(once, server, done)

    async def ask_all(
        self,
        name: str,
        body: Mapping[str, Any] | None = None,
        *,
        servers: Sequence[int] | None = None,
        **how: Any,
    ) -> dict[int, Any]:
        """Make the same repeatable call to servers at once, as ``each``; ``how`` is as in ``ask``."""
        return await self.each(lambda server: self.ask(server, name, body, **how), servers)

    async def each(
        self, call: Callable[[int], Awaitable[T]], servers: Sequence[int] | None = None
    ) -> dict[int, T]:
        """Make a call to these servers at once, or to all that are present; returns the results by server.

        Raises the first failure.  Where servers come and go and none is named, one whose call failed leaves, and a failure is
        raised if all have failed: they stay if one of them refused, for the fault is then the call's.  One that has held no
        weights of this run yet leaves in any case.
        """
        asked = self.members.present() if servers is None else servers
        leaves = servers is None and self.members.changes

        async def one(server: int) -> T:
            async with self.while_present(server):
                try:
                    return await call(server)
                except EngineError as error:
                    if not self.members.changes or not self.members.is_new(server):
                        raise
                    # one that hangs, or breaks the group again, would hold up every update: refused
                    hangs = isinstance(error, AnswerLate)
                    is_lost = isinstance(error, EngineUnreachable) and not hangs
                    if isinstance(error, GroupBroken):  # maybe another one has broken it
                        is_lost = self.members.excuse(server)
                    self.members.leave(server, str(error), "lost" if is_lost else "refused")
                    raise ServerLeft(str(error)) from error

        tasks = [asyncio.ensure_future(one(server)) for server in asked]
        try:
            results = await asyncio.gather(*tasks, return_exceptions=leaves)
        finally:
            for task in tasks:
                task.cancel()
        found = dict(zip(asked, results))
        failures = {i: result for i, result in found.items() if isinstance(result, BaseException)}
        for error in failures.values():
            refused = len(failures) == len(found) and not isinstance(error, EngineUnreachable)
            if refused or not isinstance(error, EngineError):
                raise error
        for server, error in failures.items():
            self.members.leave(server, str(error))
            del found[server]
        if leaves and not found:
            raise next(iter(failures.values()), EngineUnreachable("there is no server"))
        return found

    @asynccontextmanager
    async def while_present(self, server: int) -> AsyncIterator[None]:
        """Raise ServerLeft in the context once the server leaves: a host that vanishes closes no connection."""
        self._loop, left = asyncio.get_running_loop(), ServerLeft(f"{self.urls[server]} has left")
        limits = self._calls[server]
        try:
            async with asyncio.timeout(None) as limit:
                limits.add(limit)
                try:
                    if self.members.is_gone(server):
                        raise left
                    yield
                finally:
                    limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise left from None

    def _end_calls(self, server: int) -> None:
        """End the calls to a server that has left; any thread."""

        def end() -> None:
            for limit in self._calls.pop(server, ()):
                limit.reschedule(0)

        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and no call is under way
                self._loop.call_soon_threadsafe(end)

    async def _send(
        self, method: str, url: str, body: Mapping[str, Any] | None, most_bytes: int, what: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        data = None
        headers = None
        if method != "GET":
            data = msgspec.json.encode(body or {})
            headers = {"Content-Type": "application/json"}
        async with self._open_session().request(
            method, url, data=data, headers=headers, allow_redirects=False
        ) as answer:
            encoding = answer.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                answer.close()
                raise AnswerRefused(
                    f"{what}: {url} answered {answer.status} with Content-Encoding {encoding[:100]!r},"
                    " and none was asked for"
                )
            try:
                return answer.status, answer.headers, await read_bounded(answer, most_bytes)
            except BodyTooLong as error:
                raise AnswerRefused(f"{what}: {url}: {error}") from None
            except aiohttp.ClientPayloadError as error:
                expected = answer.headers.get("Content-Length", "unknown")
                raise aiohttp.ClientPayloadError(
                    f"the body ended after {answer.content.total_bytes} bytes, expected {expected}"
                ) from error

    async def _parse(
        self, status: int, headers: Mapping[str, str], raw: bytes, *, url: str, what: str
    ) -> Any:
        try:
            if len(raw) > _INLINE_PARSE_BYTES:
                answer = await self.in_reader(parse_answer, raw)
            else:
                answer = parse_answer(raw)
        except ValueError:
            answer = raw.decode("utf-8", errors="replace").strip()
        if status >= 400 or (isinstance(answer, dict) and answer.get("success") is False):
            hint = ""
            if status == 401:
                held = "another" if self.settings.api_key else "no"
                hint = f" (it asks for a key, and {held} one is in {self.key_variable} here)"
            text = f"{what}: {url} answered {status}: {_message(answer)}{hint}"
            if status in BUSY:
                raise EngineBusy(text, _retry_after_s(headers.get("Retry-After", "")))
            raise (GroupBroken if any(words in text for words in _BROKEN) else EngineError)(text)
        return answer

    async def in_reader(self, read: Callable[..., T], *arguments: Any) -> T:
        """Call what reads a large answer in a thread of its own, and of all answers: several would only take turns."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, read, *arguments)

    async def raise_if_dead(self) -> None:
        """Wait a moment for a dying engine; raise EngineDied, with its log, if it ends."""
        if self.settings.check_alive is None:
            return
        end = time.monotonic() + DEATH_REPORT_S
        while time.monotonic() < end:
            self.settings.check_alive()
            await asyncio.sleep(0.1)

    async def aclose(self) -> None:
        with suppress(ValueError):  # closed before
            self.members.on_leave.remove(self._end_calls)
        if self._session is not None:
            await self._session.close()
            self._session = None


class Tries:
    """The tries of one request, by one rule for rollouts, probes and control calls.

    A busy server (see ``EngineBusy``) is asked again after a growing pause, until one would end later than
    ``request_timeout_s`` after the first.  Any other error of ``ASKED_AGAIN`` is a bad answer, and there may be
    ``max_bad_answers``.  name: begins messages.
    """

    def __init__(self, http: SGLangHTTP, name: str) -> None:
        self._http, self._name = http, name
        self._bad = self._busy = 0
        self._first_busy = 0.0

    async def answer(
        self, ask: Callable[[], Awaitable[T]], server: int, done: str = ""
    ) -> T | None:
        """Return what ``ask`` returns of a server, once it does.

        done: words of a refusal that says that an earlier try was heeded: returns None then.
        """
        while True:
            try:
                return await ask()
            except ASKED_AGAIN as error:
                await self.failed(error, server)
            except EngineError as error:
                if done and done in str(error) and self._bad + self._busy:
                    return None
                raise

    async def failed(self, error: Exception, server: int) -> None:
        """Wait until the request may be made again.

        If it may not, raises the error: a bad answer that is no EngineError as BadAnswer.
        """
        http, settings, text, pause_s = self._http, self._http.settings, str(error), 0.0
        settings.on_failed_try()
        if http.urls[server] not in text:
            text += f" ({http.urls[server]})"
        if isinstance(error, EngineBusy):
            now = time.monotonic()
            self._first_busy = self._first_busy if self._busy else now
            pause_s = min(max(BUSY_S * 2**self._busy, error.retry_after_s), LONGEST_BUSY_S)
            self._busy += 1
            if now + pause_s - self._first_busy > settings.request_timeout_s:
                raise EngineBusy(text) from error
            text += f" (busy {self._busy} times)"
        else:
            self._bad += 1
            if settings.max_bad_answers > 1:
                text += f" (bad answer {self._bad}, max_bad_answers {settings.max_bad_answers})"
            if not text.startswith(self._name) and not isinstance(error, BadAnswer):
                text = f"{self._name}: {type(error).__name__}: {text}"
            if self._bad == settings.max_bad_answers:
                kind = type(error) if isinstance(error, EngineError) else BadAnswer
                raise kind(text) from error
        if settings.check_alive is not None:
            settings.check_alive()
        when = f" in {pause_s:g} s" if pause_s else ""
        logger.warning("asked again%s: %s", when, text)
        await asyncio.sleep(pause_s)


class BodyTooLong(Exception):
    """A body is longer than its request allows."""


async def read_bounded(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Read a body; raises BodyTooLong, and closes the connection, once it is longer than that."""
    length = answer.content_length
    parts, num_bytes = [], 0
    if length is None or length <= most_bytes:
        async for part in answer.content.iter_chunked(_CHUNK_BYTES):
            num_bytes += len(part)
            if num_bytes > most_bytes:
                break
            parts.append(part)
        else:
            return parts[0] if len(parts) == 1 else b"".join(parts)
    answer.close()
    length_text = "" if length is None else f" (its Content-Length is {length})"
    raise BodyTooLong(f"the body is longer than {most_bytes} bytes{length_text}")


def _retry_after_s(header: str) -> float:
    """Return the seconds that a Retry-After asks for; 0 for a date or for nothing."""
    return float(header) if header.isascii() and header.isdigit() and len(header) < 9 else 0.0


def _message(answer: Any) -> str:
    """Return the engine's own error message, from any of the fields that SGLang puts it in."""
    if isinstance(answer, dict):
        error = answer.get("error")
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])
        for key in ("message", "detail", "error"):
            if answer.get(key):
                return str(answer[key])
    return str(answer)[:2000]


def parse_answer(raw: bytes) -> Any:
    """Parse JSON; ``meta_info``'s ``routed_experts`` and ``indexer_topk`` become memoryviews.

    Nearly all of an answer is those base64 strings.  A parser would copy them through a buffer and
    look for escapes, which base64 has none of.  So the strings are cut out, and the small rest is
    parsed.  The same text inside another string has escaped quotes and is not found; other JSON (the
    field twice, or elsewhere) is parsed as a whole.
    Raises ValueError for what is no JSON, which has no NaN.
    """
    rest, cut = raw, {}
    for name in _PAYLOADS:
        if (place := _string_of(name, rest)) is not None:
            cut[name] = memoryview(rest)[place]
            rest = b"".join((rest[: place.start], rest[place.stop :]))
    answer = _decoded(rest)
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if cut and not (isinstance(meta, dict) and all(meta.get(name) == "" for name in cut)):
        return _decoded(raw)
    return answer if not cut else {**answer, "meta_info": {**meta, **cut}}


def _string_of(name: str, raw: bytes) -> slice | None:
    """The place of a field's string in JSON; None where no field has that name, or several."""
    for space in ("", " "):
        key = f'"{name}":{space}"'.encode()
        at = raw.find(key)
        if at < 0:
            continue
        start = at + len(key)
        end = raw.find(b'"', start)
        # a string with a backslash is no base64: parsed as JSON, and refused by the decoder
        if end < 0 or raw.find(key, end) >= 0 or raw.find(b"\\", start, end) >= 0:
            return None
        return slice(start, end)
    return None


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise ValueError("JSON of too many levels") from None
