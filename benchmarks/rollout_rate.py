"""Cost of routed experts in the rollout: tokens a second with them / without, on real servers.

    python -m benchmarks.rollout_rate [--rounds 7] [--requests 64] [--response 128]

A server records routes for every request or for none, so one server cannot be both: two are up at
once, the idle one asleep, and they take turns round by round with the same requests, all of a round
at once, each for ``--response`` tokens.  A third arm asks the recording server for no routes, which
tells recording from returning.  A fourth has one answer of the round before computed again meanwhile,
as --r3-audit-share does with its least, one sample a rollout.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.measure import flags, in_turns, ratios, spreads, write_result
from benchmarks.tiny_jobs import describe, tiny_model
from r3train.engine.backend import Request, SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.server import SGLangServer
from r3train.tiny import TinyOptions
from r3train.types import RouteShape

MODEL = TinyOptions(
    num_layers=8, hidden_size=128, head_dim=32, num_experts=32, topk=4, moe_intermediate_size=64
)
AUDITED = "returned, one computed again"


def main() -> None:
    arguments = flags(__doc__, rounds=7, requests=64, response=128)
    with tiny_model(MODEL) as tiny, ExitStack() as running:
        plain = SGLangServer(tiny / "model", tiny / "plain.log")
        records = SGLangServer(tiny / "model", tiny / "records.log", return_routed_experts=True)
        for server in (plain, records):
            running.callback(server.stop)
            server.start()
        for server in (plain, records):
            server.wait_ready()
        result = measure(plain.addr, records.addr, arguments)
    write_result(arguments.output, result)


def measure(plain: str, records: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of every arm, round by round, and the ratios of neighbours."""
    routes = RouteShape(MODEL.num_layers, MODEL.topk, MODEL.num_experts)
    limit = {"max_concurrency": arguments.requests}
    clients = {
        "no routes": SGLangClient([plain], **limit),
        "recorded, not asked for": SGLangClient([records], **limit),
        "recorded and returned": SGLangClient([records], routes=routes, **limit),
        AUDITED: SGLangClient([records], routes=routes, **limit),
    }
    with asyncio.Runner() as runner:

        def arm(client: SGLangClient) -> Callable[[], None]:
            numbers = iter(range(arguments.rounds + 1))
            last = [] if client is clients[AUDITED] else None
            return lambda: runner.run(one_round(client, next(numbers), arguments, last))

        seconds = in_turns({n: arm(client) for n, client in clients.items()}, arguments.rounds)
        for client in clients.values():
            runner.run(client.aclose())
    tokens = arguments.requests * arguments.response
    rates = {name: [tokens / s for s in values] for name, values in seconds.items()}
    return {
        "model": f"{describe(MODEL)} experts, float32",
        "requests": arguments.requests,
        "response": arguments.response,
        "tokens_per_s": spreads(rates),
        "over_no_routes": {n: ratios(each, rates["no routes"]) for n, each in rates.items()},
        "audited_over_returned": ratios(rates[AUDITED], rates["recorded and returned"]),
    }


async def one_round(
    client: SGLangClient,
    number: int,
    arguments: argparse.Namespace,
    last: list[Request] | None = None,
) -> None:
    """All requests of a round; prompts differ from round to round.

    last: an answer of the round before, to be computed again beside them; one of this round replaces
    it.
    """
    sampling = SamplingParams(arguments.response, ignore_eos=True)

    def request(i: int) -> Request:
        draw = np.random.default_rng([number, i])
        ids = draw.integers(3, MODEL.vocab_size, 16).astype(np.int32)
        return Request(i, i, str(i), ids, arguments.response, sampling)

    audit = [client.rescore(complete, "whole", 0) for complete in last or ()]
    requests = [request(i) for i in range(arguments.requests)]
    answers = await asyncio.gather(*map(client.generate, requests), *audit)
    answers = answers[: len(requests)]
    assert {len(a.token_ids) for a in answers} == {arguments.response}
    if last is not None:
        tokens = np.concatenate([requests[0].token_ids, answers[0].token_ids])
        last[:] = [replace(requests[0], token_ids=tokens, max_new_tokens=0)]


if __name__ == "__main__":
    main()
