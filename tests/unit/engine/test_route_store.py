"""Route stores over HTTP: what they keep, what rank 0 gets instead, and how each part fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
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
from r3train.engine.route_node import RouteNode
from r3train.engine.route_relay import RouteLedger, RouteRelay
from r3train.engine.route_store import RouteStore, RouteStoreError
from r3train.types import RouteShape
from r3train.engine.client import SGLangClient
from r3train.routing.wire import encode_routed_experts
from r3train.types import Prompt, RouteRef
from tests import whole_samples
from tests.http_serving import serving

ROUTES = RouteShape(num_layers=3, topk=2, num_experts=16)
PROMPT = Prompt("p", 0, "", np.array([5, 6, 7], dtype=np.int32), None)


def rows_of(sample_tokens: int, start: int = 0) -> np.ndarray:
    """Rows that name their position."""
    rows = np.zeros((sample_tokens - 1 - start, 3, 2), np.uint8)
    rows[:, :, 0] = (np.arange(start, sample_tokens - 1) % 16)[:, None]
    rows[:, :, 1] = 255
    return rows


def answer_to(body: dict, **meta: object) -> dict:
    tokens = len(body["input_ids"]) + 2
    rows = rows_of(tokens, body.get("routed_experts_start_len", 0))
    return {
        "output_ids": [8, 9],
        "meta_info": {
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": 2,
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 8, None], [-0.5, 9, None]],
            "weight_versions": [{"version": "0", "start": 0, "end": 2}],
            "routed_experts": encode_routed_experts(rows),
            **meta,
        },
    }


Handler = Callable[[web.Request, dict], "web.Response | AsyncIterator"]


class Scene:
    """One engine, two stores, rank 0's ledger, and clients with and without the stores."""

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
            self.ledger = RouteLedger(2, self.nodes[0].read, ROUTES)
            try:
                yield self
            finally:
                for node in self.nodes:
                    await asyncio.to_thread(node.close)

    @contextlib.asynccontextmanager
    async def client(self, *, stores: bool = True, addr: str = "", **options) -> AsyncIterator:
        relay = RouteRelay(self.urls, "the-key", self.ledger) if stores else None
        client = SGLangClient(
            [addr or self.addr], routes=ROUTES, relay=relay, api_key="engine-key", **options
        )
        try:
            yield client
        finally:
            await client.aclose()

    def held(self) -> list[int]:
        return [node.store.counts()["held_keys"] for node in self.nodes]


def one(client: SGLangClient, sample_id: int = 0, group_id: int = 0, **kwargs):
    sampling = SamplingParams(kwargs.pop("max_new_tokens", 8))
    return whole_samples.generate(
        client, PROMPT, sampling, sample_id=sample_id, group_id=group_id, **kwargs
    )


async def read(reference: RouteRef) -> np.ndarray:
    return await asyncio.to_thread(reference.read)


