"""Scored samples in one safe file: a dumped rollout, a checkpoint's buffer, a bad batch.

safetensors with one tensor a per-token field (the samples' arrays end to end) and a JSON header in
its metadata: nothing is pickled, and a truncated or altered file is refused.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from errno import EIO
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save_file

from r3train.config.files import open_regular, require_regular
from r3train.trainer.megatron.saved_state import BUFFER
from r3train.types import Prompt, RolloutSample, Scored

BUFFER_FILE = BUFFER  # of a checkpoint: samples that wait to be trained
HAS_BUFFER = "has_buffer"  # among a checkpoint's facts
TEMPERATURE = "rollout_temperature"  # among a file's facts; older files lack it
_FORMAT = "r3train-samples-1"
# each prompt is written once; its fields are arrays over the file's prompts
_NOT_IN_FILES = ("prompt", "decoded", "decoded_masks", "decoded_indexer", "conversation")


def write_samples(path: Path, samples: Sequence[Scored], facts: Mapping[str, Any]) -> None:
    """Write samples with their rewards, and JSON-able ``facts``; the file appears whole or not.

    Raises OSError when it cannot be written (a full disk); no partial file is left.
    """
    tensors, header = _encode(samples)
    header["facts"] = dict(facts)
    text = json.dumps(header)
    checksum = str(_checksum(tensors, text))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors would leave the file to its owner alone
        # not save(): it holds the interpreter, and with it all requests, 0.3 s per 200 MB
        save_file(tensors, temporary, {"format": _FORMAT, "header": text, "checksum": checksum})
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        errno = int(number[1]) if number else EIO
        raise OSError(errno, os.strerror(errno), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_samples(path: Path) -> tuple[list[Scored], dict[str, Any]]:
    """The samples, in the order they were written, and the facts.

    Raises ValueError naming the file if it is missing, truncated or altered.
    """
    try:
        with open_regular(path) as file:
            content = file.read()
        tensors = load(content)
        size = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + size]).get("__metadata__", {})
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, expected {_FORMAT!r}")
        header = json.loads(metadata["header"])
        if "checksum" in metadata:
            right = str(_checksum(tensors, metadata["header"])) == metadata["checksum"]
        else:  # of before the checksum was of the header too
            right = arrays_checksum(tensors) == header["checksum"]
        if not right:
            raise ValueError("its checksum does not match its content")
        return _decode(tensors, header), header["facts"]
    except OSError as error:
        raise ValueError(f"{path}: cannot read the samples: {error.strerror}") from None
    except (
        SafetensorError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"{path}: not a whole file of samples: {error}") from error


def holds_field(path: Path, name: str) -> bool | None:
    """True if the samples have ``name``; None if no token of theirs was generated.

    Reads no routes.  Raises ValueError naming the file if it is not one of samples.
    """
    name = _on_disk(name)
    try:
        require_regular(path)
        with safe_open(path, "numpy") as file:
            names = set(file.keys())
            if "loss_mask" not in names or not file.get_tensor("loss_mask").any():
                return None
            if name in names:
                return True
            plain = json.loads(file.metadata()["header"])["samples"]
            return None not in plain.get(name, [None])
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a whole file of samples: {error}") from error


def read_facts(path: Path) -> dict[str, Any]:
    """The facts only; raises ValueError naming the file if it is not one of samples."""
    try:
        with safe_open(path, "numpy") as file:
            return dict(json.loads(file.metadata()["header"])["facts"])
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a whole file of samples: {error}") from error


def check_temperature(path: Path, facts: Mapping[str, Any], now: float) -> str | None:
    """Compare the temperature of a file's log-probs with the actor's, ``now``.

    Returns a warning if the file does not name one.  Raises ValueError for another temperature: the
    samples would be trained as those of another policy.
    """
    sampled_at = facts.get(TEMPERATURE)
    if sampled_at is None:
        return (
            f"warning: {path} does not name the temperature of its samples (an older r3train wrote it):"
            f" they are trained as sampled at --rollout-temperature {now}"
        )
    if sampled_at != now:
        raise ValueError(
            f"{path}: its samples have log-probs at temperature {sampled_at}, and --rollout-temperature"
            f" is {now}: train them with --rollout-temperature {sampled_at}"
        )
    return None


def _encode(samples: Sequence[Scored]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays by name, and the JSON header; each prompt is written once."""
    tensors: dict[str, np.ndarray] = {}
    plain: dict[str, list[Any]] = {}
    prompts = {id(sample.prompt): sample.prompt for sample, _ in samples}
    places = {name: place for place, name in enumerate(prompts)}
    for f in fields(RolloutSample):
        if f.name not in _NOT_IN_FILES:
            values = [getattr(sample, f.name) for sample, _ in samples]
            _put(_on_disk(f.name), values, tensors, plain)
    tensors["reward"] = np.array([reward for _, reward in samples], dtype=np.float64)
    plain_prompts: dict[str, list[Any]] = {}
    for f in fields(Prompt):
        values = [getattr(prompt, f.name) for prompt in prompts.values()]
        _put(f"prompt.{f.name}", values, tensors, plain_prompts)
    sample_prompts = [places[id(sample.prompt)] for sample, _ in samples]
    header = {"samples": plain, "prompts": plain_prompts, "prompt_of_sample": sample_prompts}
    return tensors, header


