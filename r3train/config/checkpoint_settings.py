"""Files that let a run resume, or be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from r3train.config.requirements import below, check, excludes, only_with, requires
from r3train.config.section import Section

if TYPE_CHECKING:
    from r3train.config.run import RunConfig


# in save_hf, as in slime and miles
ROLLOUT_ID = "{rollout_id}"

_OF_AN_ACTOR = (
    "save or save_hf or load or lora_adapter_path or ci_inject_rollout_data_path or use_pytorch_profiler or"
    " record_memory_history or check_weight_update_equal or ci_test or plant_fault or eval_prompt_data or"
    " datasets or route_stores or max_engine_restarts: it builds no actor and publishes no weights"
)


def rollout_path(directory: Path, rollout_id: int) -> Path:
    """The file of a dumped rollout."""
    return directory / f"rollout_{rollout_id:07d}.safetensors"


class CheckpointSection(Section):
    """Checkpoints, exports, and rollouts on disk."""

    title: ClassVar[str] = "Checkpoints and dumps"
    test_hooks = (
        "ci_inject_rollout_data_path",
        "ci_inject_rollout_data_start_rollout_id",
        "ci_inject_rollout_data_min_match_ratio",
    )

    save: Path | None = Field(default=None, strict=False)
    """Directory that checkpoints are written to."""
    save_interval: Annotated[int | None, requires("save or save_hf = *{rollout_id}*")] = Field(
        default=None, ge=1
    )
    """Rollouts between checkpoints; unset means one checkpoint, at the end."""
    save_keep_last: Annotated[int | None, requires("save")] = Field(default=None, ge=1)
    """Newest checkpoints to keep; unset keeps all."""
    async_save: Annotated[bool, requires("save")] = False
    """Write checkpoints in a forked process while training continues."""
    load: Path | None = Field(default=None, strict=False)
    """Directory of checkpoints to resume from."""
    load_model_only: Annotated[bool, requires("load")] = False
    """Load only the model and start at rollout 0; the topology may differ."""
    auto_resume: Annotated[bool, requires("save")] = False
    """Resume from save if it holds a checkpoint; else start as without this flag."""
    save_hf: Path | None = Field(default=None, strict=False)
    """Directory for the last weights, exported as a Hugging Face checkpoint.  With {rollout_id} in it,
    as in hf/{rollout_id}, also for those after every --save-interval rollouts."""
    dump_rollouts: Annotated[bool, requires("has_engines: it would copy what is read")] = False
    """Write every rollout, with routes and log-probs, to rollouts/ in the run directory."""
    replay_rollouts: Path | None = Field(default=None, strict=False)
    """Train from the dumped rollouts in this directory; no server starts."""
    debug_rollout_only: Annotated[
        bool,
        requires("has_engines: it generates"),
        excludes(
            "rollout_external_engine_addrs or rollout_engines_file: nothing would bring them to hf_checkpoint's weights"
        ),
        excludes("lora_serving = adapter: no adapter would be sent to the servers"),
        excludes(_OF_AN_ACTOR),
    ] = False
    """Generate, score and dump every rollout with hf_checkpoint's weights, and train nothing: no actor
    is built."""
    ci_inject_rollout_data_path: Annotated[
        Path | None,
        requires("has_engines: it is compared with what servers generate"),
        excludes("route_stores: the recorded routes are on rank 0"),
    ] = Field(default=None, strict=False)
    """Train from the dumped rollouts in this directory while servers generate the same rollouts, which must
    match them: a test of the weights that reach the servers."""
    ci_inject_rollout_data_start_rollout_id: Annotated[
        int, only_with("ci_inject_rollout_data_path"), below("num_rollout")
    ] = Field(default=0, ge=0)
    """First rollout that is taken from ci_inject_rollout_data_path."""
    ci_inject_rollout_data_min_match_ratio: Annotated[
        float, only_with("ci_inject_rollout_data_path")
    ] = Field(default=0.9, ge=0, le=1)
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

    @check
    def _files(self, run: RunConfig) -> Iterator[str]:
        if self.load is not None and not self.load.is_dir():
            yield f"--load: {self.load}: no such checkpoint directory"
        replayed, injected = self.replay_rollouts, self.ci_inject_rollout_data_path
        if replayed is not None and not replayed.is_dir():
            yield f"--replay-rollouts: {replayed}: no such directory of rollouts"
        if injected is None:
            return
        start, end = self.ci_inject_rollout_data_start_rollout_id, run.rollout.num_rollout
        files = (rollout_path(injected, i) for i in range(start, end))
        if missing := next((file for file in files if not file.is_file()), None):
            yield (
                f"{missing}: no such file (--ci-inject-rollout-data-path needs rollouts {start} to"
                f" {end - 1})"
            )
