"""The distance of a served policy, which has to stay random, from its target, with replay and without: paired jobs.

    python -m benchmarks.replay_learning [--seeds 6] [--write-docs]

The task is that of benchmarks/match_target.py.  A seed is of the checkpoint, the prompts, their targets and the
sampling; its jobs differ in their arm only.  After a job the server, which still holds the last weights that it got, is
asked for the log-probs of every token after each prompt: KL(server || target) is exact.  One server serves all seeds:
every job gives it its own weights at the start.

A job's result is kept in --directory as soon as it ends, and is not measured again.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.match_target import write_prompts
from benchmarks.measure import flags, machine, run_logged, write_result
from benchmarks.page import RESULTS_PAGE, replay_learning_section, with_section
from benchmarks.tiny_jobs import ROOT, environment, job_flags, step_metrics, torchrun, words
from r3train.data.tokenizer import load_tokenizer
from r3train.engine.server import SGLangServer
from r3train.verify.tiny import TinyOptions, build

ARMS = {
    "R3": ("--use-rollout-routing-replay",),
    "live router": (),
    "live router, token TIS": ("--use-tis",),
    "R2": ("--use-routing-replay",),
}
SHAPE = dict(num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=128, moe_intermediate_size=64)
SHAPE |= dict(num_experts=32, topk=4, dtype="bfloat16")
KEPT = (
    "train/log_prob_gap_k3",
    "train/server_kl",
    "train/actor_kl",
    "train/entropy",
    "train/grad_norm",
)
TIMEOUT_S = 900


def main() -> None:
    arguments = flags(
        __doc__,
        seeds=6,
        first_seed=1,
        arms=["R3", "live router"],
        rollouts=60,
        prompts=8,
        group=32,
        tilt=0.3,
        layers=8,
        initializer_range=0.2,
        lr=4e-5,
        steps_per_rollout=1,
        server_dtype="bfloat16",
        directory=str(ROOT / "runs" / "bench" / "replay_learning"),
        write_docs=False,
    )
    directory = Path(arguments.directory)
    directory.mkdir(parents=True, exist_ok=True)
    facts = machine()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    wanted = [(seed, arm) for seed in seeds for arm in arguments.arms]
    if missing := [one for one in wanted if kept(directory, *one, arguments) is None]:
        measure_all(missing, directory, arguments)
    jobs = [kept(directory, *one, arguments) for one in wanted]
    result = {
        "machine": facts,
        "command": shlex.join(["python", "-m", "benchmarks.replay_learning", *changed(arguments)]),
        "settings": settings_of(arguments),
        "arms": {
            arm: [job for job in jobs if job is not None and job["arm"] == arm]
            for arm in arguments.arms
        },
    }
    if arguments.write_docs:
        page = RESULTS_PAGE.read_text(encoding="utf-8")
        section = replay_learning_section(result)
        RESULTS_PAGE.write_text(with_section(page, section), encoding="utf-8")
    write_result(arguments.output, result)
    sys.exit(0 if all(jobs) else 1)


def settings_of(arguments: Any) -> dict[str, Any]:
    """The flags that a job's result depends on."""
    others = ("seeds", "first_seed", "arms", "directory", "write_docs", "output")
    return {name: value for name, value in vars(arguments).items() if name not in others}


def changed(arguments: Any) -> list[str]:
    """The flags that say which jobs these are, for the page's command."""
    return ["--seeds", str(arguments.seeds), "--arms", *arguments.arms]


def place_of(directory: Path, seed: int, arm: str) -> Path:
    return directory / f"{arm.replace(' ', '_').replace(',', '')}-{seed}.json"


def kept(directory: Path, seed: int, arm: str, arguments: Any) -> dict[str, Any] | None:
    """A finished job with these settings, or None."""
    path = place_of(directory, seed, arm)
    job = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return job if job is not None and job["settings"] == settings_of(arguments) else None


def measure_all(missing: Sequence[tuple[int, str]], directory: Path, arguments: Any) -> None:
    """Run the jobs on one server, and keep what each found."""
    with tempfile.TemporaryDirectory() as scratch:
        tiny = {seed: Path(scratch) / f"tiny-{seed}" for seed, _ in missing}
        for seed, place in tiny.items():
            shape = dict(num_layers=arguments.layers, seed=seed)
            shape["initializer_range"] = arguments.initializer_range
            build(place, TinyOptions(**SHAPE, **shape))
            write_prompts(
                *(place / "model", place / "prompts.jsonl"),
                prompts=arguments.prompts,
                tilt=arguments.tilt,
                seed=seed,
            )
        with server_of(tiny[missing[0][0]], directory, arguments.server_dtype) as server:
            for seed, arm in missing:
                job = measure(arm, seed, tiny[seed], directory, arguments, server.addr)
                if job is not None:
                    place_of(directory, seed, arm).write_text(json.dumps(job) + "\n")


