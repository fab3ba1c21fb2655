"""Flags, rounds, spreads, the machine's name and the JSON result of every benchmark."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def flags(doc: str, **defaults: Any) -> argparse.Namespace:
    """The command line of a benchmark: a flag for each default, of its type, and ``--output``.

    A flag whose default is a list takes several values.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in defaults.items():
        several = isinstance(default, list)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default[0] if several else default),
            nargs="+" if several else None,
            default=default,
            help="default: %(default)s",
        )
    parser.add_argument("--output", type=Path, help="write the result here too")
    return parser.parse_args()


def run_logged(
    command: Sequence[str], log: Path, env: Mapping[str, str], timeout_s: float
) -> int | None:
    """Run a command in the checkout, its words in ``log``; returns its exit code, None if it is too slow.

    Nothing of it is left: its ranks end with it, and servers with their owner.
    """
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parents[1],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def in_turns(
    arms: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run every arm once a round, and return each one's seconds of all rounds but the first ones.

    Another arm begins each round: none always runs first with the caches of the same other.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = clock()
            arms[name]()
            if number >= warm_up:
                seconds[name].append(clock() - began)
    return seconds


def own_clock() -> Callable[[], float]:
    """CPU time of this process, or with a GPU the wall's.

    On a CPU every thread's work is this process's, and its own time is free of what else the machine
    does.
    """
    import torch

    return time.perf_counter if torch.cuda.is_available() else time.process_time


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest to four significant digits, and the number of values."""
    if not values:
        raise ValueError("a spread needs at least one value, got none")
    named = dict(median=statistics.median(values), low=min(values), high=max(values))
    return {name: float(f"{value:.4g}") for name, value in named.items()} | {"n": len(values)}


def spreads(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """The spread of each arm."""
    return {name: spread(each) for name, each in values.items()}


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The spread of the ratios of neighbours, which were measured one right after the other."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def machine() -> dict[str, Any]:
    """The machine and the day, for the head of a page."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] != "unknown" else platform.machine()


def write_result(output: Path | None, result: dict[str, Any]) -> None:
    """Print a result as JSON, and write it to a file where one is named."""
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="", flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
