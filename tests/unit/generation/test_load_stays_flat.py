"""Generation under load: what its process holds at the end of a hundred steps is what it held early.

The producer and the client are production's, with 64 groups of 16 samples per rollout and 500 requests in
flight, over-sampling, a filter, and an update in mid-rollout that aborts what runs.  The server is this
file, in a process of its own: it speaks SGLang's HTTP and has no model.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import subprocess
import sys
import urllib.request
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from aiohttp import web

from benchmarks.soak_processes import (
    CONNECTIONS,
    count_handles,
    open_handles,
    own_memory,
    shared_memory_of,
    tcp_sockets,
)
from r3train.config.rollout_settings import RolloutSection
from r3train.data.json_lines import append_lines
from r3train.engine.backend import SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.sglang_http import HTTPSettings
from r3train.generation.buffer import OUTCOMES_FILE
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.generation.scheduler import GroupScorer
from r3train.loop import prompt_log
from r3train.types import Prompt, RouteShape
from tests.http_serving import serving

ROOT = Path(__file__).resolve().parents[3]
ROUTES = RouteShape(num_layers=2, topk=2, num_experts=8)
PROMPT = np.arange(3, 11, dtype=np.int32)
LONGEST, TOKEN_S = 24, 0.01
# a few answers wait for the abort of an update, however slow their client is
HELD_S = 20.0
GROUPS, SAMPLES, IN_FLIGHT, SURPLUS = 64, 16, 500, 8
# compared with the last ones; before them buffers reach their size
EARLY, WINDOW, GROWTH = 20, 10, 0.05
# ids of as many digits from the first step to the last
FIRST = 1000


class ServerWithoutAModel:
    """Answers of so many tokens as the sample's number says; an abort returns what is there by then."""

    def __init__(self) -> None:
        self.version = FIRST
        self.aborted = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if request.path == "/abort_request":
            self.aborted.set()
            self.aborted = asyncio.Event()
        elif request.path == "/version":
            self.version = body["version"]
        elif request.path == "/generate":
            return web.json_response(await self.answer(body))
        return web.json_response({"success": True, "message": ""})

    async def answer(self, body: dict) -> dict:
        before, sample = len(body["input_ids"]), int(body["rid"].split("-")[2])
        left = 4 + sample % (LONGEST - 4) - (before - len(PROMPT))
        reason, version = {"type": "stop", "matched": 9}, self.version
        is_held = before == len(PROMPT) and sample // SAMPLES % GROUPS == GROUPS - 1
        try:
            await asyncio.wait_for(self.aborted.wait(), HELD_S if is_held else left * TOKEN_S)
            left, reason = left // 2, {"type": "abort", "message": ""}
        except TimeoutError:
            pass
        rows = before + left - 1 - body.get("routed_experts_start_len", 0)
        experts = np.tile(np.arange(ROUTES.topk, dtype=np.int32), rows * ROUTES.num_layers)
        return {
            "output_ids": [9] * left,
            "meta_info": {
                "id": body["rid"],
                "prompt_tokens": before,
                "completion_tokens": left,
                "finish_reason": reason,
                "output_token_logprobs": [[-0.5, 9, None]] * left,
                "num_retractions": 0,
                "cached_tokens": 0,
                "weight_versions": [{"version": str(version), "start": 0, "end": left}],
                "routed_experts": base64.b64encode(experts.tobytes()).decode(),
            },
        }


async def serve() -> None:
    async with serving(ServerWithoutAModel().handle) as addr:
        print(addr, flush=True)
        await asyncio.Event().wait()


@contextlib.contextmanager
def server():
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def score(sample) -> float:
    """Every tenth group has equal rewards, which the filter replaces."""
    return float(sample.group_id % 10 and sample.sample_id % 2)


def held_by_a_run(steps: int, directory: Path) -> list[dict[str, int]]:
    """Memory, descriptors, threads and shared memory after each step, and the bytes that it logged."""
    rollout = RolloutSection(
        num_rollout=FIRST + steps,
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
        rollout_max_response_len=LONGEST,
        rollout_max_concurrency=IN_FLIGHT,
        over_sampling_batch_size=GROUPS + SURPLUS,
        rollout_filter=("zero_variance",),
        pause_generation_mode="abort",
    )
    held, written, ended, resumed = [], 0, [], 0
    outcomes = directory / OUTCOMES_FILE
    with server() as addr:
        producer = Producer(
            rollout,
            lambda: SGLangClient([addr], HTTPSettings(max_bad_answers=3), routes=ROUTES),
            lambda group: Prompt(f"p:{group}", group, "text", PROMPT, None),
            RequestSettings(SamplingParams(LONGEST, may_stop_at=(9,))),
            start_rollout=FIRST,
            on_outcome=lambda o: (ended.append(o.outcome), append_lines(outcomes, [asdict(o)])),
            scorer=GroupScorer(score=score),
        )
        with producer:
            for step in range(FIRST, FIRST + steps):
                groups = producer.next_batch(step)
                assert [len(group) for group in groups] == [SAMPLES] * GROUPS
                prompt_log.append(directory, step, groups, 0)
                answers = (s.weight_versions[s.prompt_len :] for group in groups for s, _ in group)
                resumed += sum(len(np.unique(versions)) > 1 for versions in answers)
                del groups
                with producer.quiesced():
                    version = json.dumps({"version": step + 1}).encode()
                    headers = {"Content-Type": "application/json"}
                    call = urllib.request.Request(f"http://{addr}/version", version, headers)
                    urllib.request.urlopen(call, timeout=30).close()
                    producer.set_version(step + 1)
                logged = sum(file.stat().st_size for file in directory.iterdir())
                status = Path("/proc/self/status").read_text()
                gc.collect()  # else cycles wait until they are a quarter of all objects
                kinds = count_handles(
                    open_handles("self"), tcp_sockets(), {int(addr.rsplit(":", 1)[1])}
                )
                held.append(
                    {
                        "memory": own_memory("self"),
                        "descriptors": kinds.total() - kinds[CONNECTIONS],
                        CONNECTIONS: kinds[CONNECTIONS],
                        "threads": int(status.split("Threads:")[1].split()[0]),
                        "shared memory": len(shared_memory_of("self")),
                        "bytes logged": logged - written,
                    }
                )
                written = logged
    records = prompt_log.read([directory])
    twice = prompt_log.faults(records)
    assert not twice["groups_twice"] + twice["samples_twice"] and len(records) == steps
    assert "dropped_zero_variance" in ended, set(ended)
    assert resumed, "no answer was aborted and resumed"
    return held


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_a_run_of_100_steps_holds_is_flat(tmp_path):
    held = held_by_a_run(100, tmp_path)
    for what in held[0]:
        early, late = (
            median(step[what] for step in part)
            for part in (held[EARLY : EARLY + WINDOW], held[-WINDOW:])
        )
        most = max(step[what] for step in held)
        print(f"{what}: {early:,.0f} -> {late:,.0f}, at most {most:,.0f}")
        if what == CONNECTIONS:  # idle ones are closed after 2 s, so they come and go
            assert IN_FLIGHT / 2 < most <= IN_FLIGHT * 1.2
        else:
            assert late <= early * (1 + GROWTH), f"{what}: {early} became {late}"


def test_a_run_under_load_trains_every_group_once_or_says_why_not(tmp_path):
    assert len(held_by_a_run(2, tmp_path)) == 2


if __name__ == "__main__":
    asyncio.run(serve())