def _on_disk(name: str) -> str:
    """Return a field's name in files, which keep the names that earlier versions wrote."""
    return {
        "mask_counts": "kept_counts",
        "mask_ids": "kept_ids",
        "token_ledger": "custody",
    }.get(name, name)


def _put(
    name: str, values: list[Any], tensors: dict[str, np.ndarray], plain: dict[str, list[Any]]
) -> None:
    """One field of all records: arrays end to end with their lengths, anything else as JSON.

    Arrays of rows of different shapes lie flat, with the shape of each one's rows.
    """
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if not arrays:
        plain[name] = values
        return
    assert len(arrays) + sum(value is None for value in values) == len(values), name
    if len({array.shape[1:] for array in arrays}) > 1:  # rows of different widths
        row_shapes = [(-1, -1) if value is None else value.shape[1:] for value in values]
        tensors[f"{name}.row"] = np.array(row_shapes, dtype=np.int64)
        arrays = [array.reshape(-1) for array in arrays]
    tensors[name] = np.ascontiguousarray(np.concatenate(arrays))
    lengths = [-1 if value is None else len(value) for value in values]
    tensors[f"{name}.length"] = np.array(lengths, dtype=np.int64)


def _decode(tensors: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> list[Scored]:
    prompts = [Prompt(**p) for p in _rows(Prompt, tensors, header["prompts"], "prompt.")]
    samples = _rows(RolloutSample, tensors, header["samples"])
    rewards = tensors["reward"].tolist()
    return [
        (RolloutSample(prompt=prompts[place], **sample), reward)
        for place, sample, reward in zip(header["prompt_of_sample"], samples, rewards, strict=True)
    ]


def _rows(
    record: type,
    tensors: Mapping[str, np.ndarray],
    plain: Mapping[str, list[Any]],
    prefix: str = "",
) -> list[dict[str, Any]]:
    """The fields of each record, by name.  One with a default may be younger than the file, which lacks it."""
    columns = {}
    for f in fields(record):
        name = prefix + _on_disk(f.name)
        is_younger = f.default is not MISSING and name not in plain and name not in tensors
        if f.name not in _NOT_IN_FILES and not is_younger:
            columns[f.name] = plain[name] if name in plain else _arrays(name, tensors)
    return [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]


def _arrays(name: str, tensors: Mapping[str, np.ndarray]) -> list[np.ndarray | None]:
    lengths, content = tensors[f"{name}.length"], tensors[name]
    rows = tensors.get(f"{name}.row")
    if rows is None:
        rows = np.tile(np.array(content.shape[1:], dtype=np.int64), (len(lengths), 1))
        content = content.reshape(-1)
    sizes = lengths.clip(min=0) * rows.prod(axis=1)
    ends = np.cumsum(sizes)
    return [
        None if n < 0 else content[end - size : end].reshape(n, *row).copy()
        for n, row, size, end in zip(
            lengths.tolist(), rows.tolist(), sizes.tolist(), ends.tolist(), strict=True
        )
    ]


def _checksum(tensors: Mapping[str, np.ndarray], header: str) -> int:
    """crc32 over the header and the arrays with their dtypes and shapes: accidents, not adversaries."""
    kinds = [[name, str(tensors[name].dtype), tensors[name].shape] for name in sorted(tensors)]
    value = zlib.crc32(json.dumps(kinds).encode(), zlib.crc32(header.encode()))
    return arrays_checksum(tensors, value)


def arrays_checksum(tensors: Mapping[str, np.ndarray], value: int = 0) -> int:
    """crc32 over names and bytes, as it was of old files."""
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8), value)
    return value
