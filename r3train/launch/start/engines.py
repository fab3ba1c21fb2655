"""Servers and generation on rank 0, built from a checked job."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from r3train.config import RunConfig
from r3train.families.checks.settings_checks import context_len, replayed_index_topk
from r3train.config.rollout_settings import RolloutSection
from r3train.cuda_environment import visible_gpus
from r3train.families import FP8_SCALE, has_fused_experts, sent_together
from r3train.data.curriculum import DifficultyOrder
from r3train.data.json_lines import append_lines
from r3train.data.templates import ChatTemplate
from r3train.environments.named_environments import get_environment, get_tools
from r3train.observe.console import Phase, RunDisplay
from r3train.routing.indexer_topk import num_words
from r3train.config.sources import raise_all
from r3train.launch.job.agents import make_agents, make_chat_endpoint
from r3train.launch.start.local_servers import start_servers
from r3train.launch.job.checked_job import Job
from r3train.launch.job.other_models import served_teacher
from r3train.launch.start.door import Door
from r3train.launch.job.model_checks import check_external_server
from r3train.loop.fleet import RolloutFleet
from r3train.loop.route_transport import Routes
from r3train.loop.distribute import broadcast_json, gather_json
from r3train.loop.stage_weight_sync import StageLeaderPublisher, PerStagePublisher
from r3train.engine.adapters import AdapterPublisher, Adapters, adapter_name
from r3train.engine.addresses import address_for, address_of_interface, host_of, interface_of
from r3train.engine.addresses import is_loopback
from r3train.data.sampled import outside_vocabulary
from r3train.engine.backend import BadAnswer, EngineError, EngineUnreachable
from r3train.engine.backend import Request, RolloutBackend, SamplingParams
from r3train.engine.control import MEMORY, EngineControl
from r3train.engine.key import engine_api_key
from r3train.engine.members import Change, Members
from r3train.generation.agent_episode import AgentEpisode
from r3train.generation.buffer import OUTCOMES_FILE, Outcome, ProducerState
from r3train.generation.conversation import Conversation
from r3train.generation.episode import Episode, generate_once
from r3train.generation.eval_sets import EvalSet
from r3train.generation.environment_loop import EnvironmentLoop
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings, Episodes
from r3train.generation.scheduler import GroupScorer
from r3train.engine.client import SGLangClient
from r3train.engine.server import SGLangServer
from r3train.engine.supervisor import EngineSupervisor, ResubmittingBackend
from r3train.engine.publish import WeightPublisher
from r3train.engine.publish_disk import compare_on_servers, Comparison, DiskPublisher
from r3train.engine.publish_memory import SharedMemoryPublisher
from r3train.hf_checkpoint import NamedTensors
from r3train.host_group import one_node
from r3train.ids import CANARIES, NO_GROUP
from r3train.types import CanaryScores, Prompt

T = TypeVar("T", bound=DiskPublisher | SharedMemoryPublisher)

# A crashed server loses at most one segment of each request.  On a CPU these cost a few per cent; on a GPU, where
# nobody has measured them, each begins with a prefill between the graphs of decoding.
_SEGMENT_LEN = 256
_SEGMENT_LEN_ON_GPUS = 2048
# SGLang encodes the routes of an answer in the loop that answers /health: 0.23 to 0.35 GB/s of int32 in base64 on
# a core with other work, of which this is less than half
_ROUTES_BYTES_S = 100e6
_WIRE_BYTES_OF_AN_ID = 4 * 4 / 3
_WIRE_BYTES_OF_A_WORD = 8 * 4 / 3  # of the bits of what an indexer chose
# drawn at the start, where texts are short
_MOST_CANARY_ANSWERS = 64
SERVERS_FILE = "servers.jsonl"  # of a run: a line for each server that came or went
_MOST_FAILED_UPDATES = 3
# of a server's arguments those by which it holds other tensors than another
_LAYOUT = (
    "version",
    "tp_size",
    "ep_size",
    "pp_size",
    "dtype",
    "quantization",
    "moe_runner_backend",
    "architectures",
)


class Engines(RolloutFleet):
    """Servers (started here or external), their control, the producer and the publisher."""

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        display: RunDisplay,
        start_rollout: int,
        routes: Routes,
        buffer: ProducerState | None = None,
        servers: Sequence[SGLangServer] = (),
    ):
        self.job = job
        self._start_rollout = start_rollout
        self._buffer = buffer
        config = job.config
        replays = config.replay.use_rollout_routing_replay
        self._route_shape = job.hf.route_shape if replays else None
        self._index_topk = replayed_index_topk(config, job.hf)
        self._servers = list(servers)
        self._producer: Producer | None = None
        self._control: EngineControl | None = None
        self._publisher: WeightPublisher | None = None
        self._run_dir = run_dir
        self._display = display
        self._addrs = list(config.rollout.rollout_external_engine_addrs)
        self._members: Members | None = None
        self._door: Door | None = None
        self._counts = Counter[str]()  # servers that joined and left
        self._updating = False
        self._failed_updates = 0  # in a row, although all servers answer
        self._adapters = Adapters() if config.serves_adapters else None
        self._agents = make_agents(job, run_dir) if config.agent.named is not None else None
        self._supervisor: EngineSupervisor | None = None
        self._bad_answers = 0
        self._difficulty: DifficultyOrder | None = None  # of the prompts
        self._pool_facts: str | None = None
        self._text_ends: dict[int, range | None] = {}
        self._layouts: dict[int, dict[str, Any]] = {}  # of the servers' tensors
        self._client: SGLangClient | None = None
        self._routes = routes
        self._api_key = engine_api_key(os.environ)

    def start_server(self, num_ranks: int | None = None) -> None:
        """Start this run's servers unless they were; ``wait_ready`` waits for them.

        num_ranks: ranks of this node, which take the first GPUs; None means as torchrun says.
        """
        if not any(server.started for server in self._servers):
            self._servers = start_servers(self.job, self._run_dir, num_ranks, self._servers)

    def route_wire_bytes(self) -> int:
        """Base64 bytes of routes that this process's client has received."""
        return self._client.route_wire_bytes if self._client is not None else 0

    def check_alive(self) -> None:
        """Raise EngineDied if a server that this run started has ended, or hangs."""
        if self._supervisor is not None:
            self._supervisor.check()

    def restart(self) -> None:
        """Restart the servers; they hold the checkpoint's weights until the next publish.

        Those of others leave, if they are lost.  Raises EngineDied after --max-engine-restarts, EngineError if a server does
        not start.
        """
        self._members.record(None)
        if self._door is not None:
            return self._let_lost_leave()
        with self._display.phase("restarting SGLang") as phase:
            self._show_starts_in(phase)
            self._supervisor.restart()
        if self._control is not None:
            self._control.restarted()
            self._text_ends = self._control.text_ends()
        self.publisher.reconnect()

    def _let_lost_leave(self) -> None:
        before = self._members.present()
        self._door.let_lost_leave()
        self._failed_updates += bool(before) and before == self._members.present()
        if self._failed_updates > _MOST_FAILED_UPDATES:
            raise EngineError(f"{_MOST_FAILED_UPDATES} weight updates in a row have failed")
        while self.is_deserted and self._producer is None:  # later the producer waits
            self._door.check()
            time.sleep(0.1)
        self.publisher.reconnect()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A block in which no server joins."""
        with self._door.lock if self._door is not None else nullcontext():
            self._updating = True
            try:
                yield
            finally:
                self._updating = False

    @property
    def is_deserted(self) -> bool:
        """True where servers come and go, and none is there."""
        return self._door is not None and not self._members.present()

    def drop(self, server: int, why: str) -> None:
        """Let a server leave that does not hold what it should."""
        self._members.leave(server, why, "refused")

    def _check_served(self) -> None:
        """As ``check_alive``; also raises EngineUnreachable where an update has to come or to go on, EngineError without servers."""
        self.check_alive()
        if self._door is not None:
            self._door.check()
            if (
                self._updating and self.is_deserted
            ):  # requests wait for a server, and nobody can join
                raise EngineUnreachable("there is no server")
            if self._members.present() and not self._members.holders(0):
                raise EngineUnreachable("servers have joined, and none holds the newest weights")

    def keep_onloaded(self, *kinds: str) -> None:
        """Let every server hold these kinds of memory only: see ``EngineControl.keep_onloaded``."""
        self._supervisor.rest(True)
        self._control.keep_onloaded(*kinds)
        self._supervisor.rest(kinds != MEMORY)

    def stop_servers(self) -> None:
        """End the servers of this run, which generates no more."""
        for server in self._servers:
            server.stop()

    def _show_starts_in(self, phase: Phase) -> None:
        for server in self._servers:
            server.on_progress = lambda _, stage: phase.detail(stage)

    def fault_counts(self) -> dict[str, int]:
        """Count bad answers, restarts of servers, and requests and tokens that restarts resumed."""
        counts = {"faults/bad_answers": self._bad_answers}
        if self._supervisor is not None and self._supervisor.restartable:
            counts |= {
                "faults/engine_restarts": self._supervisor.restarts,
                "faults/resubmitted_requests": self._supervisor.resubmitted,
                "faults/resumed_tokens": self._supervisor.resumed_tokens,
            }
        if self._door is not None:
            counts |= {
                "fleet/servers": len(self._members.present()),
                "fleet/joined": self._counts["joined"],
                "fleet/left": sum(self._counts[what] for what in ("left", "lost")),
                "faults/resubmitted_requests": self._client.moved_requests,
                "faults/resumed_tokens": self._client.moved_tokens,
            }
        return counts

    def _changed(self, change: Change) -> None:
        """Note a server that came or went."""
        append_lines(self._run_dir / SERVERS_FILE, [asdict(change)])
        self._counts[change.what] += 1
        style = "" if change.what == "joined" else "yellow"
        text = f"server {change.server} ({change.url}) {change.what}: {change.why}"
        self._display.note(text, style=style)

    def _count_bad_answer(self) -> None:
        self._bad_answers += 1

    def restored(self, version: int) -> None:
        """Send broken-off requests again: restarted servers now hold the weights of ``version``."""
        if self._producer is not None:
            self._producer.resume()
        if self._supervisor is not None:
            self._supervisor.restored(version)
        self._failed_updates = 0

    def wait_ready(self) -> None:
        """Wait for the servers, and show their progress."""
        rollout, faults = self.job.config.rollout, self.job.config.faults
        if self._servers:
            with self._display.phase("starting SGLang") as phase:
                self._show_starts_in(phase)
                for server in self._servers:
                    server.wait_ready()
            self._addrs = [server.addr for server in self._servers]
            self._api_key = self._servers[0].api_key
        # started ones hold the checkpoint, which is version 0 where versions are no adapters
        version = 0 if self._servers and self._adapters is None else None
        self._members = Members(
            self._addrs,
            [version] * len(self._addrs),
            changes=rollout.rollout_engines_file is not None,
            on_change=self._changed,
        )
        if self._servers:
            self._supervisor = EngineSupervisor(
                self._servers,
                max_restarts=faults.max_engine_restarts,
                backoff_s=faults.engine_restart_backoff_s,
                health_timeout_s=self._health_timeout_s,
            )
        self._control = EngineControl(
            self._members,
            api_key=self._api_key,
            timeout_s=rollout.rollout_request_timeout_s,
            check_alive=self.check_alive,
            adapters_alone=self._adapters is not None,
            max_bad_answers=faults.max_bad_answers,
            on_failed_try=self._count_bad_answer,
        )
        if self._members.changes:
            self._open_door()
        else:
            self._control.require_settings(
                replay=self._route_shape is not None,
                indexer=self._index_topk is not None,
                kept_top_k=rollout.kept_top_k,
                exact_boundaries=rollout.exact_boundaries,
            )
            self._routes.require_reach(self._addrs, self._api_key)
            self._text_ends = self._control.text_ends()
        pool, longest = self._control.pool_tokens(), self.job.longest_prompt
        self._pool_facts = rollout.pool_facts(pool, longest)
        shortage = rollout.pool_shortage(pool, longest)
        if shortage is not None and self._route_shape is not None:
            self._display.note(f"warning: {shortage}", style="yellow")

    def _open_door(self) -> None:
        """Wait until the first server has joined."""
        rollout = self.job.config.rollout
        with self._display.phase(f"waiting for a server that {rollout.rollout_engines_file} names"):
            self._door = Door(
                source=rollout.rollout_engines_file,
                members=self._members,
                control=self._control,
                examine=self._examine,
                publisher=lambda: self.publisher,
                is_busy=lambda server: self._client is not None and self._client.is_busy(server),
                note=lambda text: self._display.note(text, style="yellow"),
                health_timeout_s=self._health_timeout_s,
                wait_s=rollout.rollout_wait_for_servers_s,
            )
            self._door.open()

    def _examine(self, server: int) -> None:
        """Raise EngineError or ValueError for a server that does not go with the run, or with the servers that it has."""
        addr, config = self._members.urls[server], self.job.config
        check_external_server(config, self.job.hf, addr, self._api_key)
        self._routes.require_reach([addr], self._api_key)
        self.publisher.require_reach(addr)
        layout = self._layout_of(server)
        present = self._members.present()
        expected = self._layouts[present[0]] if present else {"dtype": config.server_dtype}
        raise_all(
            f"engine {addr} runs with {key} = {layout[key]!r}, and the run's servers with {value!r}"
            for key, value in expected.items()
            if layout[key] != value
        )
        self._layouts[server] = layout
        self._text_ends |= self._control.text_ends([server])

    def _layout_of(self, server: int) -> dict[str, Any]:
        info = self._control.server_info([server])[server]
        model = self._control.model_info([server])[server]
        return {key: {**model, **info}.get(key) for key in _LAYOUT}

    @property
    def publisher(self) -> WeightPublisher:
        """The configured transport of new weights."""
        if self._publisher is None:
            trainer = self.job.config.trainer
            if self._adapters is not None:
                self._publisher = AdapterPublisher(
                    self._control,
                    self._adapters,
                    directory=self._run_dir / "weights",
                    settings=self.job.config.lora,
                    hf=self.job.hf,
                    max_weight_staleness=self.job.config.rollout.max_weight_staleness,
                )
            elif trainer.update_weight_transfer_mode != "distributed":
                on_disk = trainer.update_weight_transfer_mode == "disk"
                kind = DiskPublisher if on_disk else SharedMemoryPublisher
                fresh = self.job.config.rollout.fresh_prefixes
                how = {"gather": gather_json} if _senders(self.job.config) else {}
                directory = self._run_dir / "weights"
                self._publisher = _by_files(
                    kind, self.job, self._control, directory, flush_cache=fresh, **how
                )
            else:
                self._publisher = PerStagePublisher(
                    self._control,
                    _senders(self.job.config),
                    **_broadcast(self.job, self.hosts, trainer.update_weight_master_address),
                )
        return self._publisher

    @property
    def hosts(self) -> list[str]:
        """The servers' hosts."""
        return [host_of(url) for url in self._members.urls]

    def compare_weights(self, weights: NamedTensors, version: int) -> Comparison:
        """Hold every server's tensors against these; see ``compare_on_servers``."""
        # the publish must have dropped the caches
        directory = self._run_dir / "weight_check"
        reference = _by_files(DiskPublisher, self.job, self._control, directory, flush_cache=False)
        return compare_on_servers(self._control, reference, weights, version=version)

    def weight_checksums(
        self, version: int | None
    ) -> tuple[dict[int, dict[str, str]], dict[int, str]]:
        """The checksums of the tensors of every server in use, and each server's layout.

        None as ``version`` reads all servers.
        """
        for server in self._members.present():
            if server not in self._layouts:
                self._layouts[server] = self._layout_of(server)
        every = self._control.weight_checksums()
        used = every if version is None else self._members.holders(version)
        layouts = {server: repr(layout) for server, layout in self._layouts.items()}
        return {server: every[server] for server in used if server in every}, layouts

    def canary_texts(self, count: int, longest: int) -> list[np.ndarray]:
        """Make ``count`` texts of ``longest`` tokens, int32[longest] each: prompts of the run with answers to them.

        Prompts and seeds of the answers follow from --rollout-seed.  Short texts are joined, and the last one of a
        text is cut.
        """
        rollout, random = self.job.config.rollout, np.random.default_rng(
            self.job.config.rollout.rollout_seed
        )
        sampling = replace(self._sampling(), max_context_len=None, mask_vocab=None)

        def request(number: int) -> Request:
            prompt = self.job.prompts[random.integers(len(self.job.prompts))]
            ids = prompt.token_ids[: longest - 1]
            return Request(
                sample_id=CANARIES + number,
                group_id=NO_GROUP - number,
                prompt_id=prompt.prompt_id,
                token_ids=ids,
                max_new_tokens=min(rollout.rollout_max_response_len, longest - len(ids)),
                sampling=sampling,
                wants_routes=False,
                weight_version=self._adapters.versions[-1] if self._adapters else None,
            )

        async def drawn(number_of: range) -> list[np.ndarray]:
            client = self._make_client()
            try:
                requests = [request(number) for number in number_of]
                answers = await asyncio.gather(*map(client.generate, requests))
            finally:
                await client.aclose()
            pairs = zip(requests, answers)
            return [np.concatenate([r.token_ids, a.token_ids]).astype(np.int32) for r, a in pairs]

        texts = asyncio.run(drawn(range(count)))
        if min(map(len, texts)) < longest:
            texts += asyncio.run(drawn(range(count, _MOST_CANARY_ANSWERS)))
        made = []
        for first in range(count):
            parts = [texts[first]]
            while sum(map(len, parts)) < longest:
                parts.append(texts[random.integers(len(texts))])
            made.append(np.concatenate(parts)[:longest])
        return made

    def read_canaries(
        self,
        texts: Sequence[np.ndarray],
        keys: Sequence[str],
        version: int,
        *,
        halves: int,
        drawn: int,
        at_once: int,
    ) -> Callable[[], tuple[dict[int, list[CanaryScores]], float]]:
        """Let every server in use score texts, ``at_once`` at a time.

        keys: the cache key of each text; halves: so many of the first texts are also read from the middle; drawn: tokens
        that a server draws after each.  A server that does not hold ``version`` is not in use.  The result waits for
        {server: scores of each text} and the seconds that they took.
        """
        servers = self._members.holders(version)

        async def server_scores(server: int) -> list[CanaryScores]:
            if server not in servers:
                return []
            slots = asyncio.Semaphore(at_once)

            async def read(i: int) -> CanaryScores:
                async with slots:
                    scores = await self._control.read_canary(
                        texts[i],
                        keys[i],
                        server=server,
                        routes=self._route_shape,
                        halves=i < halves,
                        new_tokens=drawn,
                        adapter=adapter,
                    )
                if found := outside_vocabulary(scores.whole.sampled, self.job.hf.vocab_size):
                    raise BadAnswer(f"canary {i} of server {server}: drawn {found}")
                return scores

            return list(await asyncio.gather(*map(read, range(len(texts)))))

        async def all_scores() -> tuple[dict[int, list[CanaryScores]], float]:
            began = time.monotonic()
            every = await self._control.each(server_scores)
            read = {server: scores for server, scores in every.items() if scores}
            return read, time.monotonic() - began

        if not servers:  # all have left, and the next ones get these weights anew
            return lambda: ({}, 0.0)
        adapter = self._newest_adapter
        return self._control.begin(all_scores())

    @property
    def _newest_adapter(self) -> str | None:
        """The name of the newest adapter; None where servers have none."""
        return adapter_name(self._adapters.versions[-1]) if self._adapters is not None else None

    @property
    def _segment_len(self) -> int | None:
        """Most tokens of one request; None (no limit) unless servers may be restarted, or come and go."""
        rollout = self.job.config.rollout
        may_be_lost = self.job.config.faults.max_engine_restarts or rollout.rollout_engines_file
        if rollout.rollout_segment_len or not may_be_lost:
            return rollout.rollout_segment_len
        on_gpus = visible_gpus() and rollout.sglang.get("device") != "cpu"
        return _SEGMENT_LEN_ON_GPUS if on_gpus else _SEGMENT_LEN

    @property
    def _health_timeout_s(self) -> float:
        """Seconds without a sign of life after which a server counts as hung.

        To those of the configuration come those in which a server is busy with the routes of all its
        requests, and the choices of indexers, if they end together at their full length.
        """
        given = self.job.config.faults.engine_health_timeout_s
        if self._route_shape is None:
            return given
        rollout = self.job.config.rollout
        tokens = rollout.pool_needed(self.job.longest_prompt) / rollout.num_servers
        row_bytes = self._route_shape.topk * _WIRE_BYTES_OF_AN_ID
        if self._index_topk is not None:
            words = num_words(context_len(self.job.config, self.job.hf))
            row_bytes += words * _WIRE_BYTES_OF_A_WORD
        return given + tokens * self._route_shape.num_layers * row_bytes / _ROUTES_BYTES_S

    def _kept_buffer(self) -> ProducerState | None:
        """The buffer of a resumed run, as rank 0's records hold samples."""
        if self._buffer is None:
            return None
        samples = [(self._routes.keep(sample), reward) for sample, reward in self._buffer.samples]
        return replace(self._buffer, samples=samples)

    def make_client(self) -> RolloutBackend:
        """Make the client of the servers, in the event loop that uses it."""
        self._client = client = self._make_client()
        if self._supervisor is None or not self._supervisor.restartable:
            return client
        return ResubmittingBackend(
            client, self._supervisor, versions_stay=self._adapters is not None
        )

    def _make_client(self) -> SGLangClient:
        job, rollout = self.job, self.job.config.rollout
        return SGLangClient(
            self._members,
            routes=self._routes.row_shape,
            sent_routes=self._route_shape,
            index_topk=self._index_topk,
            api_key=self._api_key,
            request_timeout_s=rollout.rollout_request_timeout_s,
            check_alive=self.check_alive if self._servers else None,
            max_bad_answers=job.config.faults.max_bad_answers,
            on_bad_answer=self._count_bad_answer,
            shared_servers=not self._servers,
            health_timeout_s=self._health_timeout_s,
            cache_per_version=rollout.flush_cache_on_update and not rollout.fresh_prefixes,
            transport=self._routes.transport(),
            adapters=self._adapters,
            vocab_size=job.hf.vocab_size,
            ends_at=lambda server: self._text_ends[server],
        )

    def _sampling(self) -> SamplingParams:
        """Return the sampling of the run's rollouts."""
        job, rollout = self.job, self.job.config.rollout
        return SamplingParams(
            max_new_tokens=rollout.rollout_max_response_len,
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            stop_token_ids=job.stop_token_ids,
            may_stop_at=job.tokenizer_stop_ids,
            ignore_eos=rollout.rollout_ignore_eos,
            max_context_len=rollout.rollout_max_context_len,
            seed=rollout.rollout_seed,
            mask_vocab=job.hf.vocab_size if rollout.replays_sampling_mask else None,
        )

    def start_producer(self) -> Producer:
        """Start generation."""
        job, rollout = self.job, self.job.config.rollout
        order = job.order
        if job.config.data.prompt_sampling == "difficulty":
            order = self._difficulty = job.difficulty_order(self._run_dir)
        if job.config.checkpoint.debug_rollout_only:  # the weights never change: nothing is too old
            limits = {"max_weight_staleness": rollout.num_rollout}
            limits["rollout_buffer_size"] = rollout.buffer_groups
            rollout = rollout.model_copy(update=limits)
        self._producer = Producer(
            rollout,
            self.make_client,
            lambda group: job.prompts[order.index(group)],
            RequestSettings(
                self._sampling(),
                segment_len=self._segment_len,
                pool_facts=self._pool_facts,
                versions_stay=self._adapters is not None,
            ),
            start_rollout=self._start_rollout,
            check_alive=self._check_served,
            on_outcome=self._group_ended,
            state=self._kept_buffer(),
            recheck_share=job.config.recheck_share,
            eval_slots=job.config.eval_slots,
            scorer=GroupScorer(
                score=job.reward,
                score_group=job.reward.group if job.reward.takes_groups else None,
                teacher=served_teacher(job.config) if job.config.algorithm.asks_teacher else None,
            ),
            episodes=self._episodes(),
        )
        return self._producer

    def _episodes(self) -> Episodes:
        job, shared = self.job, {}
        if self._agents is not None:
            shared = {
                "most": job.config.max_sessions,
                "stats": self._agents.stats,
                "close": self._agents.stop,
            }
        return Episodes(
            make=self._make_episode(job.config.rollout),
            decode=self.job.decoder(),
            keep_decoded=job.config.r3_check_enabled,
            samples=job.config.samples_per_episode,
            **shared,
        )

    def _make_episode(
        self, rollout: RolloutSection, *, evaluates: bool = False
    ) -> Callable[[Prompt], Episode]:
        """Return a function that begins the episode of a prompt."""
        if self._agents is not None:
            return lambda prompt: AgentEpisode(self._agents, evaluates)
        return _conversations(self.job, rollout)

    def eval_sets(self) -> list[EvalSet]:
        """The evaluation sets, as generation takes them."""
        job, rollout = self.job, self.job.config.rollout
        # a row tells of all turns of an episode
        whole = rollout.model_copy(update={"environment_samples": "trajectory"})
        return [
            EvalSet(
                name=data.dataset.name,
                prompts=data.prompts,
                num_samples=data.dataset.n_samples_per_eval_prompt,
                sampling=SamplingParams(
                    max_new_tokens=data.dataset.max_response_len,
                    temperature=data.dataset.temperature,
                    top_p=data.dataset.top_p,
                    top_k=data.dataset.top_k,
                    stop_token_ids=job.stop_token_ids,
                    may_stop_at=job.tokenizer_stop_ids,
                    max_context_len=rollout.rollout_max_context_len,
                    seed=rollout.rollout_seed,
                ),
                score=data.reward.group,
                make_episode=self._make_episode(whole, evaluates=True),
                samples_per_episode=job.config.samples_per_episode,
                decode=self.job.decoder(),
                segment_len=self._segment_len,
            )
            for data in job.eval_data
        ]

    async def end_sessions(self) -> None:
        """End the agents that stay, and close their endpoint; another event loop may open it again."""
        if self._agents is not None:
            await self._agents.stop()
            context = self._agents.sessions.max_context_len
            self._agents.endpoint = make_chat_endpoint(self.job.config.agent, context)

    def _group_ended(self, outcome: Outcome) -> None:
        """Append a prompt's fate as it happens, so that it survives the process."""
        append_lines(self._run_dir / OUTCOMES_FILE, [asdict(outcome)])
        rate = outcome.pass_rate
        if self._difficulty and (rate is not None or outcome.outcome == "put_back"):
            self._difficulty.note(outcome.step, outcome.group_id, outcome.prompt_id, rate)
        self._routes.ended(outcome.group_id)

    def close(self) -> None:
        """End generation, leave the update group and stop this run's servers."""
        for part in (self._door, self._producer, self._publisher, self._control):
            if part is not None:
                part.close()
        if self._agents is not None:
            self._agents.close()
        if self._supervisor is not None:
            self._supervisor.close()
        self.stop_servers()
        self.job.close()


