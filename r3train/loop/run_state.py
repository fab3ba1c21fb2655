"""The run state saves checkpoints, heeds stops, counts bad steps and logs the trained prompts.

The loop calls it between rollouts.  Methods that say so are collectives.  Only rank 0 holds the
source and the files; they are None elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3train.config import RunConfig
from r3train.config.files import write_atomically
from r3train.data.curriculum import PASS_RATES_FILE
from r3train.data.file_fingerprint import FileFingerprint
from r3train.generation.producer import OnWait
from r3train.host_group import require_ranks, stop_noted
from r3train.loop import prompt_log
from r3train.loop.replay_source import InjectedRollouts, dump_rollout
from r3train.loop.rollout_source import ForwardedSource
from r3train.loop.rollout_file import BUFFER_FILE, HAS_BUFFER, TEMPERATURE, write_samples
from r3train.loop.stop import StopRequested, StopSignal
from r3train.trainer.megatron.saved_state import RUN_DIR
from r3train.types import RolloutSample, Scored

if TYPE_CHECKING:
    from r3train.trainer.megatron.checkpoint import Checkpointer

CONFIG_FILE = "config.toml"
ANOTHER_RANK = "a signal to another rank"


@dataclass(eq=False)
class RunState:
    """Keeps a run; see the module.

    run_facts: JSON-able, saved with a checkpoint and compared on resuming; sample_facts: likewise, with the
    samples that wait; prompt_file: fingerprint
    of the file that rank 0 read; checkpointer: None without --save; note: shows a line to people;
    with_routes: turns a sample of rank 0's records into one with its routes, for files.
    keep_more: writes other files of rank 0's into a checkpoint.
    export: writes the weights after so many rollouts (--save-hf PATH/{rollout_id}), a collective.
    """

    config: RunConfig
    run_dir: Path
    _: KW_ONLY
    run_facts: dict[str, Any]
    prompt_file: FileFingerprint | None
    stop: StopSignal
    checkpointer: Checkpointer | None
    note: Callable[[str], None]
    with_routes: Callable[[RolloutSample], RolloutSample]
    sample_facts: dict[str, Any] = field(default_factory=dict)
    export: Callable[[int], None] | None = None
    keep_more: Callable[[Path], None] = lambda directory: None

    def __post_init__(self) -> None:
        self._bad_rollouts = 0  # in a row, with a step that was skipped; the same on all ranks
        self._idle_rollouts = 0  # in a row, without a step because of --min-ess
        self._source: WatchedSource | None = None
        self._prompts_changed = False

    def watch(self, source: Any) -> WatchedSource:
        """Wrap rank 0's source of rollouts: a stop ends its waits, and rollouts are dumped."""
        dump = self._dump if self.config.checkpoint.dump_rollouts else None
        if self.config.checkpoint.ci_inject_rollout_data_path is not None:
            source = InjectedRollouts(
                source,
                self.config.checkpoint,
                needs_routes=self.config.replay.use_rollout_routing_replay,
                temperature=self._temperature,
                note=self.note,
            )
        self._source = WatchedSource(source, self.stop, dump)
        return self._source

    def _dump(self, rollout_id: int, groups: Sequence[Sequence[Scored]]) -> None:
        directory = self.run_dir / "rollouts"
        dump_rollout(directory, rollout_id, self._whole(groups), self._temperature)

    @property
    def _temperature(self) -> float:
        return self.config.rollout.rollout_temperature

    def _whole(self, groups: Sequence[Sequence[Scored]]) -> list[list[Scored]]:
        return [[(self.with_routes(s), reward) for s, reward in group] for group in groups]

    def put_back(self) -> None:
        """Rank 0: give the last rollout back to the source, because it was not trained."""
        if self._source is not None:
            self._source.put_back()

    def count_trained(self, rollout_id: int, skipped: int) -> FloatingPointError | None:
        """Record a trained rollout, of which ``skipped`` optimizer steps were not finite.

        Returns the error that ends the run after max_bad_steps bad rollouts in a row, else None.
        """
        if self._source is not None:
            prompt_log.append(self.run_dir, rollout_id, self._source.last, skipped)
            self._check_prompt_file()
        self._bad_rollouts = self._bad_rollouts + 1 if skipped else 0
        if not skipped:
            return None
        most = self.config.faults.max_bad_steps
        text = (
            f"rollout {rollout_id}: {skipped} optimizer step(s) skipped: the loss or a gradient is"
            f" not finite ({self._bad_rollouts} in a row, max_bad_steps {most})"
        )
        if self._source is not None:
            batch = self._whole(self._source.last)
            directory = self.run_dir / "bad_steps"
            path = dump_rollout(directory, rollout_id, batch, self._temperature)
            text += f"; the batch is in {path}"
        self.note(text)
        return FloatingPointError(text) if self._bad_rollouts >= most else None

    def learned_nothing(self, rollout_id: int, low_ess_steps: int) -> RuntimeError | None:
        """Count the rollouts in a row of which --min-ess left no optimizer step.

        Returns the error that ends the run after max_bad_steps of them, or after as many as there may be
        rollouts of older weights, if those are more: the weights stood still, so all later rollouts are
        of the actor's own, and are as far from it.
        """
        config = self.config
        if low_ess_steps < config.steps_per_rollout:
            self._idle_rollouts = 0
            return None
        self._idle_rollouts += 1
        most = max(config.faults.max_bad_steps, config.rollout.max_weight_staleness + 1)
        if self._idle_rollouts < most:
            return None
        return RuntimeError(
            f"rollout {rollout_id}: {most} rollouts in a row had train/ess below --min-ess"
            f" {config.algorithm.min_ess}, so nothing was trained on them, and nothing changes by waiting:"
            " lower --min-ess, or see what sets engine and actor apart (train/log_prob_gap_mean)"
        )

    def _check_prompt_file(self) -> None:
        if not self._prompts_changed and self.prompt_file.changed():
            self._prompts_changed = True
            self.note(
                "warning: the prompt file has changed since the run began; this run goes on with"
                " what it read, and its checkpoints will refuse to resume with the new content"
            )

    def agree_on_stop(self) -> bool:
        """True once the run was told to stop; a collective."""
        return self.stop.agreed()

    def save_due(self, next_rollout_id: int, *, goes_on: bool, now: bool = False) -> None:
        """Save if --save-interval is due, or ``now``; export if it is due and the run goes on; a collective.

        The last weights are exported after the run.
        """
        interval = self.config.checkpoint.save_interval
        due = bool(interval and next_rollout_id % interval == 0)
        if self.checkpointer is not None:
            self.checkpointer.poll()  # completes an asynchronous save that has been written
        if due or now:
            self.save(next_rollout_id)
        if due and goes_on and self.export is not None:
            self.export(next_rollout_id)

    def save(self, next_rollout_id: int, *, keeps_samples: bool = True) -> None:
        """Save a checkpoint that resumes at ``next_rollout_id`` (--save); a collective.

        keeps_samples: with those that wait for training, which are generated again otherwise.
        """
        if self.checkpointer is None:
            return
        write_extra, facts = None, {"run": self.run_facts, RUN_DIR: str(self.run_dir.resolve())}
        if self._source is not None:
            state = self._source.snapshot()
            if state is not None and not keeps_samples:
                state = state.without_samples()
            facts = {**facts, HAS_BUFFER: state is not None}

            def write_extra(directory: Path) -> None:
                config = directory / CONFIG_FILE
                if not config.exists():  # of a complete checkpoint only the buffer may be replaced
                    config.write_text(self.config.to_toml(), encoding="utf-8")
                    self.keep_more(directory)
                rates = self.run_dir / PASS_RATES_FILE
                if rates.exists():
                    write_atomically(directory / rates.name, rates.read_text(encoding="utf-8"))
                if state is not None:
                    [samples] = self._whole([state.samples])
                    facts_of_samples = state.facts | self.sample_facts
                    facts_of_samples[TEMPERATURE] = self._temperature
                    write_samples(directory / BUFFER_FILE, samples, facts_of_samples)

        self.checkpointer.save(next_rollout_id, facts, write_extra)

    def save_last(self, next_rollout_id: int, *, keeps_samples: bool = True) -> None:
        """Save, and wait until all is written; a collective."""
        self.save(next_rollout_id, keeps_samples=keeps_samples)
        if self.checkpointer is not None:
            self.checkpointer.finish()

    def save_failed(
        self,
        next_rollout_id: int,
        cause: str,
        what: str = "generation failed",
        *,
        keeps_samples: bool = True,
    ) -> None:
        """Save and say why no further rollout will come; a collective.  keeps_samples: see ``save``.

        If the save fails too, its error is raised after the first cause has been shown.
        """
        try:
            self.save_last(next_rollout_id, keeps_samples=keeps_samples)
        except Exception:
            self.note(f"{what} after {next_rollout_id} rollouts: {cause}")
            raise
        kept = "a checkpoint was saved" if self.checkpointer else "nothing was saved: no --save"
        self.note(f"{what} after {next_rollout_id} rollouts; {kept}: {cause}")

    def save_stopped(self, next_rollout_id: int) -> None:
        """Save because the run was told to stop, and say so; a collective."""
        self.save_last(next_rollout_id)
        self.stop.saved = self.checkpointer is not None
        kept = "nothing was saved: no --save"
        if self.checkpointer:
            save = self.config.checkpoint.save
            kept = f"a checkpoint was saved, and --load {save} goes on from it"
        name = self.stop.received or ANOTHER_RANK
        self.note(f"stopped by {name} after {next_rollout_id} rollouts; {kept}")


