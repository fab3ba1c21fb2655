"""Cost of routed experts in the rollout: tokens a CPU second of the server, with them / without.

    python -m benchmarks.rollout_rate [--rounds 7] [--requests 64] [--response 128]

A server records routes for every request or for none, so one server cannot be both: three real ones are
up, the idle ones asleep, and they take turns round by round with the same requests, all of a round at
once, each for ``--response`` tokens.  Two of them record none: their ratio is what two processes of one
kind differ by.  A further arm asks the recording server for no routes, which tells recording from
returning.  The last has the answers of such a round rechecked, one after the other, as --r3-recheck-share
does with a few of them.  CPU time of a server's processes is free of what else the machine does; the
client's decoding is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.measure import flags, in_turns, ratios, spread, spreads, write_result
from benchmarks.tiny_jobs import DTYPE, describe, tiny_model
from r3train.engine.backend import Request, SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.server import SGLangServer
from r3train.verify.tiny import TinyOptions
from r3train.types import RouteShape

MODEL = TinyOptions(
    num_layers=8, hidden_size=128, head_dim=32, num_experts=32, topk=4, moe_intermediate_size=64
)
RETURNED, AGAIN = "recorded and returned", "rechecked"
# three servers share a GPU
ON_GPU = {
    "dtype": DTYPE,
    # kernels of experts that record routes, in those that record none too
    "server_args": (
        {"mem_fraction_static": 0.3, "moe_runner_backend": "triton"}
        if torch.cuda.is_available()
        else {}
    ),
}


def main() -> None:
    arguments = flags(__doc__, rounds=7, requests=64, response=128)
    with tiny_model(MODEL) as tiny, ExitStack() as running:
        plain = SGLangServer(tiny / "model", tiny / "plain.log", **ON_GPU)
        another = SGLangServer(tiny / "model", tiny / "another.log", **ON_GPU)
        records = SGLangServer(
            tiny / "model", tiny / "records.log", return_routed_experts=True, **ON_GPU
        )
        for server in (plain, another, records):
            running.callback(server.stop)
            server.start()
        for server in (plain, another, records):
            server.wait_ready()
        result = measure(plain, another, records, arguments)
    write_result(arguments.output, result)


def measure(
    plain: SGLangServer, another: SGLangServer, records: SGLangServer, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a CPU second of every arm's server, round by round, and the ratios of neighbours."""
    routes = RouteShape(MODEL.num_layers, MODEL.topk, MODEL.num_experts)
    arms = {
        "no routes": (plain, None),
        "no routes, another server": (another, None),
        "recorded, not asked for": (records, None),
        RETURNED: (records, routes),
        AGAIN: (records, routes),
    }
    complete: list[Request] = []  # prompts with their answers, of the last round with routes
    busy: dict[str, list[float]] = {name: [] for name in arms}
    with asyncio.Runner() as runner, ExitStack() as open_clients:

        def arm(name: str, server: SGLangServer, routes: RouteShape | None) -> Callable[[], None]:
            client = SGLangClient([server.addr], routes=routes)
            open_clients.callback(lambda: runner.run(client.aclose()))
            numbers = itertools.count()

            def run() -> None:
                began = cpu_seconds(server)
                if name == AGAIN:
                    runner.run(all_again(client, complete))
                else:
                    answered = runner.run(one_round(client, next(numbers), arguments))
                    complete[:] = answered if name == RETURNED else complete
                busy[name].append(cpu_seconds(server) - began)

            return run

        turns = {name: arm(name, *of) for name, of in arms.items()}
        turns[RETURNED]()  # the first turn to compute again has answers
        busy[RETURNED].clear()
        seconds = in_turns(turns, arguments.rounds)
    tokens = arguments.requests * arguments.response
    busy = {name: each[1:] for name, each in busy.items()}  # warm
    again, seconds_again = busy.pop(AGAIN), seconds.pop(AGAIN)
    rates = {name: [tokens / s for s in each] for name, each in busy.items()}
    return {
        "model": f"{describe(MODEL)} experts, float32",
        "requests": arguments.requests,
        "response": arguments.response,
        "tokens_per_s": spreads({n: [tokens / s for s in each] for n, each in seconds.items()}),
        "tokens_per_cpu_s": spreads(rates),
        "over_no_routes": {n: ratios(each, rates["no routes"]) for n, each in rates.items()},
        "one_again_over_rollout": ratios([s / arguments.requests for s in again], busy[RETURNED]),
        "one_again_s": spread([s / arguments.requests for s in seconds_again]),
    }


def cpu_seconds(server: SGLangServer) -> float:
    """CPU time that a server's processes have taken so far."""
    tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in tree)


async def one_round(
    client: SGLangClient, number: int, arguments: argparse.Namespace
) -> list[Request]:
    """All requests of a round at once, with prompts of its own; returns prompts with their answers."""
    sampling = SamplingParams(arguments.response, ignore_eos=True)

    def request(i: int) -> Request:
        draw = np.random.default_rng([number, i])
        ids = draw.integers(3, MODEL.vocab_size, 16).astype(np.int32)
        return Request(i, i, str(i), ids, arguments.response, sampling)

    requests = [request(i) for i in range(arguments.requests)]
    answers = await asyncio.gather(*map(client.generate, requests))
    assert {len(a.token_ids) for a in answers} == {arguments.response}
    return [
        replace(asked, token_ids=np.concatenate([asked.token_ids, a.token_ids]), max_new_tokens=0)
        for asked, a in zip(requests, answers, strict=True)
    ]


async def all_again(client: SGLangClient, complete: list[Request]) -> None:
    """Have the server compute whole answers again, each alone: no batch makes one cheaper."""
    for request in complete:
        await client.recheck(request, "whole", 0)


if __name__ == "__main__":
    main()
