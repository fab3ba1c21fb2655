"""CPU time of rank 0 for a sample: from a server's answer to the messages of all ranks.

    python -m benchmarks.rank0_rate [--rounds 4] [--tokens 8192 32768] [--layers 48] [--topk 8]

A process stands for SGLang and answers each request with ``--tokens`` tokens and their routes, as int32 (SGLang
itself) and as ids of a byte (a server of ours); they take turns.  The production client asks, reads, checks and decodes; the
answer becomes a sample, gets the checksums of its evidence, and is packed, cut and written into a message for its
data-parallel rank; and for the 8 ranks of a replica of TP 2 x PP 4.  One process does all of it, so that 1 over the seconds of all
but the last part is the most samples a second that rank 0 takes in, if it does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import pybase64

from benchmarks.measure import flags, ratios, spread, write_result
from benchmarks.samples import route_payload

PROMPT, VOCAB, EXPERTS = 512, 150_000, 128
WARM_UP = 1
PARTS = ("answer", "sample", "checksums", "message of one rank")
LARGE = "messages of 8 ranks"


def main() -> None:
    arguments = flags(__doc__, rounds=4, tokens=[8192, 32768], layers=48, topk=8)
    sizes = [{"tokens": tokens, **measure(arguments, tokens)} for tokens in arguments.tokens]
    of_routes = {"layers": arguments.layers, "topk": arguments.topk}
    write_result(arguments.output, {**of_routes, "parts": [*PARTS, LARGE], "sizes": sizes})


def measure(a: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Milliseconds of CPU time of each part, by what the server sends."""
    seconds: dict[str, dict[str, list[float]]] = {}
    arms = ("int32", "short", "short again")
    with answering(tokens, a.layers, a.topk) as addrs, asyncio.Runner() as runner:
        rank_zero = RankZero(runner, a.layers, a.topk, tokens)
        rank_zero.sample(addrs["int32"], 0)  # imports
        gc.collect()
        gc.freeze()  # as rank 0 does once all is imported
        for number in range(WARM_UP + a.rounds):
            for arm in arms:
                parts = rank_zero.sample(addrs[arm.split()[0]], number)
                for part, took in parts.items() if number >= WARM_UP else ():
                    seconds.setdefault(arm, {}).setdefault(part, []).append(took)
    whole = {arm: [sum(of) for of in zip(*(seconds[arm][p] for p in PARTS))] for arm in arms}
    return {
        "ms": {
            arm: {part: spread([1e3 * s for s in of]) for part, of in seconds[arm].items()}
            for arm in arms
        },
        "samples_a_second": {arm: spread([1 / s for s in of]) for arm, of in whole.items()},
        "short_over_int32": ratios(whole["short"], whole["int32"]),
        "again_over_short": ratios(whole["short again"], whole["short"]),
    }


