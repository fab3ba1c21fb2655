"""The checkpoint, its tokenizer, the prompts and the reward, as far as reading tells."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.algo.check import check_algorithm
from r3train.config.cross_checks import check_model, check_static, replay_warnings
from r3train.config.hf_facts import HfModelFacts, read_hf_facts
from r3train.doctor.finding import Finding, fact, ok, problem, warning
from r3train.engine.flags import check_server_flags

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1}


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


def check_config(config: RunConfig, world_size: int) -> Iterator[Finding]:
    """Rules between sections, and with the checkpoint; one finding a rule that is broken."""
    checks = [lambda: check_static(config, world_size)]
    checks.append(lambda: check_server_flags(config.rollout.sglang))
    samples = config.rollout.n_samples_per_prompt
    checks.append(lambda: check_algorithm(config.algorithm, samples))
    try:
        hf = read_hf_facts(config.model.hf_checkpoint)
        checks.append(lambda: check_model(config, hf, world_size))
    except ValueError:
        pass  # check_checkpoint says it
    found = False
    for check in checks:
        try:
            check()
        except ValueError as error:
            found = True
            for line in str(error).splitlines():
                if line.strip():
                    yield problem("configuration", line.strip(), "docs/configuration.md")
    for text in replay_warnings(config):
        found = True
        yield warning("configuration", text, "add --use-rollout-routing-replay, or drop the check")
    if not found:
        yield ok("configuration", f"its rules hold for {world_size} rank(s)")


def check_preflight(config: RunConfig, world_size: int) -> Iterator[Finding]:
    """What train_async.py itself would refuse and nothing before this said; silent where it would not.

    The training command's own function: the two cannot disagree.
    """
    from r3train.launch.job import preflight

    try:
        preflight(config, world_size).reward.close()
    except ValueError as error:
        text = f"train_async.py refuses it: {str(error).splitlines()[0]}"
        yield problem("configuration", text, "docs/configuration.md")


def check_checkpoint(config: RunConfig) -> Iterator[Finding]:
    """The model's facts, and whether every weight file is there and whole."""
    path = config.model.hf_checkpoint
    try:
        hf = read_hf_facts(path)
    except ValueError as error:
        remedy = "point --hf-checkpoint at a directory with config.json and *.safetensors"
        yield problem("checkpoint", str(error), remedy)
        return
    if hf.is_moe:
        text = (
            f"{hf.model_type}: {hf.num_hidden_layers} layers, {len(hf.moe_layer_numbers)} of them "
            f"with {hf.num_experts} experts, top {hf.num_experts_per_tok}"
        )
    else:
        text = f"{hf.model_type}: {hf.num_hidden_layers} layers, dense: R3 has nothing to replay"
    yield fact("model", text)
    if hf.is_moe and not config.replay.use_rollout_routing_replay:
        text = "mixture of experts without R3: rollout and trainer will choose different experts"
        yield warning("model", text, "add --use-rollout-routing-replay")
    try:
        weights = read_weights(path)
    except ValueError as error:
        yield problem("checkpoint", str(error), "download the checkpoint again")
        return
    yield ok(
        "checkpoint", f"{weights.total:,} parameters in {weights.num_files} file(s), all there"
    )
    if not hf.eos_token_ids and not config.rollout.rollout_stop_token_ids:
        text = "no eos_token_id in config.json or generation_config.json"
        yield warning("checkpoint", text, "set it, or --rollout-stop-token-ids")


def check_tokenizer(config: RunConfig, hf: HfModelFacts | None) -> Iterator[Finding]:
    """Whether it loads and its ids fit the model's vocabulary."""
    from r3train.data.tokenizer import load_tokenizer

    path = config.model.hf_checkpoint
    if not path.is_dir():
        return
    remedy = "copy the tokenizer files of the model's own release beside the weights"
    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        yield problem("tokenizer", str(error).splitlines()[0], remedy)
        return
    if hf is not None and len(tokenizer) > hf.vocab_size:
        text = f"{len(tokenizer)} tokens, the model has {hf.vocab_size}: ids past them crash it"
        yield problem("tokenizer", text, remedy)
        return
    if config.data.apply_chat_template and not getattr(tokenizer, "chat_template", None):
        text = "--apply-chat-template and no chat template in the tokenizer"
        yield problem("tokenizer", text, "drop the flag, or add chat_template.jinja")
        return
    yield ok("tokenizer", f"{len(tokenizer)} tokens")
    yield from _check_prompts(config, hf, tokenizer)


