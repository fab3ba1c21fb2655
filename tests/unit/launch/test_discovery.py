"""Servers that join a run and leave it while it goes on; those that lie are told by test_lies_at_the_join.py."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest
from aiohttp import web

from r3train.engine.backend import EngineError, EngineUnreachable
from r3train.engine.control import EngineControl
from r3train.engine.members import Members
from r3train.engine.publish import WeightPublisher
from r3train.engine.sglang_http import HTTPSettings
from r3train.launch.job.preflight import check_engines_file
from r3train.launch.start import discovery as module
from r3train.launch.start.discovery import Discovery
from tests.fakes.server import Fake


class Server(Fake):
    """A server with a version label and checksums."""

    def __init__(self):
        super().__init__(self.answer)
        self.label, self.holds = "default", "checkpoint"
        self.hangs, self.statuses = asyncio.Event(), {}
        self.hangs.set()
        self.is_paused = False

    async def answer(self, request, _body):
        await self.hangs.wait()
        if status := self.statuses.get(request.path):
            return web.json_response({"message": "not now"}, status=status)
        if request.path == "/update_weights_from_disk":
            self.label, self.holds = "7", "right"
        if request.path == "/continue_generation":
            self.is_paused = False
        if request.path == "/weights_checker":
            return web.json_response({"ranks": [{"checksums": {"w": self.holds}}]})
        return web.json_response({"weight_version": self.label, "success": True})


class Disk(WeightPublisher):
    """Gives version 7 from disk."""

    def __init__(self, control):
        self.control = control

    def give(self, server):
        self.control.update_weights_from_disk("v7", weight_version=7, server=server)
        return 7


@contextlib.asynccontextmanager
async def fleet(tmp_path, monkeypatch, *fakes, gives=True, timeout_s=20.0, wait_s=60.0):
    """A run's discovery, whose first server has joined and holds version 7; ``told`` has (server, what, why)."""
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    monkeypatch.setattr(module, "AGAIN_S", 0.05)
    async with contextlib.AsyncExitStack() as stack:
        addrs = [await stack.enter_async_context(fake.running()) for fake in fakes]
        told, source = [], tmp_path / "servers"
        members = Members(
            [], changes=True, on_change=lambda c: told.append((c.server, c.what, c.why))
        )
        settings = HTTPSettings(request_timeout_s=20.0)
        control = stack.enter_context(EngineControl(members, settings))
        it = SimpleNamespace(members=members, told=told, source=source, addrs=addrs, notes=[])
        it.busy, it.silent, it.control, it.tries = set(), set(), control, 0

        def examine(server):
            it.tries += 1
            if members.urls[server] in it.silent:
                time.sleep(0.2)
                raise EngineUnreachable("it does not answer")

        it.name = lambda *which: source.write_text("\n".join(addrs[i] for i in which))
        it.discovery = Discovery(
            source=source,
            members=members,
            control=control,
            examine=examine,
            score=lambda server, twin, version: "",
            publisher=lambda: Disk(control) if gives else WeightPublisher(),
            is_busy=it.busy.__contains__,
            note=it.notes.append,
            health_timeout_s=timeout_s,
            wait_s=wait_s,
        )
        stack.callback(it.discovery.close)
        it.name(0)
        await asyncio.to_thread(it.discovery.start)
        fakes[0].label, fakes[0].holds = "7", "right"
        members.record(7)
        yield it


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def looks_at(server):
    """Wait until three looks have begun and ended, each of which asks the server for a sign of life."""
    before = len(server.paths)
    await until(lambda: len(server.paths) > before + 3)


def whats(it):
    return [(server, what) for server, what, _ in it.told]


async def test_a_server_that_is_named_gets_the_newest_weights_and_joins_as_equal(
    tmp_path, monkeypatch
):
    async with fleet(tmp_path, monkeypatch, Server(), second := Server()) as it:
        it.name(0, 1)
        await until(lambda: it.members.holders(7) == [0, 1])
        assert "/update_weights_from_disk" in second.paths and it.members.newest == 7
        assert whats(it) == [(0, "joined"), (1, "joined")]


