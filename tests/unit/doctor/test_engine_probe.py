"""The probe of a server: what must have happened and did not is a finding, so are wrong answers.

The fake answers as SGLang does, of a model whose log-probs and routes are known for every text; each
test takes away one thing that the probe is there to see.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from aiohttp import web

from r3train.doctor import engine_probe
from r3train.doctor.engine_probe import _ANSWER, draw_situations
from r3train.doctor.finding import OK, PROBLEM, Finding
from r3train.doctor.judgement import FLOAT32, Expected, judge_answers
from r3train.engine.backend import EngineError
from r3train.types import RouteShape
from tests.wire_encoding import encode_routed_experts
from tests.unit.fake_engine_server import Fake

LAYERS, TOPK, EXPERTS = 3, 2, 8
CONTEXT = 256
SHORT = np.arange(24, dtype=np.int32)
LONG = np.arange(100, 220, dtype=np.int32)


def log_probs(ids: np.ndarray) -> np.ndarray:
    """float32[T]; of a token after the one before it."""
    return np.concatenate([[0.0], -((ids[1:] * 7 + ids[:-1]) % 11) / 10 - 0.1]).astype(np.float32)


def routes(ids: np.ndarray) -> np.ndarray:
    """uint8[T-1, L, K]; of every token that was an input."""
    first = (ids[:-1, None] + np.arange(LAYERS)) % EXPERTS
    return np.stack([first, (first + 3) % EXPERTS], axis=-1).astype(np.uint8)


def reference(ids: np.ndarray) -> Expected:
    """The model's own forward; a chosen expert's logit is 1, another's 0."""
    logits = np.zeros((len(ids) - 1, LAYERS, EXPERTS), dtype=np.float32)
    np.put_along_axis(logits, routes(ids).astype(np.int64), 1, axis=-1)
    return Expected(log_probs(ids), logits)


class Engine:
    """A server of that model, with a cache, and with requests that run until they are aborted."""

    def __init__(self, **faults):
        self.faults = faults
        self.seen: list[list[int]] = []
        self.aborts: dict[str, asyncio.Event] = {}
        self.fake = Fake(self.handle)

    async def handle(self, request, body):
        if request.path == "/server_info":
            return web.json_response({"chunked_prefill_size": 64, **self.faults.get("info", {})})
        if request.path == "/abort_request":
            if not self.faults.get("deaf"):
                self.aborts.setdefault(body["rid"], asyncio.Event()).set()
            return web.json_response({"success": True})
        return web.json_response(await self.generate(body))

    async def generate(self, body):
        ids, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        cached = max((shared(ids, before) for before in self.seen), default=0)
        self.seen.append(ids)
        count, reason = wanted, {"type": "length", "length": wanted}
        if wanted != _ANSWER:  # the one that is to be aborted: a token each 10 ms, from begins_s on
            aborted = self.aborts.setdefault(body["rid"], asyncio.Event())
            began = asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(aborted.wait(), self.faults.get("takes_s", 30.0))
                ran = asyncio.get_running_loop().time() - began
                count = max(0, min(wanted, int((ran - self.faults.get("begins_s", 0.0)) / 0.01)))
                reason = {"type": "abort", "message": "Aborted"}
            except TimeoutError:
                pass
        output = [(ids[-1] + 5 * i) % 250 for i in range(count)]
        return self.answer(ids, output, reason, cached, body["rid"])

    def answer(self, ids, output, reason, cached, rid):
        text = np.asarray(ids + output)
        values = log_probs(text)[len(ids) :]
        if len(self.seen) == self.faults.get("wrong_log_prob_in"):
            values = values - 0.5
        rows = routes(text)
        if len(self.seen) == self.faults.get("wrong_routes_in"):
            rows = np.roll(rows, 1, axis=0)
        if len(self.seen) == self.faults.get("wrong_row", (0, 0))[0]:
            rows[self.faults["wrong_row"][1]] = (rows[self.faults["wrong_row"][1]] + 1) % EXPERTS
        if len(self.seen) == self.faults.get("shifted_from", (0, 0))[0]:
            rows[self.faults["shifted_from"][1] :] = rows[self.faults["shifted_from"][1] - 1 : -1]
        meta = {
            "id": rid,
            "prompt_tokens": len(ids),
            "completion_tokens": len(output),
            "cached_tokens": 0 if self.faults.get("no_cache") else cached,
            "finish_reason": reason,
            "output_token_logprobs": [[float(v), t, None] for v, t in zip(values, output)],
            "num_retractions": 0,
            "weight_versions": [{"version": "0", "start": 0, "end": len(output)}],
            "routed_experts": encode_routed_experts(rows[:, : self.faults.get("layers", LAYERS)]),
        }
        for key in self.faults.get("without", ()):
            del meta[key]
        return {"output_ids": output, "meta_info": meta}


def shared(a: list[int], b: list[int]) -> int:
    """Tokens of a common beginning; the last token of a prompt is always computed."""
    same = [x == y for x, y in zip(a, b)]
    return min(same.index(False) if False in same else len(same), len(a) - 1)


async def probe(long: np.ndarray = LONG, **faults) -> list[Finding]:
    engine = Engine(**faults)
    async with engine.fake.running() as addr:
        expected = RouteShape(LAYERS, TOPK, EXPERTS)
        sampled = await draw_situations(addr, expected, (SHORT, long), context=CONTEXT)
    layers = range(1, LAYERS + 1)
    actor = {what: log_probs(answer.token_ids) for what, answer in sampled.sampled.items()}
    for what in faults.get("wrong_actor_in", ()):
        actor[what] = actor[what] - 0.25
    return list(judge_answers({}, sampled, reference, actor, moe_layers=layers, tolerance=FLOAT32))


