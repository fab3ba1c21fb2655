"""The state of a checkpoint in JSON, and the pointer to it, checked before any rank joins.

Nothing here imports Megatron.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r3train.checksums import Sums, check, parsed
from r3train.config.files import load_json_object

LATEST = "latest_checkpointed_iteration.txt"
STATE = "trainer_state.json"
BUFFER = "buffer.safetensors"  # samples that wait to be trained, with a checksum of its own
CHECKSUMS = "checksums.json"  # of all other files of a checkpoint
RUN_DIR, SAVE_DIR = "run_dir", "save_dir"  # in the state: where the run and its checkpoints are
_NAME = re.compile(r"iter_\d{7}")
# file name of a checkpoint's rollout: seven digits
_MOST_ROLLOUTS = 10**7 - 1


def checkpoints(directory: Path) -> list[Path]:
    """Return the whole checkpoints of a directory, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(p for p in directory.iterdir() if _NAME.fullmatch(p.name))


def name_aside(final: Path) -> Path:
    """Return the name of an old checkpoint while a new one takes its name."""
    return final.with_suffix(".old")


def latest_checkpoint(directory: Path) -> Path:
    """Return the checkpoint that the pointer names; raises ValueError if there is none."""
    pointer = directory / LATEST
    if not pointer.is_file():
        raise ValueError(f"{directory}: no checkpoint here ({LATEST} is missing)")
    try:
        with pointer.open("rb") as file:
            text = file.read(100).decode("ascii", "replace").strip()
    except OSError as error:
        raise ValueError(f"{pointer}: cannot be read: {error.strerror}") from None
    is_number = text.isascii() and text.isdigit() and int(text) <= _MOST_ROLLOUTS
    path = directory / f"iter_{int(text):07d}" if is_number else None
    if path is not None and not path.exists() and name_aside(path).exists():
        path = name_aside(path)  # the run died while a new one replaced it
    if path is None or not (path / STATE).is_file():
        raise ValueError(f"{pointer} says {text!r}, but there is no whole checkpoint of that name")
    return path


def read_checksums(checkpoint: Path) -> Sums | None:
    """Return the checksums of a checkpoint's files; None for one that was saved before there were any.

    Raises ValueError naming the file if it is damaged.
    """
    source = checkpoint / CHECKSUMS
    if not os.path.lexists(source):
        return None
    return parsed(load_json_object(source).get("files"), source)


def read_state(checkpoint: Path) -> Mapping[str, Any]:
    """Read ``num_rollouts``, ``weight_version``, ``topology`` and the saved facts.

    Raises ValueError naming the file and the key for a file that is damaged, or of another checkpoint.
    """
    file = checkpoint / STATE
    sums = read_checksums(checkpoint)
    if sums is not None and STATE in sums:
        check(checkpoint, sums, [STATE], checkpoint / CHECKSUMS)
    state = load_json_object(file)

    def expect(key: str, expected: str, right: bool) -> None:
        if not right:
            got = repr(state.get(key, "missing"))
            got = got if len(got) <= 80 else f"{got[:80]}..."
            raise ValueError(f"{file}: {key} is {got}, expected {expected}")

    for key in ("num_rollouts", "weight_version"):
        number = state.get(key)
        right = type(number) is int and 0 <= number <= _MOST_ROLLOUTS
        expect(key, f"a number from 0 to {_MOST_ROLLOUTS}", right)
    if _NAME.fullmatch(checkpoint.stem):
        saved_as = int(checkpoint.stem.removeprefix("iter_"))
        right = state["num_rollouts"] == saved_as
        expect("num_rollouts", f"{saved_as}, the checkpoint's name", right)
    topology = state.get("topology")
    right = isinstance(topology, dict) and all(
        size is None or type(size) is int and size > 0 for size in topology.values()
    )
    expect("topology", "a table of sizes", right)
    run = state.get("run", {})
    expect("run", "a table", isinstance(run, dict))
    for key in (RUN_DIR, SAVE_DIR):
        expect(key, "a path", isinstance(state.get(key, ""), str))
    expect("has_buffer", "true or false", isinstance(state.get("has_buffer", False), bool))
    return state
