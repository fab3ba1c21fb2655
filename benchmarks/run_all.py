"""Every benchmark, one after the other: what ``make bench`` runs.

    python -m benchmarks.run_all [--write-docs] [--only NAME ...] [--quick]

Each benchmark is a process of its own and leaves runs/bench/NAME.json; the pages are written from
those, so that one that is run again alone (--only) changes its own section.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also as python benchmarks/run_all.py

from benchmarks.measure import machine, run_logged  # noqa: E402
from benchmarks.page import (  # noqa: E402
    PERFORMANCE_PAGE,
    RESULTS_PAGE,
    performance_page,
    results_page,
)

# where a shape of the train step differs from the base's 4 layers, top 4 of 16
REPLAY_SHAPES = ((), ("--layers", "8"), ("--topk", "8"), ("--experts", "64"))
BENCHMARKS: dict[str, list[str]] = {
    "route_path": [],
    "growth": ["--rounds", "15"],
    "replay_overhead": ["--rounds", "5"],
    "replay_growth": ["--rounds", "3"],
    "rollout_rate": ["--rounds", "4", "--response", "96"],
    "weight_sync": ["--rounds", "5"],
    "async_overlap": ["--rounds", "3"],
    "start_up": ["--rounds", "2"],
    "against_trl": ["--rounds", "2"],
    "job_growth": ["--rounds", "2", "--run-steps", "20"],
    "agent_endpoint": ["--rounds", "5"],
    "rank0_rate": ["--rounds", "5"],
    "agreement": ["--seeds", "3"],
}
# it times nothing, and runs beside those that measure CPU time of one thread
UNTIMED = "agreement"
CPU_TIME = {
    "route_path",
    "growth",
    "replay_overhead",
    "replay_growth",
    "agent_endpoint",
    "rank0_rate",
}
QUICK = {
    "rank0_rate": ["--rounds", "1", "--tokens", "1024"],
    "growth": ["--rounds", "2"],
    "replay_overhead": ["--rounds", "2", "--tokens", "128"],
    "replay_growth": ["--rounds", "2"],
    "rollout_rate": ["--rounds", "1", "--response", "16"],
    "weight_sync": ["--rounds", "2"],
    "async_overlap": ["--rounds", "1"],
    "start_up": ["--rounds", "1"],
    "against_trl": ["--rounds", "1", "--steps", "5", "--shape", "demo"],
    "job_growth": ["--rounds", "1", "--steps", "5", "--run-steps", "3"],
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
    "agreement": ["--seeds", "1"],
}
TIMEOUT_S = 1200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--write-docs", action="store_true", help="write the two pages")
    arguments = parser.parse_args()
    began, failed = time.monotonic(), []
    facts = machine()
    arguments.directory.mkdir(parents=True, exist_ok=True)

    def measure(name: str) -> None:
        flags = (QUICK if arguments.quick else BENCHMARKS).get(name, [])
        took = time.monotonic()
        result = run_benchmark(name, flags, arguments.directory)
        failed.extend([name] if "error" in result else [])
        (arguments.directory / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        state = result.get("error", "done")
        print(f"{name}: {state}, {time.monotonic() - took:.0f} s", flush=True)

    wanted = arguments.only or list(BENCHMARKS)
    with ThreadPoolExecutor(1) as beside:
        untimed = [beside.submit(measure, name) for name in wanted if name == UNTIMED]
        for name in (name for name in wanted if name != UNTIMED):
            if name not in CPU_TIME:
                wait(untimed)
            measure(name)
    for run in untimed:
        run.result()
    facts["minutes"] = (time.monotonic() - began) / 60
    print(f"{len(failed)} failed, {facts['minutes']:.1f} minutes", flush=True)
    facts = with_earlier(facts, arguments.directory / "machine.json", arguments.only)
    if arguments.write_docs:
        write_pages(arguments.directory, facts)
    return 1 if failed else 0


def with_earlier(facts: dict[str, Any], path: Path, only: Sequence[str] | None) -> dict[str, Any]:
    """The head of the page: of the last whole run, with what was measured alone since."""
    if only and path.exists():
        alone = {name: facts["date"] for name in only}
        facts = json.loads(path.read_text())
        facts["alone"] = facts.get("alone", {}) | alone
    path.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def run_benchmark(name: str, flags: Sequence[str], directory: Path) -> dict[str, Any]:
    """Its result, or {"error": ...} where it fails; the others go on."""
    if name != "replay_growth":
        return run_script(name, flags, directory)
    shapes = []
    for shape in REPLAY_SHAPES:
        result = run_script(
            "replay_overhead", ["--growth", "--tokens", "256", *flags, *shape], directory
        )
        if "error" in result:
            return result
        shapes.append(result)
    return {"shapes": shapes}


def run_script(script: str, flags: Sequence[str], directory: Path) -> dict[str, Any]:
    """One benchmark's JSON; its own words go to a log beside it."""
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


def write_pages(directory: Path, facts: dict[str, Any]) -> None:
    """Both pages from whatever the directory holds."""
    results: dict[str, Any] = {"machine": facts}
    for name in BENCHMARKS:
        path = directory / f"{name}.json"
        if path.exists():
            results[name] = json.loads(path.read_text())
    PERFORMANCE_PAGE.write_text(performance_page(results), encoding="utf-8")
    agreement = results.get("agreement")
    if agreement is not None and "error" not in agreement:
        earlier = RESULTS_PAGE.read_text(encoding="utf-8")
        RESULTS_PAGE.write_text(results_page(agreement, earlier), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
