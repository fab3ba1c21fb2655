"""Rollouts on rank 0: those that servers generate, with client, producer and canaries, and those of files and conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from r3train.config.files import write_atomically
from r3train.config.rollout_settings import RolloutSection
from r3train.cuda_environment import visible_gpus
from r3train.data.curriculum import PASS_RATES_FILE, DifficultyOrder
from r3train.data.json_lines import append_lines
from r3train.data.templates import ChatTemplate
from r3train.engine.backend import Request, SamplingParams
from r3train.engine.client import SGLangClient
from r3train.environments.named_environments import get_environment, get_tools
from r3train.families.checks.settings_checks import replayed_index_topk
from r3train.generation.agent_episode import AgentEpisode
from r3train.generation.buffer import OUTCOMES_FILE, Outcome, ProducerState
from r3train.generation.conversation import Conversation
from r3train.generation.environment_loop import EnvironmentLoop
from r3train.generation.episode import Episode, generate_once
from r3train.generation.eval_sets import EvalSet
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings, Episodes
from r3train.generation.scheduler import GroupScorer
from r3train.ids import CANARIES, NO_GROUP
from r3train.launch.job.agents import make_agents, make_chat_endpoint
from r3train.launch.job.checked_job import Job
from r3train.launch.job.other_models import served_teacher
from r3train.launch.job.resume import ResumePoint, scored_by_another, unknown_temperature
from r3train.launch.start.servers import RunServers
from r3train.loop.replay_source import Conversations, DumpedRollouts
from r3train.observe.console import RunDisplay
from r3train.types import Prompt

# A crashed server loses at most one segment of each request.  On a CPU these cost a few per cent; on a GPU, where
# nobody has measured them, each begins with a prefill between the graphs of decoding.
_SEGMENT_LEN = 256
_SEGMENT_LEN_ON_GPUS = 2048
# drawn at the start, where texts are short
_MOST_CANARY_ANSWERS = 64
_ALIVE_EVERY_S = 0.5


def build_rollouts(
    job: Job, servers: RunServers | None, display: RunDisplay, resume: ResumePoint
) -> GeneratedRollouts | Replayed:
    """Build what rollouts come from: the servers, or without them the reader of what takes their place."""
    if servers is None:
        return Replayed(job, display.note)
    if job.config.data.prompt_sampling == "difficulty":
        goes_on = resume.checkpoint is not None and not resume.model_only
        lines = (resume.checkpoint / PASS_RATES_FILE).read_text(encoding="utf-8") if goes_on else ""
        write_atomically(servers.run_dir / PASS_RATES_FILE, lines)
    buffer = resume.buffer(job.hf.vocab_size)
    state = ProducerState(*buffer) if buffer is not None else None
    warning = unknown_temperature(job.config, resume)
    if warning is not None:
        display.note(warning, style="yellow")
    if state is not None and (other := scored_by_another(job, state.facts)):
        # an episode's reward came with it
        by_episodes = job.config.rollout.environment or job.config.agent.named
        state = state.without_samples() if by_episodes else replace(state, score_again=True)
        again = "generated" if by_episodes else "scored"
        display.note(f"warning: the samples that wait are {again} again: {other}", style="yellow")
    return GeneratedRollouts(servers, resume.start_rollout_id, state)


class GeneratedRollouts:
    """Rollouts and evaluations that a run's servers generate.

    buffer: of a resumed run, as its checkpoint has it.
    """

    def __init__(
        self, servers: RunServers, start_rollout: int = 0, buffer: ProducerState | None = None
    ):
        self._servers, self._job = servers, servers.job
        self._start_rollout = start_rollout
        self._buffer = buffer
        self._producer: Producer | None = None
        self._difficulty: DifficultyOrder | None = None  # of the prompts
        named = self._job.config.agent.named
        self._agents = make_agents(self._job, servers.run_dir) if named is not None else None

    @property
    def segment_len(self) -> int | None:
        """Most tokens of one request; None (no limit) unless servers may be restarted, or come and go."""
        rollout = self._job.config.rollout
        if rollout.rollout_segment_len or not self._job.config.servers_change:
            return rollout.rollout_segment_len
        on_gpus = visible_gpus() and rollout.sglang.get("device") != "cpu"
        return _SEGMENT_LEN_ON_GPUS if on_gpus else _SEGMENT_LEN

    def _kept_buffer(self) -> ProducerState | None:
        """The buffer of a resumed run, as rank 0's records hold samples."""
        if self._buffer is None:
            return None
        samples = [
            (self._servers.routes.keep(sample), reward) for sample, reward in self._buffer.samples
        ]
        return replace(self._buffer, samples=samples)

    def make_client(self) -> SGLangClient:
        """Make the client of the servers, in the event loop that uses it."""
        self._servers.client = client = self._make_client()
        return client

    def _make_client(self) -> SGLangClient:
        servers, rollout = self._servers, self._job.config.rollout
        return SGLangClient(
            servers.members,
            servers.http_settings,
            routes=servers.routes.row_shape,
            sent_routes=servers.route_shape,
            index_topk=servers.index_topk,
            shared_servers=not servers.own,
            health_timeout_s=servers.health_timeout_s,
            cache_per_version=rollout.flush_cache_on_update and not rollout.fresh_prefixes,
            transport=servers.routes.transport(),
            adapters=servers.adapters,
            vocab_size=self._job.hf.vocab_size,
            ends_at=lambda server: servers.text_ends[server],
        )

    def route_wire_bytes(self) -> int:
        """Base64 bytes of routes that this process's client has received."""
        client = self._servers.client
        return client.route_wire_bytes if client is not None else 0

    def _sampling(self) -> SamplingParams:
        """Return the sampling of the run's rollouts."""
        job, rollout = self._job, self._job.config.rollout
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
        job, rollout = self._job, self._job.config.rollout
        order = job.order
        if job.config.data.prompt_sampling == "difficulty":
            order = self._difficulty = job.difficulty_order(self._servers.run_dir)
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
                segment_len=self.segment_len,
                pool_facts=self._servers.pool_facts,
                versions_stay=self._servers.adapters is not None,
            ),
            start_rollout=self._start_rollout,
            check_alive=self._servers.check_served,
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
        job, shared = self._job, {}
        if self._agents is not None:
            shared = {
                "most": job.config.max_sessions,
                "stats": self._agents.stats,
                "close": self._agents.stop,
            }
        return Episodes(
            make=self._make_episode(job.config.rollout),
            decode=self._job.decoder(),
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
        return _conversations(self._job, rollout)

    def eval_sets(self) -> list[EvalSet]:
        """The evaluation sets, as generation takes them."""
        job, rollout = self._job, self._job.config.rollout
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
                decode=self._job.decoder(),
                segment_len=self.segment_len,
            )
            for data in job.eval_data
        ]

    def resume(self) -> None:
        """Go on after an update that failed: restarted servers hold the newest weights now."""
        if self._producer is not None:
            self._producer.resume()

    def canary_texts(self, count: int, longest: int) -> list[np.ndarray]:
        """Make ``count`` texts of ``longest`` tokens, int32[longest] each: prompts of the run with answers to them.

        Prompts and seeds of the answers follow from --rollout-seed.  Short texts are joined, and the last one of a
        text is cut.
        """
        rollout, random = self._job.config.rollout, np.random.default_rng(
            self._job.config.rollout.rollout_seed
        )
        sampling = replace(self._sampling(), max_context_len=None, mask_vocab=None)
        adapters = self._servers.adapters

        def request(number: int) -> Request:
            prompt = self._job.prompts[random.integers(len(self._job.prompts))]
            ids = prompt.token_ids[: longest - 1]
            return Request(
                sample_id=CANARIES + number,
                group_id=NO_GROUP - number,
                prompt_id=prompt.prompt_id,
                token_ids=ids,
                max_new_tokens=min(rollout.rollout_max_response_len, longest - len(ids)),
                sampling=sampling,
                wants_routes=False,
                weight_version=adapters.newest if adapters is not None else None,
            )

        async def drawn(number_of: range) -> list[np.ndarray]:
            client = self._make_client()
            try:
                requests = [request(number) for number in number_of]
                answering = asyncio.gather(*map(client.generate, requests))
                while not (await asyncio.wait([answering], timeout=_ALIVE_EVERY_S))[0]:
                    self._servers.check_served()  # else a request waits for a server to come
                answers = answering.result()
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

    async def end_sessions(self) -> None:
        """End the agents that stay, and close their endpoint; another event loop may open it again."""
        if self._agents is not None:
            await self._agents.stop()
            context = self._agents.sessions.max_context_len
            self._agents.endpoint = make_chat_endpoint(self._job.config.agent, context)

    def _group_ended(self, outcome: Outcome) -> None:
        """Append a prompt's fate as it happens, so that it survives the process."""
        append_lines(self._servers.run_dir / OUTCOMES_FILE, [asdict(outcome)])
        rate = outcome.pass_rate
        if self._difficulty and (rate is not None or outcome.outcome == "put_back"):
            self._difficulty.note(outcome.step, outcome.group_id, outcome.prompt_id, rate)
        self._servers.routes.ended(outcome.group_id)

    def close(self) -> None:
        """End generation, agents and rewards."""
        for part in (self._producer, self._agents, self._job):
            if part is not None:
                part.close()


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


