"""The run itself, and the whole configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from r3train.config import sources
from r3train.config.agent_settings import AgentSection
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.config.checkpoint_settings import CheckpointSection
from r3train.config.data_settings import DataSection
from r3train.config.evaluation_settings import EvalDataset, EvalSection
from r3train.config.fault_settings import FaultsSection
from r3train.config.lora_settings import LoraSection
from r3train.config.model_settings import ModelSection
from r3train.config.parallel_settings import ParallelSection
from r3train.config.recipes import recipe_path
from r3train.config.replay_settings import ReplaySection
from r3train.config.rollout_settings import RolloutSection
from r3train.config.requirements import check, only_with
from r3train.config.section import Section
from r3train.config.sources import FILE_NAME
from r3train.config.tracker_settings import TrackersSection
from r3train.config.trainer_settings import TrainerSection

_PROFILED = only_with("use_pytorch_profiler or record_memory_history")


class RunSection(Section):
    """Output of the run: files and terminal."""

    title: ClassVar[str] = "Run"

    run_dir: Path | None = Field(default=None, strict=False)
    """Directory of everything the run writes.  Unset: that of the run whose checkpoint in save it resumes,
    and runs/<UTC time>-<run_name> for a new one."""
    run_name: str = Field(default="r3train", pattern=FILE_NAME, max_length=100)
    """Name in the run directory and in titles, of at most 100 characters."""
    dry_run: bool = False
    """Check everything, print the settings that are not at their defaults and what a run would do, and stop."""
    world_size: int | None = Field(default=None, ge=1)
    """Number of ranks of all nodes that r3train train starts, or that a --dry-run counts."""
    estimate: Annotated[bool, only_with("dry_run")] = False
    """With --dry-run: print the memory of every rank and server, estimated, and topologies that fit (docs/run/gpus.md)."""
    gpu_memory_gb: Annotated[float | None, only_with("estimate")] = Field(default=None, gt=0)
    """With --estimate: memory of a GPU in 10^9 bytes.  Unset: that of the GPUs here, and 80 without any."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    plot: bool = True
    """Write a plot of reward, log-prob gap and R3 counts."""
    progress: bool = True
    """Show progress bars on rank 0."""
    use_pytorch_profiler: bool = False
    """Write a trace of torch.profiler to profile/ in the run directory, for Perfetto."""
    record_memory_history: bool = False
    """Write a snapshot of CUDA's memory, with its history, to profile/ in the run directory, for
    pytorch.org/memory_viz."""
    profile_step_start: Annotated[int, _PROFILED] = Field(default=10, ge=0)
    """First rollout that is profiled, counted from 0 as in metrics.jsonl."""
    profile_step_end: Annotated[int, _PROFILED] = Field(default=12, ge=1)
    """Rollout at which profiling stops; it is not profiled."""
    profile_ranks: Annotated[tuple[int, ...], _PROFILED] = Field(default=(0,), strict=False)
    """Ranks that are profiled."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Level of the log files; the terminal never shows more than rank 0's INFO."""

    @check
    def _profile(self, run: RunConfig) -> Iterator[str]:
        if not (self.use_pytorch_profiler or self.record_memory_history):
            return
        start, end = self.profile_step_start, self.profile_step_end
        if end <= start:
            yield f"profile_step_end {end} is not after profile_step_start {start}"
        elif start >= run.rollout.num_rollout:
            yield (
                f"profile_step_start {start}: the run ends after num_rollout"
                f" {run.rollout.num_rollout}, so nothing would be profiled"
            )

    def ranks(self, environ: Mapping[str, str]) -> int:
        """The number of ranks: torchrun's, or of a dry run without it those of --world-size.

        Raises ValueError where the two differ, or --world-size has no effect.
        """
        started = environ.get("WORLD_SIZE")
        if self.world_size is None:
            return int(started or 1)
        if started is not None and int(started) != self.world_size:
            raise ValueError(
                f"--world-size {self.world_size}: torchrun has started {started} ranks"
            )
        return self.world_size


