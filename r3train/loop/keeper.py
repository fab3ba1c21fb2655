"""The keeper saves checkpoints, heeds stops, counts bad steps and logs the trained prompts.

The loop calls it between rollouts.  Methods that say so are collectives.  Rank 0 alone holds the
source and the files; they are None elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3train.config import RunConfig
from r3train.data.fingerprint import FileFingerprint
from r3train.host_group import require_ranks, stop_noted
from r3train.loop import prompt_log
from r3train.loop.replay_source import InjectedRollouts, dump_rollout
from r3train.loop.rollout_file import BUFFER_FILE, HAS_BUFFER, write_samples
from r3train.loop.stop import StopRequested, StopSignal
from r3train.types import RolloutSample, Scored

if TYPE_CHECKING:
    from r3train.trainer.megatron.checkpoint import Checkpointer

CONFIG_FILE = "config.toml"
ANOTHER_RANK = "a signal to another rank"


class Keeper:
    """Keeps a run; see the module.

    run_facts: JSON-able, saved with a checkpoint and compared on resuming; prompt_file: fingerprint
    of the file that rank 0 read; checkpointer: None without --save; note: shows a line to people;
    with_routes: turns a sample of rank 0's records into one with its routes, for files.
    export: writes the weights after so many rollouts (--save-hf PATH/{rollout_id}), a collective.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        run_facts: dict[str, Any],
        prompt_file: FileFingerprint | None,
        stop: StopSignal,
        checkpointer: Checkpointer | None,
        note: Callable[[str], None],
        with_routes: Callable[[RolloutSample], RolloutSample],
        export: Callable[[int], None] | None = None,
    ):
        self._config = config
        self._run_dir = run_dir
        self._run_facts = run_facts
        self._prompt_file = prompt_file
        self._stop = stop
        self._bad_steps = BadSteps(config.faults.max_bad_steps, run_dir)
        self._idle_rollouts = 0  # in a row, without a step because of --min-ess
        self._checkpointer = checkpointer
        self._note = note
        self._with_routes = with_routes
        self._export = export
        self._source: WatchedSource | None = None
        self._prompts_changed = False

    def watch(self, source: Any) -> WatchedSource:
        """Wrap rank 0's source of rollouts: a stop ends its waits, and rollouts are dumped."""
        dump = self._dump if self._config.checkpoint.dump_rollouts else None
        if self._config.checkpoint.ci_inject_rollout_data_path is not None:
            source = InjectedRollouts(
                source,
                self._config.checkpoint,
                needs_routes=self._config.replay.use_rollout_routing_replay,
            )
        self._source = WatchedSource(source, self._stop, dump)
        return self._source

    def _dump(self, rollout_id: int, groups: Sequence[Sequence[Scored]]) -> None:
        dump_rollout(self._run_dir / "rollouts", rollout_id, self._whole(groups))

    def _whole(self, groups: Sequence[Sequence[Scored]]) -> list[list[Scored]]:
        return [[(self._with_routes(s), reward) for s, reward in group] for group in groups]

    def trained(self, rollout_id: int, skipped: int) -> None:
        """Record a trained rollout, of which ``skipped`` optimizer steps were not finite.

        Raises FloatingPointError after too many bad rollouts in a row.
        """
        groups = None
        if self._source is not None:
            groups = self._source.last
            prompt_log.append(self._run_dir, rollout_id, groups, skipped)
            self._check_prompt_file()
            groups = self._whole(groups) if skipped else None
        text = self._bad_steps.count(rollout_id, skipped, groups)
        if text:
            self._note(text)
            self._bad_steps.raise_if_too_many(text)

    def learned_nothing(self, rollout_id: int, low_ess_steps: int) -> None:
        """Count the rollouts in a row of which --min-ess left no optimizer step; a collective.

        Saves and raises RuntimeError after max_bad_steps of them, or after as many as there may be
        rollouts of older weights, if those are more: the weights stood still, so all later rollouts are
        of the actor's own, and are as far from it.
        """
        config = self._config
        if low_ess_steps < config.steps_per_rollout:
            self._idle_rollouts = 0
            return
        self._idle_rollouts += 1
        most = max(config.faults.max_bad_steps, config.rollout.max_weight_staleness + 1)
        if self._idle_rollouts < most:
            return
        self.save(rollout_id + 1)
        self.finish()
        raise RuntimeError(
            f"rollout {rollout_id}: {most} rollouts in a row had train/ess below --min-ess"
            f" {config.algorithm.min_ess}, so nothing was trained on them, and nothing changes by waiting:"
            " lower --min-ess, or see what sets engine and actor apart (train/log_prob_gap_mean)"
        )

    def _check_prompt_file(self) -> None:
        if not self._prompts_changed and self._prompt_file.changed():
            self._prompts_changed = True
            self._note(
                "warning: the prompt file has changed since the run began; this run goes on with"
                " what it read, and its checkpoints will refuse to resume with the new content"
            )

    def stopping(self) -> bool:
        """True once the run was told to stop; a collective."""
        return self._stop.agreed()

    def due(self, next_rollout_id: int) -> bool:
        """True if ``--save-interval`` asks for a checkpoint, or an export, now."""
        interval = self._config.checkpoint.save_interval
        return bool(interval and next_rollout_id % interval == 0)

    def export(self, next_rollout_id: int) -> None:
        """Export the weights where that is asked for during the run; a collective."""
        if self._export is not None:
            self._export(next_rollout_id)

    def save(self, next_rollout_id: int) -> None:
        """Save a checkpoint that resumes at ``next_rollout_id`` (--save); a collective."""
        if self._checkpointer is None:
            return
        write_extra, facts = None, {"run": self._run_facts}
        if self._source is not None:
            state = self._source.snapshot()
            facts = {**facts, HAS_BUFFER: state is not None}

            def write_extra(directory: Path) -> None:
                config = directory / CONFIG_FILE
                if not config.exists():  # of a complete checkpoint only the buffer may be replaced
                    config.write_text(self._config.to_toml(), encoding="utf-8")
                if state is not None:
                    [samples] = self._whole([state.samples])
                    write_samples(directory / BUFFER_FILE, samples, state.facts)

        self._checkpointer.save(next_rollout_id, facts, write_extra)

    def poll(self) -> None:
        """Complete an asynchronous save that has been written; a collective."""
        if self._checkpointer is not None:
            self._checkpointer.poll()

    def finish(self) -> None:
        """Wait for the last save; a collective."""
        if self._checkpointer is not None:
            self._checkpointer.finish()

    def failed(self, next_rollout_id: int, cause: str, what: str = "generation failed") -> None:
        """Save and say why no further rollout will come; a collective.

        If the save fails too, its error is raised after the first cause has been shown.
        """
        try:
            self.save(next_rollout_id)
            self.finish()
        except Exception:
            self._note(f"{what} after {next_rollout_id} rollouts: {cause}")
            raise
        kept = "a checkpoint was saved" if self._checkpointer else "nothing was saved: no --save"
        self._note(f"{what} after {next_rollout_id} rollouts; {kept}: {cause}")

    def stopped(self, next_rollout_id: int) -> None:
        """Save because the run was told to stop, and say so; a collective."""
        self.save(next_rollout_id)
        self.finish()
        self._stop.saved = self._checkpointer is not None
        kept = "nothing was saved: no --save"
        if self._checkpointer:
            save = self._config.checkpoint.save
            kept = f"a checkpoint was saved, and --load {save} goes on from it"
        name = self._stop.received or ANOTHER_RANK
        self._note(f"stopped by {name} after {next_rollout_id} rollouts; {kept}")


