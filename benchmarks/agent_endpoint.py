"""Cost of the chat endpoint in rank 0: CPU time of a call against a turn of an environment, and memory.

    python -m benchmarks.agent_endpoint [--rounds 5] [--sessions 4] [--memory-sessions 200]

The engine is a stub: answers of one text, with rows of 48 layers x 8 experts, at once.  Agents are a process of
their own, which sends the whole history with every call, as harnesses do; its time is not counted.  Both sides
make the same tokens: answers, and messages of tools between them, by the same chat template.  The endpoint a second time
shows the noise.  CPU time of rank 0's process is free of what else the machine does.

Then many sessions at once, each as long as the longest: their memory over that of their rows, and the longest time
that one callback kept the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import flags, in_turns, ratios, spread, spreads, write_result

# 48 layers x top 8 of 128, as Qwen3-30B-A3B
ROWS = (48, 8)
FIRST_WORDS, OBSERVED_WORDS = 280, 175
END, CALL, CLOSE = "<|im_end|>", "<tool_call>", "</tool_call>"
SPECIAL = ["<|im_start|>", END, CALL, CLOSE, "<think>", "</think>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    '{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words(count: int, seed: int) -> str:
    """Words of this file: text that a tokenizer cuts as it does any other."""
    known = Path(__file__).read_text(encoding="utf-8").split()
    return " ".join(known[i] for i in np.random.default_rng(seed).integers(0, len(known), count))


def tools() -> list[dict[str, Any]]:
    """Six tools of thirty words each."""
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    return [
        {
            "type": "function",
            "function": {"name": f"tool{i}", "description": words(30, i), "parameters": schema},
        }
        for i in range(6)
    ]


def first_messages() -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": words(FIRST_WORDS, 100)},
        {"role": "user", "content": words(FIRST_WORDS // 2, 101)},
    ]


def observation(turn: int) -> str:
    return words(OBSERVED_WORDS, 200 + turn % 32)


# -- the agents: a process of their own --------------------------------------------------------


def agents() -> None:
    """Play sessions: a line of JSON on stdin has base_url, keys and turns; a line on stdout says that they ended."""
    for line in sys.stdin:
        asyncio.run(_play(**json.loads(line)))
        print("ended", flush=True)


async def _play(base_url: str, keys: list[str], turns: int, at_once: int) -> None:
    import aiohttp
    import orjson

    schemas, observed = tools(), [observation(turn) for turn in range(32)]
    slots = asyncio.Semaphore(at_once)

    async def one(key: str) -> None:
        messages = first_messages()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        for turn in range(turns):
            async with slots:
                body = orjson.dumps({"model": "r3", "messages": messages, "tools": schemas})
                async with http.post(
                    f"{base_url}/chat/completions", headers=headers, data=body
                ) as response:
                    answer = orjson.loads(await response.read())
                    assert response.status == 200, answer
            [choice] = answer["choices"]
            messages.append(
                {k: v for k, v in choice["message"].items() if k != "reasoning_content"}
            )
            [call] = choice["message"]["tool_calls"]
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": observed[turn % 32]}
            )

    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=unlimited
    ) as http:
        await asyncio.gather(*map(one, keys))


@contextlib.contextmanager
def harnesses() -> Iterator[Callable[..., Any]]:
    """The agents' process; yields what has them play and waits for their end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.agent_endpoint", "--agents"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    async def play(**how: Any) -> None:
        process.stdin.write(json.dumps(how) + "\n")
        process.stdin.flush()
        ended = await asyncio.to_thread(process.stdout.readline)
        assert ended == "ended\n", "the agents' process has failed"

    try:
        yield play
    finally:
        process.stdin.close()
        process.wait()


# -- rank 0's side -----------------------------------------------------------------------------


@dataclass(eq=False)
class Parts:
    """All that both sides share: the tokenizer with its template, and what the stub answers."""

    tokenizer: Any

    def __post_init__(self) -> None:
        from r3train.config.data_settings import DataSection
        from r3train.data.templates import ChatTemplate

        self.chat = ChatTemplate(self.tokenizer, DataSection(prompt_data="p.jsonl"))
        call = json.dumps({"name": "tool1", "arguments": {"command": words(18, 7)}})
        text = f"<think>{words(24, 5)}</think>{words(14, 6)}\n{CALL}\n{call}\n{CLOSE}"
        self.own = np.array(self.chat.encode(text + END), np.int32)

    async def generate(self, sample: Any, limit: int | None = None) -> Any:
        """One answer, at once."""
        from r3train.engine.backend import Segment
        from r3train.generation import stitch

        own, known = self.own, stitch.rows_known(sample)
        await asyncio.sleep(0)
        zeros = np.zeros(len(own))
        segment = Segment(
            token_ids=own,
            log_probs=zeros.astype(np.float32),
            weight_versions=zeros.astype(np.int32),
            rows=np.full((sample.num_tokens + len(own) - 1 - known, *ROWS), 1, np.uint8),
            rows_start=known,
            finish_reason="stop",
        )
        return stitch.extend(sample, segment)