def wrong(findings: list[Finding]) -> list[str]:
    found = [f for f in findings if f.level == PROBLEM]
    assert all(f.remedy for f in found)
    return [f.text for f in found]


async def test_a_good_server_is_quiet_and_every_situation_happened():
    findings = await probe()
    assert {f.level for f in findings} == {OK}, wrong(findings)
    situations = {f.text.split(":")[0].split(", ")[0] for f in findings}
    assert len(situations) == 5 and len(findings) == 15
    assert {"after a prefix-cache hit", "an aborted answer", "after an abort"} < situations


async def test_a_prefix_cache_hit_that_did_not_happen_is_found():
    (only,) = wrong(await probe(no_cache=True))
    assert "a prefix-cache hit did not happen: cached_tokens is 0 for 120 tokens" in only
    found = wrong(await probe(without=["cached_tokens"]))
    assert len(found) == 5 and all("cached_tokens is None, expected 0 to" in f for f in found)
    # where it was switched off there is none to probe, which is no fault of the server
    assert not wrong(await probe(no_cache=True, info={"disable_radix_cache": True}))


@pytest.mark.parametrize("chunk", [8192, 120, -1, None, "64"])
async def test_a_prefill_in_chunks_that_did_not_happen_is_found(chunk):
    (only,) = wrong(await probe(info={"chunked_prefill_size": chunk}))
    assert "a prefill in chunks did not happen: 120 of 120 tokens were computed" in only


async def test_a_long_prompt_that_was_cached_already_was_not_prefilled_in_chunks():
    long = np.concatenate([SHORT, LONG[:60]])  # 84 tokens, of which 24 come from the cache
    (only,) = wrong(await probe(long=long))
    assert "60 of 84 tokens were computed" in only


async def test_an_abort_is_found_missing_on_a_server_that_is_deaf_to_it(monkeypatch):
    monkeypatch.setattr(engine_probe, "_ABORT_TRIES", 2)
    (only,) = wrong(await probe(deaf=True, takes_s=0.3))
    assert "no request could be aborted while it generated" in only
    assert "'length' after" in only


async def test_an_abort_before_the_first_token_does_not_count(monkeypatch):
    """A slow server: the first aborts meet requests that have not begun."""
    engine_findings = await probe(begins_s=0.7)
    assert not wrong(engine_findings)
    monkeypatch.setattr(engine_probe, "_ABORT_TRIES", 2)
    (only,) = wrong(await probe(begins_s=5.0))
    assert "'abort' after 0 tokens, 'abort' after 0 tokens" in only


async def test_an_abort_that_comes_after_the_end_does_not_count(monkeypatch):
    """A fast server: the first request is finished before it is aborted."""
    assert not wrong(await probe(takes_s=0.08))
    monkeypatch.setattr(engine_probe, "_ABORT_TRIES", 2)
    (only,) = wrong(await probe(takes_s=0.0))
    assert "'length' after 195 tokens" in only


@pytest.mark.parametrize(
    "faults, text",
    [
        ({"without": ["routed_experts"]}, "carries no routed_experts"),
        ({"layers": 2}, "routed_experts holds"),
    ],
)
async def test_routes_that_miss_or_have_a_wrong_shape_are_found_in_every_situation(faults, text):
    found = wrong(await probe(**faults))
    assert len(found) == 5 and all(text in one for one in found)


@pytest.mark.parametrize(
    "number, situation",
    [
        (1, "a fresh prompt"),
        (2, "a prompt of 120 tokens in chunks"),
        (3, "after a prefix-cache hit"),
        (5, "after an abort"),
    ],
)
async def test_wrong_log_probs_and_routes_are_found_where_they_are(number, situation):
    # aborted at the first try: the fourth request
    hf, actor = wrong(await probe(wrong_log_prob_in=number))
    assert hf.startswith(f"{situation}, against HF: largest gap of log-probs 0.5")
    assert actor.startswith(f"{situation}, against the actor: largest gap of log-probs 0.5")
    (only,) = wrong(await probe(wrong_routes_in=number))
    assert only.startswith(f"{situation}: ") and "of rows are the reference's" in only


HIT, CHUNKS = "after a prefix-cache hit: ", "a prompt of 120 tokens in chunks: "


@pytest.mark.parametrize(
    "faults, start",
    [
        # 1 of 127 rows, at the cache's boundary or in the answer: a share of them would be 99.2%
        *(({"wrong_row": (3, row)}, HIT) for row in (118, 119, 120, 124, -1)),
        *(({"wrong_row": (2, row)}, CHUNKS) for row in (1, 63, 64, 100)),
        ({"wrong_routes_in": 4}, "an aborted answer: "),
        ({"shifted_from": (5, 60)}, "after an abort: "),
        ({"wrong_actor_in": ["after an abort"]}, "after an abort, against the actor: largest gap"),
    ],
)
async def test_one_fault_is_one_finding_in_its_situation(faults, start):
    (only,) = wrong(await probe(**faults))
    assert only.startswith(start)


async def test_a_server_that_does_not_say_how_it_runs_is_found():
    engine = Engine()

    async def handle(request, body):
        if request.path == "/server_info":
            return web.json_response({"error": "gone"}, status=404)
        return await Engine.handle(engine, request, body)

    engine.fake.handler = handle
    async with engine.fake.running() as addr:
        with pytest.raises(EngineError, match="server_info: .* answered 404: gone"):
            await draw_situations(addr, None, (SHORT, LONG), context=CONTEXT)
