"""What is written so that a run can go on, or be repeated."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from r3train.config.section import Section


class CheckpointSection(Section):
    """Checkpoints, exports, and rollouts on disk."""

    title: ClassVar[str] = "Checkpoints and dumps"

    save: Path | None = Field(default=None, strict=False)
    """Directory that checkpoints are written to."""
    save_interval: int | None = Field(default=None, ge=1)
    """Rollouts between checkpoints; unset means one at the end."""
    save_keep_last: int | None = Field(default=None, ge=1)
    """Checkpoints that are kept; unset means all."""
    async_save: bool = False
    """Write checkpoints from a forked process while training goes on."""
    load: Path | None = Field(default=None, strict=False)
    """Directory of checkpoints to resume from."""
    load_model_only: bool = False
    """Take the model alone from load and start at rollout 0; the topology may differ."""
    auto_resume: bool = False
    """Resume from save where it holds a checkpoint, else start as told."""
    save_hf: Path | None = Field(default=None, strict=False)
    """Directory to export the last weights to as a Hugging Face checkpoint."""
    dump_rollouts: bool = False
    """Write every rollout, routes and log-probs included, to rollouts/ in the run directory."""
    replay_rollouts: Path | None = Field(default=None, strict=False)
    """Train from the dumped rollouts in this directory, without any server."""
