"""The start of a run: rollout 0, or a checkpoint that its settings agree with.

Preflight asks for it too, before any rank joins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.data.curriculum import PASS_RATES_FILE
from r3train.data.file_fingerprint import facts_fingerprint
from r3train.data.sampled import flaw
from r3train.hf_checkpoint import identity
from r3train.launch.job.checked_job import Job
from r3train.loop.rollout_file import (
    BUFFER_FILE,
    HAS_BUFFER,
    TEMPERATURE,
    check_temperature,
    holds_field,
    read_facts,
    read_samples,
)
from r3train.trainer.megatron.saved_state import LATEST, latest_checkpoint, read_state
from r3train.types import Scored

logger = logging.getLogger(__name__)

_LORA, _MODEL = "lora", "model"  # among the facts of a run
_SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
_SHAPE += ("num_key_value_heads", "num_experts", "num_experts_per_tok")
# among the facts of waiting samples: with another value the first is refused, the second decided again
_EPISODES, _REWARD = "episodes", "reward"
_REWARD_SETTINGS = {"rm_type", "custom_rm_path", "group_rm", "reward_key", "rm_url", "judge_url"}
_REWARD_SETTINGS |= {"judge_model", "judge_template", "judge_pattern", "judge_max_tokens"}
_REWARD_SETTINGS |= {"label_key", "metadata_key"}


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to load, if any, and the first rollout to train."""

    checkpoint: Path | None = None
    model_only: bool = False
    start_rollout_id: int = 0

    def buffer(self, vocab_size: int) -> tuple[list[Scored], dict[str, Any]] | None:
        """Read the samples that are generated but not trained, and the producer's facts (rank 0).

        A rollout of which the model of ``vocab_size`` cannot have sampled something is left out, with a
        warning: it is generated again.
        """
        if self.checkpoint is None or self.model_only:
            return None
        path = self.checkpoint / BUFFER_FILE
        if not path.exists() and read_state(self.checkpoint).get(HAS_BUFFER):
            raise ValueError(
                f"{path}: missing, but the checkpoint was saved with it: without the samples that"
                " wait in it prompts would be lost or trained twice"
            )
        return _without_flaws(path, *read_samples(path), vocab_size) if path.exists() else None

    def next_rollout_in(self, directory: Path) -> int | None:
        """Return the first rollout if ``directory`` holds the loaded checkpoint; else None."""
        at = self.checkpoint
        if at is None or self.model_only or at.suffix or at.parent.resolve() != directory.resolve():
            return None
        return self.start_rollout_id


def _without_flaws(
    path: Path, samples: Sequence[Scored], facts: Mapping[str, Any], vocab_size: int
) -> tuple[list[Scored], dict[str, Any]]:
    """Leave out each place of a group (all turns of its episode) with a sample that has a flaw."""
    kept: list[Scored] = []
    groups, start = [], 0
    for group in facts["groups"]:
        places = []
        for place, count in group["places"]:
            place_samples = samples[start : start + count]
            start += count
            flaws = {
                s.sample_id: f for s, _ in place_samples if (f := flaw(s, vocab_size)) is not None
            }
            for sample_id, found in flaws.items():
                logger.warning(
                    "%s: sample %d (prompt %r) is not trained, and generated again: %s",
                    path,
                    sample_id,
                    group["prompt_id"],
                    found,
                )
            if not flaws:
                kept += place_samples
                places.append([place, count])
        groups.append({**group, "places": places})
    return [*kept, *samples[start:]], {**facts, "groups": groups}


def resume_point(job: Job) -> ResumePoint:
    """Return the start that --auto-resume or --load names; raises ValueError for another run's."""
    settings = job.config.checkpoint
    if settings.auto_resume and (settings.save / LATEST).is_file():
        return _point(job, latest_checkpoint(settings.save))
    if settings.load is None:
        return ResumePoint()
    path = latest_checkpoint(settings.load)
    if settings.load_model_only:
        check_adapters(job.config, path)
        return ResumePoint(path, model_only=True)
    return _point(job, path)


