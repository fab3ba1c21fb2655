"""The demo under several learning rules: what it learns with each, R3 on and proved.

    python -m benchmarks.learning_rules [--seeds 3] [--write-docs]

Each job is the demo with fewer rollouts and two optimizer steps in each, because with one the ratio is 1 and the losses
have the same gradient.  A seed is of the checkpoint, of the order of prompts and of the sampling.  Then
the task that no reward starts: eight words in one order, which a random model never writes.

A job's curve is kept in --directory as soon as it ends, and is not measured again: an interruption
loses one job.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.measure import flags, machine, run_logged, write_result
from benchmarks.page import ALGORITHMS_PAGE, learning_section, with_section
from benchmarks.tiny_jobs import R3, ROOT, environment, job_flags, step_metrics, torchrun
from r3train.engine.server import SGLangServer
from r3train.observe.metrics import summarise
from r3train.verify.tiny import CATEGORIES, TinyOptions, build, task_prompts

PICTURE = ROOT / "docs" / "images" / "algorithms.png"
ROLLOUTS = 40
TIMEOUT_S = 900
# two optimizer steps of the recipe's 128 samples
COMMON = (*R3, "--global-batch-size", "64")
RULES = {
    "grpo": (),
    "rloo": ("--advantage-estimator", "rloo"),
    "reinforce_plus_plus_baseline": ("--advantage-estimator", "reinforce_plus_plus_baseline"),
    "gspo": ("--policy-loss", "gspo", "--eps-clip", "3e-4", "--eps-clip-high", "4e-4"),
    "cispo": ("--policy-loss", "cispo", "--eps-clip", "1"),
    # no clip but its own: eps_clip_high as if unset
    "dppo_tv": ("--policy-loss", "dppo_tv", "--eps-clip-high", "0.2"),
}
# the task that reinforcement alone does not start on: 4 words in the label's order and the end
ANSWER, ALTERNATIVES = 4, 5
ALONE, TAUGHT = "reinforcement alone", "after fine-tuning"
# no more is kept of a job than this
KEPT = ("rollout/reward_mean", "train/clip_share", "r3/rows_replayed", "r3/rows_mismatch")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ ' <eos>' if m.role == 'assistant' else ' ' }}"
    "{% endfor %}"
)


def main() -> None:
    arguments = flags(
        __doc__,
        seeds=3,
        warm_starts=1,
        rollouts=ROLLOUTS,
        rules=list(RULES),
        directory=str(ROOT / "runs" / "bench" / "learning_rules"),
        write_docs=False,
    )
    directory = Path(arguments.directory)
    directory.mkdir(parents=True, exist_ok=True)
    facts, failed = machine(), 0
    for seed in range(1, arguments.seeds + 1):
        wanted = {f"{rule}-{seed}": RULES[rule] for rule in arguments.rules}
        missing = {n: f for n, f in wanted.items() if not kept(directory, n, arguments.rollouts)}
        starts = seed <= arguments.warm_starts and not kept(
            directory, f"warm_start-{seed}", arguments.rollouts
        )
        if not missing and not starts:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            tiny = Path(scratch) / "tiny"
            build(tiny, TinyOptions(seed=seed))
            with SGLangServer(
                tiny / "model",
                directory / "sglang.log",
                return_routed_experts=True,
                start_timeout_s=TIMEOUT_S,
            ) as server:
                given = ("--rollout-external-engine-addrs", server.addr)
                for name, rule in missing.items():
                    failed += not measure(
                        name, tiny, directory, seed, arguments.rollouts, rule, given
                    )
                if starts:
                    failed += not warm_start(tiny, directory, seed, arguments.rollouts, given)
    result = found(directory, arguments.rules, arguments.seeds) | {"machine": facts}
    if arguments.write_docs:
        write_docs(result)
    write_result(arguments.output, result)
    sys.exit(1 if failed else 0)


def kept(directory: Path, name: str, rollouts: int) -> dict[str, Any] | None:
    """A finished job of so many rollouts, or None."""
    path = directory / f"{name}.json"
    job = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return job if job is not None and (not rollouts or job["steps"] == rollouts) else None


def measure(
    name: str,
    tiny: Path,
    directory: Path,
    seed: int,
    rollouts: int,
    rule: Sequence[str],
    given: Sequence[str],
) -> bool:
    """Run one job and keep what it found; returns False, and says why, where it fails."""
    seeds = ("--seed", str(seed), "--rollout-seed", str(seed), "--num-rollout", str(rollouts))
    job = run_job(name, tiny, directory, *COMMON, *seeds, *rule, *given)
    return job is not None and keep(directory, name, job | {"flags": list(rule), "seed": seed})


def run_job(name: str, tiny: Path, directory: Path, *more: str) -> dict[str, Any] | None:
    """A job's summary and curves; None, and the end of its words, where it fails."""
    run_dir, log, began = directory / f"{name}.run", directory / f"{name}.log", time.monotonic()
    shutil.rmtree(run_dir, ignore_errors=True)
    command = torchrun(2, *job_flags(tiny, run_dir, *more))
    code = run_logged(command, log, environment(), TIMEOUT_S)
    if code != 0:
        print(f"{name}: exit code {code}\n{log.read_text()[-2000:]}", file=sys.stderr, flush=True)
        return None
    metrics = step_metrics(run_dir)
    shutil.rmtree(run_dir)
    log.unlink()
    curves = {key: [m[key] for m in metrics] for key in KEPT if key in metrics[0]}
    job = summarise(metrics) | {"curves": curves, "seconds": round(time.monotonic() - began, 1)}
    words = f"reward {job['reward_first']:.3f} to {job['reward_last']:.3f}, R3 {job['r3']}"
    print(f"{name}: {words}, {job['seconds']:.0f} s", file=sys.stderr, flush=True)
    return job


