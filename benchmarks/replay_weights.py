"""The effective share of a rollout's samples under weights of whole answers, with replay and without: paired jobs.

    python -m benchmarks.replay_weights [--seeds 5] [--write-docs]

The task is the demo's.  A weight is the actor's probability of a whole answer over the server's
(`--rollout-is sequence`).  Jobs are paired and kept as those of benchmarks/replay_learning.py.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import flags, machine, write_result
from benchmarks.page import RESULTS_PAGE, replay_weights_section, with_section
from benchmarks.replay_learning import SHAPE, job_metrics, kept, place_of, server_of, settings_of
from benchmarks.tiny_jobs import ROOT
from r3train.verify.tiny import TinyOptions, build

ARMS = ("R3", "live router")
KEPT = ("train/ess", "train/chi2_seq", "train/log_prob_gap_k3", "rollout/reward_mean")


def main() -> None:
    arguments = flags(
        __doc__,
        seeds=5,
        first_seed=1,
        rollouts=5,
        prompts=16,
        group=4,
        answer=32,
        layers=8,
        initializer_range=0.2,
        lr=4e-5,
        server_dtype="bfloat16",
        directory=str(ROOT / "runs" / "bench" / "replay_weights"),
        write_docs=False,
    )
    directory = Path(arguments.directory)
    directory.mkdir(parents=True, exist_ok=True)
    facts = machine()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    missing = [
        (seed, arm) for seed in seeds for arm in ARMS if not kept(directory, seed, arm, arguments)
    ]
    if missing:
        measure_all(missing, directory, arguments)
    jobs = {arm: [kept(directory, seed, arm, arguments) for seed in seeds] for arm in ARMS}
    pairs = [pair for pair in zip(*jobs.values()) if all(pair)]
    words = ["python", "-m", "benchmarks.replay_weights", "--seeds", str(arguments.seeds)]
    result = {
        "machine": facts,
        "command": shlex.join(words),
        "settings": settings_of(arguments),
        "arms": dict(zip(ARMS, zip(*pairs))),
    }
    if arguments.write_docs:
        page = RESULTS_PAGE.read_text(encoding="utf-8")
        RESULTS_PAGE.write_text(
            with_section(page, replay_weights_section(result)), encoding="utf-8"
        )
    write_result(arguments.output, result)
    sys.exit(0 if len(pairs) == arguments.seeds else 1)


def measure_all(missing: list[tuple[int, str]], directory: Path, arguments: Any) -> None:
    """Run the jobs on one server, and keep what each found."""
    settings = {
        "sglang-dtype": arguments.server_dtype,
        "num-rollout": arguments.rollouts,
        "rollout-batch-size": arguments.prompts,
        "n-samples-per-prompt": arguments.group,
        "rollout-max-response-len": arguments.answer,
        "max-tokens-per-gpu": 4096,
        "lr": arguments.lr,
        "rollout-is": "sequence",
    }
    with tempfile.TemporaryDirectory() as scratch:
        tiny = {seed: Path(scratch) / f"tiny-{seed}" for seed, _ in missing}
        for seed, place in tiny.items():
            shape = dict(num_layers=arguments.layers, seed=seed)
            shape["initializer_range"] = arguments.initializer_range
            build(place, TinyOptions(**SHAPE, **shape))
        with server_of(tiny[missing[0][0]], directory, arguments.server_dtype) as server:
            address = {"rollout-external-engine-addrs": server.addr}
            for seed, arm in missing:
                metrics = job_metrics(arm, seed, tiny[seed], directory, settings | address)
                if metrics is None:
                    continue
                curves = {key: [m[key] for m in metrics] for key in KEPT}
                job = {"arm": arm, "seed": seed, "curves": curves}
                job |= {"settings": settings_of(arguments)}
                place_of(directory, seed, arm).write_text(json.dumps(job) + "\n")
                print(f"{arm} {seed}: {curves}", flush=True)


if __name__ == "__main__":
    main()