async def test_by_broadcast_it_joins_without_weights_and_so_does_one_that_nobody_can_vouch_for(
    tmp_path, monkeypatch
):
    async with fleet(tmp_path, monkeypatch, Server(), Server(), gives=False) as it:
        it.name(0, 1)
        await until(lambda: it.members.present() == [0, 1])
        assert it.members.ready() == [0]
    async with fleet(tmp_path, monkeypatch, Server(), second := Server()) as it:
        it.members.record(None)  # as after an update that failed
        it.name(0, 1)
        await until(lambda: it.members.present() == [0, 1])
        assert it.members.all() == [None, None]
        assert "/update_weights_from_disk" not in second.paths


async def test_nobody_joins_in_the_middle_of_an_update(tmp_path, monkeypatch):
    async with fleet(tmp_path, monkeypatch, first := Server(), Server()) as it:
        with it.discovery.lock:
            it.name(0, 1)
            await looks_at(first)
            assert it.members.present() == [0]
        await until(lambda: it.members.present() == [0, 1])


async def test_an_address_that_is_taken_back_leaves_when_its_calls_have_ended_and_may_come_back(
    tmp_path, monkeypatch
):
    async with fleet(tmp_path, monkeypatch, first := Server(), Server()) as it:
        it.name(0, 1)
        await until(lambda: it.members.holders(7) == [0, 1])
        it.busy.add(1)
        it.name(0)
        await until(lambda: it.members.holders(7) == [0])
        it.name(0, 1)  # back before its calls have ended
        await looks_at(first)
        assert it.members.present() == [0, 1] and it.members.holders(7) == [0]
        it.busy.clear()
        await until(lambda: it.members.holders(7) == [0, 2])
        assert whats(it)[2:] == [(1, "leaving"), (1, "left"), (2, "joined")]


async def test_a_file_that_cannot_be_read_or_that_others_may_write_changes_nothing_and_is_said_once(
    tmp_path, monkeypatch
):
    async with fleet(tmp_path, monkeypatch, first := Server(), Server()) as it:
        said = lambda: [note for note in it.notes if "stay" in note]  # noqa: E731
        it.source.unlink()
        await until(lambda: len(said()) == 1)
        it.source.write_text("no port")
        await until(lambda: len(said()) == 2)
        it.source.chmod(0o666)
        it.name(1)
        await until(lambda: len(said()) == 3)
        await looks_at(first)
        assert it.members.present() == [0] and whats(it) == [(0, "joined")]
        assert len(said()) == 3 and "key" in said()[2]


async def test_one_that_dies_and_one_that_hangs_leave_and_come_back_under_new_numbers(
    tmp_path, monkeypatch
):
    fakes = Server(), Server(), Server()
    async with fleet(tmp_path, monkeypatch, *fakes, timeout_s=2.0) as it:
        it.name(0, 1, 2)
        await until(lambda: it.members.holders(7) == [0, 1, 2])
        fakes[2].hangs.clear()
        fakes[1].statuses["/health"] = 503  # SGLang says so of a scheduler that does not answer
        await until(lambda: not {1, 2} & set(it.members.present()))
        assert {(1, "lost"), (2, "lost")} <= set(whats(it))
        fakes[2].hangs.set()
        fakes[1].statuses.clear()
        await until(lambda: len(it.members.holders(7)) == 3)
        assert not {1, 2} & set(it.members.present())


@pytest.mark.parametrize("gives", [True, False])
async def test_one_that_hung_and_left_while_the_run_paused_it_computes_again_before_it_joins(
    tmp_path, monkeypatch, gives
):
    async with fleet(tmp_path, monkeypatch, Server(), second := Server(), gives=gives) as it:
        second.is_paused = True
        it.name(0, 1)
        await until(lambda: it.members.present() == [0, 1])
        assert not second.is_paused