def made_tokenizer() -> Any:
    """A byte-level tokenizer of 16,000 tokens, trained on this project's own text, with a chat template."""
    from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers
    from transformers import PreTrainedTokenizerFast

    root = Path(__file__).resolve().parents[1]
    files = sorted([*root.glob("docs/**/*.md"), *root.glob("r3train/**/*.py")])
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=16000, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator((f.read_text(encoding="utf-8") for f in files), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=trained)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = TEMPLATE
    return made


async def endpoint(
    parts: Parts, read: Any, play: Any, *, sessions: int, turns: int, at_once: int
) -> dict[str, float]:
    """Sessions through the chat endpoint, all alive until the last call of all; facts of their end."""
    from r3train.agents.http import ChatEndpoint
    from r3train.data.templates import SessionTemplate
    from r3train.engine.backend import SamplingParams
    from r3train.generation.sessions import Session, SessionSettings
    from r3train.types import Prompt

    settings = SessionSettings(
        template=SessionTemplate.of(parts.chat),
        read=read,
        decode=lambda ids: parts.tokenizer.decode(ids, skip_special_tokens=False),
        sampling=SamplingParams(10**6),
        max_context_len=10**6,
        history="append",
        max_calls=turns,
        max_answer_len=None,
    )

    def fail(error: BaseException) -> None:
        raise error

    prompt = Prompt("p", 0, "", np.zeros(1, np.int32), None)
    endpoint = ChatEndpoint()
    try:
        opened = [
            Session(settings, parts.generate, prompt, i * turns, fail=fail) for i in range(sessions)
        ]
        accesses = [await endpoint.open(session.answer) for session in opened]
        keys = [access.key for access in accesses]
        await play(base_url=accesses[0].base_url, keys=keys, turns=turns, at_once=at_once)
        tokens, ends = 0, []
        alive_mb = resident_mb()
        samples = []
        for key, session in zip(keys, opened, strict=True):
            await endpoint.close(key)
            samples += await asyncio.to_thread(timed_samples, session, ends)
        tokens = sum(sample.num_tokens for sample in samples)
        assert len(samples) == sessions and all(len(s.calls) == turns for s in opened)
        rows_mb = sum(sample.routed_experts.nbytes for sample in samples) / 2**20
        return {
            "tokens": tokens / sessions,
            "rows_mb": rows_mb,
            "alive_mb": alive_mb,
            "ended_mb": resident_mb(),
            "end_ms": 1e3 * max(ends),
        }
    finally:
        await endpoint.stop()


async def environment(parts: Parts, *, sessions: int, turns: int) -> float:
    """The same answers and messages as episodes of an environment; returns the tokens of one."""
    from r3train.config.rollout_settings import RolloutSection
    from r3train.engine.backend import SamplingParams
    from r3train.environments.environment import StepResult
    from r3train.generation import stitch
    from r3train.generation.conversation import Conversation
    from r3train.generation.environment_loop import EnvironmentLoop
    from r3train.types import Prompt

    class Tools:
        async def step(self, turn: Any) -> StepResult:
            said = [{"role": "tool", "content": observation(turn.index)}]
            return StepResult(said, done=turn.index + 1 == turns, reward=0.0)

    rollout = RolloutSection(
        num_rollout=1,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        rollout_max_response_len=10**6,
        environment="benchmarks:Tools",
        environment_max_turns=turns,
        environment_samples="trajectory",
    )
    chat = replace(parts.chat, tools=tools())
    episode = Conversation(
        Tools,
        rollout,
        EnvironmentLoop(),
        encode=chat.encode,
        decode=lambda ids: parts.tokenizer.decode(ids, skip_special_tokens=False),
        reply=chat.reply,
    )
    ids = np.array(chat.encode(chat.text(first_messages())), np.int32)

    async def generate(sample: Any = None, limit: int | None = None) -> Any:
        return await parts.generate(sample or stitch.begin(prompt, sample_id=0, group_id=0), limit)

    prompt = Prompt("p", 0, "", ids, None)
    made = await asyncio.gather(
        *(
            episode(generate, prompt, sampling=SamplingParams(10**6), sample_id=i)
            for i in range(sessions)
        )
    )
    return sum(sample.num_tokens for samples, _ in made for sample in samples) / sessions


def timed_samples(session: Any, ends: list[float]) -> list[Any]:
    """The samples of a session, made in a thread as an agent's episode does; adds its CPU time."""
    began = time.thread_time()
    samples = session.samples()
    ends.append(time.thread_time() - began)
    return samples


def resident_mb() -> float:
    fields = Path("/proc/self/statm").read_text(encoding="utf-8").split()
    return int(fields[1]) * resource.getpagesize() / 2**20