def _check_prompts(config: RunConfig, hf: HfModelFacts | None, tokenizer) -> Iterator[Finding]:
    from r3train.launch.job import read_prompts
    from r3train.rewards.registry import get_reward

    if hf is None:
        return
    data = config.data
    try:
        prompts = read_prompts(config, hf, tokenizer)
        yield ok("prompts", f"{len(prompts)}, the longest {max(len(p.token_ids) for p in prompts)}")
    except ValueError as error:
        yield problem(
            "prompts", str(error).splitlines()[0], "mend the file, or its keys and limits"
        )
    try:
        reward = get_reward(data.rm_type, data.custom_rm_path, timeout_s=data.reward_timeout_s)
        reward.close()
        yield ok("reward", data.custom_rm_path or data.rm_type)
    except ValueError as error:
        remedy = "mend --rm-type or --custom-rm-path (module:function)"
        yield problem("reward", str(error).splitlines()[0], remedy)


def read_weights(path: Path) -> Weights:
    """Count parameters from the headers of *.safetensors, and compare with the index.

    Raises ValueError naming the file that is missing, cut or unreadable.
    """
    index = path / "model.safetensors.index.json"
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if os.path.lexists(index):  # a link to nowhere too: an incomplete download
        wanted = _indexed_files(index)
        missing = sorted(wanted - set(names))
        if missing:
            raise ValueError(f"{path}: {missing[0]} is missing ({len(missing)} of {len(wanted)})")
        names = sorted(wanted)
    if not names:
        raise ValueError(f"{path}: no *.safetensors file")
    dense = expert = num_bytes = 0
    for name in names:
        for tensor, count, size in _tensors(path / name):
            num_bytes += size
            if ".experts." in tensor:
                expert += count
            else:
                dense += count
    return Weights(dense, expert, num_bytes, len(names))


def _indexed_files(index: Path) -> set[str]:
    """Names of the files that an index refers to.  Raises ValueError for one that is none."""
    try:
        wanted = set(json.loads(index.read_bytes())["weight_map"].values())
        if not all(isinstance(name, str) for name in wanted):
            raise TypeError("weight_map must hold names of files")
    except OSError as error:
        raise ValueError(f"{index}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{index}: not an index of weights: {type(error).__name__}: {error}"
        raise ValueError(text) from None
    return wanted


def _tensors(file: Path) -> Iterator[tuple[str, int, int]]:
    """(name, elements, bytes) of each tensor, from the header; the file must hold them all."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if length + 8 > size:
                raise ValueError(f"{file}: cut within its header ({size} bytes)")
            header = _header(file, stream.read(length))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    end = 0
    for name, entry in header.items():
        count, num_bytes, stop = _measured(file, name, entry)
        end = max(end, stop)
        yield name, count, num_bytes
    if 8 + length + end != size:
        raise ValueError(f"{file}: {size} bytes, its header tells of {8 + length + end}: cut?")


def _header(file: Path, content: bytes) -> dict[str, Any]:
    """What a shard says of its tensors, by name."""
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: its header is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    return header


def _measured(file: Path, name: str, entry: Any) -> tuple[int, int, int]:
    """(elements, bytes, end within the data) of one tensor's entry."""
    try:
        shape, (begin, stop), dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, stop))
        if not whole or begin > stop or not isinstance(dtype, str):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        wanted = "a dtype, a shape and two data_offsets"
        text = f"{file}: tensor {name!r} is {str(entry)[:100]}, expected {wanted}"
        raise ValueError(text) from None
    count = prod(shape)
    return count, count * _ITEM_BYTES[dtype] if dtype in _ITEM_BYTES else stop - begin, stop