class BadSteps:
    """Counts rollouts with a loss or a gradient that is not finite, whose optimizer steps are skipped.

    All ranks hold the same counts.
    """

    def __init__(self, max_in_a_row: int, run_dir: Path):
        self._max = max_in_a_row
        self._directory = run_dir / "bad_steps"
        self._in_a_row = 0
        self.total = 0

    def count(
        self, rollout_id: int, skipped: int, groups: Sequence[Sequence[Scored]] | None
    ) -> str:
        """Count a rollout's skipped steps; returns a message for people, or "".

        groups: the rollout on rank 0, dumped for inspection; None elsewhere.
        """
        if not skipped:
            self._in_a_row = 0
            return ""
        self._in_a_row += 1
        self.total += skipped
        text = (
            f"rollout {rollout_id}: {skipped} optimizer step(s) skipped: the loss or a gradient is"
            f" not finite ({self._in_a_row} in a row, max_bad_steps {self._max})"
        )
        if groups is not None:
            text += f"; the batch is in {dump_rollout(self._directory, rollout_id, groups)}"
        return text

    def raise_if_too_many(self, text: str) -> None:
        """Raise FloatingPointError after ``max_in_a_row`` bad rollouts in a row."""
        if self._in_a_row >= self._max:
            raise FloatingPointError(text)


class WatchedSource:
    """A RolloutSource that keeps its last rollout, dumps each if wanted, and heeds a stop."""

    def __init__(
        self,
        source: Any,
        stop: StopSignal,
        dump: Callable[[int, list[list[Scored]]], None] | None,
    ):
        self._inner = source
        self._stop = stop
        self._dump = dump
        self.last: list[list[Scored]] = []

    def next_batch(
        self, rollout_id: int, on_wait: Callable[[dict[str, Any]], None] | None = None
    ) -> list[list[Scored]]:
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

    def await_evaluation(self) -> None:
        """Wait for the source's evaluation; raise StopRequested once the run is told to stop."""
        self._inner.await_evaluation(self._heed_stop)

    def _heed_stop(self, _stats: dict[str, Any]) -> None:
        require_ranks()
        if self._stop.received is not None or stop_noted():
            raise StopRequested(self._stop.received or ANOTHER_RANK)

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to the source."""
        return getattr(self._inner, name)