@contextlib.contextmanager
def longest_callback() -> Iterator[dict[str, Any]]:
    """The longest CPU time of one callback of the event loop, and its name; the longest garbage collection."""
    found: dict[str, Any] = {"ms": 0.0, "of": "", "gc_ms": 0.0, "collections": 0}
    began_gc = 0.0

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal began_gc
        if phase == "start":
            began_gc = time.thread_time()
        else:
            found["gc_ms"] = max(found["gc_ms"], 1e3 * (time.thread_time() - began_gc))
            found["collections"] += info["generation"] == 2

    run = asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        took = 1e3 * (time.thread_time() - began)
        if took > found["ms"]:
            found.update(ms=took, of=_name(handle))

    asyncio.events.Handle._run = timed
    gc.callbacks.append(collected)
    try:
        yield found
    finally:
        gc.callbacks.remove(collected)
        asyncio.events.Handle._run = run


def _name(handle: asyncio.Handle) -> str:
    task = getattr(handle._callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return getattr(task.get_coro(), "__qualname__", "a task")
    return getattr(handle._callback, "__qualname__", str(handle._callback))


# -- measurements ------------------------------------------------------------------------------


def measure_calls(parts: Parts, read: Any, play: Any, turns: int, arguments: Any) -> dict[str, Any]:
    """CPU time of a call and of a turn, in rounds."""
    sessions = arguments.sessions
    how = {"sessions": sessions, "turns": turns, "at_once": sessions}
    facts: dict[str, float] = {}

    def through() -> None:
        facts.update(asyncio.run(endpoint(parts, read, play, **how)))

    def inside() -> None:
        facts["in_environment"] = asyncio.run(environment(parts, sessions=sessions, turns=turns))

    arms = {"environment": inside, "endpoint": through, "endpoint, again": through}
    seconds = in_turns(arms, arguments.rounds, clock=time.process_time)
    each = {name: [1e3 * s / (sessions * turns) for s in of] for name, of in seconds.items()}
    more = [a - b for a, b in zip(each["endpoint"], each["environment"], strict=True)]
    return {
        "turns": turns,
        "tokens": facts["tokens"],
        "tokens_in_environment": facts["in_environment"],
        "cpu_ms": spreads(each),
        "more_ms": spread(more),
        "over_environment": ratios(each["endpoint"], each["environment"]),
        "again_over_endpoint": ratios(each["endpoint, again"], each["endpoint"]),
    }


def measure_memory(
    parts: Parts, read: Any, play: Any, turns: int, arguments: Any
) -> dict[str, Any]:
    """Memory and the longest callback of many sessions at once."""
    sessions = arguments.memory_sessions
    asyncio.run(endpoint(parts, read, play, sessions=1, turns=2, at_once=1))  # imports
    process = psutil.Process(read.pid)
    parsing = sum(process.cpu_times()[:2])
    gc.collect()
    gc.freeze()  # as rank 0 does once all is imported
    before = resident_mb()
    began = time.process_time()
    with longest_callback() as longest:
        facts = asyncio.run(
            endpoint(parts, read, play, sessions=sessions, turns=turns, at_once=sessions)
        )
    parsing = sum(process.cpu_times()[:2]) - parsing
    return {
        "sessions": sessions,
        "turns": turns,
        "tokens": facts["tokens"],
        "rows_mb": facts["rows_mb"],
        "alive_over_rows": (facts["alive_mb"] - before) / facts["rows_mb"],
        "ended_over_rows": (facts["ended_mb"] - before) / facts["rows_mb"],
        "parser_ms": 1e3 * parsing / (sessions * turns),
        "parser_mb": process.memory_info().rss / 2**20,
        "session_kb_besides_rows": 1024
        * (facts["alive_mb"] - before - facts["rows_mb"])
        / sessions,
        "cpu_ms": 1e3 * (time.process_time() - began) / (sessions * turns),
        "longest_ms": longest["ms"],
        "longest_of": longest["of"],
        "longest_gc_ms": longest["gc_ms"],
        "full_collections": longest["collections"],
        "end_ms": facts["end_ms"],
    }


def main() -> None:
    if "--agents" in sys.argv[1:]:
        agents()
        return
    arguments = flags(__doc__, rounds=5, sessions=4, turns=[10, 48], memory_sessions=200)
    from r3train.cpu.torchvision_stub import declare_torchvision_ops

    declare_torchvision_ops()
    write_result(arguments.output, measure(arguments))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from r3train.engine.parser_process import Parser

    parts = Parts(made_tokenizer())
    parser = Parser("qwen25", "qwen3", parts.tokenizer, {})
    parser.check()
    with contextlib.closing(parser), harnesses() as play:
        # first: a process that has held as much once has it still
        memory = measure_memory(parts, parser, play, arguments.turns[-1], arguments)
        calls = [measure_calls(parts, parser, play, turns, arguments) for turns in arguments.turns]
    return {
        "answer_tokens": len(parts.own),
        "sessions": arguments.sessions,
        "load": os.getloadavg()[0],
        "calls": calls,
        "memory": memory,
    }


if __name__ == "__main__":
    main()