async def test_silence_counts_from_the_last_sign_of_life(tmp_path, monkeypatch):
    clock = SimpleNamespace(now_s=time.monotonic(), sleep=time.sleep)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(module, "time", clock)
    async with fleet(tmp_path, monkeypatch, first := Server()) as it:
        clock.now_s += 100
        await looks_at(first)
        first.statuses["/health"] = 503
        await looks_at(first)
        assert it.members.present() == [0], "it has answered for 100 s"
        clock.now_s += 100
        await until(lambda: it.members.present() == [])


async def test_where_nobody_is_there_two_that_do_not_answer_hold_no_third_up(tmp_path, monkeypatch):
    async with fleet(tmp_path, monkeypatch, *(Server() for _ in range(4))) as it:
        it.silent |= set(sorted(f"http://{addr}" for addr in it.addrs[1:])[:2])
        it.members.leave(0, "it died")
        it.name(1, 2, 3)
        await until(lambda: len(it.members.present()) == 1)


async def test_one_that_hangs_while_it_joins_holds_nobody_up_where_the_last_one_has_left(
    tmp_path, monkeypatch
):
    _, second, _ = fakes = Server(), Server(), Server()
    async with fleet(tmp_path, monkeypatch, *fakes) as it:
        second.hangs.clear()
        it.name(0, 1)
        await until(lambda: second.paths)
        it.members.leave(0, "it died")
        it.name(1, 2)
        await until(lambda: it.members.present() == [2])
        assert (1, "refused") not in whats(it)
        second.hangs.set()


async def test_one_that_hangs_while_it_joins_is_given_up_and_tried_again_under_another_number(
    tmp_path, monkeypatch
):
    async with fleet(tmp_path, monkeypatch, Server(), second := Server(), timeout_s=2.0) as it:
        second.hangs.clear()
        it.name(0, 1)
        await until(lambda: (1, "refused") in whats(it))
        second.hangs.set()
        await until(lambda: len(it.members.holders(7)) == 2)
        assert 1 not in it.members.present()


async def test_one_that_is_named_before_it_is_up_keeps_its_number_and_is_told_of_once(
    tmp_path, monkeypatch
):
    """Silence counts within a try: tries of two seconds and more together, each of a part of one."""
    async with fleet(tmp_path, monkeypatch, Server(), second := Server(), timeout_s=2.0) as it:
        second.statuses |= dict.fromkeys(("/model_info", "/health"), 503)
        it.silent.add(f"http://{it.addrs[1]}")
        it.name(0, 1)
        await until(lambda: it.tries > 14)
        assert whats(it) == [(0, "joined"), (1, "refused")]
        assert len(it.members.urls) == 2


async def test_while_weights_are_loaded_a_server_is_asked_for_no_token(tmp_path, monkeypatch):
    async with fleet(tmp_path, monkeypatch, first := Server()) as it:
        it.members.record(None)
        await looks_at(first)
        first.paths.clear()
        await looks_at(first)
        assert set(first.paths) == {"/model_info"}


async def test_without_a_server_the_run_waits_says_so_and_ends_after_its_time(
    tmp_path, monkeypatch
):
    async with fleet(tmp_path, monkeypatch, Server(), wait_s=0.5) as it:
        it.discovery.check()
        it.members.leave(0, "it died")
        it.source.write_text("")
        await until(lambda: any("no server" in note for note in it.notes))
        time.sleep(0.6)
        with pytest.raises(EngineError, match="rollout-wait-for-servers-s"):
            it.discovery.check()


def test_a_start_is_refused_whose_addresses_others_may_write_and_a_missing_file_may_come(tmp_path):
    file = tmp_path / "servers"
    check_engines_file(None)
    check_engines_file(file)
    file.write_text("h:1")
    check_engines_file(file)
    file.chmod(0o666)
    with pytest.raises(ValueError, match="rollout-engines-file.*key"):
        check_engines_file(file)
