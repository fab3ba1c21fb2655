"""One session of an agent against a scripted model, without a GPU or a server.

The chat endpoint, the session, the chat template and the way in which the agent is run are those of a run.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from r3train.agents.http import ChatEndpoint
from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.data.templates import ChatTemplate, SessionTemplate
from r3train.data.tokenizer import load_tokenizer
from r3train.generation.agent_episode import AgentEpisode, Agents
from r3train.generation.episode import EpisodeDropped
from r3train.launch.job.agents import (
    end_token,
    make_chat_endpoint,
    runner,
    ScriptedModel,
    session_settings,
)
from r3train.launch.job.read_data import read_prompts
from r3train.types import Prompt

_TASK = "What is 1 + 2? Use your tools."
NONE_GIVEN = "none-given"  # the model and the data, without --config
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_DIALECTS = {"completions": "OpenAI", "responses": "OpenAI Responses", "messages": "Anthropic"}
_DRY_RUN_S = 120.0


class _Endpoint(ChatEndpoint):
    """A chat endpoint that tells a scripted model of each request."""

    model: ScriptedModel

    async def open(self, answer: Any, *arguments: Any) -> Any:
        async def decided(request: Any) -> Any:
            self.model.decide(request)
            return await answer(request)

        return await super().open(decided, *arguments)


def play_session(config: RunConfig, prompt: Prompt | None = None) -> dict[str, Any]:
    """Play one session on a prompt, the first of the data without; returns its line of sessions.jsonl.

    It has cpu_s and peak_mb of its processes too.  Raises ValueError for a model or an agent that cannot be used.
    """
    if str(config.model.hf_checkpoint) == NONE_GIVEN:
        hf, tokenizer = None, _small_tokenizer()
        stop = tokenizer.eos_token_id
    else:
        hf = read_hf_facts(config.model.hf_checkpoint)
        tokenizer = load_tokenizer(config.model.hf_checkpoint)
        stop = end_token(config, hf, tokenizer)
    if prompt is None and hf is not None and config.data.prompt_data != (NONE_GIVEN,):
        prompt = read_prompts(config, hf, tokenizer, lambda *_: None)[0][0]
    given = prompt or Prompt("check", 0, _TASK, np.zeros(1, np.int32), None, content=_TASK)
    settings = config.agent.model_copy(update={"agent_on_failure": "drop"})
    template = SessionTemplate.of(ChatTemplate(tokenizer, config.data))
    model, facts = ScriptedModel(template, stop), {}
    sessions = session_settings(config, hf, tokenizer, model.read)
    endpoint = make_chat_endpoint(settings, sessions.max_context_len, _Endpoint)
    endpoint.model = model

    async def watch() -> None:
        while True:
            size = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    size += process.memory_info().rss
            facts["peak_mb"] = max(facts.get("peak_mb", 0), size >> 20)
            await asyncio.sleep(0.05)

    async def play(directory: str) -> None:
        watching = asyncio.create_task(watch())
        run, end = runner(settings, Path(directory))
        agents = Agents(settings, sessions, endpoint, run, settings.named, facts.update, end=end)
        episode = AgentEpisode(agents)
        try:
            with suppress(EpisodeDropped):  # its failure is recorded
                await episode(model.generate, given, sampling=sessions.sampling, sample_id=0)
        finally:
            watching.cancel()
            await agents.stop()

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory(prefix="r3train-agent-") as directory:
        asyncio.run(play(directory))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts["cpu_s"] = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return facts


def try_session(config: RunConfig, prompt: Prompt) -> tuple[list[str], list[str]]:
    """Play one session for a dry run, two minutes at most; returns its lines, and a warning if it failed."""
    limit = {"agent_timeout_s": min(config.agent.agent_timeout_s, _DRY_RUN_S)}
    agent = config.agent.model_copy(update=limit)
    facts = play_session(config.model_copy(update={"agent": agent}), prompt)
    lines = [f"agent-check, {k}: {v}".replace("\n", "; ") for k, v in columns(facts).items()]
    what = f"warning: {agent.named}: a session against a scripted model failed"
    return lines, [f"{what}: {facts['failure']}"] if facts["failure"] else []


def columns(facts: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a session as a person reads them, by name."""
    ways: dict[bool, list[str]] = {False: [], True: []}
    for kind in facts["requests"]:
        dialect = _DIALECTS.get(kind["request"].rpartition("/")[2])
        text = f"{kind['request']} ×{kind['count']}" + f" ({dialect})" * bool(dialect)
        is_refused = kind["status"] >= 400
        text += f": {kind['status']} {kind['reason']}: {kind['first']}" * is_refused
        ways[is_refused].append(text)
    ignored = [(k[8:], n) for k, n in facts.items() if k.startswith("ignored_")]
    begun = f"{facts.get('roots', 0)} roots, {facts.get('forks', 0)} forks"
    made = [
        f"{s['begins']}, {s['tokens']} tokens, {s['with_loss']} trained" for s in facts["samples"]
    ]
    reward, used = facts["reward"], f"{facts.get('cpu_s', 0):.1f} s, {facts['peak_mb']} MB"
    found = {
        "connects": ways[False],
        "models": [f"{name} ×{count}" for name, count in facts["models"].items()],
        "ignored": [f"{name} ×{count}" for name, count in ignored],
        "calls": [f"{facts['calls']}, with {facts.get('tool_calls', 0)} calls of tools"],
        "samples": [f"{len(made)} of {facts['calls']} calls: {begun}", *made],
        "refused": ways[True],
        "reward": [] if reward is None else [f"{reward:g}"],
        "seconds": [f"{facts['seconds']:.1f}"],
        "CPU, memory": [f"{used} of its processes"],
        "last lines": facts["last_lines"],
        "result": [f"FAILED: {facts['failure']}" if facts["failure"] else "works"],
    }
    return {name: "\n".join(lines) or "none" for name, lines in found.items()}


def _small_tokenizer() -> Any:
    """A tokenizer with a token for each byte, and a chat template with tools."""
    from tokenizers import decoders, models, pre_tokenizers, Tokenizer
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    made.chat_template = _TEMPLATE
    return made