class RankZero:
    """The work of rank 0 on one sample after another, by the production code."""

    def __init__(self, runner: asyncio.Runner, layers: int, topk: int, tokens: int) -> None:
        from r3train.engine.backend import SamplingParams
        from r3train.types import Prompt, RankTopology, RouteShape

        self.runner, self.tokens = runner, tokens
        self.routes = RouteShape(layers, topk, EXPERTS)
        self.prompt = Prompt("p", 0, "", np.arange(PROMPT, dtype=np.int32), None)
        self.sampling = SamplingParams(tokens - PROMPT, ignore_eos=True)
        share, all_layers = layers // 4, tuple(range(1, layers + 1))
        self.places = [RankTopology(moe_layer_numbers=(all_layers,))] + [
            RankTopology(
                **dict(tp_rank=t, tp_size=2, pp_rank=p, pp_size=4, sequence_parallel=True),
                moe_layer_numbers=(all_layers[p * share : (p + 1) * share],),
            )
            for p in range(4)
            for t in range(2)
        ]

    def sample(self, addr: str, number: int) -> dict[str, float]:
        """Seconds of CPU time of each part of one sample's way."""
        from r3train.generation import stitch
        from r3train.layout.microbatch import build_microbatch, slice_microbatch, Streams
        from r3train.loop.distribute import pack_records
        from r3train.loop.recorded import decoded_rows, Recorded
        from r3train.types import TrainSample

        marks = [time.process_time()]
        self.runner.run(self.ask(addr, number))
        answer = self.answer
        marks.append(time.process_time())
        begun = stitch.begin(self.prompt, sample_id=number, group_id=number)
        sample = stitch.finished(stitch.extend(begun, answer))
        assert sample.num_tokens == self.tokens
        marks.append(time.process_time())
        recorded = Recorded(1, range(1, self.routes.num_layers + 1))
        recorded.add(0, [(number, rows, first) for first, rows in decoded_rows(sample)])
        marks.append(time.process_time())
        trained = TrainSample(sample, 0.0, np.ones(self.tokens, np.float32))
        for places in (self.places[:1], self.places[1:]):
            tp = places[0].tp_size
            whole = build_microbatch(0, [trained], Streams(self.routes), cp_size=1, tp_size=tp)
            for place in places:
                pack_records([slice_microbatch(whole, place)])
            marks.append(time.process_time())
        return dict(zip((*PARTS, LARGE), np.diff(marks).tolist(), strict=True))

    async def ask(self, addr: str, number: int) -> None:
        """Ask; the answer is no result of the task, whose arrays the runner would write out for 8 ms."""
        from r3train.engine.client import SGLangClient
        from r3train.generation import stitch

        client = SGLangClient([addr], routes=self.routes, vocab_size=VOCAB)
        begun = stitch.begin(self.prompt, sample_id=number, group_id=number)
        try:
            self.answer = await client.generate(stitch.next_request(begun, self.sampling))
        finally:
            await client.aclose()


@contextmanager
def answering(tokens: int, layers: int, topk: int) -> Iterator[dict[str, str]]:
    """{int32 or short: host:port} of a process that stands for SGLang."""
    context = multiprocessing.get_context("spawn")
    ports = context.SimpleQueue()
    server = context.Process(target=_answer, args=(tokens, layers, topk, ports), daemon=True)
    server.start()
    try:
        yield {arm: f"127.0.0.1:{port}" for arm, port in ports.get().items()}
    finally:
        server.kill()
        server.join()


def _answer(tokens: int, layers: int, topk: int, ports: Any) -> None:
    from aiohttp import web

    from r3train.routing.wire import shortened

    text = route_payload(tokens - 1, layers, topk, EXPERTS).decode()
    ids = np.frombuffer(pybase64.b64decode(text), "<i4").reshape(-1, layers, topk)
    sent = tokens - PROMPT
    output = np.random.default_rng(0).integers(0, VOCAB, sent).tolist()
    meta = {
        "finish_reason": {"type": "length", "length": sent},
        "prompt_tokens": PROMPT,
        "completion_tokens": sent,
        "cached_tokens": 0,
        "num_retractions": 0,
        "weight_versions": [{"start": 0, "end": sent, "version": "0"}],
        "output_token_logprobs": [[-1 - i / sent, token, None] for i, token in enumerate(output)],
    }
    bodies = {
        arm: orjson.dumps({"output_ids": output, "meta_info": {**meta, "routed_experts": routes}})
        for arm, routes in (("int32", text), ("short", shortened(ids)))
    }

    async def serve() -> None:
        found = {}
        for arm, body in bodies.items():

            async def reply(request: web.Request, body: bytes = body) -> web.Response:
                rid = orjson.dumps((await request.json())["rid"])
                named = body.replace(b'"meta_info":{', b'"meta_info":{"id":' + rid + b",", 1)
                return web.Response(body=named, content_type="application/json")

            app = web.Application(client_max_size=1 << 30)
            app.router.add_post("/generate", reply)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            found[arm] = runner.addresses[0][1]
        ports.put(found)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