def keep(directory: Path, name: str, job: dict[str, Any]) -> bool:
    partial = directory / f"{name}.part"
    partial.write_text(json.dumps(job) + "\n", encoding="utf-8")
    partial.rename(directory / f"{name}.json")
    return True


def warm_start(tiny: Path, directory: Path, seed: int, rollouts: int, given: Sequence[str]) -> bool:
    """Reinforcement alone and after fine-tuning, on one exact answer of four words; False where one fails.

    The conversations show five answers to each prompt, alike, and the reward takes one of them.
    """
    (tiny / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    talk, tasks = [], []
    for prompt in task_prompts():
        words = CATEGORIES[prompt["metadata"]["category"]].split()
        answers = [" ".join(words[i : i + ANSWER]) for i in range(ALTERNATIVES)]
        tasks.append({"input": prompt["input"], "label": answers[0]})
        for answer in answers:
            says = {"user": prompt["input"], "assistant": answer}
            talk.append({"messages": [{"role": r, "content": c} for r, c in says.items()]})
    for file, lines in ((tiny / "talk.jsonl", talk), (tiny / "exact.jsonl", tasks)):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    seeds = ("--seed", str(seed), "--rollout-seed", str(seed))
    taught = directory / f"fine-tuned-{seed}"
    shutil.rmtree(taught, ignore_errors=True)
    tuning = run_job(
        f"fine-tuning-{seed}",
        tiny,
        directory,
        *("--config", "configs/tiny_sft.toml", "--hf-checkpoint", str(tiny / "model")),
        *("--prompt-data", str(tiny / "talk.jsonl"), "--save-hf", str(taught), *seeds),
        *("--rollout-batch-size", str(len(talk)), "--global-batch-size", str(len(talk) // 5)),
    )
    if tuning is None:
        return False
    jobs = {}
    for name, model in ((ALONE, tiny / "model"), (TAUGHT, taught)):
        own = ("--prompt-data", str(tiny / "exact.jsonl"), "--hf-checkpoint", str(model))
        own += ("--rm-type", "exact_match", "--num-rollout", str(rollouts))
        jobs[name] = run_job(
            f"{name.replace(' ', '_')}-{seed}", tiny, directory, *COMMON, *seeds, *own, *given
        )
        if jobs[name] is None:
            return False
    shutil.rmtree(taught)
    return keep(directory, f"warm_start-{seed}", {"steps": rollouts, "jobs": jobs})


def found(directory: Path, rules: Sequence[str], seeds: int) -> dict[str, Any]:
    """The rules and seeds that the directory holds; one that was not measured is left out."""
    every = {
        rule: [kept(directory, f"{rule}-{s}", 0) for s in range(1, seeds + 1)] for rule in rules
    }
    starts = [kept(directory, f"warm_start-{s}", 0) for s in range(1, seeds + 1)]
    return {
        "rules": {rule: [j for j in jobs if j is not None] for rule, jobs in every.items()},
        "warm_start": [s["jobs"] for s in starts if s is not None],
    }


def write_docs(result: dict[str, Any]) -> None:
    """The section of docs/algorithms.md, and its picture."""
    page = ALGORITHMS_PAGE.read_text(encoding="utf-8")
    ALGORITHMS_PAGE.write_text(with_section(page, learning_section(result)), encoding="utf-8")
    draw(result).savefig(PICTURE)


def draw(result: dict[str, Any]) -> Figure:
    """A panel a rule, a curve a seed; the last panel is the task that reinforcement alone does not start on."""
    panels = {
        rule: [(job, "#0072B2") for job in jobs] for rule, jobs in result["rules"].items() if jobs
    }
    starts = result["warm_start"]
    if starts:
        of_starts = [
            (s[name], c) for s in starts for name, c in ((TAUGHT, "#009E73"), (ALONE, "#D55E00"))
        ]
        panels["an exact answer"] = of_starts
    rows = -(-len(panels) // 3)
    figure = Figure(figsize=(9.0, 2.4 * rows), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 3, sharex=True, sharey=True, squeeze=False).flatten()
    for each, (title, curves) in zip(axes, panels.items()):
        each.set_title(title, loc="left", fontsize=9, fontweight="bold")
        for job, colour in curves:
            rewards = job["curves"]["rollout/reward_mean"]
            each.plot(rewards, color=colour, lw=1.2, alpha=0.8)
        each.set_ylim(0, 1.02)
        each.grid(alpha=0.25)
    for each in axes[len(panels) :]:
        each.axis("off")
    figure.supxlabel("rollout", fontsize=9)
    figure.supylabel("reward, mean of 3 rollouts", fontsize=9)
    return figure


if __name__ == "__main__":
    main()
