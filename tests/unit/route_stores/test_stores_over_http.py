"""Route stores over HTTP: the rows that they keep, rank 0's handles, and the failures of each part."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from r3train.engine.backend import (
    BadAnswer,
    EngineDied,
    EngineError,
    EngineUnreachable,
    SamplingParams,
)
from r3train.engine.client import SGLangClient
from r3train.route_stores import handles
from r3train.route_stores.node import RouteNode
from r3train.route_stores.relay import Keys, RouteRelay
from r3train.route_stores.store import RouteStore, RouteStoreError
from r3train.route_stores.handles import HANDLES
from r3train.types import Prompt, RouteShape
from tests.wire_encoding import encode_routed_experts
from tests import whole_samples
from tests.fakes.server import client_to
from tests.http_serving import serving

ROUTES = RouteShape(num_layers=3, topk=2, num_experts=16)
PROMPT = Prompt("p", 0, "", np.array([5, 6, 7], dtype=np.int32), None)


def rows_of(sample_tokens: int, start: int = 0) -> np.ndarray:
    """Rows that name their position."""
    rows = np.zeros((sample_tokens - 1 - start, 3, 2), np.uint8)
    rows[:, :, 0] = (np.arange(start, sample_tokens - 1) % 16)[:, None]
    rows[:, :, 1] = (np.arange(start + 1, sample_tokens) % 16)[:, None]
    return rows


def answer_to(body: dict, **meta: object) -> dict:
    tokens = len(body["input_ids"]) + 2
    rows = rows_of(tokens, body.get("routed_experts_start_len", 0))
    return {
        "output_ids": [8, 9],
        "meta_info": {
            "id": body["rid"],
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": 2,
            "finish_reason": {"type": "stop", "matched": 9},
            "output_token_logprobs": [[-0.5, 8, None], [-0.5, 9, None]],
            "num_retractions": 0,
            "cached_tokens": 0,
            "weight_versions": [{"version": "0", "start": 0, "end": 2}],
            "routed_experts": encode_routed_experts(rows),
            **meta,
        },
    }


Handler = Callable[[web.Request, dict], "web.Response | AsyncIterator"]


class Scene:
    """One engine, two stores, rank 0's keys, and clients with and without the stores."""

    def __init__(self) -> None:
        self.handler: Callable = lambda request, body: web.json_response(answer_to(body))
        self.asked: list[tuple[dict, str | None]] = []
        self.nodes: list[RouteNode] = []
        self.urls: list[str] = []

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        if request.path != "/generate":
            return web.json_response({"success": True, "model_path": "m"})
        self.asked.append((body, request.headers.get("Authorization")))
        made = self.handler(request, body)
        return await made if asyncio.iscoroutine(made) else made

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Scene]:
        async with serving(self._handle) as self.addr:
            self.nodes = [RouteNode(i, "the-key", ROUTES, "127.0.0.1") for i in range(2)]
            self.urls = [f"http://127.0.0.1:{node.start()}" for node in self.nodes]
            for node in self.nodes:
                node.connect(self.urls)
            self.keys = Keys(2)
            try:
                yield self
            finally:
                for node in self.nodes:
                    await asyncio.to_thread(node.close)

    @contextlib.asynccontextmanager
    async def client(self, *, stores: bool = True, addr: str = "", **options) -> AsyncIterator:
        client = client_to(
            [addr or self.addr],
            routes=HANDLES if stores else ROUTES,
            transport=self.relay() if stores else None,
            api_key="engine-key",
            **options,
        )
        try:
            yield client
        finally:
            await client.aclose()

    def relay(self) -> RouteRelay:
        return RouteRelay(self.urls, "the-key", self.keys)

    def held(self) -> list[int]:
        return [len(node.store._rows_by_key) for node in self.nodes]


