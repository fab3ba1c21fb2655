"""A server whose weights nobody knows takes no request: after a restart, another label, a failed update."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from r3train.engine.backend import EngineError
from r3train.engine.control import MEMORY
from r3train.engine.members import Members
from r3train.engine.sglang_http import SGLangHTTP
from tests.fakes.server import control_of, Fake


def holding(label):
    """A server that does what it is asked and always says this version label."""

    async def handle(_request, _body):
        return web.json_response({"weight_version": label, "success": True})

    return Fake(handle)


async def test_what_servers_confirmed_before_a_restart_says_nothing_about_the_new_ones():
    """Otherwise they would be used as soon as they hold all memory again, before weights are published."""
    fake = holding("3")
    async with control_of(fake) as engine:
        await asyncio.to_thread(engine.update_weights_from_disk, "somewhere", weight_version=3)
        assert engine.members.all() == [3]
        engine.restarted()
        assert engine.members.all() == [None]
        await asyncio.to_thread(engine.keep_onloaded, "weights")
        fake.paths.clear()
        await asyncio.to_thread(engine.keep_onloaded, *MEMORY)
        assert fake.paths == ["/resume_memory_occupation"]
        assert engine.members.all() == [None]


async def test_a_server_that_was_in_use_and_says_another_label_is_used_no_more():
    async with control_of(holding("2"), holding("1")) as engine:
        engine.members.record(2)
        await asyncio.to_thread(engine.confirm_version, 2)
        assert engine.members.all() == [2, None] and engine.members.ready() == [0]


async def test_during_an_update_from_disk_and_after_a_failed_one_no_version_is_known():
    seen, engine = [], None

    async def refuse(_request, _body):
        seen.append(engine.members.all())
        return web.json_response({"success": False, "message": "no such file"}, status=400)

    async with control_of(Fake(refuse), Fake(refuse)) as engine:
        engine.members.record(1)
        with pytest.raises(EngineError, match="no such file"):
            await asyncio.to_thread(engine.update_weights_from_disk, "v2", weight_version=2)
        assert seen and all(versions == [None, None] for versions in seen)
        assert engine.members.all() == [None, None] and engine.members.newest == 1


async def test_a_call_that_one_server_refuses_is_broken_off_on_the_others():
    asked, broken_off, give_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(request, _body):
        asked.set()
        while request.transport is not None and not give_up.is_set():
            await asyncio.sleep(0.01)
        if request.transport is None:
            broken_off.set()
        return web.json_response({})

    async def refuse(_request, _body):
        await asked.wait()
        return web.json_response({"message": "no"}, status=400)

    async with Fake(slow).running() as first, Fake(refuse).running() as second:
        http = SGLangHTTP([first, second])
        try:
            with pytest.raises(EngineError, match="flush_cache: .* answered 400: no"):
                await http.ask_all("flush_cache")
            await asyncio.wait_for(broken_off.wait(), 10)
        finally:
            give_up.set()
            await http.aclose()


def test_the_newest_version_that_a_server_ever_held_never_goes_back():
    addrs = ["h:1", "h:2", "h:3"]
    assert Members(addrs).newest is None
    versions = Members(addrs, [4, 7, None])
    assert versions.newest == 7
    for version, server in ((9, 0), (8, 1), (None, None), (3, None)):
        versions.record(version, server)
        assert versions.newest == 9
    assert versions.all() == [3, 3, 3]
