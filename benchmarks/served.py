"""Canaries: false alarms over sound updates, and their share of a step.

    python -m benchmarks.served [--updates 1000] [--dtype float32 bfloat16] [--lr 2e-3 1e-5] [--rounds 3]

Whole jobs of the demo train in each dtype and learning rate, ``--updates`` over all of them; every update is sound, so
each verdict that fails is a false alarm, which ends its job.  With ``--rounds`` jobs of 1,000 samples a rollout take turns:
without canaries, without them again, and with them.  Their ratio is of the median step's seconds; next to it stands the
share that a job itself says its canaries take of its steps.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.measure import flags, ratios, spread, write_result
from benchmarks.tiny_jobs import job_flags, R3, run, step_metrics, tiny_model, torchrun

_A_THOUSAND = ("--rollout-batch-size", "125", "--n-samples-per-prompt", "8")
_COST_STEPS, _WARM_UP = 8, 2


def main() -> None:
    arguments = flags(
        __doc__, updates=1000, dtype=["float32", "bfloat16"], lr=[2e-3, 1e-5], rounds=3
    )
    result: dict[str, Any] = {"sound": [], "cost": {}}
    with tiny_model() as tiny:
        arms = [(dtype, lr) for dtype in arguments.dtype for lr in arguments.lr]
        for dtype, lr in arms if arguments.updates else ():
            updates = -(-arguments.updates // len(arms))
            result["sound"].append(sound(tiny, dtype, lr, updates))
        if arguments.rounds:
            result["cost"] = cost(tiny, arguments.rounds)
    write_result(arguments.output, result)


def job(tiny: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """Run a job of two ranks on the tiny model; returns the metrics of its steps."""
    run_dir = tiny / "runs" / name
    run(torchrun(2, *job_flags(tiny, run_dir, *R3, *more)))
    return step_metrics(run_dir)


def sound(tiny: Path, dtype: str, lr: float, updates: int) -> dict[str, Any]:
    """Train through so many updates; a false alarm ends the job, and this benchmark, with its words."""
    small = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "4")
    precision = ("--bf16",) if dtype == "bfloat16" else ()
    steps = job(
        tiny,
        f"{dtype}-{lr:g}",
        *small,
        *precision,
        "--lr",
        str(lr),
        "--lr-warmup-iters",
        "0",
        "--num-rollout",
        str(updates + 1),
        "--r3-mismatch-threshold",
        "1",
    )
    judged = [step for step in steps if "served/passed" in step]
    assert len(judged) == updates and all(step["served/passed"] for step in judged)
    return {
        "dtype": dtype,
        "lr": lr,
        "updates": len(judged),
        "false_alarms": 0,
        "inconclusive": sum(step["served/inconclusive"] for step in judged),
        "gap_mean": spread([step["served/gap_mean"] for step in judged]),
        "gap_max": spread([step["served/gap_max"] for step in judged]),
        "router_left": spread([step["served/router_left"] for step in judged]),
        "canaries_s": spread([step["perf/canaries_s"] for step in judged]),
    }


def cost(tiny: Path, rounds: int) -> dict[str, Any]:
    """The median step of each arm's jobs, which take turns, and their ratios."""
    arms = {"off": "0", "off again": "0", "on": "1024"}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    shares = []
    for number in range(rounds):
        for name, tokens in arms.items():
            steps = job(
                tiny,
                f"{name}-{number}".replace(" ", "-"),
                *_A_THOUSAND,
                "--num-rollout",
                str(_COST_STEPS),
                "--r3-canaries",
                tokens,
            )[_WARM_UP:-1]
            seconds[name].append(statistics.median(step["perf/step_s"] for step in steps))
            if tokens != "0":
                shares += [step["perf/canaries_s"] / step["perf/step_s"] for step in steps]
    return {
        "step_s": {name: spread(values) for name, values in seconds.items()},
        "on_over_off": ratios(seconds["on"], seconds["off"]),
        "off_again_over_off": ratios(seconds["off again"], seconds["off"]),
        "share_of_a_step": spread(shares),
    }


if __name__ == "__main__":
    main()