def check_adapters(config: RunConfig, path: Path) -> None:
    """Raise ValueError for a checkpoint of other adapters than the run's, or of another base."""
    saved, now = read_state(path).get("run", {}).get(_LORA), adapter_facts(config)
    if saved is not None and not isinstance(saved, dict):
        raise ValueError(f"{path}: its facts of adapters are {saved!r}, expected a table")
    if (saved is None) != (now is None):
        has = "the whole model" if saved is None else "LoRA adapters"
        raise ValueError(
            f"{path}: holds {has}, and --lora-rank is {config.lora.lora_rank}: a run resumes with"
            " adapters or without, as it began"
        )
    for name, value in (now or {}).items():
        if saved.get(name) == value:
            continue
        if name == "base":
            raise ValueError(
                f"{path}: its adapters belong to another base than --hf-checkpoint"
                f" {config.model.hf_checkpoint} (identity {str(saved.get(name))[:12]}..., now"
                f" {value[:12]}...)"
            )
        raise ValueError(
            f"{path}: its adapters have {name} {saved.get(name)!r}, and the run has {value!r}"
        )


def _point(job: Job, path: Path) -> ResumePoint:
    check_adapters(job.config, path)
    state, last = read_state(path), job.config.rollout.num_rollout
    if state["num_rollouts"] > last:
        raise ValueError(
            f"{path}: has trained {state['num_rollouts']} rollouts, and --num-rollout, which counts the whole"
            f" run, is {last}"
        )
    if job.prompt_file is not None:
        _check_facts(job, path, state.get("run", {}))
    _check_buffer(job.config, path / BUFFER_FILE)
    if job.prompt_file is not None and job.config.data.prompt_sampling == "difficulty":
        if not (path / PASS_RATES_FILE).is_file():
            raise ValueError(
                f"{path}: {PASS_RATES_FILE} is missing, by which its prompts were drawn"
            )
        job.difficulty_order(path)  # reads it
    return ResumePoint(path, start_rollout_id=state["num_rollouts"])


