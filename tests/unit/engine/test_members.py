"""Servers that come and go: their numbers, calls to all of them, and requests whose server is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web

from r3train.engine.backend import (
    AnswerCutShort,
    AnswerLate,
    BadAnswer,
    EngineDied,
    EngineError,
    EngineUnreachable,
    GroupBroken,
    Request,
    ServerLeft,
)
from r3train.engine.client import SGLangClient
from r3train.engine.control import EngineControl
from r3train.engine.members import Members
from r3train.engine.sglang_http import SGLangHTTP
from tests.fakes.server import PROMPT, SAMPLING, Fake, answer_to, client_of, refuse

REQUEST = Request(0, 0, "p", np.array(PROMPT.token_ids), 4, SAMPLING, weight_version=1)


def fleet(count, versions=None):
    """A fleet that changes, and what it tells: (server, what, version)."""
    told = []
    members = Members(
        [f"h:{i}" for i in range(count)],
        versions,
        changes=True,
        on_change=lambda c: told.append((c.server, c.what, c.version)),
    )
    return members, told


def labelled(version):
    """A handler of a server that holds this version."""

    async def handle(_request, body):
        answer = answer_to(body)
        if "meta_info" in answer:
            answer["meta_info"]["weight_versions"][0]["version"] = str(version)
        return web.json_response(answer)

    return handle


async def wait_until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_number_is_given_once_and_its_server_leaves_once():
    members, told = fleet(1, [3])
    second = members.number("h:9")
    assert members.present() == [0] and second == 1
    members.join(second, 3, "as server 0")
    members.leave(0, "it died")
    members.leave(0, "it died again")
    third = members.number("h:0")  # started again at its address
    assert third == 2 and members.is_gone(0) and not members.is_gone(third)
    assert members.present() == [1] and members.all() == [None, 3, None]
    assert told == [(1, "joined", 3), (0, "lost", 3)]


def test_one_of_the_run_that_is_started_again_joins_under_its_number_without_weights():
    members, told = fleet(1, [3])
    members.leave(0, "it died")
    members.join(0, None, "started again")
    assert members.present() == [0] and members.all() == [None] and not members.is_gone(0)
    assert not members.is_new(0), "what it refuses is no fault of a stranger"
    assert told == [(0, "lost", 3), (0, "joined", None)]


def test_one_that_was_taken_back_gets_no_request_and_is_updated_until_it_leaves():
    members, told = fleet(2, [3, 3])
    members.take_back(0, "its name is away")
    members.take_back(0, "still")
    assert members.holders(3) == [1] and members.present() == [0, 1]
    members.record(4)
    members.leave(0, "its calls have ended", "left")
    assert told == [(0, "leaving", 3), (0, "left", 4)]


def test_what_a_server_that_left_says_afterwards_is_not_recorded():
    members, _ = fleet(2, [3, 3])
    members.leave(0, "lost")
    members.record(4, 0)
    assert members.all() == [None, 3] and members.newest == 3


def test_a_new_one_has_held_no_weights_where_others_have():
    members, _ = fleet(0)
    first = members.number("h:1")
    members.join(first, None, "")
    assert not members.is_new(first), "nobody has held any"
    members.record(0)
    second = members.number("h:2")
    members.join(second, None, "")
    assert members.is_new(second) and not members.is_new(first)
    members.record(None)
    members.record(1)
    assert not members.is_new(second)


async def ask_all(fakes, versions, **how):
    """Flush all servers; returns (who answered or the error, who stays)."""
    async with client_of(*fakes, versions=versions, changes=True, **how) as client:
        try:
            found = sorted(await client.http.ask_all("flush_cache"))
        except EngineError as error:
            found = error
        return found, client.members.present()


async def gone(request, _body):
    request.transport.abort()


async def test_of_a_call_to_all_the_one_that_fails_leaves_and_the_others_go_on():
    assert await ask_all([Fake(), Fake(refuse), Fake(gone)], [1, 1, 1]) == ([0], [0])


async def test_what_all_refuse_is_the_calls_fault_and_all_stay():
    error, present = await ask_all([Fake(refuse), Fake(refuse)], [1, 1])
    assert "too long" in str(error) and present == [0, 1]


async def test_where_all_are_lost_all_leave():
    error, present = await ask_all([Fake(gone), Fake(gone)], [1, 1])
    assert isinstance(error, EngineUnreachable) and present == []
    with pytest.raises(EngineUnreachable, match="no server"):
        members, _ = fleet(0)
        await SGLangHTTP(members).ask_all("flush_cache")


async def test_a_new_one_that_refuses_a_part_of_a_broadcast_leaves_and_the_broadcast_is_made_anew():
    """It ends neither the run nor the others, whichever weights it has room for."""
    async with client_of(Fake(), Fake(refuse), versions=[1, None], changes=True) as client:
        with pytest.raises(EngineUnreachable, match="too long"):
            await client.http.ask_all("flush_cache", servers=[0, 1])
        assert client.members.present() == [0] and client.members.refused == {1}
        client.members.record(2)
        with pytest.raises(EngineError, match="too long"):  # one that took part before is named
            await client.http.each(lambda server: failed(EngineError("too long")), [0])
        assert client.members.present() == [0]


@pytest.mark.parametrize("error", [EngineUnreachable, AnswerCutShort, AnswerLate, BadAnswer])
async def test_a_new_one_that_dies_in_its_first_update_is_lost_and_one_that_hangs_or_lies_is_refused(
    error,
):
    """One that is started again at its address may join; one that hangs would hold up every update."""
    async with client_of(Fake(), Fake(), versions=[1, None], changes=True) as client:
        with pytest.raises(ServerLeft):
            await client.http.each(lambda server: failed(error("no")), [1])
        is_refused = error in (AnswerLate, BadAnswer)
        assert client.members.refused == ({1} if is_refused else set())


async def test_a_new_one_whose_first_broadcast_is_broken_may_join_again_once():
    """A sound one answers so where another one of its group has died; one whose connections fail does so each time."""
    async with client_of(Fake(), Fake(), versions=[1, None], changes=True) as client:
        members, server = client.members, 1
        for refused in (set(), {2}):
            with pytest.raises(ServerLeft):
                await client.http.each(lambda server: failed(GroupBroken("reset")), [server])
            assert members.refused == refused and members.present() == [0]
            server = members.number(members.urls[1])
            members.join(server, None, "")
        members.record(2, server)
        assert members.excuse(server), "its connections have brought it weights"


def test_a_name_that_is_none_gives_no_sign_of_life():
    with EngineControl(["a..b:80"]) as control:
        assert isinstance(control.look_for_life({0: "/health"}, 5)[0], EngineUnreachable)


async def failed(error):
    raise error


async def test_the_request_of_a_lost_server_goes_on_elsewhere_with_its_tokens_and_the_newest_weights():
    async with client_of(Fake(gone), Fake(labelled(2)), versions=[1, None], changes=True) as client:
        call = asyncio.create_task(client.generate(replace(REQUEST, num_generated=5)))
        await wait_until(lambda: client.members.present() == [1])
        await asyncio.sleep(0.2)
        assert not call.done(), "nobody holds the weights"
        client.members.record(2)  # an update came meanwhile
        segment = await asyncio.wait_for(call, 20)
        assert segment.server == 1 and segment.weight_versions.tolist() == [2]
        assert (client.moved_requests, client.moved_tokens) == (1, 5)


async def test_a_request_that_has_waited_for_a_server_takes_the_newest_weights():
    """The last server left before it could be sent; an update came before the next one joined."""
    async with client_of(Fake(labelled(2)), versions=[None], changes=True) as client:
        call = asyncio.create_task(client.generate(REQUEST))
        await asyncio.sleep(0.2)
        assert not call.done(), "nobody holds the weights"
        client.members.record(2)
        segment = await asyncio.wait_for(call, 20)
        assert segment.weight_versions.tolist() == [2]


async def test_a_request_for_any_weights_goes_to_no_server_that_has_none_of_the_run_yet():
    """As those for a start's canaries, while others join by broadcast, which hold an earlier job's."""
    request = replace(REQUEST, weight_version=None)
    for versions, asked in (([1, None], {0}), ([None, None], {0, 1})):
        fakes = Fake(labelled(1)), Fake(labelled(1))
        async with client_of(*fakes, versions=versions, changes=True) as client:
            answers = [client.generate(replace(request, group_id=group)) for group in range(4)]
            assert {answer.server for answer in await asyncio.gather(*answers)} == asked


async def test_the_request_of_a_server_of_the_run_that_ended_waits_until_that_has_weights_again():
    fake, dead = Fake(gone), [EngineDied("it ended with exit code -9")]

    def check():
        for error in dead:
            raise error

    async with client_of(fake, versions=[1], changes=True, check_alive=check) as client:
        call = asyncio.create_task(client.generate(REQUEST))
        await wait_until(lambda: client.members.present() == [])
        dead.clear()
        fake.handler = labelled(2)
        client.members.join(0, None, "started again")
        await asyncio.sleep(0.2)
        assert not call.done(), "it holds the checkpoint's weights"
        client.members.record(2)
        assert (await asyncio.wait_for(call, 20)).weight_versions.tolist() == [2]
        assert client.moved_requests == 1


async def test_a_server_that_was_started_again_is_not_lost_by_its_old_lifes_silence():
    asked = []

    async def silent(request, _body):
        asked.append(request.path)
        await asyncio.sleep(600)

    how = dict(versions=[1], changes=True, request_timeout_s=0.1, health_timeout_s=600.0)
    async with client_of(Fake(silent), **how) as client:
        call = asyncio.create_task(client.generate(REQUEST))
        await wait_until(lambda: "/health" in asked)
        await asyncio.to_thread(client.members.leave, 0, "it hangs")
        client.members.join(0, None, "started again")
        await wait_until(lambda: client.moved_requests == 1)
        assert client.members.present() == [0]
        call.cancel()


async def test_calls_to_a_server_end_when_it_leaves_for_a_host_that_vanishes_closes_nothing():
    hangs = asyncio.Event()

    async def hang(_request, _body):
        hangs.set()
        await asyncio.sleep(600)

    async with client_of(Fake(hang), Fake(labelled(1)), versions=[1, None], changes=True) as client:
        call = asyncio.create_task(client.generate(REQUEST))
        flush = asyncio.create_task(client.http.ask(0, "flush_cache"))
        await hangs.wait()
        assert client.is_busy(0)
        await asyncio.to_thread(client.members.leave, 0, "no sign of life")
        client.members.record(1, 1)
        assert (await asyncio.wait_for(call, 20)).server == 1
        assert not client.is_busy(0)
        flush.cancel()


async def test_a_server_that_answers_health_is_not_lost_by_an_answer_that_is_cut_short():
    async def cut(request, body):
        if request.path == "/health":
            return web.json_response({})
        return await gone(request, body)

    async with client_of(Fake(cut), versions=[1], changes=True, max_bad_answers=2) as client:
        with pytest.raises(BadAnswer):
            await client.generate(REQUEST)
        assert client.members.present() == [0]


async def test_without_changes_a_lost_server_is_the_callers_to_handle():
    async with client_of(Fake(gone), versions=[1]) as client:
        with pytest.raises(EngineUnreachable):
            await client.generate(REQUEST)
        assert client.members.present() == [0]


def test_a_client_of_a_fleet_needs_no_server_to_begin():
    members, _ = fleet(0)
    assert SGLangClient(members).servers() == []