def server_of(tiny: Path, directory: Path, dtype: str) -> SGLangServer:
    """One server for all seeds: every job gives it its own weights at the start."""
    return SGLangServer(
        tiny / "model",
        directory / "sglang.log",
        dtype=dtype,
        return_routed_experts=True,
        start_timeout_s=TIMEOUT_S,
        server_args={"mem_fraction_static": 0.3, "max_total_tokens": 8192},
    )


def measure(
    arm: str, seed: int, tiny: Path, directory: Path, arguments: Any, address: str
) -> dict[str, Any] | None:
    """Run one job, and measure the server that it leaves; None where it fails."""
    samples = arguments.prompts * arguments.group
    settings = {
        "sglang-dtype": arguments.server_dtype,
        "num-rollout": arguments.rollouts,
        "rollout-batch-size": arguments.prompts,
        "n-samples-per-prompt": arguments.group,
        "global-batch-size": samples // arguments.steps_per_rollout,
        "rollout-max-response-len": 1,
        "max-tokens-per-gpu": 4096,
        "lr": arguments.lr,
        "lr-decay-style": "linear",
        "lr-warmup-iters": 4,
        "custom-rm-path": "benchmarks.match_target:log_target",
        "advantage-estimator": "benchmarks.match_target:as_given",
        "policy-loss": "benchmarks.match_target:towards_target",
        "rollout-external-engine-addrs": address,
    }
    began = time.monotonic()
    metrics = job_metrics(arm, seed, tiny, directory, settings)
    if metrics is None:
        return None
    job = {
        "arm": arm,
        "seed": seed,
        "served_kl": served_kl(address, tiny),
        "curves": {key: [m[key] for m in metrics] for key in KEPT},
        "settings": settings_of(arguments),
        "seconds": round(time.monotonic() - began, 1),
    }
    last = {key: f"{np.mean(of[-10:]):.2e}" for key, of in job["curves"].items()}
    print(f"{arm} {seed}: served {job['served_kl']} {last} {job['seconds']} s", flush=True)
    return job


def job_metrics(
    arm: str, seed: int, tiny: Path, directory: Path, settings: Mapping[str, object]
) -> list[dict[str, Any]] | None:
    """Run one job of one rank, actor in bfloat16; returns the metrics of its steps, None where it fails."""
    run_dir, log = directory / "job.run", directory / "job.log"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = {
        "expert-model-parallel-size": 1,
        "max-weight-staleness": 0,
        "seed": seed,
        "rollout-seed": seed,
        **settings,
    }
    command = job_flags(
        tiny, run_dir, *words(settings), "--rollout-ignore-eos", "--bf16", *ARMS[arm]
    )
    code = run_logged(torchrun(1, *command), log, environment(), TIMEOUT_S)
    if code != 0:
        print(f"{arm} {seed}: exit code {code}\n{log.read_text()[-2000:]}", file=sys.stderr)
        return None
    metrics = step_metrics(run_dir)
    shutil.rmtree(run_dir)
    return metrics


def served_kl(address: str, tiny: Path) -> float:
    """KL(server || target), nats, mean of the prompts: from the server's log-probs of the whole vocabulary."""
    lines = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(tiny / "model")
    targets = np.array([line["metadata"]["target"] for line in lines])
    asked = {
        "input_ids": [tokenizer.encode(line["input"]) for line in lines],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": targets.shape[1],
    }
    answers = httpx.post(f"http://{address}/generate", json=asked, timeout=120).raise_for_status()
    served = np.full(targets.shape, np.nan)
    for row, answer in zip(served, answers.json(), strict=True):
        for log_prob, token, _ in answer["meta_info"]["output_top_logprobs"][0]:
            row[token] = log_prob
    assert np.allclose(np.exp(served).sum(1), 1, atol=1e-2), np.exp(served).sum(1)
    return float((np.exp(served) * (served - targets)).sum(1).mean())


if __name__ == "__main__":
    main()