class WatchedSource(ForwardedSource):
    """A RolloutSource that keeps its last rollout, dumps each if wanted, and heeds a stop."""

    def __init__(
        self,
        source: Any,
        stop: StopSignal,
        dump: Callable[[int, list[list[Scored]]], None] | None,
    ):
        super().__init__(source)
        self._stop = stop
        self._dump = dump
        self.last: list[list[Scored]] = []

    def next_batch(self, rollout_id: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """Return the source's next batch; raise StopRequested once the run is told to stop.

        A batch whose dump fails is put back: it waits in the checkpoint that is saved then.
        """

        def waiting(stats: dict[str, Any]) -> None:
            self._heed_stop(stats)
            if on_wait is not None:
                on_wait(stats)

        self.last = self._inner.next_batch(rollout_id, waiting)
        if self._dump is not None:
            try:
                self._dump(rollout_id, self.last)
            except Exception:
                self._inner.put_back()
                raise
        return self.last

    def await_evaluation(self, on_wait: OnWait | None = None) -> None:
        """Wait for the source's evaluation; raise StopRequested once the run is told to stop."""
        assert on_wait is None
        self._inner.await_evaluation(self._heed_stop)

    def _heed_stop(self, _stats: dict[str, Any]) -> None:
        require_ranks()
        if self._stop.received is not None or stop_noted():
            raise StopRequested(self._stop.received or ANOTHER_RANK)
