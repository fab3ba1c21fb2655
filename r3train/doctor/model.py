"""The configuration's rules, the checkpoint, its tokenizer, the prompts and the reward."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.config.cross_checks import check_model, check_static, replay_warnings
from r3train.config.hf_facts import HfModelFacts, read_hf_facts
from r3train.doctor.finding import Finding, Findings, fact, ok, problem, warning
from r3train.engine.flags import check_server_flags


@dataclass(frozen=True)
class Weights:
    """Parameters of a checkpoint, counted from the headers of its files."""

    dense: int
    expert: int
    num_bytes: int
    num_files: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def check_config(config: RunConfig, hf: HfModelFacts | None, world_size: int) -> Findings:
    """The rules between sections, and with the checkpoint; one finding a rule that is broken."""
    from r3train.algo.check import check_algorithm  # imports torch

    checks: list[Callable[[], object]] = [
        lambda: check_static(config, world_size),
        lambda: check_server_flags(config.rollout.sglang),
        lambda: check_algorithm(config.algorithm, config.rollout.n_samples_per_prompt),
    ]
    if hf is not None:
        checks.append(lambda: check_model(config, hf, world_size))
    found: list[Finding] = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            found += [problem("configuration", line, "docs/configuration.md") for line in lines]
    remedy = "add --use-rollout-routing-replay, or drop the check"
    found += [warning("configuration", text, remedy) for text in replay_warnings(config)]
    yield from found or [ok("configuration", f"its rules hold for {world_size} rank(s)")]


def check_preflight(config: RunConfig, world_size: int) -> Findings:
    """The training command's own checks; a finding only for what nothing before this found."""
    from r3train.launch.job import preflight

    try:
        preflight(config, world_size).reward.close()
    except ValueError as error:
        text = f"train_async.py refuses it: {_first_line(error)}"
        yield problem("configuration", text, "docs/configuration.md")


def check_checkpoint(
    config: RunConfig,
) -> Generator[Finding, None, tuple[HfModelFacts | None, Weights | None]]:
    """The model's facts, and whether every weight file is there and whole; returns both or None."""
    path = config.model.hf_checkpoint
    try:
        hf = read_hf_facts(path)
    except ValueError as error:
        remedy = "point --hf-checkpoint at a directory with config.json and *.safetensors"
        yield problem("checkpoint", str(error), remedy)
        return None, None
    head = f"{hf.model_type}: {hf.num_hidden_layers} layers, "
    if hf.is_moe:
        experts = f"{hf.num_experts} experts, top {hf.num_experts_per_tok}"
        yield fact("model", f"{head}{len(hf.moe_layer_numbers)} of them with {experts}")
    else:
        yield fact("model", f"{head}dense: R3 has nothing to replay")
    if hf.is_moe and not config.replay.use_rollout_routing_replay:
        text = "mixture of experts without R3: rollout and trainer will choose different experts"
        yield warning("model", text, "add --use-rollout-routing-replay")
    try:
        weights = read_weights(path)
    except ValueError as error:
        yield problem("checkpoint", str(error), "download the checkpoint again")
        return hf, None
    text = f"{weights.total:,} parameters in {weights.num_files} file(s), all there"
    yield ok("checkpoint", text)
    if not hf.eos_token_ids and not config.rollout.rollout_stop_token_ids:
        text = "no eos_token_id in config.json or generation_config.json"
        yield warning("checkpoint", text, "set it, or --rollout-stop-token-ids")
    return hf, weights


def check_tokenizer(config: RunConfig, hf: HfModelFacts | None) -> Findings:
    """The tokenizer must load and its ids fit the vocabulary; then prompts and reward."""
    from r3train.data.tokenizer import load_tokenizer

    path = config.model.hf_checkpoint
    if not path.is_dir():
        return
    remedy = "copy the tokenizer files of the model's own release beside the weights"
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        yield problem("tokenizer", _first_line(error), remedy)
        return
    if hf is not None and len(tokenizer) > hf.vocab_size:
        text = f"{len(tokenizer)} tokens, the model has {hf.vocab_size}: ids past them crash it"
        yield problem("tokenizer", text, remedy)
    elif config.data.apply_chat_template and not getattr(tokenizer, "chat_template", None):
        text = "--apply-chat-template and no chat template in the tokenizer"
        yield problem("tokenizer", text, "drop the flag, or add chat_template.jinja")
    else:
        yield ok("tokenizer", f"{len(tokenizer)} tokens")
        if hf is not None:
            yield from _check_prompts(config, hf, tokenizer)


def _check_prompts(config: RunConfig, hf: HfModelFacts, tokenizer: Any) -> Findings:
    from r3train.launch.job import read_prompts
    from r3train.rewards.registry import get_reward

    data = config.data
    try:
        prompts = read_prompts(config, hf, tokenizer)
        yield ok("prompts", f"{len(prompts)}, the longest {max(len(p.token_ids) for p in prompts)}")
    except ValueError as error:
        yield problem("prompts", _first_line(error), "mend the file, or its keys and limits")
    try:
        get_reward(data.rm_type, data.custom_rm_path, timeout_s=data.reward_timeout_s).close()
        yield ok("reward", data.custom_rm_path or data.rm_type)
    except ValueError as error:
        remedy = "mend --rm-type or --custom-rm-path (module:function)"
        yield problem("reward", _first_line(error), remedy)


def read_weights(path: Path) -> Weights:
    """Count parameters from the headers of *.safetensors, and compare with the index.

    Raises ValueError naming the file that is missing, cut or unreadable.
    """
    from safetensors import SafetensorError, safe_open

    index = path / "model.safetensors.index.json"
    names = {file.name for file in path.glob("*.safetensors")}
    if os.path.lexists(index):  # a link to nowhere too: an incomplete download
        wanted = _indexed_files(index)
        if missing := sorted(wanted - names):
            raise ValueError(f"{path}: {missing[0]} is missing ({len(missing)} of {len(wanted)})")
        names = wanted
    if not names:
        raise ValueError(f"{path}: no *.safetensors file")
    dense = expert = num_bytes = 0
    for file in (path / name for name in sorted(names)):
        try:
            with file.open("rb"), safe_open(file, "numpy") as shard:  # open() words its errors
                num_bytes += file.stat().st_size
                sizes = {n: prod(shard.get_slice(n).get_shape()) for n in shard.keys()}
        except OSError as error:
            raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
        except SafetensorError as error:
            raise ValueError(f"{file}: not a whole safetensors file, cut? {error}") from None
        in_experts = sum(size for name, size in sizes.items() if ".experts." in name)
        expert += in_experts
        dense += sum(sizes.values()) - in_experts
    return Weights(dense, expert, num_bytes, len(names))


def _indexed_files(index: Path) -> set[str]:
    """Names of the files that an index refers to.  Raises ValueError for one that is none."""
    try:
        wanted = set(json.loads(index.read_bytes())["weight_map"].values())
        if not all(isinstance(name, str) for name in wanted):
            raise TypeError("weight_map must hold names of files")
        return wanted
    except OSError as error:
        raise ValueError(f"{index}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{index}: not an index of weights: {type(error).__name__}: {error}"
        raise ValueError(text) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
