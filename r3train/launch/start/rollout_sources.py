"""Sources of rollouts on rank 0: servers, dumped files, or conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from r3train.config.files import write_atomically
from r3train.families.checks.settings_checks import replayed_index_topk
from r3train.observe.console import RunDisplay
from r3train.data.curriculum import PASS_RATES_FILE
from r3train.launch.start.rollouts import GeneratedRollouts
from r3train.launch.start.servers import RunServers
from r3train.launch.job.checked_job import Job
from r3train.launch.job.resume import ResumePoint, scored_by_another, unknown_temperature
from r3train.loop.replay_source import Conversations, DumpedRollouts
from r3train.generation.buffer import ProducerState
from r3train.generation.eval_sets import EvalSet


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
