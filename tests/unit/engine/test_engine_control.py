"""Control calls against tiny servers: all are reached, the unfit and the hung are refused."""

import asyncio
from contextlib import nullcontext
import threading

import pytest
from aiohttp import web

from r3train.engine.backend import EngineDied, EngineError
from r3train.engine.control import EngineControl
from r3train.engine.sglang_http import HTTPSettings
from tests.fakes.server import control_of, Fake, answer_to, client_of, one


async def facts(_request, _body):
    return web.json_response({"tp_size": 2, "pp_size": 2, "enable_return_routed_experts": False})


async def test_success_false_is_an_error_even_with_status_200():
    async def refuse(_request, _body):
        return web.json_response({"success": False, "message": "no group"})

    async with control_of(Fake(), Fake(refuse)) as engine:
        with pytest.raises(EngineError, match="end_weight_update: .* answered 200: no group"):
            await asyncio.to_thread(engine.end_weight_update)


async def test_the_kv_pools_of_all_servers_and_their_ranks_add_up_where_all_are_known():
    def of(**info):
        async def server_info(_request, _body):
            return web.json_response(info)

        return Fake(server_info)

    small, large = of(max_total_num_tokens=400), of(max_total_num_tokens=1000, dp_size=2)
    async with control_of(small, large) as engine:
        assert await asyncio.to_thread(engine.pool_tokens) == 2400
    async with control_of(of(max_total_num_tokens=400), of()) as engine:
        assert await asyncio.to_thread(engine.pool_tokens) is None


@pytest.mark.parametrize("name", ["server_info", "model_info"])
async def test_an_address_that_answers_something_else_is_no_server(name):
    async def page(_request, _body):
        return web.json_response("welcome")

    async with control_of(Fake(page)) as engine:
        with pytest.raises(
            EngineError, match=f"/{name} answered: the answer is 'welcome', expected `object`"
        ):
            await asyncio.to_thread(getattr(engine, name))


@pytest.mark.parametrize("by", ["distributed", "disk"])
async def test_a_server_that_could_not_drop_its_cache_does_so_when_it_is_idle(by):
    """SGLang 0.5.23 has loaded the weights by then, and its label is still the old one."""
    calls, label = [], ["6"]

    async def server(request, body):
        calls.append(request.path_qs)
        if request.path == "/model_info":
            return web.json_response({"weight_version": label[0]})
        if request.path == "/update_weight_version":
            label[0] = body["new_version"]
        if request.path.startswith("/update_weights"):
            message = "Weights were updated, but the cache was not flushed because requests are"
            return web.json_response({"success": False, "message": message}, status=400)
        return web.json_response({"success": True})

    def update(engine):
        if by == "disk":
            return engine.update_weights_from_disk("v7", weight_version=7)
        engine.begin_weight_update()
        engine.update_weights_from_distributed(names=[], weight_version=7).result(60)
        engine.end_weight_update()

    async with control_of(Fake(server)) as engine:
        await asyncio.to_thread(update, engine)
        assert engine.members.all() == [7]
    assert calls.index("/flush_cache?timeout=60") < calls.index("/update_weight_version")
    assert calls.index(f"/update_weights_from_{by}") < calls.index("/flush_cache?timeout=60")


async def test_calls_reach_every_server():
    fakes = [Fake(), Fake(), Fake()]
    async with client_of(*fakes) as client:
        await client.pause_generation("in_place")
        await client.continue_generation()
        await client.abort()
        with EngineControl(client.http.urls) as engine:
            joined = engine.init_weights_update_group(
                servers=[0, 1, 2],
                master_address="h",
                master_port=1,
                rank_offsets=[1, 3, 4],
                world_size=5,
                group_name="g",
                backend="gloo",
            )
            await asyncio.wrap_future(joined)
    for fake, offset in zip(fakes, [1, 3, 4], strict=True):
        assert fake.paths == [
            "/pause_generation",
            "/continue_generation",
            "/abort_request",
            "/init_weights_update_group",
        ]
        assert fake.bodies[2] == {"abort_all": True}
        assert fake.bodies[3]["rank_offset"] == offset


@pytest.mark.parametrize("shared", [True, False])
async def test_on_shared_servers_only_own_requests_are_aborted(shared):
    gate = asyncio.Event()

    async def wait(request, body):
        if request.path == "/generate":
            await gate.wait()
            return web.json_response(answer_to(body))
        return web.json_response({})

    fake = Fake(wait)
    async with client_of(fake, shared_servers=shared) as client:
        calls = [asyncio.create_task(one(client, i, i)) for i in range(2)]
        await asyncio.sleep(0.2)
        await client.abort()
        gate.set()
        await asyncio.gather(*calls)
    sent = [b["rid"] for b, path in zip(fake.bodies, fake.paths) if path == "/generate"]
    aborts = [b for b, path in zip(fake.bodies, fake.paths) if path == "/abort_request"]
    if shared:
        assert sorted(b["rid"] for b in aborts) == sorted(sent) and all(len(b) == 1 for b in aborts)
    else:
        assert [b.get("abort_all") for b in aborts] == [True]
    assert not any(a != b and b.startswith(a) for a in sent for b in sent)


@pytest.mark.parametrize(
    "question, message",
    [
        (
            lambda engine: engine.require_settings(replay=True),
            "enable_return_routed_experts = False.*\\n.*pp_size = 2",
        ),
        (lambda engine: engine.update_group_sizes(), "runs with pp_size 2"),
    ],
)
async def test_a_server_started_unfit_for_the_job_is_refused(question, message):
    async with control_of(Fake(facts)) as engine:
        with pytest.raises(ValueError, match=message):
            await asyncio.to_thread(question, engine)
    engine.close()