async def test_a_sample_by_way_of_a_store_is_the_sample_but_for_its_rows_which_are_kept():
    async with Scene().running() as scene:
        async with scene.client() as through, scene.client(stores=False) as straight:
            a, b = await one(through), await one(straight)
            assert through.route_wire_bytes == 0 and straight.route_wire_bytes > 0
        assert isinstance(a.routed_experts, RouteRef)
        for name in ("token_ids", "loss_mask", "rollout_log_probs", "weight_versions"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
        assert np.array_equal(await read(a.routed_experts), b.routed_experts)
        # the engine was asked the same, with its own key
        (body, key), (other, other_key) = scene.asked
        assert {**body, "rid": ""} == {**other, "rid": ""} and key == other_key
        assert key == "Bearer engine-key"
        assert scene.nodes[0].store.counts()["wire_bytes"] > 0


async def test_a_groups_requests_stay_with_one_store_and_groups_take_turns():
    async with Scene().running() as scene, scene.client() as client:
        samples = [await one(client, i, i // 2) for i in range(8)]
        stores = [s.routed_experts.segments[0].rows.store for s in samples]
        assert stores == [0, 0, 1, 1, 0, 0, 1, 1] and scene.held() == [4, 4]


async def test_the_rest_of_a_rollout_is_added_by_reference():
    async with Scene().running() as scene, scene.client() as client:
        first = await one(client)
        whole = await one(client, resume_from=first)
        assert scene.asked[1][0]["routed_experts_start_len"] == 4
        assert [len(s) for s in whole.routed_experts.segments] == [4, 2]
        assert np.array_equal(await read(whole.routed_experts), rows_of(7))


async def test_a_request_without_the_key_is_refused():
    async with Scene().running() as scene, scene.client() as client:
        sample = await one(client)
        key = sample.routed_experts.segments[0].rows.key
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
                words.append(str(failure.value))
                del failure
        assert words[0] == words[1]
        gc.collect()
        for store, node in enumerate(scene.nodes):
            node.store.release(scene.ledger.take_released(store))
        assert scene.held() == [0, 0]


async def test_what_is_dropped_on_rank_0_is_freed_with_the_next_request():
    async with Scene().running() as scene, scene.client() as client:
        for sample_id in range(5):
            await one(client, sample_id)  # and forgotten at once
            assert scene.held()[0] == 1
        counts = scene.nodes[0].store.counts()
        assert counts["held_bytes"] == counts["peak_bytes"] == rows_of(5).nbytes


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
        del call
        scene.handler = lambda request, body: web.json_response(answer_to(body))
        sample = await one(client, 1)  # tells the store that the first key is not wanted
        gate.set()
        await asyncio.sleep(0.3)
        assert scene.held() == [1, 0] and sample.routed_experts.shape == (4, 3, 2)


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
        assert sample.routed_experts.shape == (4, 3, 2) and len(scene.asked) == 2


async def test_the_engines_own_refusal_comes_through():
    async with Scene().running() as scene, scene.client() as client:
        scene.handler = lambda request, body: web.json_response(
            {"error": {"message": "too long"}}, status=400
        )
        with pytest.raises(EngineError, match="sample 0: .*answered 400: too long"):
            await one(client)


async def test_a_store_that_cannot_reach_a_server_is_named_at_start_up():
    async with Scene().running() as scene:
        relay = RouteRelay(scene.urls, "the-key", scene.ledger)
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
        parts = [(1, 101, 5, 299_000), (0, 100, 1, 40), (1, 101, 0, 5), (0, 100, 7, 7)]
        for node in scene.nodes:
            places = [np.zeros((b - a, 3, 2), np.uint8) for _, _, a, b in parts]
            await asyncio.to_thread(lambda: node.fetch(parts, places).result())
            for (store, _, a, b), place in zip(parts, places):
                assert np.array_equal(place, kept[store][a:b])
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
        place = np.zeros((2, 3, 2), np.uint8)
        for part in ((1, 8, 0, 2), (1, 7, 3, 5)):
            fetched = scene.nodes[0].fetch([part], [place])
            with pytest.raises(RouteStoreError, match=f"route store 1 .*key {part[1]} are asked"):
                await asyncio.wrap_future(fetched)


def test_a_store_counts_what_it_holds_and_forgets_what_is_released():
    store = RouteStore()
    store.put(1, rows_of(5), wire_bytes=128)
    store.put(2, rows_of(9))
    store.release([1])
    counts = store.counts()
    assert counts["held_keys"] == 1 and counts["held_bytes"] == rows_of(9).nbytes
    assert counts["peak_bytes"] == rows_of(9).nbytes + rows_of(5).nbytes
    store.release([3, 2, 2])
    store.put(3, rows_of(5))  # released before it came
    assert store.counts()["held_keys"] == store.counts()["held_bytes"] == 0
    with pytest.raises(RouteStoreError, match="key 3 are asked, held: nothing"):
        store.rows(3, 0, 1)
