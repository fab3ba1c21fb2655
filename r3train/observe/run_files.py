"""A run's own files, metrics.jsonl, samples.jsonl and config.toml, whatever a crash or a hand left of them.

What is whole is returned; what is not is named: lines that no crash explains in ``BrokenLines``, the
rest in notices.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from r3train.proof.audit_lines import BrokenLines, odd, raw_lines, TOO_LONG
from r3train.observe.metrics import METRICS_FILE

CONFIG_FILE = "config.toml"
# of a step, far below where a float, which is what a chart has, tells it not from the next
MAX_STEP = 1 << 40


def metrics_lines(
    run_dir: Path, broken: BrokenLines, notices: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of metrics.jsonl that are of a step, in their order: its number, the whole line.

    Raises OSError where the file is missing or cannot be read.
    """
    for number, record in read_objects(run_dir / METRICS_FILE, broken, notices):
        step = record.get("step")
        if "step" not in record:
            broken.add(METRICS_FILE, number, "step is missing")
        elif type(step) is not int or not 0 <= step <= MAX_STEP:
            expected = f"an integer from 0 to {MAX_STEP}"
            broken.add(METRICS_FILE, number, odd("step", step, expected))
        else:
            yield number, record


def read_objects(
    path: Path, broken: BrokenLines, notices: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with their 1-based lines.

    A last line without its end is left out, as whoever goes on with the file cuts it off.  The
    writers' own json reads: it takes NaN and half a character in a text, which they may write.
    Raises OSError where the file is missing or cannot be read.
    """
    for number, _, _, line in raw_lines(path):
        if line is None:
            broken.add(path.name, number, TOO_LONG)
            continue
        if not line.endswith(b"\n"):
            notices.append(f"{path.name} ends within a line: its writer was stopped")
            return
        try:
            value = json.loads(line[:-1].decode())
        except (ValueError, RecursionError) as error:
            broken.add(path.name, number, f"not JSON: {_reason(error)}")
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            broken.add(path.name, number, f"got a {type(value).__name__}, expected an object")


def read_config(run_dir: Path, notices: list[str]) -> dict[str, Any]:
    """The run's settings; empty where there are none, or where they cannot be read."""
    try:
        return tomllib.loads((run_dir / CONFIG_FILE).read_bytes().decode())
    except FileNotFoundError:
        pass
    except OSError as error:
        notices.append(f"{CONFIG_FILE}: cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        notices.append(f"{CONFIG_FILE}: not TOML: {_reason(error)}")
    return {}


def section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A table of the settings; empty where there is none of that name."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)