def _by_files(
    kind: type[T], job: Job, control: EngineControl | None, directory: Path, **settings: Any
) -> T:
    """Make a publisher that writes checkpoints to a directory in that of the run."""
    return kind(
        control,
        directory=directory,
        hf_checkpoint=job.config.served_checkpoint(directory.parent),
        bucket_bytes=job.config.trainer.update_weight_buffer_size,
        **settings,
    )


def _senders(config: RunConfig) -> range:
    """Return the ranks that send weights next to rank 0."""
    return config.weight_senders(dist.get_world_size(), one_node=one_node(os.environ))


def build_sender(job: Job, engines: Engines | None) -> WeightPublisher | None:
    """Build what sends a rank's part of the weights next to rank 0, None on ranks that send none.

    A collective where there are such ranks.  engines: on rank 0, its servers ready.
    """
    senders = _senders(job.config)
    if not senders:
        return None
    if job.config.trainer.update_weight_transfer_mode == "shared_memory":
        # rank 0's is made first: it removes the links of a killed job
        directory = Path(broadcast_json(engines and str(engines.publisher.directory)))
        if engines is not None:
            return None
        return _by_files(SharedMemoryPublisher, job, None, directory, gather=gather_json)
    hosts = broadcast_json(engines and engines.hosts)
    if dist.get_rank() not in senders:
        return None
    named = job.config.trainer.update_weight_master_address
    if dist.get_rank() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # not on rank 0's node
        hosts = [os.environ["MASTER_ADDR"] if is_loopback(host) else host for host in hosts]
        named = named and address_of_interface(named)
    return StageLeaderPublisher(**_broadcast(job, hosts, named))


