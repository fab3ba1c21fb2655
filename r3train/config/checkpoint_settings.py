"""Files that let a run resume, or be repeated."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from r3train.config.section import Section


# in save_hf, as in slime and miles
ROLLOUT_ID = "{rollout_id}"


def rollout_path(directory: Path, rollout_id: int) -> Path:
    """The file of a dumped rollout."""
    return directory / f"rollout_{rollout_id:07d}.safetensors"


class CheckpointSection(Section):
    """Checkpoints, exports, and rollouts on disk."""

    title: ClassVar[str] = "Checkpoints and dumps"

    save: Path | None = Field(default=None, strict=False)
    """Directory that checkpoints are written to."""
    save_interval: int | None = Field(default=None, ge=1)
    """Rollouts between checkpoints; unset means one checkpoint, at the end."""
    save_keep_last: int | None = Field(default=None, ge=1)
    """Newest checkpoints to keep; unset keeps all."""
    async_save: bool = False
    """Write checkpoints in a forked process while training continues."""
    load: Path | None = Field(default=None, strict=False)
    """Directory of checkpoints to resume from."""
    load_model_only: bool = False
    """Load only the model and start at rollout 0; the topology may differ."""
    auto_resume: bool = False
    """Resume from save if it holds a checkpoint; else start as without this flag."""
    save_hf: Path | None = Field(default=None, strict=False)
    """Directory for the last weights, exported as a Hugging Face checkpoint.  With {rollout_id} in it,
    as in hf/{rollout_id}, also for those after every --save-interval rollouts."""
    dump_rollouts: bool = False
    """Write every rollout, with routes and log-probs, to rollouts/ in the run directory."""
    replay_rollouts: Path | None = Field(default=None, strict=False)
    """Train from the dumped rollouts in this directory; no server starts."""
    debug_rollout_only: bool = False
    """Generate, score and dump every rollout with hf_checkpoint's weights, and train nothing: no actor
    is built."""
    ci_inject_rollout_data_path: Path | None = Field(default=None, strict=False)
    """Train from the dumped rollouts in this directory while servers generate the same rollouts, which
    must be like them: a test of the weights that reach the servers."""
    ci_inject_rollout_data_start_rollout_id: int = Field(default=0, ge=0)
    """First rollout that is taken from ci_inject_rollout_data_path."""
    ci_inject_rollout_data_min_match_ratio: float = Field(default=0.9, ge=0, le=1)
    """Smallest mean share of an answer's tokens that the servers must generate again; below it the run
    ends."""

    def hf_directory(self, rollout_id: int) -> Path:
        """The directory of the export after ``rollout_id`` rollouts; only with save_hf."""
        return Path(str(self.save_hf).replace(ROLLOUT_ID, str(rollout_id)))

    def hf_directories(self, num_rollout: int) -> list[Path]:
        """The directories of all exports of a run of ``num_rollout`` rollouts; only with save_hf."""
        interval = self.save_interval if self.exports_often else None
        early = range(interval, num_rollout, interval) if interval else ()
        return [self.hf_directory(rollout_id) for rollout_id in (*early, num_rollout)]

    @property
    def exports_often(self) -> bool:
        """True if weights are exported during the run too."""
        return self.save_interval is not None and ROLLOUT_ID in str(self.save_hf or "")
