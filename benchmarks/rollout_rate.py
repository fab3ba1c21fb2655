"""What routed experts cost the rollout: tokens a second with them / without, on real servers.

    python -m benchmarks.rollout_rate [--rounds 7] [--requests 64] [--response 128]

A server records routes for every request or for none, so one server cannot be both: two are up at
once, the idle one asleep, and they take turns round by round with the same requests.  A third arm
asks the recording server for no routes, which tells recording from returning.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import ratios, spread, write_result
from r3train.engine.backend import Request, SamplingParams
from r3train.types import RouteShape
from r3train.engine.client import SGLangClient
from r3train.engine.server import SGLangServer
from r3train.tiny import TinyOptions, build

MODEL = TinyOptions(
    num_layers=8, hidden_size=128, head_dim=32, num_experts=32, topk=4, moe_intermediate_size=64
)
WARM_UP = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=64, help="of a round, all at once")
    parser.add_argument("--response", type=int, default=128, help="tokens of each response")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch) / "tiny", MODEL)
        checkpoint = Path(scratch) / "tiny" / "model"
        servers = [
            SGLangServer(checkpoint, Path(scratch) / "plain.log"),
            SGLangServer(checkpoint, Path(scratch) / "records.log", return_routed_experts=True),
        ]
        with ExitStack() as running:
            for server in servers:
                running.callback(server.stop)
                server.start()
            for server in servers:
                server.wait_ready()
            plain, records = (server.addr for server in servers)
            result = asyncio.run(measure(plain, records, arguments))
    write_result(arguments.output, result)


async def measure(plain: str, records: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of every arm, round by round, and the ratios of neighbours."""
    routes = RouteShape(MODEL.num_layers, MODEL.topk, MODEL.num_experts)
    clients = {
        "no routes": SGLangClient([plain], max_concurrency=arguments.requests),
        "recorded, not asked for": SGLangClient([records], max_concurrency=arguments.requests),
        "recorded and returned": SGLangClient(
            [records], routes=routes, max_concurrency=arguments.requests
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(arguments.rounds + WARM_UP):
        names = list(clients)
        for name in names[number % 3 :] + names[: number % 3]:
            rate = await one_round(clients[name], arguments, number)
            if number >= WARM_UP:
                rates[name].append(rate)
    for client in clients.values():
        await client.aclose()
    base = rates["no routes"]
    return {
        "model": f"{MODEL.num_layers} layers x {MODEL.hidden_size}, top {MODEL.topk} of"
        f" {MODEL.num_experts} experts, float32",
        "requests": arguments.requests,
        "response": arguments.response,
        "tokens_per_s": {name: spread(values) for name, values in rates.items()},
        "over_no_routes": {name: ratios(values, base) for name, values in rates.items()},
    }


async def one_round(client: SGLangClient, arguments: argparse.Namespace, number: int) -> float:
    """New tokens a second over all requests of a round; prompts differ from round to round."""
    sampling = SamplingParams(arguments.response, ignore_eos=True)

    def request(i: int) -> Request:
        draw = np.random.default_rng([number, i])
        ids = draw.integers(3, MODEL.vocab_size, 16).astype(np.int32)
        return Request(i, i, str(i), ids, arguments.response, sampling)

    began = time.perf_counter()
    answers = await asyncio.gather(
        *(client.generate(request(i)) for i in range(arguments.requests))
    )
    return sum(len(a.token_ids) for a in answers) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
