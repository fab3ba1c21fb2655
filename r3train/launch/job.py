"""A job whose settings were checked, before any server or model is built."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from r3train.algo.check import check_algorithm
from r3train.config import RunConfig
from r3train.config.cross_checks import check_model, check_static, prompt_limit
from r3train.config.families import check_family
from r3train.config.hf_facts import HfModelFacts, read_hf_facts
from r3train.config.sources import ConfigError
from r3train.data.fingerprint import FileFingerprint
from r3train.data.prompts import load_prompts
from r3train.data.tokenizer import load_tokenizer
from r3train.environments.registry import get_environment
from r3train.rewards.registry import Reward, get_reward
from r3train.engine.backend import EngineError
from r3train.engine.control import EngineControl
from r3train.engine.key import engine_api_key
from r3train.engine.flags import check_server_flags
from r3train.trainer.megatron.freezing import check_freezing
from r3train.trainer.megatron.overrides import check_overrides
from r3train.types import Prompt
from r3train.hf_checkpoint import check_export_directory, check_tensors

T = TypeVar("T")

# a server that others use too may take a while
_ANSWER_S = 30.0


@dataclass(frozen=True)
class Job:
    """A checked configuration, with the files that its checks have read."""

    config: RunConfig
    hf: HfModelFacts
    prompts: list[Prompt]
    tokenizer: Any
    reward: Reward
    prompt_file: FileFingerprint

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in self.prompts)


class PreflightError(ConfigError):
    """The faults of a job: its text has one a line, ``faults`` holds (subject, line) of each.

    Subjects: configuration, key of the servers, server ADDRESS, checkpoint, tokenizer, prompts, reward.
    """

    def __init__(self, faults: list[tuple[str, str]]):
        super().__init__("\n".join(line for _, line in faults))
        self.faults = faults


def preflight(config: RunConfig, world_size: int, *, ask_servers: bool = False) -> Job:
    """Check everything that can be checked before a server or an actor is built.

    The training command, its dry run and the doctor all come through here.  ask_servers: ask those of
    --rollout-external-engine-addrs too, which one rank does for all.  Raises PreflightError with every
    fault that was found.
    """
    faults: list[tuple[str, str]] = []

    def attempt(subject: str, check: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return check(*arguments)
        except ConfigError as error:
            faults.extend((subject, line) for line in str(error).splitlines())
        except ValueError as error:
            faults.append((subject, " ".join(str(error).split())))
        return None

    data, model, settings = config.data, config.model.hf_checkpoint, "configuration"
    attempt(settings, check_static, config, world_size)
    attempt(settings, check_overrides, config)
    replay = config.replay.use_rollout_routing_replay
    attempt(settings, lambda: check_server_flags(config.rollout.sglang, replay=replay))
    attempt(settings, check_layers_here, config)
    # refuses a key that HTTP cannot send
    api_key = attempt("key of the servers", engine_api_key, os.environ)
    if ask_servers and config.has_engines:
        for address in config.rollout.rollout_external_engine_addrs:
            attempt(f"server {address}", check_external_server, config, address, api_key)
    if config.checkpoint.save_hf is not None:
        attempt(settings, check_export_directory, config.checkpoint.save_hf, model)
    samples_per_prompt = config.rollout.n_samples_per_prompt
    attempt(settings, check_algorithm, config.algorithm, samples_per_prompt)
    hf = attempt("checkpoint", read_checkpoint, model)
    tokenizer = attempt("tokenizer", load_tokenizer, model) if model.is_dir() else None
    if hf is not None:
        attempt(settings, check_model, config, hf, world_size)
        attempt(settings, check_freezing, config, hf)
    if hf is not None and tokenizer is not None:
        prompts = attempt("prompts", read_prompts, config, hf, tokenizer)
        if prompts and config.rollout.environment is not None:
            # the environment may refuse the prompts
            name = config.rollout.environment
            attempt(settings, lambda: get_environment(name)(prompts[0]))
    reward = attempt(
        "reward",
        lambda: get_reward(data.rm_type, data.custom_rm_path, timeout_s=data.reward_timeout_s),
    )
    if faults:
        if reward is not None:
            reward.close()
        raise PreflightError(faults)
    assert hf is not None and prompts is not None and reward is not None
    return Job(config, hf, prompts, tokenizer, reward, FileFingerprint.of(data.prompt_data))


def read_checkpoint(path: Path) -> HfModelFacts:
    """Return the facts of a checkpoint that the actor can train.

    Raises ValueError for one of a family that nobody verified, and for a tensor too many or too few.
    """
    hf = read_hf_facts(path)
    check_family(hf)
    check_tensors(hf)
    return hf


def check_external_server(config: RunConfig, address: str, api_key: str | None) -> None:
    """Raise ValueError for a server that does not answer, or that the run refuses."""
    try:
        with EngineControl([address], api_key=api_key, timeout_s=_ANSWER_S) as control:
            control.model_info()
            if config.replay.use_rollout_routing_replay:
                control.require_routed_experts()
            if config.rollout.pause_generation_mode != "drain":
                control.require_exact_boundaries()
    except EngineError as error:
        raise ValueError(f"{address}: does not answer as it should: {error}") from None


def check_layers_here(config: RunConfig) -> None:
    """Raise ValueError where a visible CUDA device lacks what the actor's layers need there."""
    import torch

    from r3train.trainer.megatron.cpu_device import uses_transformer_engine

    if torch.cuda.is_available():  # a login node without a device is no reason to refuse
        uses_transformer_engine(config.model.attention_backend, on_cuda=True)


def read_prompts(config: RunConfig, hf: HfModelFacts, tokenizer: Any) -> list[Prompt]:
    """Read the prompts; each leaves room for the longest response in the model's context.

    Raises ValueError naming file and line.
    """
    data = config.data
    limit, limit_name = prompt_limit(config, hf)
    return load_prompts(
        data.prompt_data,
        tokenizer=tokenizer,
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        apply_chat_template=data.apply_chat_template,
        max_prompt_len=limit,
        limit_name=limit_name,
    )


def open_run_dir(config: RunConfig, broadcast: Callable[[Any], Any]) -> Path:
    """Make the run's directory, the same for all ranks, and save the configuration there.

    broadcast: returns rank 0's value on all ranks.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    asked = config.run.run_dir or Path("runs") / f"{stamp}-{config.run.run_name}"
    run_dir = Path(broadcast(str(asked)))
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir / "config.toml", config.to_toml())
    return run_dir


def start_stamp() -> str:
    """Return a name for this start of the job; it sorts after every earlier one."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def write_atomically(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old content or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
