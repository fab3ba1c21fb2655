"""A checked job: everything that can be known before a server or a model is built."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from r3train.algo.check import check_algorithm
from r3train.config import RunConfig
from r3train.config.cross_checks import check_model, check_static, prompt_limit
from r3train.config.hf_facts import HfModelFacts, read_hf_facts
from r3train.config.model import ModelSection
from r3train.config.parallel import ParallelSection
from r3train.config.pipeline_layout import parse_pipeline_layout
from r3train.data.fingerprint import FileFingerprint
from r3train.data.prompts import load_prompts
from r3train.data.tokenizer import load_tokenizer
from r3train.environments.registry import get_environment
from r3train.loop.parts import LoopSettings, ReplayPlan
from r3train.loop.planted_bugs import POISONS
from r3train.rewards.registry import Reward, get_reward
from r3train.engine.key import engine_api_key
from r3train.engine.flags import check_server_flags
from r3train.routing.layers import recomputed_layers, stage_layer_numbers
from r3train.types import Prompt
from r3train.engine.hf_export import check_export_directory

_PROBE_LEN = 32


@dataclass(frozen=True)
class Job:
    """A checked configuration with what its checks had to read anyway."""

    config: RunConfig
    hf: HfModelFacts
    prompts: list[Prompt]
    tokenizer: Any
    reward: Reward
    prompt_file: FileFingerprint


def preflight(config: RunConfig, world_size: int) -> Job:
    """Everything that can be wrong before GPU or server time is spent; raises ValueError."""
    check_static(config, world_size)
    check_server_flags(config.rollout.sglang)
    engine_api_key(os.environ)  # one that cannot be sent is refused now
    if config.checkpoint.save_hf is not None:
        check_export_directory(config.checkpoint.save_hf, config.model.hf_checkpoint)
    check_algorithm(config.algorithm, config.rollout.n_samples_per_prompt)
    hf = read_hf_facts(config.model.hf_checkpoint)
    check_model(config, hf, world_size)
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    data, prompts = config.data, read_prompts(config, hf, tokenizer)
    if config.rollout.environment is not None:
        get_environment(config.rollout.environment)(prompts[0])  # what it refuses, it refuses now
    prompt_file = FileFingerprint.of(data.prompt_data)
    reward = get_reward(data.rm_type, data.custom_rm_path, timeout_s=data.reward_timeout_s)
    return Job(config, hf, prompts, tokenizer, reward, prompt_file)


def read_prompts(config: RunConfig, hf: HfModelFacts, tokenizer: Any) -> list[Prompt]:
    """The configuration's prompts, none longer than the model and the response leave room for.

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
    """The run's directory, the same on every rank; rank 0 makes it and saves the configuration.

    ``broadcast`` hands rank 0's value to all ranks.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    asked = config.run.run_dir or Path("runs") / f"{stamp}-{config.run.run_name}"
    run_dir = Path(broadcast(str(asked)))
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir / "config.toml", config.to_toml())
    return run_dir


def start_stamp() -> str:
    """A name for this start of the job that sorts after every earlier one."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or what was there before."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def loop_settings(job: Job, start_rollout: int) -> LoopSettings:
    """The loop's numbers from the configuration."""
    config = job.config
    probe = None
    if config.trainer.check_weight_update_equal:
        # any text will do; this one is the same in every run
        rng = np.random.default_rng(0)
        probe = rng.integers(0, job.hf.vocab_size, _PROBE_LEN).astype(np.int32)
    return LoopSettings(
        num_rollout=config.rollout.num_rollout,
        start_rollout=start_rollout,
        rollout_batch_size=config.rollout.rollout_batch_size,
        steps_per_rollout=config.steps_per_rollout,
        max_tokens_per_gpu=config.trainer.max_tokens_per_gpu,
        algorithm=config.algorithm,
        needs_reference=config.algorithm.needs_reference,
        ci_test=config.trainer.ci_test,
        probe_tokens=probe,
        # bfloat16 engines differ by rounding alone: the tight bound holds in float32
        probe_tolerance=0.5 if config.model.bf16 else 1e-4,
        # a resumed actor is ahead of the checkpoint that a server starts from, and what a server
        # of somebody else's holds is not known
        publish_at_start=bool(
            start_rollout
            or config.checkpoint.load is not None
            or config.rollout.rollout_external_engine_addrs
        ),
        has_engines=config.checkpoint.replay_rollouts is None,
        poison=POISONS.get(config.faults.plant_fault),
    )


def recomputed_moe_layers(
    parallel: ParallelSection, model: ModelSection, hf: HfModelFacts
) -> tuple[int, ...]:
    """Numbers of the MoE layers whose router runs a second time in backward."""
    if parallel.pipeline_model_parallel_layout is not None:
        chunks = parse_pipeline_layout(
            parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
        )
    else:
        chunks = stage_layer_numbers(
            hf.num_hidden_layers,
            parallel.pipeline_model_parallel_size,
            vpp_size=parallel.virtual_pipeline_model_parallel_size or 1,
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
        )
    return tuple(
        layer
        for stage in chunks
        for chunk in stage
        for layer in recomputed_layers(
            chunk,
            granularity=model.recompute_granularity,
            method=model.recompute_method,
            num_layers=model.recompute_num_layers,
            modules=tuple(model.recompute_modules),
        )
        if layer in hf.moe_layer_numbers
    )


def replay_plan(job: Job) -> ReplayPlan | None:
    """R3 for the loop, or None without --use-rollout-routing-replay."""
    config, hf = job.config, job.hf
    if not config.replay.use_rollout_routing_replay:
        return None
    return ReplayPlan(
        num_layers=hf.num_hidden_layers,
        num_experts=hf.num_experts,
        topk=hf.num_experts_per_tok,
        moe_layers=hf.moe_layer_numbers,
        recomputed=recomputed_moe_layers(config.parallel, config.model, hf),
        mismatch_threshold=config.replay.r3_mismatch_threshold,
        check=config.r3_check_enabled,
        plant_bug=config.replay.plant_bug,
    )
