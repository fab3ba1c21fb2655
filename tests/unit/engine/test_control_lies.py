"""Servers that say nonsense of themselves: one EngineError with the server and the field, whatever it is."""

import asyncio
import contextlib

import numpy as np
import pytest
from aiohttp import web

from r3train.config.sources import ConfigError
from r3train.engine.backend import EngineError
from r3train.engine.control import EngineControl
from tests.fakes.lies import changed, lies, places
from tests.fakes.server import Fake

INFO = {
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "page_size": 1,
    "max_total_num_tokens": 400,
    "max_req_input_len": 95,
    "enable_return_routed_experts": True,
    "chunked_prefill_size": 512,
    "internal_states": [{"effective_max_running_requests_per_dp": 4}],
}
CHECKSUMS = {"ranks": [{"checksums": {"w": "abc"}}, {"checksums": {"w": "def"}}]}


def scored(body):
    entries = [[None, 5, None], [-0.5, 6, None], [-1.5, 7, None]]
    new_tokens = body.get("sampling_params", {}).get("max_new_tokens", 0)
    return {
        "output_ids": [8] * new_tokens,
        "meta_info": {
            "id": body["rid"],
            "prompt_tokens": 3,
            "completion_tokens": new_tokens,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": new_tokens},
            "input_token_logprobs": entries[body.get("logprob_start_len", 0) :],
            "output_token_logprobs": [[-0.25, 8, None]] * new_tokens,
        },
    }


CALLS = {
    "/server_info": (
        lambda _: INFO,
        ("server_info", "pool_tokens", "text_ends", "update_group_sizes"),
    ),
    "/model_info": (lambda _: {"weight_version": "3"}, ("model_info", "weight_versions")),
    "/weights_checker": (lambda _: CHECKSUMS, ("weight_checksums",)),
    "/generate": (scored, ("score_canary",)),
}


def ask(control, name):
    call = getattr(control, name)
    if name != "score_canary":
        return call()
    text = np.array([5, 6, 7], dtype=np.int32)
    return control.begin(call(text, "key", server=0, routes=None, halves=False))()


@contextlib.asynccontextmanager
async def told(telling):
    """A control, and its server, which tells the next lie at each call."""

    async def server(request, body):
        truth = CALLS[request.path][0](body)
        if not telling:
            return web.json_response(truth)
        return web.json_response(changed(truth, *telling[0]))

    async with Fake(server).running() as addr:
        with EngineControl([addr]) as control:
            yield control, addr


async def test_the_truth_is_understood():
    async with told([]) as (control, _):
        answers = {
            name: await asyncio.to_thread(ask, control, name)
            for _, names in CALLS.values()
            for name in names
        }
    assert answers["pool_tokens"] == 400 and answers["update_group_sizes"] == [2]
    assert answers["text_ends"] == {0: range(99, 100)}
    assert answers["weight_versions"] == {0: "3"}
    assert answers["weight_checksums"] == {0: {"rank 0 w": "abc", "rank 1 w": "def"}}
    assert answers["score_canary"].whole.log_probs.tolist() == [0, -0.5, -1.5]


@pytest.mark.parametrize("path", CALLS)
async def test_nonsense_in_any_place_is_understood_or_an_error_that_names_the_server(path):
    """Nothing but an EngineError, or a ConfigError of a setting; it names the server's address."""
    truth, names = CALLS[path]
    telling, refused, spots = [None], 0, len(list(places(truth({"rid": "r."}))))
    async with told(telling) as (control, addr):
        for spot, lie in lies(truth({"rid": "r."})):
            telling[0] = (spot, lie)
            for name in names:
                try:
                    await asyncio.to_thread(ask, control, name)
                except (EngineError, ConfigError) as error:
                    assert addr in str(error), (name, spot, lie)
                    refused += 1
                except ValueError as error:  # a size that is none of an update group
                    assert addr in str(error) and "need 1" in str(error), (name, spot, lie)
            if path == "/server_info":
                with contextlib.suppress(EngineError, ConfigError):
                    await asyncio.to_thread(control.require_settings, replay=True)
    assert refused > spots * 2


@pytest.mark.parametrize(
    "name, spot, lie, words",
    [
        (
            "pool_tokens",
            ("max_total_num_tokens",),
            -1,
            "max_total_num_tokens of /server_info is -1",
        ),
        ("weight_checksums", ("ranks", 1), {}, r"ranks\[1\] is {}, .* field `checksums`"),
        ("server_info", (), [], r"/server_info answered: the answer is \[\], expected `object`"),
        (
            "score_canary",
            ("meta_info", "id"),
            "s.",
            "is to the request 's.', expected 'r3train-pro",
        ),
    ],
)
async def test_the_field_is_named(name, spot, lie, words):
    async with told([(spot, lie)]) as (control, addr):
        with pytest.raises(EngineError, match=words) as error:
            await asyncio.to_thread(ask, control, name)
        assert addr in str(error.value)


async def test_only_the_whole_reading_of_a_canary_draws_tokens():
    async with told([]) as (control, _):
        text, halves = np.array([5, 6, 7], dtype=np.int32), {"halves": True, "routes": None}
        reading = control.score_canary(text, "key", server=0, new_tokens=2, **halves)
        scores = await asyncio.to_thread(control.begin(reading))
    assert scores.whole.log_probs.tolist() == [0, -0.5, -1.5, -0.25, -0.25]
    assert scores.whole.sampled.tolist() == [8, 8] and scores.whole.rows.shape == (4, 0, 0)
    for half in (scores.early, scores.warm):
        assert half.log_probs.tolist() == [0, -1.5] and len(half.sampled) == 0


async def test_a_server_with_pages_ends_a_text_up_to_two_pages_before_its_room():
    async with told([(("page_size",), 16)]) as (control, _):
        assert await asyncio.to_thread(control.text_ends) == {0: range(69, 100)}
    async with told([(("max_req_input_len",), KeyError)]) as (control, _):
        assert await asyncio.to_thread(control.text_ends) == {0: None}