async def test_after_an_update_a_server_with_another_label_is_left_out():
    def holding(label):
        async def handle(_request, _body):
            return web.json_response({"weight_version": label, "success": True})

        return handle

    fakes = [Fake(holding("2")), Fake(holding("1"))]
    async with control_of(*fakes) as engine:
        await asyncio.to_thread(engine.update_weights_from_disk, "somewhere", weight_version=2)
        assert engine.members.all() == [2, None] and engine.members.holders(2) == [0]
        with pytest.raises(EngineError, match="no engine holds weight version 9"):
            await asyncio.to_thread(engine.update_weights_from_disk, "somewhere", weight_version=9)
        await asyncio.to_thread(engine.begin_weight_update)
        assert engine.members.all() == [None, None], "in the middle of one nobody knows"


async def test_servers_release_memory_when_idle_and_are_used_again_once_they_hold_all_of_it():
    async def holding(_request, body):
        return web.json_response({"weight_version": "3", "success": True, "tags": body.get("tags")})

    fake = Fake(holding)
    async with control_of(fake) as engine:

        async def hold(*kinds):
            fake.paths.clear(), fake.bodies.clear()
            await asyncio.to_thread(engine.keep_onloaded, *kinds)
            return [(path[1:], body.get("tags")) for path, body in zip(fake.paths, fake.bodies)]

        engine.members.record(2)
        released = [("flush_cache", None), ("release_memory_occupation", ["weights", "kv_cache"])]
        assert await hold() == released
        assert await hold() == []  # and once is enough
        assert await hold("weights") == [("resume_memory_occupation", ["weights"])]
        await asyncio.to_thread(engine.update_weights_from_disk, "somewhere", weight_version=3)
        assert engine.members.all() == [None], "a request would find no KV cache"
        resumed = [("resume_memory_occupation", ["kv_cache"]), ("model_info", None)]
        assert await hold("weights", "kv_cache") == resumed
        assert engine.members.all() == [3]
        await hold("kv_cache")
        await hold("weights", "kv_cache")
        assert engine.members.all() == [None], "what came back is undefined"
        await hold("weights")
        engine.restarted()
        assert await hold() == released


async def test_an_update_whose_last_bucket_had_no_label_is_an_error():
    async def done(_request, _body):
        return web.json_response({"weight_version": "2", "success": True})

    async with control_of(Fake(done)) as engine:
        for labels, ending in (((None, 2), None), ((2, None), "last bucket carried no version")):
            await asyncio.to_thread(engine.begin_weight_update)
            for label in labels:
                sent = engine.update_weights_from_distributed(weight_version=label, names=[])
                await asyncio.wrap_future(sent)
            with pytest.raises(EngineError, match=ending) if ending else nullcontext():
                await asyncio.to_thread(engine.end_weight_update)
            assert engine.members.all() == [None if ending else 2]


async def test_a_server_with_overlap_scheduling_is_refused_for_updates_in_flight():
    async def overlapping(_request, _body):
        return web.json_response({"disable_overlap_schedule": False})

    async with control_of(Fake(overlapping)) as engine:
        with pytest.raises(ValueError, match="without --disable-overlap-schedule"):
            await asyncio.to_thread(engine.require_settings, exact_boundaries=True)


def test_a_server_that_hangs_in_mid_call_ends_the_wait_of_the_control():
    """Health is asked for while the call waits, not only before it."""

    async def hang(_request, _body):
        await asyncio.sleep(3600)

    ready, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    addrs, asked = [], []

    async def serve():
        async with Fake(hang).running() as addr:
            addrs.append(addr)
            ready.set()
            await stop.wait()

    def hung():
        asked.append(True)
        if len(asked) > 1:
            raise EngineDied("no sign of life")

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(60)
    with EngineControl(addrs, HTTPSettings(check_alive=hung)) as control:
        with pytest.raises(EngineDied, match="no sign of life"):
            control.begin_weight_update()
    loop.call_soon_threadsafe(stop.set)
    thread.join(timeout=5)


class Session:
    """The weight-update session of a server, as SGLang 0.5.23 keeps it."""

    def __init__(self, is_open):
        self.is_open, self.calls = is_open, []

    async def __call__(self, request, _body):
        call = request.path.removeprefix("/").removesuffix("_weight_update")
        self.calls.append(call)
        if self.is_open == (call == "begin"):
            message = "a weight-update session is already open; call end_weight_update() first"
            return web.json_response({"success": False, "message": message}, status=400)
        self.is_open = call == "begin"
        return web.json_response({"success": True})


async def test_an_update_that_a_killed_job_left_open_on_one_server_is_ended_there_and_begun_anew():
    sessions = [Session(False), Session(True)]
    async with control_of(*map(Fake, sessions)) as engine:
        await asyncio.to_thread(engine.begin_weight_update)
    assert [session.is_open for session in sessions] == [True, True]
    assert [session.calls for session in sessions] == [["begin"], ["begin", "end", "begin"]]


async def test_another_refusal_of_a_weight_update_is_an_error():
    async def refuse(_request, _body):
        return web.json_response({"success": False, "message": "no memory"}, status=400)

    async with control_of(Fake(refuse)) as engine:
        with pytest.raises(EngineError, match="no memory"):
            await asyncio.to_thread(engine.begin_weight_update)
