"""Canaries: false alarms over sound updates.  All claims: the steps that prove them, over steps that prove none.

    python -m benchmarks.served [--updates 1000] [--dtype float32 bfloat16] [--lr 2e-3 1e-5] [--rounds 3] [--shape demo]

Whole jobs of the demo train in each dtype and learning rate, ``--updates`` over all of them; every update is sound, so
each verdict that fails is a false alarm, which ends its job.  With ``--rounds`` jobs of each shape of ``against_trl`` take turns on
one server: without the R3 check, without it again, and with all claims.  Their ratios are of mean steps.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.against_trl import ASYNC, lengthen, run_job, SHAPES, THREADS
from benchmarks.measure import flags, ratios, spread, write_result
from benchmarks.tiny_jobs import job_flags, R3, run, step_metrics, tiny_model, torchrun
from r3train.engine.server import SGLangServer

NO_CLAIM = ("--no-enable-r3-correctness-check",)
# of a job of each shape: one update is judged in about 40 of these steps
_COST_STEPS = {"demo": 100, "longer": 45, "long": 12}


def main() -> None:
    arguments = flags(
        __doc__, updates=1000, dtype=["float32", "bfloat16"], lr=[2e-3, 1e-5], rounds=3, shape=""
    )
    result: dict[str, Any] = {"sound": [], "cost": {}}
    with tiny_model() as tiny:
        arms = [(dtype, lr) for dtype in arguments.dtype for lr in arguments.lr]
        for dtype, lr in arms if arguments.updates else ():
            updates = -(-arguments.updates // len(arms))
            result["sound"].append(sound(tiny, dtype, lr, updates))
    for name in ([arguments.shape] if arguments.shape else SHAPES) if arguments.rounds else ():
        result["cost"][name] = cost(name, arguments.rounds)
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
        *f"--num-rollout {updates + 1} --r3-mismatch-threshold 1 --r3-canary-share 1".split(),
    )
    judged = [step for step in steps if "perf/canary_answers_s" in step]
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
        "canary_answers_s": spread([step["perf/canary_answers_s"] for step in judged]),
    }


def cost(name: str, rounds: int) -> dict[str, Any]:
    """The mean step of each arm's jobs on one server, which take turns, and their ratios."""
    shape, steps = SHAPES[name], _COST_STEPS[name]
    arms = {"none": NO_CLAIM, "none again": NO_CLAIM, "all": ()}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    judged: list[float] = []
    with tiny_model(shape.model) as tiny:
        if shape.prompt_words:
            lengthen(tiny / "prompts.jsonl", shape.prompt_words)
        with SGLangServer(tiny / "model", tiny / "log", return_routed_experts=True) as server:
            for number in range(rounds):
                for arm, more in arms.items():
                    run_dir = tiny / f"{arm}-{number}".replace(" ", "-")
                    measured = run_job(
                        tiny, run_dir, server.addr, shape, steps, (*ASYNC, *more), threads=THREADS
                    )
                    seconds[arm].append(statistics.mean(step["perf/step_s"] for step in measured))
                    print(f"{name}, {arm}: {seconds[arm][-1]:.3f} s", file=sys.stderr, flush=True)
                    if arm == "all":
                        with_canaries = sum("perf/canary_answers_s" in step for step in measured)
                        judged.append(with_canaries / len(measured))
    return {
        "step_s": {arm: spread(values) for arm, values in seconds.items()},
        "all_over_none": ratios(seconds["all"], seconds["none"]),
        "none_again_over_none": ratios(seconds["none again"], seconds["none"]),
        "updates_judged_by_canaries": spread(judged),
    }


if __name__ == "__main__":
    main()
