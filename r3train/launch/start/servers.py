"""The servers of a run on rank 0: their start, their health, those that join and leave, their end."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from r3train.config.files import load_json_object
from r3train.config.sources import raise_all
from r3train.data.json_lines import append_lines
from r3train.engine.adapters import Adapters
from r3train.engine.backend import EngineError, EngineUnreachable
from r3train.engine.client import SGLangClient
from r3train.engine.control import MEMORY, EngineControl
from r3train.engine.key import engine_api_key
from r3train.engine.members import Change, Members
from r3train.engine.server import SGLangServer
from r3train.engine.sglang_http import HTTPSettings
from r3train.engine.supervisor import EngineSupervisor
from r3train.families.checks.settings_checks import context_len, replayed_index_topk
from r3train.launch.job.checked_job import Job
from r3train.launch.job.model_checks import check_external_server
from r3train.launch.start.discovery import Discovery
from r3train.launch.start.local_servers import start_servers
from r3train.loop.route_transport import Routes
from r3train.loop.server_weights import ServerWeights
from r3train.observe.console import Phase, RunDisplay
from r3train.routing.indexer_topk import num_words

# SGLang encodes the routes of an answer in the loop that answers /health: 0.23 to 0.35 GB/s of int32 in base64 on
# a core with other work, of which this is less than half
_ROUTES_BYTES_S = 100e6
_WIRE_BYTES_OF_AN_ID = 4 * 4 / 3
_WIRE_BYTES_OF_A_WORD = 8 * 4 / 3  # of the bits of what an indexer chose
SERVERS_FILE = "servers.jsonl"  # of a run: a line for each server that came or went
_MOST_FAILED_UPDATES = 3


class RunServers:
    """The servers of a run, started here or named; after ``wait_ready`` with ``control`` and ``weights``.

    servers: those of this run, where they were started already.  client: of rollouts, once they are generated.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        display: RunDisplay,
        routes: Routes,
        servers: Sequence[SGLangServer] = (),
    ):
        self.job, self.run_dir, self.display, self.routes = job, run_dir, display, routes
        config = job.config
        replays = config.replay.use_rollout_routing_replay
        self.route_shape = job.hf.route_shape if replays else None
        self.index_topk = replayed_index_topk(config, job.hf)
        self.adapters = Adapters() if config.serves_adapters else None
        self.api_key = engine_api_key(os.environ)
        self.http_settings: HTTPSettings | None = None
        self.client: SGLangClient | None = None
        self.members: Members | None = None
        self.control: EngineControl | None = None
        self.weights: ServerWeights | None = None
        self.text_ends: dict[int, range | None] = {}
        self.pool_facts: str | None = None  # how much their KV pools hold
        self.own = list(servers)
        self.supervisor: EngineSupervisor | None = None  # of them
        self.score_joiner: Callable[[int, int, int], str] = lambda server, twin, version: "unscored"
        self._discovery: Discovery | None = None
        self._counts = Counter[str]()  # servers that joined and left
        self._last_loss = ""
        self._updating = False
        self._failed_updates = 0  # in a row, although all servers answer
        self._updated: set[int] = set()  # servers of the newest update, as it began
        self._bad_answers = 0

    def start(self, num_ranks: int | None = None) -> None:
        """Start this run's servers unless they were; ``wait_ready`` waits for them.

        num_ranks: ranks of this node, which take the first GPUs; None means as torchrun says.
        """
        self.own = self.own or start_servers(self.job, self.run_dir, num_ranks)

    def wait_ready(self) -> None:
        """Wait for the servers, show their progress, and refuse those that do not go with the run."""
        config = self.job.config
        rollout, faults = config.rollout, config.faults
        if self.own:
            with self.display.phase("starting SGLang") as phase:
                self._show_starts_in(phase)
                for server in self.own:
                    server.wait_ready()
            self.api_key = self.own[0].api_key
        self.http_settings = HTTPSettings(
            api_key=self.api_key,
            request_timeout_s=rollout.rollout_request_timeout_s,
            check_alive=self.check_alive if self.own else None,
            max_bad_answers=faults.max_bad_answers,
            on_failed_try=self._count_bad_answer,
        )
        addrs = [server.addr for server in self.own] or rollout.rollout_external_engine_addrs
        # started ones hold the checkpoint, which is version 0 where versions are no adapters
        version = 0 if self.own and self.adapters is None else None
        self.members = Members(
            addrs,
            [version] * len(addrs),
            changes=config.servers_change,
            on_change=self._changed,
        )
        if self.own:
            self.supervisor = EngineSupervisor(
                self.own,
                max_restarts=faults.max_engine_restarts,
                backoff_s=faults.engine_restart_backoff_s,
                health_timeout_s=self.health_timeout_s,
            )
        self.control = EngineControl(
            self.members, self.http_settings, adapters_alone=self.adapters is not None
        )
        self.weights = ServerWeights(config, self.job.hf, self.run_dir, self.control, self.adapters)
        if rollout.rollout_engines_file is not None:
            self._discover()
        else:
            self.control.require_settings(
                replay=self.route_shape is not None,
                indexer=self.index_topk is not None,
                kept_top_k=rollout.kept_top_k,
                exact_boundaries=rollout.exact_boundaries,
            )
            self.routes.require_reach(addrs, self.api_key)
            self.text_ends = self.control.text_ends()
        pool, longest = self.control.pool_tokens(), self.job.longest_prompt
        self.pool_facts = rollout.pool_facts(pool, longest)
        shortage = rollout.pool_shortage(pool, longest)
        if shortage is not None and self.route_shape is not None:
            self.display.note(f"warning: {shortage}", style="yellow")

    def _discover(self) -> None:
        """Wait until the first server has joined."""
        rollout = self.job.config.rollout
        with self.display.phase(f"waiting for a server that {rollout.rollout_engines_file} names"):
            self._discovery = Discovery(
                source=rollout.rollout_engines_file,
                members=self.members,
                control=self.control,
                examine=self._examine,
                score=lambda server, twin, version: self.score_joiner(server, twin, version),
                publisher=lambda: self.weights.publisher,
                is_busy=lambda server: self.client is not None and self.client.is_busy(server),
                note=lambda text: self.display.note(text, style="yellow"),
                health_timeout_s=self.health_timeout_s,
                wait_s=rollout.rollout_wait_for_servers_s,
            )
            self._discovery.start()

    def _examine(self, server: int) -> None:
        """Raise EngineError or ValueError for a server that does not go with the run, or with the servers that it has."""
        addr, config = self.members.urls[server], self.job.config
        check_external_server(config, self.job.hf, addr, self.api_key)
        self.routes.require_reach([addr], self.api_key)
        self.weights.publisher.require_reach(addr)
        layout, present = self.weights.read_layout(server), self.members.present()
        content = load_json_object(self.job.hf.path / "config.json")
        expected = {"dtype": config.server_dtype, "architectures": content.get("architectures")}
        if present:
            expected = self.weights.layout(present[0])
        raise_all(
            f"engine {addr} runs with {key} = {layout[key]!r}, and the run's servers with {value!r}"
            for key, value in expected.items()
            if layout[key] != value
        )
        self.text_ends |= self.control.text_ends([server])

    def _changed(self, change: Change) -> None:
        """Note a server that came or went."""
        append_lines(self.run_dir / SERVERS_FILE, [asdict(change)])
        self._counts[change.what] += 1
        style, why = "" if change.what == "joined" else "yellow", change.why.splitlines()[0]
        text = f"server {change.server} ({change.url}) {change.what}: {why}"
        if change.what != "joined":
            self._last_loss = change.why
        self.display.note(text, style=style)

    @property
    def health_timeout_s(self) -> float:
        """Seconds without a sign of life after which a server counts as hung.

        To those of the configuration come those in which a server is busy with the routes of all its
        requests, and the choices of indexers, if they end together at their full length.
        """
        given = self.job.config.faults.engine_health_timeout_s
        if self.route_shape is None:
            return given
        rollout = self.job.config.rollout
        tokens = rollout.pool_needed(self.job.longest_prompt) / rollout.num_servers
        row_bytes = self.route_shape.topk * _WIRE_BYTES_OF_AN_ID
        if self.index_topk is not None:
            words = num_words(context_len(self.job.config, self.job.hf))
            row_bytes += words * _WIRE_BYTES_OF_A_WORD
        return given + tokens * self.route_shape.num_layers * row_bytes / _ROUTES_BYTES_S

    def check_alive(self) -> None:
        """Raise EngineDied if a server that this run started has ended, or hangs."""
        if self.supervisor is not None:
            self.supervisor.check()

    def _check_own(self) -> None:
        """As ``check_alive``; also raises EngineUnreachable for one that left because a call failed."""
        self.check_alive()
        if len(self.members.present()) < len(self.own):
            raise EngineUnreachable(self._last_loss)

    def check_served(self) -> None:
        """As ``check_alive``; also raises EngineUnreachable where an update has to come or to go on, EngineError without servers."""
        self._check_own()
        if self._discovery is not None:
            self._discovery.check()
            # requests wait for a server, and nobody can join
            if self._updating and self.is_deserted:
                raise EngineUnreachable("there is no server")
            # those that are leaving get no weights for requests any more
            if set(self.members.present()) - self.members.leaving and not self.members.ready():
                raise EngineUnreachable("servers have joined, and none holds the newest weights")

    def restart(self, cause: str) -> None:
        """Let lost servers leave; those of the run all leave, are started again and join: they wait for the next publish.

        Raises EngineDied with the cause after --max-engine-restarts, EngineError if a server does not start.
        """
        self.members.record(None)
        if self._discovery is not None:
            self._let_lost_leave()
        else:
            self._start_again(cause)
        self.weights.publisher.reconnect()

    def _start_again(self, cause: str) -> None:
        with self.display.phase("restarting SGLang") as phase:
            self._show_starts_in(phase)
            cause = self._last_loss or cause
            for server in self.members.present():
                self.members.leave(server, "all servers of the run are started again")
            self.supervisor.restart(cause)
            self._last_loss = ""
        self.control.restarted()
        for server in range(len(self.own)):
            self.members.join(server, None, "it gets its first request after an update")
        self.text_ends = self.control.text_ends()

    def _let_lost_leave(self) -> None:
        self._discovery.let_lost_leave()
        nobody_left = self._updated <= set(self.members.present())
        self._failed_updates += bool(self._updated) and nobody_left
        if self._failed_updates > _MOST_FAILED_UPDATES:
            raise EngineError(f"{_MOST_FAILED_UPDATES} weight updates in a row have failed")
        while self.is_deserted and self.client is None:  # later the producer waits
            self._discovery.check()
            time.sleep(0.1)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A block in which no server joins; raises as ``restart`` mends it where one of the run's own is lost."""
        with self._discovery.lock if self._discovery is not None else nullcontext():
            self._check_own()
            self._updated = set(self.members.present())
            self._updating = True
            try:
                yield
                self._failed_updates = 0
            finally:
                self._updating = False

    @contextmanager
    def requests_wait(self) -> Iterator[None]:
        """A block in which no request is sent to servers, but for those of adapters, which keep older ones.

        Idle servers that are named no more leave before it, and no sound server leaves during it.
        """
        with ExitStack() as end:
            if self._discovery is not None:
                end.callback(setattr, self._discovery, "is_sending", False)
                self._discovery.is_sending = True
                self._discovery.let_idle_leave()
            if self.adapters is None:
                end.enter_context(self.members.requests_wait())
            yield

    @property
    def is_deserted(self) -> bool:
        """True where servers come and go, and none is there."""
        return self._discovery is not None and not self.members.present()

    def drop(self, server: int, why: str) -> None:
        """Let a server leave that does not hold what it should."""
        self.members.leave(server, why, "refused")

    def keep_onloaded(self, *kinds: str) -> None:
        """Let every server hold these kinds of memory only: see ``EngineControl.keep_onloaded``."""
        self.supervisor.rest(True)
        self.control.keep_onloaded(*kinds)
        self.supervisor.rest(kinds != MEMORY)

    def _show_starts_in(self, phase: Phase) -> None:
        for server in self.own:
            server.on_progress = lambda _, stage: phase.detail(stage)

    def _count_bad_answer(self) -> None:
        """Note an answer that is asked for again."""
        self._bad_answers += 1

    def fault_counts(self) -> dict[str, int]:
        """Count bad answers, restarts of servers, and requests and tokens that restarts resumed."""
        counts = {"faults/bad_answers": self._bad_answers}
        if self.members.changes:
            counts["faults/resubmitted_requests"] = self.client.moved_requests
            counts["faults/resumed_tokens"] = self.client.moved_tokens
        if self.members.changes and self.own:
            counts["faults/engine_restarts"] = self.supervisor.restarts
        if self._discovery is not None:
            counts["fleet/servers"] = len(self.members.present())
            counts["fleet/joined"] = self._counts["joined"]
            counts["fleet/left"] = self._counts["left"] + self._counts["lost"]
        return counts

    def stop(self) -> None:
        """End the servers of this run, which generates no more."""
        for server in self.own:
            server.stop()

    def close(self) -> None:
        """Leave the update group and stop this run's servers."""
        for part in (self._discovery, self.weights, self.control, self.supervisor):
            if part is not None:
                part.close()
        self.stop()
