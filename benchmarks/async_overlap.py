"""Wall time per step, asynchronous against synchronous, side by side on the tiny model.

    python -m benchmarks.async_overlap [--rounds 3] [--mode in_place]

A training step and a rollout that cost the same take half the time when they overlap.  One real
SGLang server generates; two cores cannot hold both sides, so training is a sleep, as long as a
rollout alone just took.  Each round measures that anew, then runs the two one after the other, the
synchronous one twice, so
that a machine that grows busy is busy for all of them.  ``--mode`` is the pause mode of updates.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

from benchmarks.measure import flags, write_result
from benchmarks.tiny_jobs import tiny_model
from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.control import EngineControl
from r3train.engine.server import SGLangServer
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.verify.tiny import TinyOptions
from r3train.types import Prompt, RouteShape

_BATCH, _SAMPLES, _RESPONSE, _STEPS = 8, 4, 32, 7


def main() -> None:
    arguments = flags(__doc__, rounds=3, mode="in_place")
    runs = []
    with (
        tiny_model() as tiny,
        SGLangServer(tiny / "model", tiny / "sglang.log", return_routed_experts=True) as server,
    ):
        run(server.addr, 0, 0.0, "drain")  # warm-up
        for i in range(arguments.rounds):
            train_s = run(server.addr, 0, 0.0, "drain")["step_s"]
            sync = run(server.addr, 0, train_s, "drain")
            again = run(server.addr, 0, train_s, "drain")
            overlapped = run(server.addr, 1, train_s, arguments.mode)
            ratio = overlapped["step_s"] / sync["step_s"]
            same = again["step_s"] / sync["step_s"]
            ratios = {"ratio": ratio, "ratio_again": same}
            runs.append({"train_s": train_s, "sync": sync, "async": overlapped, **ratios})
            print(f"{i}: async / sync {ratio:.3f}", file=sys.stderr, flush=True)
    ratio = statistics.median(r["ratio"] for r in runs)
    write_result(arguments.output, {"mode": arguments.mode, "runs": runs, "ratio": ratio})


def prompt_for(group: int) -> Prompt:
    ids = np.random.default_rng(group).integers(3, 60, 16).astype(np.int32)
    return Prompt(str(group), group, "", ids, None)


def run(addr: str, staleness: int, train_s: float, mode: str) -> dict[str, float]:
    """One run; seconds per step and each side's share of waiting, the first step left out."""
    options = TinyOptions()
    routes = RouteShape(options.num_layers, options.topk, options.num_experts)
    rollout = RolloutSection(
        rollout_batch_size=_BATCH,
        n_samples_per_prompt=_SAMPLES,
        num_rollout=_STEPS,
        rollout_max_response_len=_RESPONSE,
        max_weight_staleness=staleness,
        rollout_max_concurrency=_BATCH * _SAMPLES,
        pause_generation_mode=mode,
    )
    with EngineControl([addr]) as control:
        control.update_weight_version(0)
        with Producer(
            rollout,
            lambda: SGLangClient([addr], routes=routes),
            prompt_for,
            RequestSettings(SamplingParams(_RESPONSE, ignore_eos=True)),
        ) as producer:
            producer.next_batch(0)
            began, before = time.monotonic(), producer.stats()
            for step in range(_STEPS - 1):
                time.sleep(train_s)
                with producer.quiesced():
                    control.update_weight_version(step + 1)
                    producer.set_version(step + 1)
                producer.next_batch(step + 1)
            wall_s, after = time.monotonic() - began, producer.stats()
    waited, idle = (after[k] - before[k] for k in ("waiting_s", "idle_s"))
    return {
        "step_s": wall_s / (_STEPS - 1),
        "train_wait_share": waited / wall_s,
        "rollout_idle_share": idle / wall_s,
    }


if __name__ == "__main__":
    main()