def one(client: SGLangClient, sample_id: int = 0, group_id: int = 0, **kwargs):
    sampling = SamplingParams(kwargs.pop("max_new_tokens", 8), may_stop_at=(9,))
    return whole_samples.generate(
        client, PROMPT, sampling, sample_id=sample_id, group_id=group_id, **kwargs
    )


async def read(node: RouteNode, numbers: np.ndarray) -> np.ndarray:
    rows, fetched = node.fetch(numbers)
    await asyncio.wrap_future(fetched)
    return rows


def keys_of(numbers: np.ndarray) -> list[int]:
    return [run.key for run in handles.runs(numbers)]


async def test_a_sample_by_way_of_a_store_is_the_sample_but_for_its_rows_which_are_kept():
    async with Scene().running() as scene:
        async with scene.client() as through, scene.client(stores=False) as straight:
            a, b = await one(through), await one(straight)
            assert through.route_wire_bytes == 0 and straight.route_wire_bytes > 0
        assert a.routed_experts.dtype == np.uint64
        for name in ("token_ids", "loss_mask", "rollout_log_probs", "weight_versions"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
        for node in scene.nodes:
            assert np.array_equal(await read(node, a.routed_experts), b.routed_experts)
        # the engine was asked the same, with its own key
        (body, key), (other, other_key) = scene.asked
        assert {**body, "rid": ""} == {**other, "rid": ""} and key == other_key
        assert key == "Bearer engine-key"
        assert scene.nodes[0].store.wire_bytes > 0


async def test_a_groups_requests_stay_with_one_store_and_groups_take_turns():
    async with Scene().running() as scene, scene.client() as client:
        samples = [await one(client, i, i // 2) for i in range(8)]
        stores = [keys_of(s.routed_experts)[0] % 2 for s in samples]
        assert stores == [0, 0, 1, 1, 0, 0, 1, 1] and scene.held() == [4, 4]


async def test_the_rest_of_a_rollout_is_added_as_tickets():
    async with Scene().running() as scene, scene.client() as client:
        first = await one(client)
        whole = await one(client, resume_from=first)
        assert scene.asked[1][0]["routed_experts_start_len"] == 4
        runs = handles.runs(whole.routed_experts)
        assert [run.stop - run.start for run in runs] == [4, 2]
        assert np.array_equal(await read(scene.nodes[1], whole.routed_experts), rows_of(7))


async def test_a_request_without_the_key_is_refused():
    async with Scene().running() as scene, scene.client() as client:
        sample = await one(client)
        [key] = keys_of(sample.routed_experts)
        for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "the-key"}):
            async with aiohttp.ClientSession(headers=headers) as session:
                for path in ("/rows", "/generate", "/reach", "/nothing"):
                    async with session.post(f"{scene.urls[0]}{path}", data=b"[]") as answer:
                        assert answer.status == 401
                        assert "the-key" not in await answer.text()
        right = {"Authorization": "Bearer the-key"}
        async with aiohttp.ClientSession(headers=right) as session:
            async with session.post(f"{scene.urls[0]}/rows", json=[[key, 1, 3]]) as answer:
                assert answer.status == 200 and await answer.read() == rows_of(5)[1:3].tobytes()


@pytest.mark.parametrize(
    "meta",
    [
        {"routed_experts": "AAAA"},
        {"routed_experts": "not base64!"},
        {"routed_experts": encode_routed_experts(np.full((4, 3, 2), 99, np.uint8))},
        {"routed_experts": None},
        {"completion_tokens": 3},
        {"weight_versions": []},
        {"id": "another"},
        {"routed_experts": encode_routed_experts(np.full((4, 3, 2), 255, np.uint8))},
    ],
)
async def test_a_bad_answer_fails_in_the_same_words_either_way_and_leaves_nothing(meta):
    async with Scene().running() as scene:
        scene.handler = lambda request, body: web.json_response(answer_to(body, **meta))
        words = []
        for stores in (False, True):
            async with scene.client(stores=stores) as client:
                with pytest.raises(BadAnswer, match="sample 0 ") as failure:
                    await one(client)
                # a client has a name of its own
                words.append(re.sub("r3train-[0-9a-f]+-", "", str(failure.value)))
        assert words[0] == words[1]
        release(scene, 0)
        assert scene.held() == [0, 0]


def release(scene: Scene, group_id: int) -> None:
    """End a group, and let two rollouts go by."""
    scene.keys.ended(group_id)
    for _ in range(2):
        for node, keys in zip(scene.nodes, scene.keys.take_released(), strict=True):
            node.store.release(keys)


async def test_a_groups_rows_are_freed_once_it_has_ended():
    async with Scene().running() as scene, scene.client() as client:
        for sample_id in range(4):
            await one(client, sample_id, group_id=sample_id // 2 * 2)
        assert scene.held() == [4, 0]
        release(scene, 2)
        assert scene.held() == [2, 0]
        assert scene.nodes[0].store.held_bytes == 2 * rows_of(5).nbytes


async def test_a_cancelled_requests_rows_are_not_kept_when_they_come():
    gate = asyncio.Event()

    async def wait(_request: web.Request, body: dict) -> web.Response:
        await gate.wait()
        return web.json_response(answer_to(body))

    async with Scene().running() as scene, scene.client() as client:
        scene.handler = wait
        call = asyncio.create_task(one(client))
        while not scene.asked:
            await asyncio.sleep(0.01)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        release(scene, 0)
        scene.handler = lambda request, body: web.json_response(answer_to(body))
        await one(client, 1, group_id=2)
        gate.set()
        await asyncio.sleep(0.3)
        assert scene.held() == [1, 0]


async def test_an_engine_that_is_gone_is_not_a_store_that_is_gone():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{held.getsockname()[1]}"
        async with Scene().running() as scene:
            async with scene.client(addr=nobody) as client:
                with pytest.raises(EngineUnreachable, match="sample 0: cannot connect"):
                    await one(client)

            def died() -> None:
                raise EngineDied("the server ended with exit code 1")

            async with scene.client(addr=nobody, check_alive=died) as client:
                with pytest.raises(EngineDied, match="exit code 1"):
                    await one(client)
            async with scene.client() as client:
                await asyncio.to_thread(scene.nodes[1].close)
                with pytest.raises(RouteStoreError, match=f"route store 1 .*{scene.urls[1]}"):
                    await one(client, group_id=1)
                assert not issubclass(RouteStoreError, EngineError)
                await one(client, group_id=0)


async def test_a_late_answer_of_a_healthy_engine_is_asked_for_again_through_the_store():
    async def late(_request: web.Request, body: dict) -> web.Response:
        await asyncio.sleep(30 if len(scene.asked) == 1 else 0)
        return web.json_response(answer_to(body))

    async with (
        Scene().running() as scene,
        scene.client(request_timeout_s=0.3, max_bad_answers=2) as client,
    ):
        scene.handler = late
        sample = await one(client)
        assert sample.routed_experts.shape == (4, 1, 1) and len(scene.asked) == 2


async def test_a_busy_engine_and_a_compressed_answer_are_asked_again_through_the_store(monkeypatch):
    pauses, yield_to_others = [], asyncio.sleep

    async def sleep(pause_s):
        if pause_s >= 1:
            pauses.append(pause_s)
        await yield_to_others(0)

    monkeypatch.setattr("r3train.engine.client.asyncio.sleep", sleep)
    async with Scene().running() as scene, scene.client(max_bad_answers=2) as client:

        def spoiled(_request: web.Request, body: dict) -> web.Response:
            if len(scene.asked) == 1:
                return web.Response(status=503, headers={"Retry-After": "17"})
            if len(scene.asked) == 2:
                return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})
            return web.json_response(answer_to(body))

        scene.handler = spoiled
        sample = await one(client)
        assert sample.routed_experts.shape == (4, 1, 1)
        assert len(scene.asked) == 3 and pauses == [17]


