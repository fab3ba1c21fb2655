"""What every benchmark needs: spreads, the machine's name, a result written as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest, to four digits that count."""
    if not values:
        raise ValueError("a spread needs at least one value, got none")
    named = dict(median=statistics.median(values), low=min(values), high=max(values))
    return {name: float(f"{value:.4g}") for name, value in named.items()} | {"n": len(values)}


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The spread of the ratios of neighbours: what was measured one right after the other."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


@contextmanager
def counted_sends() -> Iterator[Counter[int]]:
    """Bytes that this rank sends with ``isend``, by receiver."""
    import torch.distributed as dist

    sent: Counter[int] = Counter()
    isend = dist.isend

    def counting(message: Any, dst: int) -> Any:
        sent[dst] += message.numel() * message.element_size()
        return isend(message, dst=dst)

    with mock.patch.object(dist, "isend", counting):
        yield sent


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
    """Print a result as JSON, and write it where a file is named."""
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="", flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