class RunConfig(Section):
    """The whole configuration; each section is an attribute and a TOML table."""

    model: ModelSection
    lora: LoraSection = LoraSection()
    parallel: ParallelSection = ParallelSection()
    data: DataSection
    rollout: RolloutSection
    agent: AgentSection = AgentSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    replay: ReplaySection = ReplaySection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    faults: FaultsSection = FaultsSection()
    trackers: TrackersSection = TrackersSection()
    run: RunSection = RunSection()

    @property
    def r3_check_enabled(self) -> bool:
        """True when R3 evidence is written: replay is on, and so is the check or ci_test."""
        return self.replay.use_rollout_routing_replay and (
            self.trainer.ci_test or self.replay.enable_r3_correctness_check
        )

    @property
    def sums_evidence(self) -> bool:
        """True when the evidence of a right step is the sums of its router calls."""
        return self.r3_check_enabled and self.replay.r3_evidence == "summed"

    @property
    def recheck_share(self) -> float:
        """r3_recheck_share; 0 with the check off, and where nothing can be rechecked exactly.

        That is without servers, where prefixes of older weights stay in their caches, and where
        what servers generate is not trained.
        """
        checkpoint = self.checkpoint
        exact = self.has_engines and self.rollout.flush_cache_on_update
        if checkpoint.debug_rollout_only or checkpoint.ci_inject_rollout_data_path is not None:
            exact = False  # what the servers generated is not trained
        return self.replay.r3_recheck_share if self.r3_check_enabled and exact else 0.0

    @property
    def server_dtype(self) -> str:
        """The dtype in which servers compute, as torch spells it."""
        dtype = self.rollout.sglang.get("dtype")
        if dtype in (None, "auto"):
            return self.model.dtype_name
        return {"float": "float32", "half": "float16"}.get(str(dtype), str(dtype))

    @property
    def suspect_limit(self) -> float:
        """r3_suspect_limit; with ci_test the first suspect step fails."""
        return 1.0 if self.trainer.ci_test else self.replay.r3_suspect_limit

    @property
    def mismatch_threshold(self) -> float:
        """r3_mismatch_threshold with its default resolved."""
        # of a toy with two groups of experts, of which a row has one, 2.7% of the rows went to the other one in fp8
        default = 0.03 if self.serves_fp8 else 0.01
        return _first(self.replay.r3_mismatch_threshold, default)

    @property
    def canary_share(self) -> float:
        """r3_canary_share; with ci_test every update is judged."""
        return 1.0 if self.trainer.ci_test else self.replay.r3_canary_share

    @property
    def _compares_servers(self) -> bool:
        """True if the actor is compared with its servers: with the R3 check or check_weight_update_equal.

        Not without servers or actor, and not where one server has several replicas, of which any answers.
        """
        is_wanted = self.r3_check_enabled or self.trainer.check_weight_update_equal
        alone = self.rollout.sglang.get("dp_size") in (None, 1)
        return is_wanted and self.has_engines and alone and not self.checkpoint.debug_rollout_only

    @property
    def canary_tokens(self) -> int:
        """r3_canaries; 0 where servers are not compared, or compute in another precision than the actor."""
        alike = self.server_dtype == self.model.dtype_name
        alike &= not self.rollout.sglang.get("quantization")
        return self.replay.r3_canaries if self._compares_servers and alike else 0

    @property
    def judges_checksums(self) -> bool:
        """True if servers' own checksums are read after every update.

        Not where servers are not compared, or store other values than were sent to them (a quantization, adapters).
        """
        stores_alike = not self.rollout.sglang.get("quantization") and not self.serves_adapters
        return self._compares_servers and stores_alike

    @property
    def eval_sets(self) -> tuple[EvalDataset, ...]:
        """The evaluation sets, those of the flag first, with defaults resolved; rm_type None is the run's reward."""
        evaluation, data, rollout = self.eval, self.data, self.rollout
        defaults = {
            "input_key": evaluation.eval_input_key or data.input_key,
            "label_key": evaluation.eval_label_key or data.label_key,
            "metadata_key": data.metadata_key,
            "apply_chat_template": data.apply_chat_template,
            "rm_type": evaluation.eval_rm_type,
            "n_samples_per_eval_prompt": evaluation.n_samples_per_eval_prompt,
            "temperature": _first(evaluation.eval_temperature, rollout.rollout_temperature),
            "top_p": _first(evaluation.eval_top_p, rollout.rollout_top_p),
            "top_k": _first(evaluation.eval_top_k, rollout.rollout_top_k),
            "max_response_len": evaluation.eval_max_response_len
            or rollout.rollout_max_response_len,
        }
        pairs = zip(evaluation.eval_prompt_data[::2], evaluation.eval_prompt_data[1::2])
        sets = [EvalDataset(name=name, path=path) for name, path in pairs]
        return tuple(
            dataset.model_copy(
                update={k: v for k, v in defaults.items() if getattr(dataset, k) is None}
            )
            for dataset in (*sets, *evaluation.datasets)
        )

    def eval_due(self, weight_version: int) -> bool:
        """True where a run that trains through ``weight_version`` evaluates it."""
        if not self.eval_sets:
            return False
        if weight_version == 0:
            return not self.eval.skip_eval_before_train
        interval = self.eval.eval_interval
        at_interval = interval is not None and weight_version % interval == 0
        return at_interval or weight_version == self.rollout.num_rollout

    @property
    def eval_slots(self) -> int:
        """eval_max_concurrency with its default resolved."""
        return self.eval.eval_max_concurrency or max(1, self.rollout.max_concurrency // 2)

    @property
    def max_sessions(self) -> int:
        """agent_max_sessions with its default resolved; a worker has one at a time."""
        most = self.agent.agent_max_sessions or self.rollout.max_concurrency
        return min(most, self.agent.agent_workers or most)

    @property
    def samples_per_episode(self) -> int:
        """Sample ids that one episode may need."""
        if self.agent.named is not None:
            return self.agent.agent_max_calls
        rollout = self.rollout
        return rollout.environment_max_turns if rollout.environment_samples == "turn" else 1

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def samples_in_words(self) -> str:
        return (
            f"rollout_batch_size {self.rollout.rollout_batch_size} * n_samples_per_prompt"
            f" {self.rollout.n_samples_per_prompt} = {self.samples_per_rollout}"
        )

    @property
    def samples_per_step(self) -> int:
        """global_batch_size with its default resolved."""
        return self.trainer.global_batch_size or self.samples_per_rollout

    @property
    def steps_per_rollout(self) -> int:
        return self.samples_per_rollout // self.samples_per_step

    @property
    def reuses_log_probs(self) -> bool:
        """True when the train forward's own log-probs stand for the old ones (--reuse-log-probs).

        With one optimizer step per rollout no weight changes between the two, and the loss's ratio is 1.
        --loss-type sft has no ratio.  With --kl-coef the old log-probs are part of the reward, and so
        needed before, and with --use-routing-replay the routes of their pass.  Under --ci-test without a reference, whose log-probs it compares,
        auto keeps the pass: the train forward would be compared with itself.
        """
        sft = self.algorithm.loss_type == "sft"
        if self.algorithm.kl_coef or self.replay.use_routing_replay:
            return False
        if self.trainer.ci_test and not sft and not self.algorithm.needs_reference:
            return self.trainer.reuse_log_probs == "on" and self.steps_per_rollout == 1
        return (sft or self.steps_per_rollout == 1) and self.trainer.reuse_log_probs != "off"

    @property
    def servers_change(self) -> bool:
        """True if a lost server does not end the run: others come and go, or its own are started again."""
        return self.rollout.rollout_engines_file is not None or self.faults.max_engine_restarts > 0

    @property
    def may_send_targets_alone(self) -> bool:
        """True if servers that hold a LoRA run's base may get the adapted tensors only.

        One that reads files reads a whole checkpoint, and may lay out all of its tensors anew.  One that joins may hold
        another base.
        """
        by_broadcast = self.trainer.update_weight_transfer_mode == "distributed"
        return self.lora.enabled and by_broadcast and self.rollout.rollout_engines_file is None

    def weight_senders(self, world_size: int, *, one_node: bool) -> range:
        """Ranks other than 0 that send weights to the servers themselves; the rest send theirs through rank 0.

        They broadcast: the first of each later pipeline stage, without LoRA.  They write into shared memory: all,
        if they are on ``one_node``.
        """
        mode = self.trainer.update_weight_transfer_mode
        if mode == "shared_memory" and self.has_engines and not self.serves_adapters and one_node:
            return range(1, world_size)
        if mode != "distributed" or self.lora.enabled or not self.has_engines:
            return range(0)
        stage_size = world_size // self.parallel.pipeline_model_parallel_size
        return range(stage_size, world_size, stage_size)

    @property
    def replay_passes(self) -> tuple[str, ...]:
        """The passes of a rollout that replay its routes, in their order."""
        old = () if self.reuses_log_probs else ("old_log_prob",)
        replays_reference = (
            self.algorithm.needs_reference and self.algorithm.ref_routing == "replay"
        )
        reference = ("ref_log_prob",) if replays_reference else ()
        return (*old, *reference, "train")

    @property
    def shards_optimizer(self) -> bool:
        """True when the optimizer's state is sharded over data-parallel ranks; SGD has no state."""
        return self.parallel.use_distributed_optimizer and self.trainer.optimizer == "adam"

    @property
    def has_engines(self) -> bool:
        """True when servers generate; dumped files or conversations may take their place."""
        return self.checkpoint.replay_rollouts is None and self.algorithm.loss_type != "sft"

    @property
    def learns_conversations(self) -> bool:
        """True when prompt_data holds conversations to train on (--loss-type sft)."""
        return self.algorithm.loss_type == "sft" and self.checkpoint.replay_rollouts is None

    @property
    def reward_is_optional(self) -> bool:
        """True when a teacher teaches (--use-opd) and no reward is named: rows without one score 0."""
        data, environment = self.data, self.rollout.environment
        named = data.rm_type or data.custom_rm_path or environment or self.agent.named
        return self.algorithm.use_opd and named is None

    @property
    def scores_answers(self) -> bool:
        """True where a reward scores what is generated.

        Environments and dumped rollouts have their own; agents have theirs, unless a reward is named.
        """
        if not self.has_engines or self.rollout.environment is not None:
            return False
        named = self.data.rm_type or self.data.custom_rm_path
        return self.agent.named is None or named is not None

    @property
    def servers_may_hold_other_weights(self) -> bool:
        """True when the servers may start with other weights than the actor.

        Servers start from hf_checkpoint, and a loaded actor or adapter is ahead of it.  An external
        server may hold anything.  A server of adapters starts without one.
        """
        if self.serves_adapters:
            return True
        external = self.rollout.has_external_servers
        ahead = self.checkpoint.load is not None or self.lora.lora_adapter_path is not None
        return external or ahead

    @property
    def serves_adapters(self) -> bool:
        """True when servers hold weight versions as adapters, side by side (--lora-serving adapter)."""
        return self.has_engines and self.lora.enabled and self.lora.lora_serving == "adapter"

    @property
    def serves_fp8(self) -> bool:
        """True when servers hold linears in blocks of fp8."""
        return self.has_engines and self.rollout.rollout_weights == "fp8"

    def server_checkpoint(self, run_dir: Path) -> Path:
        """The checkpoint that the run's servers start from."""
        return run_dir / "served" if self.serves_fp8 else self.model.hf_checkpoint

    @property
    def reference_is_base(self) -> bool:
        """True when the KL reference is the actor with its adapters switched off."""
        return self.lora.enabled and self.ref_checkpoint == self.model.hf_checkpoint

    @property
    def ref_checkpoint(self) -> Path:
        """ref_load with its default resolved: the checkpoint of the KL reference."""
        return self.model.ref_load or self.model.hf_checkpoint

    @classmethod
    def from_sources(
        cls,
        *,
        file: Path | str | None = None,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> RunConfig:
        """Merge a TOML file, flags by field name and the environment; flags win over the file.

        file: its path, or the bare name of a recipe of the package.
        The environment sets r3_mismatch_threshold only, and only if neither flag nor file does.
        Raises ConfigError (a ValueError) naming flag, file and key of every bad value.
        """
        path = None if file is None else recipe_path(file)
        return sources.merge(cls, file=path, flags=flags or {}, environ=environ or {})

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
        """Read a TOML file; ``overrides`` are fields by name, as flags would set them."""
        return cls.from_sources(file=path, flags=overrides)

    def to_toml(self) -> str:
        """The resolved configuration as TOML that ``from_toml`` reads back to an equal one."""
        return sources.to_toml(self)

    def given_toml(self) -> str:
        """The same of the settings that are not at their defaults, for a reader."""
        head = "# settings that are not at their defaults (r3train docs configuration has all)\n"
        return head + sources.to_toml(self, exclude_defaults=True)


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value