async def test_a_body_has_the_same_bound_through_the_store():
    async with Scene().running() as scene, scene.client() as client:
        scene.handler = lambda request, body: web.Response(body=b" " * (2 << 20))
        with pytest.raises(BadAnswer, match="the body is longer than 10[0-9]{5} bytes"):
            await one(client)


async def test_the_engines_own_refusal_comes_through():
    async with Scene().running() as scene, scene.client() as client:
        scene.handler = lambda request, body: web.json_response(
            {"error": {"message": "too long"}}, status=400
        )
        with pytest.raises(EngineError, match="sample 0: .*answered 400: too long"):
            await one(client)


async def test_a_store_that_cannot_reach_a_server_is_named_at_start_up():
    async with Scene().running() as scene:
        relay = scene.relay()
        async with scene.client(stores=False) as client:
            await relay.require_reach(client.http)
        async with scene.client(stores=False, addr="127.0.0.1:9") as client:
            with pytest.raises(ValueError, match=r"route store \d .* cannot connect .*sglang.host"):
                await relay.require_reach(client.http)
        await relay.aclose()


async def test_rows_of_every_store_are_fetched_into_place_together():
    async with Scene().running() as scene:
        rng = np.random.default_rng(0)
        kept = [rng.integers(0, 16, (n, 3, 2)).astype(np.uint8) for n in (40, 300_000)]
        for store, rows in enumerate(kept):
            scene.nodes[store].store.put(100 + store, rows)
        mine, other = handles.issue(100, 40), handles.issue(101, 300_000)
        nobodys = np.full((3, 1, 1), HANDLES.missing, HANDLES.dtype)
        wanted = [other[5:299_000], mine[1:], nobodys, other[:5], mine[7:7]]
        missing = np.full((3, 3, 2), 255, np.uint8)
        rows = [kept[1][5:299_000], kept[0][1:], missing, kept[1][:5]]
        for node in scene.nodes:
            got = await read(node, np.concatenate(wanted))
            assert np.array_equal(got, np.concatenate(rows))
        assert scene.nodes[0].fetched_bytes == 299_000 * 6
        assert scene.nodes[1].fetched_bytes == 39 * 6


