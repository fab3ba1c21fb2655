"""The training thread's handle on the servers: weight updates, and questions about their state."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from itertools import starmap
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import Meta, Struct

from r3train.config.sources import raise_all
from r3train.engine.backend import EngineError, EngineUnreachable
from r3train.engine.members import Members
from r3train.engine.sglang_http import ASKED_AGAIN, HTTPSettings, SGLangHTTP, Tries
from r3train.engine.score import GivenText, score
from r3train.engine.refusals import refused, settings_of_a_server
from r3train.types import CanaryScores, RouteShape, Scores

logger = logging.getLogger(__name__)

T = TypeVar("T")

# what a server can release of its memory, by SGLang's names
MEMORY = ("weights", "kv_cache")
_NOT_FLUSHED = "the cache was not flushed"
# SGLang refuses by these words a call that it has heeded before
_OPEN, _ENDED = "session is already open", "no weight-update session is open"
_LOADED, _UNLOADED = "it is already loaded", "does not exist"
# waits until no request is in progress
_FLUSH = "flush_cache?timeout=60"
_ALIVE_EVERY_S = 0.5
_CANARY = "of a canary"  # name of its text in messages


def _label(version: int) -> dict[str, Any]:
    return {"new_version": str(version), "abort_all_requests": False}


def _count(url: str, info: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    """Return a count that a server said; ``default`` where it said none or null.

    Raises EngineError naming the server and the key of /server_info for anything else.
    """
    value = info.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 <= value < 1 << 53:
        got = repr(value)[:100]
        raise EngineError(
            f"engine {url}: {key} of /server_info is {got}, expected a number from 0 on"
        )
    return value


class RankChecksums(Struct):
    """The checksums of one rank of a server, by the names of its tensors."""

    checksums: Annotated[dict[str, str], Meta(min_length=1)]


class WeightChecksums(Struct):
    """The answer of ``/weights_checker``."""

    ranks: Annotated[list[RankChecksums], Meta(min_length=1)]


class EngineControl:
    """Synchronous calls to all servers, on a loop and a thread of their own.

    Any thread may use it while a producer's loop runs elsewhere.  Each method makes SGLang's call
    of the same name and raises EngineError with the server's own message when one server refuses.
    Calls are made again as ``Tries`` says, but for those that must not be repeated: the parts of a
    broadcast's group, and releasing or resuming memory, which ends SGLang's scheduler the second time.
    The two calls that need a simultaneous partner in the trainer (joining a group, receiving a
    broadcast) return a Future.  The versions of ``members`` are kept up to date: unknown when an update begins, and
    the new version once every server has confirmed it.  All arguments are for ``SGLangHTTP``.
    Where a method takes ``servers``, None means all that are present (see ``SGLangHTTP.each``).
    """

    def __init__(
        self,
        servers: Members | Sequence[str],
        settings: HTTPSettings = HTTPSettings(),
        *,
        adapters_alone: bool = False,
    ) -> None:
        self._sent_version: int | None = None
        self._held_memory: tuple[str, ...] = MEMORY
        self._confirmed: int | None = None  # the version that servers hold whose cache is released
        self._http = SGLangHTTP(servers, settings, adapters_alone=adapters_alone, keeps_alive=False)
        self.members = self._http.members
        self._check_alive = settings.check_alive
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-control", daemon=True
        )
        self._thread.start()

    def present(self) -> list[int]:
        """The servers that are members now."""
        return self.members.present()

    def each(
        self, call: Callable[[int], Awaitable[T]], servers: Sequence[int] | None = None
    ) -> Coroutine[Any, Any, dict[int, T]]:
        """Make a call of this object's coroutines to servers at once: see ``SGLangHTTP.each`` and ``begin``."""
        return self._http.each(call, servers)

    def check_alive(self) -> None:
        """Raise EngineDied when a server process of this job has ended."""
        if self._check_alive is not None:
            self._check_alive()

    def begin(self, call: Coroutine[Any, Any, T]) -> Callable[[], T]:
        """Begin a call of this object's coroutines; the returned function waits for its result.

        It raises EngineDied if a server ends or hangs meanwhile.
        """
        pending = asyncio.run_coroutine_threadsafe(call, self._loop)

        def result() -> T:
            while not wait([pending], timeout=_ALIVE_EVERY_S).done:
                try:
                    self.check_alive()
                except EngineError:
                    pending.cancel()
                    raise
            return pending.result()

        return result

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.begin(call)()

    def _post(self, name: str, body: Mapping[str, Any] | None = None, *, done: str = "") -> None:
        """Make SGLang's call of this name on every server; done: see ``Tries.answer``."""
        self._run(self._http.ask_all(name, body, done=done))

    def _post_once(
        self, name: str, body: Mapping[str, Any], servers: Sequence[int] | None = None
    ) -> None:
        """Make SGLang's call of this name, which must not be repeated, on servers."""
        call = lambda i: self._http.call(i, f"/{name}", body, what=name)  # noqa: E731
        self._run(self._http.each(call, servers))

    async def _updated(
        self, server: int, update: Callable[[int], Awaitable[Any]], version: int | None
    ) -> None:
        """Make a server's update; where it had loaded it and not dropped its cache, have that done now.

        A request in progress forbids it, and SGLang answers ``/health`` with one of its own.  Such a
        server keeps its old label too.  /flush_cache waits until it is idle.
        """
        try:
            await update(server)
        except EngineError as error:
            if version is None or _NOT_FLUSHED not in str(error):
                raise
            await self._http.ask(server, _FLUSH)
            await self._http.ask(server, "update_weight_version", _label(version))

    def keep_onloaded(self, *kinds: str) -> None:
        """Let every server hold these kinds of ``MEMORY`` and release the others (--colocate).

        What comes back has undefined content: weights are to be published before the next request, and a
        server's version is known once it holds all memory.  SGLang dies of a release with a request in
        progress, so this waits until none is.
        """
        released = [kind for kind in self._held_memory if kind not in kinds]
        resumed = [kind for kind in kinds if kind not in self._held_memory]
        if released:
            self.members.record(None)
            if "weights" in released:
                self._confirmed = None
            self._post(_FLUSH)
            self._post_once("release_memory_occupation", {"tags": released})
        if resumed:
            self._post_once("resume_memory_occupation", {"tags": resumed})
        if released or resumed:
            logger.info("servers hold %s", ", ".join(kinds) or "nothing")
        self._held_memory = kinds
        if kinds == MEMORY and self._confirmed is not None:
            self.confirm_version(self._confirmed)

    def restarted(self) -> None:
        """Note that all servers are new: they hold all of their memory, and nobody knows which weights."""
        self.members.record(None)
        self._held_memory, self._confirmed = MEMORY, None

    def look_for_life(
        self, paths: Mapping[int, str], timeout_s: float
    ) -> dict[int, EngineError | None]:
        """Ask each server for its path; returns the error of each, None of one that answers."""

        async def error_of(server: int, path: str) -> EngineError | None:
            how = {"method": "GET", "what": path[1:], "timeout_s": timeout_s}
            try:
                async with self._http.while_present(server):
                    await self._http.call(server, path, **how)
            except EngineError as error:  # also where it has left meanwhile
                return error
            except ValueError as error:  # no host can have such a name
                return EngineUnreachable(str(error))
            return None

        async def errors() -> dict[int, EngineError | None]:
            return dict(zip(paths, await asyncio.gather(*starmap(error_of, paths.items()))))

        return self._run(errors())

    def continue_generation(self, server: int) -> None:
        """Let a server that joins compute: it may have left the run while that had paused it."""
        self._run(self._http.ask_all("continue_generation", servers=[server]))

    def server_info(self, servers: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
        """Each server's arguments: tp_size, random_seed, enable_return_routed_experts, ..."""
        return self._objects("server_info", servers)

    def model_info(self, servers: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
        """Each server's current model: model_path, weight_version, ..."""
        return self._objects("model_info", servers)

    def _objects(self, name: str, servers: Sequence[int] | None) -> dict[int, dict[str, Any]]:
        return self._run(self._http.ask_all(name, servers=servers, method="GET", kind=dict))

    def weight_versions(self, servers: Sequence[int] | None = None) -> dict[int, str]:
        """The version label that each server holds now."""
        found = self.model_info(servers)
        return {server: str(info.get("weight_version")) for server, info in found.items()}

    def pool_tokens(self) -> int | None:
        """Tokens that the KV pools of all servers hold together; None if one does not say it."""
        sizes = [
            _count(url, info, "max_total_num_tokens", default=0)
            * (_count(url, info, "dp_size", default=1) or 1)
            for url, info in self._infos().values()
        ]
        return sum(sizes) if all(sizes) else None

    def _infos(self, servers: Sequence[int] | None = None) -> dict[int, tuple[str, dict[str, Any]]]:
        infos = self.server_info(servers)
        return {server: (self._http.urls[server], info) for server, info in infos.items()}

    def text_ends(self, servers: Sequence[int] | None = None) -> dict[int, range | None]:
        """Numbers of tokens at which each server ends a text for want of room; None if it does not say.

        SGLang 0.5.23 gives a request fewer tokens than it asks for where prompt and answer would have more
        than two below the context or the KV pool (``Scheduler.init_req_max_new_tokens``), and with pages
        up to two pages below.  It says that bound less 4 (``max_req_input_len``).
        """
        ends: dict[int, range | None] = {}
        for server, (url, info) in self._infos(servers).items():
            most = _count(url, info, "max_req_input_len", default=0)
            page = _count(url, info, "page_size", default=1) or 1
            ends[server] = range(most + 4 - 2 * (page - 1), most + 5) if most else None
        return ends

    def update_group_sizes(self, servers: Sequence[int] | None = None) -> list[int]:
        """Ranks that each server brings into a weight-update group: its tensor-parallel size.

        Raises ValueError for a server with pipeline or data parallelism, whose ranks would claim
        the same place in the group.
        """
        sizes = []
        for url, info in self._infos(servers).values():
            for key in ("pp_size", "dp_size"):
                if (_count(url, info, key, default=1) or 1) != 1:
                    raise ValueError(
                        f"engine {url} runs with {key} {info[key]}: distributed weight updates "
                        "need 1; use --update-weight-transfer-mode disk"
                    )
            sizes.append(_count(url, info, "tp_size"))
        return sizes

    def require_settings(
        self,
        *,
        replay: bool = False,
        indexer: bool = False,
        kept_top_k: int | None = None,
        exact_boundaries: bool = False,
    ) -> None:
        """Raise ConfigError for servers whose settings spoil the run: see ``refused``.

        A server of our own was refused by its flags; external ones are asked.  exact_boundaries: the token
        at a weight update must have the right version.
        """
        found = []
        for url, info in self._infos().values():
            settings = settings_of_a_server(info)
            found += [
                f"engine {url} runs with {field} = {value!r}, which {reason}"
                for field, value, reason in refused(
                    settings, replay=replay, indexer=indexer, kept_top_k=kept_top_k
                )
            ]
            if exact_boundaries and not settings.get("disable_overlap_schedule"):
                found.append(
                    f"engine {url} was started without --disable-overlap-schedule: with weight updates"
                    " in mid-generation the version of the token at the boundary would be wrong"
                )
        raise_all(found)

    def init_weights_update_group(
        self, *, servers: Sequence[int], rank_offsets: Sequence[int], **arguments: Any
    ) -> Future[Any]:
        """Let these servers' ranks join a group, each server's from its offset on.

        arguments: master_address, master_port, world_size, group_name, backend.
        """
        offsets = zip(servers, rank_offsets, strict=True)
        bodies = {i: {**arguments, "rank_offset": offset} for i, offset in offsets}
        name = "init_weights_update_group"
        call = lambda i: self._http.call(i, f"/{name}", bodies[i], what=name)  # noqa: E731
        return asyncio.run_coroutine_threadsafe(self._http.each(call, servers), self._loop)

    def destroy_weights_update_group(self, group_name: str, servers: Sequence[int]) -> None:
        """Let those of these servers that are still present leave a group, which others do not know."""
        present = self.present()
        still = [server for server in servers if server in present]
        self._post_once("destroy_weights_update_group", {"group_name": group_name}, still)

    def begin_weight_update(self) -> None:
        """Begin an update; one that a killed job has left open on a server is ended first."""
        self.members.record(None)
        self._sent_version = None

        async def begin(server: int) -> None:
            try:
                await self._http.ask(server, "begin_weight_update")
            except EngineError as error:
                if _OPEN not in str(error):
                    raise
                logger.warning("%s: it is ended, and all weights are sent anew", error)
                await self._http.ask(server, "end_weight_update", done=_ENDED)
                await self._http.ask(server, "begin_weight_update", done=_OPEN)

        self._run(self._http.each(begin))

    def end_weight_update(self) -> None:
        """End the update; raises EngineError where its last bucket carried no version label."""
        self._post("end_weight_update", done=_ENDED)
        if self._sent_version is None:
            raise EngineError("a weight update ended whose last bucket carried no version label")
        self.confirm_version(self._sent_version)

    def update_weights_from_distributed(
        self,
        *,
        servers: Sequence[int] | None = None,
        weight_version: int | None = None,
        **arguments: Any,
    ) -> Future[Any]:
        """Let the servers of a group receive one broadcast, which this job must send meanwhile.

        Call it between the begin and the end of an update.

        arguments: names, dtypes, shapes, group_name, load_format, flush_cache.
        """
        self._sent_version = weight_version
        if weight_version is not None:
            arguments["weight_version"] = str(weight_version)
        name = "update_weights_from_distributed"
        update = lambda i: self._http.call(i, f"/{name}", arguments, what=name)  # noqa: E731
        call = self._http.each(lambda i: self._updated(i, update, weight_version), servers)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def update_weights_from_disk(
        self,
        model_path: str,
        *,
        weight_version: int,
        flush_cache: bool = True,
        server: int | None = None,
    ) -> None:
        """Let all servers load a checkpoint; server: this one alone, which is no member yet."""
        if server is None:
            self.members.record(None)
        body = {
            "model_path": model_path,
            "weight_version": str(weight_version),
            "flush_cache": flush_cache,
        }
        update = lambda i: self._http.ask(i, "update_weights_from_disk", body)  # noqa: E731
        servers = None if server is None else [server]
        self._run(self._http.each(lambda i: self._updated(i, update, weight_version), servers))
        if server is None:
            self.confirm_version(weight_version)

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter's directory on every server; nothing is paused."""
        body = {"lora_name": name, "lora_path": path}
        self._post("load_lora_adapter", body, done=_LOADED)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter from every server, which waits for its requests."""
        self._post("unload_lora_adapter", {"lora_name": name}, done=_UNLOADED)

    def confirm_version(self, version: int) -> None:
        """Ask every server for its version label; servers with another label stay out of use.

        So do all of them while their memory is released.  Raises EngineError when no server holds ``version``.
        """
        labels = self.weight_versions()
        self._confirmed = version
        for server, label in labels.items():
            if label == str(version):
                if self._held_memory == MEMORY:
                    self.members.record(version, server)
            else:
                self.members.record(None, server)
                logger.warning(
                    "engine %s holds weights %s after the update to %d: it is not used",
                    self._http.urls[server],
                    label,
                    version,
                )
        if str(version) not in labels.values():
            raise EngineError(
                f"no engine holds weight version {version} after the update: {labels}"
            )

    def update_weight_version(self, version: int) -> None:
        """Relabel the weights that the servers hold; touches no weight and aborts nothing."""
        self._post("update_weight_version", _label(version))

    def weight_checksums(self, servers: Sequence[int] | None = None) -> dict[int, dict[str, str]]:
        """Checksum every tensor of servers, by ``"rank R NAME"`` of the server's own names.

        A server hashes the bytes of its parameters and persistent buffers as it holds them: q, k and
        v in one, a layer's experts in one.  Equal checksums mean equal weights on one server only.
        """
        body = {"action": "checksum"}
        found = self._run(
            self._http.ask_all("weights_checker", body, servers=servers, kind=WeightChecksums)
        )
        return {
            server: {
                f"rank {rank} {name}": checksum
                for rank, part in enumerate(answer.ranks)
                for name, checksum in part.checksums.items()
            }
            for server, answer in found.items()
        }

    async def score_canary(
        self,
        token_ids: np.ndarray,
        key: str,
        *,
        server: int,
        routes: RouteShape | None,
        halves: bool,
        adapter: str | None = None,
        new_tokens: int = 0,
    ) -> CanaryScores:
        """Let a server score a text from its first token on, after twice from its middle on with ``halves``; see ``begin``.

        key: the cache key of this text alone, by which nothing else can fill or use the cache.  routes: None where
        servers return none.  new_tokens: that the server samples greedily after the whole text.
        """
        rows_from, keys = None if routes is None else 0, [key]
        whole = GivenText(token_ids, _CANARY, rows_from=rows_from, adapter=adapter)
        half = replace(whole, log_probs_from=len(token_ids) // 2)

        async def ask(text: GivenText) -> Scores:
            rid = f"r3train-probe-{secrets.token_hex(4)}."
            with_key = replace(text, cache_key=keys[-1])
            return await score(self._http, server, with_key, rid, routes=routes)

        async def ask_first() -> Scores:
            try:
                return await ask(half)
            except ASKED_AGAIN:
                keys.append(f"{key}-try-{len(keys)}")  # this try may have filled the cache
                raise

        def scores(ask_once: Callable[[], Awaitable[Scores]]) -> Awaitable[Scores]:
            return Tries(self._http, f"sample {_CANARY}").answer(ask_once, server)

        early = warm = None
        if halves:
            early = await scores(ask_first)
            warm = await scores(partial(ask, half))
        longer = replace(whole, new_tokens=new_tokens)
        return CanaryScores(early, warm, await scores(partial(ask, longer)))

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _end(self) -> None:
        """Cancel calls that nobody waits for, such as canaries of a run that stops."""
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._http.aclose()

    def __enter__(self) -> EngineControl:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