def _check_facts(job: Job, path: Path, saved: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint that was saved with other data, on a rank that has read it."""
    now = run_facts(job)
    saved = (
        {"prompt_sampling": "uniform"} | _token_facts(job) | dict(saved)
    )  # earlier checkpoints do not say
    if saved.get("prompt_data_sha256") != now["prompt_data_sha256"]:
        raise ValueError(
            f"{path}: was trained on prompts of another content than"
            f" {' '.join(job.config.data.prompt_data)}"
            f" has now (sha256 {str(saved.get('prompt_data_sha256'))[:12]}..., now"
            f" {now['prompt_data_sha256'][:12]}...): bring the file back, or start anew from the"
            " weights with --load-model-only"
        )
    model = now.pop(_MODEL)
    before = saved.get(_MODEL, model)  # earlier checkpoints do not say
    if before != model:
        names = [name for name in model if before.get(name) != model[name]]
        raise ValueError(
            f"{path}: holds a model of {', '.join(f'{name} {before.get(name)}' for name in names)}, and"
            f" --hf-checkpoint {job.config.model.hf_checkpoint} has"
            f" {', '.join(str(model[name]) for name in names)}: a run resumes with the model that it began with"
        )
    if different := _differences(saved, now):
        raise ValueError(
            f"{path}: cannot resume with other settings of the prompts or their order:"
            f" {'; '.join(different)}. Start anew from the weights with --load-model-only"
        )


def _check_buffer(config: RunConfig, path: Path) -> None:
    """Raise ValueError for waiting samples that lack what the run needs of them."""
    if not config.has_engines or not path.exists():
        return

    def refuse(found: str, remedy: str) -> None:
        raise ValueError(
            f"{path}: its samples wait to be trained {found}: resume {remedy}, or start anew from the"
            " weights with --load-model-only"
        )

    if config.algorithm.asks_teacher and holds_field(path, "teacher_log_probs") is False:
        found = "without a teacher's log-probs, and --opd-type sglang needs them"
        refuse(found, "without --use-opd")
    by_parts = config.algorithm.advantage_estimator == "gdpo"
    if by_parts and holds_field(path, "reward_parts") is False:
        found = "without the parts of their rewards, and --advantage-estimator gdpo needs them"
        refuse(found, "with the estimator that the run had")
    sampled, now = holds_field(path, "mask_counts"), config.rollout.replays_sampling_mask
    if sampled is not None and sampled != now:
        among = "the tokens that top-k kept" if sampled else "the whole vocabulary"
        found = (
            f"with log-probs among {among}, and --rollout-top-k is {config.rollout.rollout_top_k}"
        )
        refuse(found, f"with --rollout-top-k {'above 1' if sampled else '-1'}")
    sampled_at, now = _temperature(path), config.rollout.rollout_temperature
    if sampled_at is not None and sampled_at != now:
        found = f"with log-probs at temperature {sampled_at}, and --rollout-temperature is {now}"
        refuse(found, f"with --rollout-temperature {sampled_at}")
    now = _episode_facts(config)
    different = _differences(read_facts(path).get(_EPISODES, now), now)
    if different and sampled is not None:
        refuse(f"after other episodes ({'; '.join(different)})", "with the same")


def _temperature(path: Path) -> float | None:
    """The temperature of waiting samples; None if the file is older than this fact, or holds no answer."""
    sampled = holds_field(path, "loss_mask") is not None
    return read_facts(path).get(TEMPERATURE) if sampled else None


def unknown_temperature(config: RunConfig, resume: ResumePoint) -> str | None:
    """Return a warning if samples wait to be trained whose file does not name their temperature."""
    if resume.checkpoint is None or resume.model_only:
        return None
    path = resume.checkpoint / BUFFER_FILE
    if not path.exists() or holds_field(path, "loss_mask") is None:
        return None
    return check_temperature(path, read_facts(path), config.rollout.rollout_temperature)


def scored_by_another(job: Job, facts: Mapping[str, Any]) -> str | None:
    """Return "name was X, is Y" for the reward of waiting samples, which is decided again; else None.

    facts: those of the samples.
    """
    now = sample_facts(job)[_REWARD]
    before = facts.get(_REWARD, now)  # earlier checkpoints do not say
    return "; ".join(_differences(before, now)) or None


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} was {before.get(name)!r}, is {value!r}"
        for name, value in now.items()
        if before.get(name) != value
    ]


def sample_facts(job: Job) -> dict[str, Any]:
    """Return the settings that decided a sample before it was trained; {} on a rank that has read no data."""
    config: RunConfig = job.config
    if job.prompt_file is None:
        return {}
    reward = config.data.model_dump(mode="json", include=_REWARD_SETTINGS)
    reward["reward_weights"] = config.algorithm.weight_of_key
    reward["custom_rm_path_sha256"] = job.reward.code
    reward["agent_failure_reward"] = config.agent.agent_failure_reward
    return {_EPISODES: _episode_facts(config), _REWARD: reward}


def _episode_facts(config: RunConfig) -> dict[str, Any]:
    return {"environment": config.rollout.environment, "agent": config.agent.named}


def _token_facts(job: Job) -> dict[str, Any]:
    """The settings that decide what the model gets of a row."""
    keys = {"input_key", "tool_key", "apply_chat_template", "apply_chat_template_kwargs"}
    words = {"vocabulary": job.tokenizer.get_vocab(), "template": job.tokenizer.chat_template}
    facts = job.config.data.model_dump(mode="json", include=keys)
    return facts | {"tokenizer": facts_fingerprint(words)}


def run_facts(job: Job) -> dict[str, Any]:
    """Return the settings that decide the prompts and their order, the numbers of samples and the adapters.

    Empty on a rank that has read no data: rank 0 saves them, and a node's first rank compares them.
    """
    config: RunConfig = job.config
    if job.prompt_file is None:
        return {}
    return {
        _LORA: adapter_facts(config),
        _MODEL: {name: getattr(job.hf, name) for name in _SHAPE},
        "prompt_data_sha256": job.prompt_file.sha256,
        "num_prompts": len(job.prompts),
        "rollout_batch_size": config.rollout.rollout_batch_size,
        "n_samples_per_prompt": config.rollout.n_samples_per_prompt,
        "rollout_seed": config.rollout.rollout_seed,
        "rollout_shuffle": config.data.rollout_shuffle,
        "prompt_sampling": config.data.prompt_sampling,
        "prompt_files": _prompt_files(config),
        **_token_facts(job),
    }


def adapter_facts(config: RunConfig) -> dict[str, Any] | None:
    """Return what a checkpoint's adapters are, with the identity of their base; None without LoRA."""
    if not config.lora.enabled:
        return None
    fields = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")
    facts = config.lora.model_dump(mode="json", include=set(fields))
    return facts | {"base": identity(config.model.hf_checkpoint)}


def _prompt_files(config: RunConfig) -> list[list[Any]] | None:
    """Name, first row, end and weight of each file of prompts; None for one whole file."""
    files = config.data.prompt_files
    if len(files) == 1 and files[0].start == 0 and files[0].stop is None:
        return None
    return [[file.path.name, file.start, file.stop, file.weight] for file in files]
