"""Every benchmark, one after the other: what ``make bench`` runs.

    python -m benchmarks.run_all [--write-results] [--only NAME ...] [--quick]

Each benchmark is a process of its own and leaves runs/bench/NAME.json.  ``--write-results`` writes
benchmarks/results.json and the table benchmarks/RESULTS.md from those, of earlier runs too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also as python benchmarks/run_all.py

from benchmarks.measure import machine, run_logged  # noqa: E402
from benchmarks.page import table  # noqa: E402

BENCHMARKS: dict[str, list[str]] = {
    "replay_overhead": ["--rounds", "5"],
    "rollout_rate": ["--rounds", "4", "--response", "96"],
    "weight_sync": ["--rounds", "5"],
    "async_overlap": ["--rounds", "3"],
    "start_up": ["--rounds", "2"],
    "against_trl": ["--rounds", "2"],
    "agent_endpoint": ["--rounds", "5"],
    "rank0_rate": ["--rounds", "5"],
}
QUICK = {
    "replay_overhead": ["--rounds", "2", "--tokens", "128"],
    "rollout_rate": ["--rounds", "1", "--response", "16"],
    "weight_sync": ["--rounds", "2"],
    "async_overlap": ["--rounds", "1"],
    "start_up": ["--rounds", "1"],
    "against_trl": ["--rounds", "1", "--steps", "5", "--shape", "demo"],
    "agent_endpoint": [
        "--rounds",
        "1",
        "--sessions",
        "2",
        "--turns",
        "2",
        "4",
        "--memory-sessions",
        "2",
    ],
    "rank0_rate": ["--rounds", "1", "--tokens", "1024"],
}
TIMEOUT_S = 1200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument(
        "--write-results",
        action="store_true",
        help="write benchmarks/results.json and benchmarks/RESULTS.md",
    )
    arguments = parser.parse_args()
    began, failed = time.monotonic(), []
    facts = machine()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name in arguments.only or BENCHMARKS:
        flags = (QUICK if arguments.quick else BENCHMARKS)[name]
        took = time.monotonic()
        result = run_script(name, flags, arguments.directory)
        failed.extend([name] if "error" in result else [])
        (arguments.directory / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        state = result.get("error", "done")
        print(f"{name}: {state}, {time.monotonic() - took:.0f} s", flush=True)
    print(f"{len(failed)} failed, {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    results = read_results(arguments.directory, facts)
    print(table(results), end="")
    if arguments.write_results:
        here = Path(__file__).parent
        (here / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (here / "RESULTS.md").write_text(table(results), encoding="utf-8")
    return 1 if failed else 0


def read_results(directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The results that a directory holds, by benchmark, and the ``machine``."""
    files = {name: directory / f"{name}.json" for name in BENCHMARKS}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    return {"machine": facts, **found}


def run_script(script: str, flags: Sequence[str], directory: Path) -> dict[str, Any]:
    """One benchmark's JSON, or {"error": ...} where it fails; what it prints goes to a log next to it."""
    output, log = directory / f"{script}.part.json", directory / f"{script}.log"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{script}", *flags, "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = run_logged(command, log, environment, TIMEOUT_S)
    if code is None:
        return {"error": f"not done after {TIMEOUT_S} s"}
    if code or not output.exists():
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        return {"error": f"exit code {code}: {last[:200]}".replace(str(ROOT), ".")}
    result = json.loads(output.read_text())
    output.unlink()
    return result


if __name__ == "__main__":
    sys.exit(main())
