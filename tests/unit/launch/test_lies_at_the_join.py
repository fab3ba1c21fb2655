"""Servers that lie when they join a run: each is refused with its address or outlived, and joins once it is sound."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from r3train.engine.backend import EngineError, EngineUnreachable
from r3train.families.read_facts import read_hf_facts
from r3train.launch.start import discovery
from r3train.launch.start.servers import RunServers
from r3train.loop.route_transport import RoutesOnRank0
from r3train.observe.console import RunDisplay
from tests.fakes.server import Fake
from tests.unit.config.test_config import config
from tests.unit.launch.test_discovery import until
from tests.unit.launch.test_refused_settings import SERVER_INFO

LOAD, KEYS = "/update_weights_from_disk", "/weights_checker"


@dataclass(frozen=True)
class Lie:
    """A lie about one call: another status, 0 for none, or changes of the answer; with ``waits`` it comes once the server is sound.

    model: other values in the config.json of the server's model.  said: what the refusal names; empty: it is not refused.
    times: so often it is told.  is_banned: it is not tried again before its name was away.
    """

    path: str = ""
    status: int = 200
    answer: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    said: str = ""
    waits: bool = False
    times: int = 1 << 20
    is_banned: bool = False
    timeout_s: float = 20.0


LIES = {
    "an architecture": Lie("/model_info", answer={"architectures": ["Other"]}, said="Other"),
    "a vocabulary": Lie(model={"vocab_size": 99}, said="vocab_size"),
    "a vocabulary, of a checkpoint elsewhere": Lie(LOAD, 0, said=LOAD[1:]),  # SGLang ends
    "weights that it cannot load": Lie(LOAD, 400, said="400", is_banned=True),
    "a number of layers": Lie(model={"num_hidden_layers": 3}, said="num_hidden_layers"),
    "a number of layers, of a checkpoint elsewhere": Lie(
        KEYS, answer={"ranks": [{"checksums": {"w": "v7"}}]}, said="layer 1", is_banned=True
    ),
    "a dtype": Lie("/server_info", answer={"dtype": "bfloat16"}, said="bfloat16"),
    "a version": Lie("/model_info", answer={"weight_version": "6"}, said="6", is_banned=True),
    "tensors": Lie(
        KEYS,
        answer={"ranks": [{"checksums": {"w": "v6", "layer 1": "v7"}}]},
        said="w",
        is_banned=True,
    ),
    "scores": Lie("scores", said="nats", is_banned=True),
    "a key": Lie("/server_info", 401, said="401"),
    "a full queue when it is asked": Lie("/server_info", 429, times=1),
    "a full queue when it is given weights": Lie(LOAD, 503, said="503", timeout_s=0.5),
    "a disk slower than a look": Lie(LOAD, waits=True),
    "a disk slower than the timeout": Lie(LOAD, waits=True, said=LOAD, timeout_s=0.5),
}


class Server(Fake):
    """A server that holds a checkpoint, and what it loads; sound unless it has a lie to tell."""

    def __init__(self, model, lie: Lie | None = None):
        super().__init__(self.answer)
        self.config, self.model = model / "config.json", model
        self.lie, self.told, self.is_sound = lie, 0, asyncio.Event()
        self.label = "default"

    def become_sound(self):
        self.lie, self.model = None, self.config.parent
        self.is_sound.set()

    async def answer(self, request, body):
        lie, path = self.lie, request.path
        if lie is None or lie.path != path or self.told >= lie.times:
            return web.json_response(self.truth(path, body))
        self.told += 1
        if lie.waits:
            await self.is_sound.wait()
        if not lie.status:
            request.transport.abort()
        if lie.status != 200:
            return web.json_response({"message": "no"}, status=lie.status or 500)
        return web.json_response(self.truth(path, body) | lie.answer)

    def truth(self, path, body):
        if path == LOAD:
            self.label = body["weight_version"]
        tensors = {name: f"v{self.label}" for name in ("w", "layer 1")}
        return {
            "/server_info": SERVER_INFO | {"dtype": "float32"},
            KEYS: {"ranks": [{"checksums": tensors}]},
            "/model_info": {
                "model_path": str(self.model),
                "architectures": json.loads(self.config.read_text())["architectures"],
                "weight_version": self.label,
            },
        }.get(path, {"success": True})


@contextlib.asynccontextmanager
async def run_with(liar, tiny, tmp_path, monkeypatch, timeout_s=20.0, first_lie=None):
    """A run whose first server holds version 7 from disk; another one, ``liar``, may be named."""
    monkeypatch.setattr(discovery, "EVERY_S", 0.02)
    monkeypatch.setattr(discovery, "AGAIN_S", 0.05)
    source, model = tmp_path / "servers", tiny / "model"
    settings = config(
        hf_checkpoint=str(model),
        rollout_engines_file=source,
        update_weight_transfer_mode="disk",
        rollout_request_timeout_s=timeout_s,
        max_bad_answers=1,
    )
    job = SimpleNamespace(config=settings, hf=read_hf_facts(model), longest_prompt=4)
    servers = RunServers(job, tmp_path, RunDisplay(3, enabled=False), RoutesOnRank0(None, ()))

    def score(server, twin, version):
        if liar.lie is not None and liar.lie.path == "scores":
            raise ValueError("2 nats")
        return ""

    servers.score_joiner = score

    def update(version):
        with servers.unchanged():
            weights = iter([("model.norm.weight", torch.zeros(8))])
            servers.weights.publisher.publish(weights, version=version)

    def begin_update():
        with servers.unchanged():
            pass

    async def looked():
        """Wait until the addresses were read a few times: with each reading the first server is asked for life."""
        before = len(first.paths)
        await until(lambda: len(first.paths) > before + 5)

    def lines():
        return [json.loads(line) for line in (tmp_path / "servers.jsonl").read_text().splitlines()]

    first = Server(model, first_lie)
    async with first.running() as first_addr, liar.running() as addr:
        name = lambda *which: source.write_text("\n".join([first_addr, *which]))  # noqa: E731
        name()
        ready = asyncio.create_task(asyncio.to_thread(servers.wait_ready))
        try:
            if first_lie is not None:
                await until(lambda: (tmp_path / "servers.jsonl").exists())
                first.become_sound()
            await ready
            await asyncio.to_thread(update, 7)
            yield SimpleNamespace(
                **dict(servers=servers, members=servers.members, addr=addr, name=name),
                update=lambda version: asyncio.to_thread(update, version),
                looked=looked,
                begin_update=lambda: asyncio.to_thread(begin_update),
                whats=lambda: [(line["server"], line["what"]) for line in lines()],
                refused=lambda: [line for line in lines() if line["what"] == "refused"],
            )
        finally:
            first.become_sound(), liar.become_sound()
            await asyncio.to_thread(servers.close)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_lie_at_the_join_is_refused_with_its_address_or_outlived(
    lie, tiny, tmp_path, monkeypatch
):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    content = json.loads((tiny / "model" / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(content | lie.model))
    liar = Server(tiny / "model", lie)
    liar.model = theirs
    async with run_with(liar, tiny, tmp_path, monkeypatch, lie.timeout_s) as run:
        run.name(run.addr)
        await until(lambda: run.refused() if lie.said else liar.told)
        for line in run.refused():
            assert line["url"].endswith(run.addr) and lie.said in line["why"]
        async with asyncio.timeout(20):
            await run.begin_update()  # it waits for nobody
        assert run.members.present() == [0]
        loads = liar.paths.count(LOAD)
        liar.become_sound()
        if lie.is_banned:
            await run.looked()
            assert liar.paths.count(LOAD) == loads and run.members.present() == [0]
            run.name()
            await run.looked()
            run.name(run.addr)
        await until(lambda: run.whats()[-1] == (1, "joined"))
        assert run.members.holders(7) == [0, 1]
        said = [(1, "refused")] if lie.said else []
        assert run.whats() == [(0, "joined"), *said, (1, "joined")]


async def test_an_address_that_is_taken_back_while_it_is_admitted_joins_when_it_is_named_again(
    tiny, tmp_path, monkeypatch
):
    liar = Server(tiny / "model", LIES["a disk slower than a look"])
    async with run_with(liar, tiny, tmp_path, monkeypatch) as run:
        run.name(run.addr)
        await until(lambda: liar.told)
        run.name()
        await run.looked()
        liar.become_sound()
        await until(run.refused)
        assert run.refused()[0]["url"].endswith(run.addr)
        run.name(run.addr)
        await until(lambda: run.whats()[-1] == (1, "joined"))
        assert run.members.holders(7) == [0, 1]
        assert run.whats() == [(0, "joined"), (1, "refused"), (1, "joined")]


@pytest.mark.parametrize("status", [200, 400])
async def test_what_is_the_newest_no_more_when_it_is_loaded_is_no_reason_to_refuse(
    status, tiny, tmp_path, monkeypatch
):
    """The update that has come in between waits for nobody."""
    liar = Server(tiny / "model", Lie(LOAD, status, waits=True))
    async with run_with(liar, tiny, tmp_path, monkeypatch) as run:
        run.name(run.addr)
        await until(lambda: liar.told)
        await run.update(8)
        weights = Path(liar.bodies[liar.paths.index(LOAD)]["model_path"])
        assert weights.is_dir(), "it is read"
        liar.become_sound()
        await until(lambda: run.members.present() == [0, 1])
        await run.update(9)
        assert run.members.holders(9) == [0, 1] and not weights.exists()


async def test_the_first_one_is_held_against_the_checkpoint(tiny, tmp_path, monkeypatch):
    liar = Server(tiny / "model")
    how = dict(first_lie=LIES["an architecture"])
    async with run_with(liar, tiny, tmp_path, monkeypatch, **how) as run:
        assert LIES["an architecture"].said in run.refused()[0]["why"]
        assert run.whats() == [(0, "refused"), (0, "joined")]


async def test_a_server_that_is_leaving_is_no_reason_for_an_update_and_one_that_joins_is(
    tiny, tmp_path, monkeypatch
):
    async with run_with(Server(tiny / "model"), tiny, tmp_path, monkeypatch) as run:
        run.servers.client = SimpleNamespace(is_busy=lambda server: True)
        run.members.take_back(0, "its host is wanted")
        run.servers.check_served()
        assert run.members.present() == [0]
        run.name(run.addr)
        await until(lambda: run.members.present() == [0, 1])
        with pytest.raises(EngineUnreachable):
            run.servers.check_served()


async def test_one_whose_last_call_ends_before_an_update_is_gone_before_it_is_sent(
    tiny, tmp_path, monkeypatch
):
    async with run_with(Server(tiny / "model"), tiny, tmp_path, monkeypatch) as run:
        monkeypatch.setattr(discovery, "EVERY_S", 60.0)
        await asyncio.sleep(0.2)  # a look under way ends
        run.members.take_back(0, "its host is wanted")
        with run.servers.requests_wait():
            assert run.members.present() == []


async def test_one_that_is_named_no_more_while_weights_are_sent_leaves_afterwards(
    tiny, tmp_path, monkeypatch
):
    async with run_with(Server(tiny / "model"), tiny, tmp_path, monkeypatch) as run:
        run.name(run.addr)
        await until(lambda: run.members.present() == [0, 1])
        with run.servers.requests_wait():
            run.name()
            await until(lambda: 1 in run.members.leaving)
            await run.looked()
            assert run.members.present() == [0, 1]
        await until(lambda: run.members.present() == [0])


@pytest.mark.parametrize("is_lost", [True, False])
async def test_updates_that_fail_end_the_run_where_no_server_was_lost_in_them(
    is_lost, tiny, tmp_path, monkeypatch
):
    other = Server(tiny / "model", None)

    def fail(run):
        with contextlib.suppress(EngineUnreachable), run.servers.unchanged():
            if is_lost:
                run.members.leave(max(run.members.present()), "a call failed")
            raise EngineUnreachable("the update has failed")
        run.servers.restart("the update has failed")

    async with run_with(other, tiny, tmp_path, monkeypatch) as run:
        run.name(run.addr)
        for attempt in range(4):
            await until(lambda: len(run.members.present()) == 2)
            ends = attempt == 3 and not is_lost
            with pytest.raises(EngineError) if ends else contextlib.nullcontext():
                await asyncio.to_thread(fail, run)
