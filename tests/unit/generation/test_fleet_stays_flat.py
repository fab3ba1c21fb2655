"""A long run of agents whose servers change every 50 steps: memory, handles and the price of a step stay flat.

The producer, its sessions, the client, the control and the discovery of servers are production's.  The servers are this
file, in a process of its own: they speak SGLang's HTTP and have no model.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack, contextmanager
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
    tcp_sockets,
)
from r3train.engine.client import SGLangClient
from r3train.engine.control import EngineControl
from r3train.engine.members import Members
from r3train.engine.publish import WeightPublisher
from r3train.engine.sglang_http import HTTPSettings
from r3train.launch.start import discovery as module
from r3train.launch.start.discovery import Discovery
from r3train.loop import prompt_log
from tests.fakes.server import ROUTES
from tests.http_serving import serving
from tests.unit.generation.test_agents_in_the_producer import (
    producer_of,
    three_turns_and_a_fork,
)

ROOT = Path(__file__).resolve().parents[3]
FIRST = 1000  # ids of as many digits from the first step to the last
EVERY, SERVERS = 50, 3
# two of them at a time
NAMED = ((0, 1), (1, 2), (0, 2))


class ServerWithWeights:
    """Answers each request at once, and holds the weights that it was given last."""

    version = "default"

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if request.path == "/generate":
            return web.json_response(self.answer(body))
        if request.path == "/update_weights_from_disk":
            self.version = body["weight_version"]
        if request.path == "/weights_checker":
            return web.json_response({"ranks": [{"checksums": {"w": self.version}}]})
        return web.json_response({"weight_version": self.version, "success": True, "message": ""})

    def answer(self, body: dict) -> dict:
        before, left = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        rows = before + left - 1 - body.get("routed_experts_start_len", 0)
        experts = np.tile(np.arange(ROUTES.topk, dtype=np.int32), rows * ROUTES.num_layers)
        return {
            "output_ids": [9] * left,
            "meta_info": {
                "id": body["rid"],
                "prompt_tokens": before,
                "completion_tokens": left,
                "finish_reason": {"type": "length", "length": left},
                "output_token_logprobs": [[-0.5, 9, None]] * left,
                "num_retractions": 0,
                "cached_tokens": 0,
                "weight_versions": [{"version": self.version, "start": 0, "end": left}],
                "routed_experts": base64.b64encode(experts.tobytes()).decode(),
            },
        }


async def serve() -> None:
    async with AsyncExitStack() as stack:
        for _ in range(SERVERS):
            print(await stack.enter_async_context(serving(ServerWithWeights().handle)), flush=True)
        await asyncio.Event().wait()


@contextmanager
def servers():
    """Yield the servers' addresses."""
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield [process.stdout.readline().strip() for _ in range(SERVERS)]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Disk(WeightPublisher):
    """Gives all members, or one that joins, the newest weights."""

    def __init__(self, control: EngineControl) -> None:
        self.control, self.version = control, FIRST

    def publish_version(self, version: int) -> None:
        self.version = version
        self.control.update_weights_from_disk(f"v{version}", weight_version=version)

    def give(self, server: int) -> int:
        self.control.update_weights_from_disk(
            f"v{self.version}", weight_version=self.version, server=server
        )
        return self.version


def held_by_a_run(steps: int, directory: Path) -> tuple[list[dict[str, float]], Counter[str]]:
    """Run; return what the process holds every 50 steps, with the CPU milliseconds of a step, and changes of the fleet."""
    changes, held, clients = Counter[str](), [], []
    members = Members([], changes=True, on_change=lambda change: changes.update([change.what]))
    source = directory / "servers"

    def make_client() -> SGLangClient:
        clients.append(SGLangClient(members, HTTPSettings(max_bad_answers=3), routes=ROUTES))
        return clients[-1]

    with servers() as addrs, EngineControl(members) as control:
        ports, publisher = {int(addr.rsplit(":", 1)[1]) for addr in addrs}, Disk(control)
        discovery = Discovery(
            source=source,
            members=members,
            control=control,
            examine=lambda server: None,
            score=lambda server, twin, version: "",
            publisher=lambda: publisher,
            is_busy=lambda server: bool(clients) and clients[0].is_busy(server),
            note=lambda text: None,
            health_timeout_s=60.0,
            wait_s=60.0,
        )
        source.write_text("\n".join(addrs[i] for i in NAMED[0]))
        discovery.start()
        publisher.publish_version(FIRST)
        producer = producer_of(
            make_client,
            three_turns_and_a_fork,
            most=8,
            rollout_max_concurrency=16,
            num_rollout=FIRST + steps,
            start=FIRST,
        )
        try:
            with producer:
                began = time.process_time()
                for step in range(FIRST, FIRST + steps):
                    groups = producer.next_batch(step)
                    prompt_log.append(directory, step, groups, 0)
                    del groups
                    with discovery.lock, producer.quiesced():
                        publisher.publish_version(step + 1)
                        producer.set_version(step + 1)
                    done = step + 1 - FIRST
                    if done % EVERY == 0:
                        named = NAMED[done // EVERY % len(NAMED)]
                        source.write_text("\n".join(addrs[i] for i in named))
                        cpu_ms = (time.process_time() - began) * 1000 / EVERY
                        gc.collect()  # else cycles wait until they are a quarter of all objects
                        kinds = count_handles(open_handles("self"), tcp_sockets(), ports)
                        held.append(
                            {
                                "memory": own_memory("self"),
                                "descriptors": kinds.total() - kinds[CONNECTIONS],
                                "CPU ms of a step": cpu_ms,
                            }
                        )
                        began = time.process_time()
        finally:
            discovery.close()
    records = prompt_log.read([directory])
    faults = prompt_log.faults(records)
    assert not faults["groups_twice"] + faults["samples_twice"] and len(records) == steps
    return held, changes


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_5000_steps_of_agents_and_a_changing_fleet_hold_is_flat(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EVERY_S", 0.1)
    monkeypatch.setattr(module, "AGAIN_S", 0.2)
    held, changes = held_by_a_run(5000, tmp_path)
    print(dict(changes))
    assert changes["joined"] > len(held) / 2 and changes["left"] > len(held) / 2
    tenth = len(held) // 10
    for what in held[0]:
        early, late = (
            median(row[what] for row in part) for part in (held[tenth : 2 * tenth], held[-tenth:])
        )
        print(f"{what}: {early:,.1f} -> {late:,.1f} ({late / early - 1:+.1%})")
        if what != "CPU ms of a step":  # it depends on the machine's other work
            assert late <= early * 1.02, f"{what}: {early} became {late}"


def test_a_short_run_of_agents_and_a_changing_fleet_trains_every_group_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    held, _ = held_by_a_run(2 * EVERY, tmp_path)
    assert len(held) == 2


if __name__ == "__main__":
    asyncio.run(serve())
