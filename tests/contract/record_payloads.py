"""Record real answers of SGLang for the contract tests: ``python tests/contract/record_payloads.py``.

Run it again when SGLang's pin moves, and read the difference: it is what the client must follow.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "e2e"))

from sglang_support import NUM_EXPERTS, NUM_LAYERS, TOPK, make_model  # noqa: E402

from r3train.engine.sglang_http import SGLangHTTP  # noqa: E402
from r3train.engine.refusals import REPLAY_REFUSALS  # noqa: E402
from r3train.engine.server import SGLangServer  # noqa: E402

PROMPT = np.random.default_rng(0).integers(3, 500, 6).tolist()
# They differ from run to run and mean nothing to the client.
_DROPPED = ("e2e_latency", "response_sent_to_client_ts", "id")
_INFO = (
    "version",
    "quantization",
    "tp_size",
    "dp_size",
    "random_seed",
    "weight_version",
    "max_running_requests",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "speculative_num_draft_tokens",
    "moe_a2a_backend",
    "cuda_graph_config",
)


def generate_body(max_new_tokens: int, **more) -> dict:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True}
    return {
        "input_ids": PROMPT,
        "sampling_params": sampling,
        "return_logprob": True,
        "return_routed_experts": True,
    } | more


async def record_info(addr: str) -> dict[str, object]:
    """The settings that a server tells of itself, those that something here reads."""
    http = SGLangHTTP([addr])
    (info,) = await http.ask_all("server_info", method="GET")
    await http.aclose()
    running = "effective_max_running_requests_per_dp"
    states = [{running: state[running]} for state in info["internal_states"]]
    for graphs in info["cuda_graph_config"].values():
        del graphs["bs"]  # a hundred sizes
    return {key: info[key] for key in sorted([*REPLAY_REFUSALS, *_INFO])} | {
        "internal_states": states
    }


async def record(addr: str) -> dict[str, object]:
    http = SGLangHTTP([addr])

    async def ask(body):
        return await http.call(0, "/generate", body, what="record")

    answers = {"length": await ask(generate_body(3)), "cached_prefix": await ask(generate_body(3))}
    stop = generate_body(50)
    stop["sampling_params"] |= {"ignore_eos": False, "stop_token_ids": list(range(3, 250))}
    answers["stop"] = await ask(stop)
    long = asyncio.create_task(ask(generate_body(400, rid="long")))
    await asyncio.sleep(0.3)
    await http.call(0, "/abort_request", {"rid": "long"}, what="record")
    answers["abort"] = await long
    spanning = asyncio.create_task(ask(generate_body(200)))
    await asyncio.sleep(0.2)
    await http.call(0, "/pause_generation", {"mode": "in_place"}, what="record")
    label = {"new_version": "1", "abort_all_requests": False}
    await http.call(0, "/update_weight_version", label, what="record")
    await http.call(0, "/continue_generation", what="record")
    answers["two_versions"] = await spanning
    among_kept = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    kept = generate_body(5, return_sampling_mask=True)
    kept["sampling_params"] |= among_kept
    answers["sampling_mask"] = await ask(kept)
    long = generate_body(400, rid="long-kept", return_sampling_mask=True)
    long["sampling_params"] |= among_kept
    task = asyncio.create_task(ask(long))
    await asyncio.sleep(0.3)
    await http.call(0, "/abort_request", {"rid": "long-kept"}, what="record")
    answers["sampling_mask_abort"] = await task
    answers["no_routes"] = await ask(generate_body(2) | {"return_routed_experts": False})
    answers["prompt_log_probs"] = await ask(generate_body(0, logprob_start_len=0))
    await http.aclose()
    return answers


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", 0)
        log = Path(directory) / "sglang.log"
        with SGLangServer(model, log, return_routed_experts=True) as server:
            answers = asyncio.run(record(server.addr))
            info = asyncio.run(record_info(server.addr))
    for answer in answers.values():
        for key in _DROPPED:
            answer["meta_info"].pop(key, None)
        routes = answer["meta_info"].get("routed_experts")
        if isinstance(routes, memoryview):  # as the client reads them
            answer["meta_info"]["routed_experts"] = str(routes, "ascii")
    payload = {
        "sglang": version("sglang"),
        "num_layers": NUM_LAYERS,
        "topk": TOPK,
        "num_experts": NUM_EXPERTS,
        "prompt": PROMPT,
        "answers": answers,
    }
    target = HERE / "payloads" / "generate.json"
    target.parent.mkdir(exist_ok=True)
    target.with_name("server_info.json").write_text(json.dumps(info, indent=1) + "\n")
    # One answer a line: a difference then shows which one moved.
    head = {key: value for key, value in payload.items() if key != "answers"}
    lines = [f"{json.dumps(name)}: {json.dumps(answers[name])}" for name in sorted(answers)]
    body = ",\n".join(lines)
    text = json.dumps(head)[:-1] + ', "answers": {\n' + body + "\n}}\n"
    assert json.loads(text) == payload
    target.write_text(text)


if __name__ == "__main__":
    main()