def _broadcast(job: Job, hosts: Sequence[str], named: str | None) -> dict[str, Any]:
    """Return how a rank of this node broadcasts weights to servers on these hosts.

    named: as for ``address_for``.
    """
    trainer, rollout = job.config.trainer, job.config.rollout
    # NCCL refuses a device twice in a group: where ranks and servers share theirs, gloo's is of hosts
    cuda = torch.cuda.is_available() and not rollout.colocate
    address = address_for(hosts, named)
    return dict(
        bucket_bytes=trainer.update_weight_buffer_size,
        backend="nccl" if cuda else "gloo",
        device="cuda" if cuda else "cpu",
        master_address=address,
        interface=None if is_loopback(address) else interface_of(address),
        flush_cache=rollout.fresh_prefixes,
        together=_together(job),
        fused_experts=has_fused_experts(job.hf.path),
    )


def _together(job: Job) -> Sequence[tuple[str, ...]]:
    """Return the tensors that one call of an update must bring, and so their scales."""
    pairs = sent_together(job.hf)
    scales = [tuple(name + FP8_SCALE for name in pair) for pair in pairs]
    return [*pairs, *scales] if job.config.serves_fp8 else pairs


def _conversations(job: Job, rollout: RolloutSection) -> Callable[[Prompt], Episode]:
    """Return a function that begins the episode of a prompt: one turn without --environment."""
    if rollout.environment is None:
        return lambda prompt: generate_once
    environment, reply = get_environment(rollout.environment), None
    if job.config.data.apply_chat_template:
        reply = ChatTemplate(job.tokenizer, job.config.data, get_tools(environment)).reply
    environments = EnvironmentLoop()
    return lambda prompt: Conversation(
        lambda: environment(prompt),
        rollout,
        environments,
        encode=lambda text: job.tokenizer.encode(text, add_special_tokens=False),
        decode=job.decoder(),
        reply=reply,
    )
