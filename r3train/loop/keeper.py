"""What lets a run survive: checkpoints, stops, bad steps, and accounts of what was trained.

The loop asks it between rollouts.  Methods that say so are collectives; what rank 0 alone holds
(the source, the files) is None elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from r3train.loop import prompt_log
from r3train.loop.bad_steps import BadSteps
from r3train.loop.replay_source import dump_rollout
from r3train.loop.rollout_file import write_samples
from r3train.loop.stop import StopRequested, StopSignal
from r3train.types import Scored

logger = logging.getLogger(__name__)

BUFFER_FILE = "buffer.safetensors"
CONFIG_FILE = "config.toml"
HAS_BUFFER = "has_buffer"  # among a checkpoint's facts


class Checkpointer(Protocol):
    """``trainer.megatron.checkpoint.Checkpointer``; every method is a collective."""

    def save(
        self,
        num_rollouts: int,
        facts: dict[str, Any],
        write_extra: Callable[[Path], None] | None = None,
    ) -> None: ...

    def poll(self) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class KeeperSettings:
    """What is kept, and where."""

    run_dir: Path
    save_interval: int | None
    dump_rollouts: bool
    facts: dict[str, Any]  # JSON-able, of the checkpoint; checked when it is resumed
    config_toml: str
    prompts_changed: Callable[[], bool]


class Keeper:
    """Keeps a run; see the module."""

    def __init__(
        self,
        settings: KeeperSettings,
        *,
        stop: StopSignal,
        bad_steps: BadSteps,
        checkpointer: Checkpointer | None,
        tell: Callable[[str], None],
    ):
        self._settings = settings
        self._stop = stop
        self._bad_steps = bad_steps
        self._checkpointer = checkpointer
        self._tell = tell
        self._source: WatchedSource | None = None
        self._prompts_changed = False

    def watch(self, source: Any) -> WatchedSource:
        """Rank 0's source of rollouts, with a stop ending its waits and its rollouts on record."""
        dump = self._settings.run_dir / "rollouts" if self._settings.dump_rollouts else None
        self._source = WatchedSource(source, self._stop, dump)
        return self._source

    def trained(self, rollout_id: int, skipped: int) -> None:
        """A rollout was trained; raises FloatingPointError after too many bad ones in a row."""
        groups = None
        if self._source is not None:
            groups = self._source.last
            prompt_log.append(self._settings.run_dir, rollout_id, groups, skipped)
            self._look_at_prompts()
        text = self._bad_steps.see(rollout_id, skipped, groups)
        if text:
            self._tell(text)
            self._bad_steps.raise_if_too_many(text)

    def _look_at_prompts(self) -> None:
        if not self._prompts_changed and self._settings.prompts_changed():
            self._prompts_changed = True
            self._tell(
                "warning: the prompt file has changed since the run began; this run goes on with"
                " what it read, and its checkpoints will refuse to resume with the new content"
            )

    def stopping(self) -> bool:
        """Whether the run was told to stop; a collective."""
        return self._stop.agreed()

    def due(self, num_rollouts: int) -> bool:
        """Whether ``--save-interval`` asks for a checkpoint now."""
        interval = self._settings.save_interval
        return bool(interval and self._checkpointer and num_rollouts % interval == 0)

    def save(self, num_rollouts: int) -> None:
        """Save a checkpoint (--save); a collective."""
        if self._checkpointer is None:
            return
        write_extra, facts = None, self._settings.facts
        if self._source is not None:
            state = self._source.snapshot()
            facts = {**facts, HAS_BUFFER: state is not None}

            def write_extra(directory: Path) -> None:
                config = directory / CONFIG_FILE
                if not config.exists():  # a whole checkpoint may only have its buffer renewed
                    config.write_text(self._settings.config_toml, encoding="utf-8")
                if state is not None:
                    write_samples(directory / BUFFER_FILE, state.samples, state.facts)

        self._checkpointer.save(num_rollouts, facts, write_extra)

    def poll(self) -> None:
        """Complete an asynchronous save that has been written; a collective."""
        if self._checkpointer is not None:
            self._checkpointer.poll()

    def finish(self) -> None:
        """Wait for the last save; a collective."""
        if self._checkpointer is not None:
            self._checkpointer.finish()

    def failed(self, num_rollouts: int, cause: str) -> None:
        """Save what there is because no further rollout will come, and say so; a collective.

        Raises what the save did, once the cause of all has been told.
        """
        try:
            self.save(num_rollouts)
            self.finish()
        except Exception:
            self._tell(f"generation failed after {num_rollouts} rollouts: {cause}")
            raise
        kept = "a checkpoint was saved" if self._checkpointer else "nothing was saved: no --save"
        self._tell(f"generation failed after {num_rollouts} rollouts; {kept}: {cause}")

    def stopped(self, num_rollouts: int) -> None:
        """Save because the run was told to stop, and say so; a collective."""
        self.save(num_rollouts)
        self.finish()
        kept = "a checkpoint was saved" if self._checkpointer else "nothing was saved: no --save"
        name = self._stop.received or "a signal to another rank"
        self._tell(f"stopped by {name} after {num_rollouts} rollouts; {kept}")


class WatchedSource:
    """A RolloutSource that keeps its last rollout, dumps each if wanted, and heeds a stop."""

    def __init__(self, source: Any, stop: StopSignal, dump_directory: Path | None):
        self._inner = source
        self._stop = stop
        self._dump_directory = dump_directory
        self.last: list[list[Scored]] = []

    def next_batch(
        self, step: int, on_wait: Callable[[dict[str, Any]], None] | None = None
    ) -> list[list[Scored]]:
        """As the source's; raises StopRequested when the run was told to stop meanwhile."""

        def waiting(stats: dict[str, Any]) -> None:
            if self._stop.received is not None:
                raise StopRequested(self._stop.received)
            if on_wait is not None:
                on_wait(stats)

        self.last = self._inner.next_batch(step, waiting)
        if self._dump_directory is not None:
            dump_rollout(self._dump_directory, step, self.last)
        return self.last

    def __getattr__(self, name: str) -> Any:
        """Everything else is the source's own."""
        return getattr(self._inner, name)