class Replayed:
    """Dumped rollouts or conversations: no server, so no weights to send."""

    def __init__(self, job: Job, note: Callable[[str], None]):
        self._job = job
        self._note = note

    def start_producer(self) -> DumpedRollouts | Conversations:
        """Open the dumped rollouts, or the conversations that were read at start-up."""
        job, config = self._job, self._job.config
        if config.learns_conversations:
            return Conversations(job.conversations, job.order, config.rollout.rollout_batch_size)
        assert config.checkpoint.replay_rollouts is not None
        fine_tunes = config.algorithm.loss_type == "sft"  # on the tokens only, at any temperature
        return DumpedRollouts(
            config.checkpoint.replay_rollouts,
            temperature=None if fine_tunes else config.rollout.rollout_temperature,
            note=self._note,
            needs_routes=config.replay.use_rollout_routing_replay,
            num_groups=config.rollout.rollout_batch_size,
            group_size=config.rollout.n_samples_per_prompt,
            steps_per_rollout=config.steps_per_rollout,
            vocab_size=job.hf.vocab_size,
            index_topk=replayed_index_topk(config, job.hf),
        )

    def eval_sets(self) -> list[EvalSet]:
        """No evaluation set: nobody would answer it."""
        return []

    def route_wire_bytes(self) -> int:
        """0: routes come from files."""
        return 0

    def close(self) -> None:
        """End the rewards' helpers."""
        self._job.close()