async def test_leaders_that_do_not_reach_one_another_say_so():
    async with Scene().running() as scene:
        first, second = scene.nodes
        assert await asyncio.to_thread(first.reach) == []
        first.connect([scene.urls[0], "http://127.0.0.1:9"])
        [failure] = await asyncio.to_thread(first.reach)
        assert "route store 1" in failure and "127.0.0.1:9" in failure
        stranger = RouteNode(0, "another-key", ROUTES, "127.0.0.1")
        try:
            second.connect([f"http://127.0.0.1:{stranger.start()}", scene.urls[1]])
            [failure] = await asyncio.to_thread(second.reach)
            assert "route store 0" in failure and "401" in failure
        finally:
            await asyncio.to_thread(stranger.close)


async def test_rows_that_are_not_held_end_the_fetch_with_store_and_key():
    async with Scene().running() as scene:
        scene.nodes[1].store.put(7, rows_of(5))
        for key, rows in ((9, slice(0, 2)), (7, slice(3, 5))):
            with pytest.raises(RouteStoreError, match=f"route store 1 .*key {key} are asked"):
                await read(scene.nodes[0], handles.issue(key, 5)[rows])


def test_a_store_counts_what_it_holds_and_forgets_what_is_released():
    store = RouteStore()
    store.put(1, rows_of(5), wire_bytes=128)
    store.put(2, rows_of(9))
    store.release([1])
    assert (store.held_bytes, store.wire_bytes) == (rows_of(9).nbytes, 128)
    store.release([3, 2, 2])
    store.put(3, rows_of(5))  # released before it came
    assert store.held_bytes == len(store._rows_by_key) == 0
    with pytest.raises(RouteStoreError, match="key 3 are asked, held: nothing"):
        store.rows(3, 0, 1)
