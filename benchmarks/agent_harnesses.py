"""Harnesses as they are installed, against the real chat endpoint: what connects, samples a call, CPU and memory.

    python -m benchmarks.agent_harnesses [NAME ...] [--directory DIR] [--python PYTHON] [--delay-s 0] [--remove]

Each gets an environment of its own with its newest version, from PyPI or npm, and plays one session: r3train starts
the program of benchmarks/harnesses/ as it does with --agent-command, and a script answers in the place of the model.
It calls a tool, and what it says in the end depends on the tool's result.  A row is right if the harness took the answers,
ran the calls and gave the right result.  Without names: all.  Prints the rows of docs/guide/harnesses.md.

--delay-s holds back the first answer, so that the harness has to wait.  --remove deletes an environment after its rows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.agent_endpoint import END, made_tokenizer
from r3train.agents.command import run_command
from r3train.agents.http import ChatEndpoint
from r3train.chat.base import AgentFailed, ChatRequest
from r3train.config.agent_settings import AgentSection

PROGRAMS = Path(__file__).parent / "harnesses"
EXAMPLES = Path(__file__).parents[1] / "examples/agents"
SUM, FIX = "What is 1 + 2? Use the tool.", "Fix add in calc.py"
# what the examples of examples/agents want
METADATA = {"check": "grep -q 3 out.txt", "taskset": "sums", "idx": 1}
Says = Callable[[ChatRequest], str]

# -- the model ---------------------------------------------------------------------------------


def call(name: str, arguments: dict[str, Any]) -> str:
    function = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(function)}\n</tool_call>"


_SHOWN = ("Observation:", "<tool_response>")


def results(request: ChatRequest) -> list[str]:
    """The results of tools, also as smolagents and Qwen-Agent show them."""
    texts = ((m["role"], str(m.get("content"))) for m in request.messages)
    return [text for role, text in texts if role == "tool" or text.startswith(_SHOWN)]


def schemas(request: ChatRequest) -> dict[str, dict[str, Any]]:
    functions = (tool["function"] for tool in request.readable or request.tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


def adds(request: ChatRequest) -> str:
    """Call the tool that adds, then the one that ends or gives a table if there is one, or say the result."""
    tools, found = schemas(request), results(request)
    adder = next((name for name in tools if re.split(r"\W|_", name)[-1] == "add"), None)
    if not tools and "<tools>" in str(request.messages[0].get("content")):
        adder = "add"  # Qwen-Agent shows tools as text and reads calls from it
    has_search = "ToolSearch" in tools  # Claude Code hides tools of others until they are asked for
    if has_search and not found:
        return call("ToolSearch", {"query": "select:mcp__sums__add"})
    if adder and len(found) == has_search:
        return f"I add.\n{call(adder, {'a': 1, 'b': 2})}"
    said = (re.findall(r"\d+", found[-1]) or ["nothing"])[-1] if found else "3"
    for name, schema in tools.items():
        fields = list(schema.get("properties", {}))
        if fields == ["answer"]:
            is_number = schema["properties"]["answer"].get("type") == "integer"
            return call(name, {"answer": int(said) if is_number else said})
    return f"The answer is {said}."


def fills(request: ChatRequest) -> str:
    """Give a table as text where no tool takes it."""
    said = adds(request)
    return '{"answer": 3}' if said.startswith("The answer") else said


_SHELLS = "Bash bash shell terminal exec_command run_shell_command execute_command".split()


def fixes(request: ChatRequest) -> str:
    """Look at the file with the harness's shell, correct it, and finish."""
    tools, turn = schemas(request), len(results(request))
    shell = next((name for name in _SHELLS if name in tools), None)
    if shell is None or turn > 1:
        return call("finish", {"message": "It adds now."}) if "finish" in tools else "It adds now."
    line = ("cat calc.py", "perl -pi -e 's/a - b/a + b/' calc.py")[turn]
    fields = tools[shell].get("properties", {})
    values = {
        "security_risk": "LOW",
        "summary": "look",
        "description": "look",
        "is_background": False,
    }
    known = {name: value for name, value in values.items() if name in fields}
    argument = next((name for name in ("command", "cmd") if name in fields), "command")
    is_list = fields.get(argument, {}).get("type") == "array"
    return f"I look.\n{call(shell, {argument: ['bash', '-c', line] if is_list else line, **known})}"


def weather(request: ChatRequest) -> str:
    return "It is cold." if results(request) else call("get_weather", {"city": "sf"})


def asked(request: ChatRequest) -> str:
    return str(request.messages[-1].get("content"))


def edits(request: ChatRequest) -> str:
    """As aider wants it: the whole file, or a title."""
    if "commit message" in str(request.messages[0].get("content")).lower():
        return "fix: add"
    return "Fixed.\n\ncalc.py\n```\ndef add(a, b):\n    return a + b\n```\n"


def types(request: ChatRequest) -> str:
    """As terminus-2 wants it: keystrokes."""
    turn = sum(message["role"] == "assistant" for message in request.messages)
    keys = [{"keystrokes": "echo 3 > out.txt\n", "duration": 0.5}] if turn < 1 else []
    said = {"analysis": "a", "plan": "p", "commands": keys, "task_complete": turn > 0}
    return json.dumps(said)


def dspy_says(request: ChatRequest) -> str:
    said = asked(request)
    fields = {"reasoning": "a sum", "answer": "3"}
    if "next_tool_name" in str(request.messages[0].get("content")):
        tool = ("add", '{"a": 1, "b": 2}') if "observation_0" not in said else ("finish", "{}")
        fields = dict(zip(("next_thought", "next_tool_name", "next_tool_args"), ("t", *tool)))
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items()) + (
        "\n\n[[ ## completed ## ]]"
    )


def reacts(request: ChatRequest) -> str:
    if "Observation: 3" in asked(request):
        return "Thought: I can answer without using any more tools.\nAnswer: 3"
    return 'Thought: I add.\nAction: add\nAction Input: {"a": 1, "b": 2}'


def codes(request: ChatRequest) -> str:
    """As smolagents' CodeAgent wants it."""
    turn = sum(message["role"] == "assistant" for message in request.messages)
    line = "print(add(1, 2))" if turn < 1 else "final_answer(add(1, 2))"
    return f"Thought: I add.\n<code>\n{line}\n</code>"


def in_fences(request: ChatRequest) -> str:
    """As mini-swe-agent and gptme want it without a tool."""
    if "bash" in schemas(request):
        return ends(request)
    if request.tools:
        is_done = len(results(request)) > 1 and "complete" in schemas(request)
        return call("complete", {}) if is_done else fixes(request)
    turn = sum(message["role"] == "assistant" for message in request.messages)
    line = ("cat calc.py", "perl -pi -e 's/a - b/a + b/' calc.py")
    return f"I look.\n```shell\n{line[turn]}\n```" if turn < 2 else "It adds now."


def ends(request: ChatRequest) -> str:
    """As mini-swe-agent wants it: its end is a command."""
    if len(results(request)) > 1:
        return call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    return fixes(request)


def judges(request: ChatRequest) -> str:
    return "<think>A sum.</think>\n<answer>3</answer>"


# -- the harnesses -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Harness:
    """Packages of an environment, and programs that run in it: a row each, with the answers that make them work.

    npm: packages of node.  The versions of the first ``shown`` packages are in the table.
    """

    packages: str
    rows: dict[str, Says]
    npm: bool = False
    shown: int = 1


def each(program: str, ways: str, says: Says = adds) -> dict[str, Says]:
    """A row for each argument of a program."""
    return {f"{program} {way}": says for way in ways.split()}


HARNESSES = {
    "terminus-2": Harness("harbor", {"with_harbor.py": types}),
    "verifiers-0.1": Harness(
        "verifiers<0.2 reasoning-gym openai-agents",
        each("verifiers0_.py tools", "openai_chat_completions openai_responses anthropic_messages")
        | each("verifiers0_.py reasoning_gym", "openai_chat_completions", judges)
        | each("verifiers0_.py judge", "openai_chat_completions", judges),
    ),
    "verifiers": Harness("verifiers", {"with_verifiers.py play": adds}),
    "langgraph": Harness(
        "langgraph langchain-openai langchain langchain-anthropic",
        each("langgraph_.py", "invoke stream responses anthropic")
        | each("langgraph_.py", "json_schema function_calling json_mode", fills),
        shown=2,
    ),
    "deepagents": Harness("deepagents langchain-openai", {"deepagents_.py": adds}),
    "openai-agents": Harness("openai-agents", each("openai_agents_.py", "run stream")),
    "dspy": Harness("dspy", {"dspy_.py": dspy_says}),
    "strands": Harness(
        "strands-agents[openai,anthropic]", each("strands_.py", "chat responses anthropic")
    ),
    "agno": Harness("agno openai anthropic", each("agno_.py", "chat responses anthropic")),
    "haystack": Harness("haystack-ai", each("haystack_.py", "chat responses")),
    "llamaindex": Harness(
        "llama-index-core llama-index-llms-openai-like",
        each("llamaindex_.py", "functions") | each("llamaindex_.py", "react", reacts),
    ),
    "autogen": Harness("autogen-agentchat autogen-ext[openai]", each("autogen_.py", "one team")),
    "crewai": Harness("crewai", {"crewai_.py": adds}),
    "outlines": Harness("outlines openai", {"outlines_.py": fills}),
    "guidance": Harness("guidance openai", {"guidance_.py": adds}),
    "smolagents": Harness(
        "smolagents[openai]",
        each("smolagents_.py", "tools") | each("smolagents_.py", "code", codes),
    ),
    "pydantic-ai": Harness(
        "pydantic-ai-slim[openai,anthropic]",
        each("pydantic_ai_.py", "openai-chat openai-responses anthropic tool")
        | each("pydantic_ai_.py", "native prompted", fills),
    ),
    "instructor": Harness(
        "instructor", each("instructor_.py", "TOOLS JSON JSON_SCHEMA RESPONSES_TOOLS", fills)
    ),
    "inspect-ai": Harness("inspect-ai openai", each("inspect_.py", "default chat")),
    "google-adk": Harness("google-adk litellm", {"adk_.py": adds}),
    "semantic-kernel": Harness("semantic-kernel", {"semantic_kernel_.py": adds}),
    "agent-framework": Harness(
        "agent-framework-openai agent-framework-core",
        each("agent_framework_.py", "chat responses unstored"),
    ),
    "camel": Harness("camel-ai mcp<2", {"camel_.py": adds}),
    "qwen-agent": Harness("qwen-agent soundfile tqdm", {"qwen_agent_.py": adds}),
    "langroid": Harness("langroid", {"langroid_.py": adds}),
    "litellm": Harness("litellm", {"litellm_.py": adds}),
    "claude-agent-sdk": Harness("claude-agent-sdk", {"claude_agent_sdk_.py": adds}),
    "nemo-gym": Harness("nemo-gym", {"nemo_gym.sh": weather}),
    "openhands": Harness("openhands-sdk openhands-tools", {"coding.sh openhands_.py": fixes}),
    "aider": Harness("aider-chat", each("coding.sh aider.sh --edit-format", "whole", edits)),
    "mini-swe-agent": Harness("mini-swe-agent", {"coding.sh mini_swe_agent.sh": in_fences}),
    "gptme": Harness("gptme", {"coding.sh gptme.sh": in_fences}),
    "claude-code": Harness("@anthropic-ai/claude-code", {"coding.sh claude.sh": fixes}, npm=True),
    "codex": Harness("@openai/codex", {"coding.sh codex.sh": fixes}, npm=True),
    "opencode": Harness("opencode-ai", {"coding.sh opencode.sh": fixes}, npm=True),
    "qwen-code": Harness("@qwen-code/qwen-code", {"coding.sh qwen_code.sh": fixes}, npm=True),
    "pi": Harness(
        "@mariozechner/pi-coding-agent",
        each("coding.sh pi.sh", "openai-completions openai-responses", fixes),
        npm=True,
    ),
    "gemini-cli": Harness("@google/gemini-cli", {"coding.sh gemini.sh": fixes}, npm=True),
    "ai-sdk": Harness(
        "ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod",
        {
            f"ai_sdk.mjs {how} {mode}": adds
            for how in "responses chat compatible anthropic".split()
            for mode in ("generate", "stream")
        },
        npm=True,
    ),
    "mastra": Harness("@mastra/core @ai-sdk/openai zod", {"mastra.mjs": adds}, npm=True),
    "openai-agents-js": Harness(
        "@openai/agents zod", each("openai_agents_js.mjs", "run stream"), npm=True
    ),
    "langchain-js": Harness(
        "langchain @langchain/openai zod", {"langchain_js.mjs": adds}, npm=True
    ),
}


def installed(name: str, directory: Path, python: str) -> dict[str, str]:
    """Make a harness's environment unless it is there; its versions by package.  Raises RuntimeError."""
    harness, packages = HARNESSES[name], HARNESSES[name].packages.split()
    shown = [re.split(r"[\[<]", package)[0] for package in packages[: harness.shown]]
    if harness.npm:
        if not directory.exists():
            directory.mkdir(parents=True)
            options = "--no-audit --no-fund --loglevel error".split()
            logged(["npm", "install", "--prefix", str(directory), *options, *packages])
        files = (directory / "node_modules" / package / "package.json" for package in shown)
        return {file.parent.name: json.loads(file.read_text())["version"] for file in files}
    if not directory.exists():
        logged([python, "-m", "venv", str(directory)])
        logged([str(directory / "bin/pip"), "install", "--no-compile", "-q", *packages])
    ask = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    versions = logged([interpreter(directory), "-c", ask, *shown]).split()
    return dict(zip(shown, versions, strict=True))


def interpreter(directory: Path) -> str:
    return str(directory / "bin/python")


def logged(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def command_of(program: str, directory: Path) -> list[str]:
    """The command of a row, with its environment first on PATH."""
    words, command = program.split(), []
    for word in words:
        found = next((d / word for d in (PROGRAMS, EXAMPLES) if (d / word).is_file()), None)
        if found is None:
            command.append(word)
        elif found.suffix == ".py":
            command += [interpreter(directory), str(found)]
        elif found.suffix == ".mjs":  # node looks for packages where the program is
            command += ["node", shutil.copy(found, directory)]
        else:
            command += ["bash", str(found)]
    path = f"{directory}/bin:{directory}/node_modules/.bin:{os.environ['PATH']}"
    return ["env", f"PATH={path}", f"PYTHONPATH={PROGRAMS}", *command]


# -- a session ---------------------------------------------------------------------------------


class Engine:
    """Answers of a script as segments; a session asks it for each answer, in pieces where there are stop texts."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.encode, self.said = encode, contextvars.ContextVar[str]("said")
        self.rest: dict[int, list[int]] = {}

    async def __call__(self, sample: Any, limit: int | None = None) -> Any:
        from r3train.engine.backend import Segment
        from r3train.generation import stitch

        own = self.rest.pop(sample.sample_id, None) or self.encode(self.said.get() + END)
        own, rest = own[:limit], own[limit:] if limit else []
        if rest:
            self.rest[sample.sample_id] = rest
        known, zeros = stitch.rows_known(sample), np.zeros(len(own))
        segment = Segment(
            token_ids=np.array(own, np.int32),
            log_probs=zeros.astype(np.float32),
            weight_versions=zeros.astype(np.int32),
            rows=np.ones((sample.num_tokens + len(own) - 1 - known, 2, 2), np.uint8),
            rows_start=known,
            finish_reason="stop" if own[-1] == self.encode(END)[0] else "length",
        )
        return stitch.extend(sample, segment)


class Watched(ChatEndpoint):
    """A chat endpoint that keeps what it was asked, and with which status and text it refused."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    async def _guarded(self, dialect: Any, handler: Any, request: Any) -> Any:
        line = {"path": request.path, "method": request.method, "body": await request.text()}
        self.seen.append(line)
        response = await super()._guarded(dialect, handler, request)
        body = getattr(response, "body", None)
        line |= {"status": response.status}
        line["answer"] = body.decode(errors="replace") if isinstance(body, bytes) else None
        return response


async def memory_of_children(peak: list[float]) -> None:
    """Keep the most memory that the new children of this process have had at once, MB."""
    there = {child.pid for child in psutil.Process().children(recursive=True)}
    while True:
        now = 0
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                now += child.memory_info().rss if child.pid not in there else 0
        peak[0] = max(peak[0], now / 2**20)
        await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Model:
    """The tokenizer with its chat template, and SGLang's parsers."""

    tokenizer: Any
    parser: Any

    def session(self, engine: Engine, errors: list[BaseException]) -> Any:
        """A session of r3train whose answers the engine gives."""
        from r3train.data.templates import SessionTemplate
        from r3train.engine.backend import SamplingParams
        from r3train.generation.sessions import Session, SessionSettings
        from r3train.types import Prompt

        settings = SessionSettings(
            template=SessionTemplate.of(self.chat),
            read=self.parser,
            decode=lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False),
            sampling=SamplingParams(10**6),
            max_context_len=200_000,
            history="append",
            max_calls=64,
            max_answer_len=None,
        )
        prompt = Prompt("p", 0, "", np.zeros(1, np.int32), None)
        return Session(settings, engine, prompt, 640, fail=errors.append)

    @property
    def chat(self) -> Any:
        from r3train.config.data_settings import DataSection
        from r3train.data.templates import ChatTemplate

        return ChatTemplate(self.tokenizer, DataSection(prompt_data="p.jsonl"))


async def played(program: str, says: Says, directory: Path, model: Model, arguments: Any) -> dict:
    """One session of a program; facts of its row."""
    engine, errors = Engine(model.chat.encode), []
    session, endpoint, peak = model.session(engine, errors), Watched(), [0.0]

    async def answer(request: ChatRequest) -> Any:
        engine.said.set(says(request))
        request.begun()
        if len(endpoint.seen) == 1:
            await asyncio.sleep(arguments.delay_s)
        return await session.answer(request)

    task = {"prompt": FIX if program.startswith("coding.sh") else SUM, "metadata": METADATA}
    row: dict[str, Any] = {"program": program, "failure": None, "reward": None}
    command = command_of(program, directory)
    before, began = children_cpu_s(), time.monotonic()
    watch = asyncio.create_task(memory_of_children(peak))
    access = await endpoint.open(answer, count=session.count_tokens)
    with tempfile.TemporaryDirectory() as home:
        limit = arguments.timeout_s + arguments.delay_s
        try:
            settings = AgentSection(agent_timeout_s=limit, agent_env=tuple(arguments.env))
            row["reward"] = await run_command(command, access, task, Path(home), settings)
        except AgentFailed as error:
            row["failure"] = str(error)
    watch.cancel()
    row["models"] = await endpoint.close(access.key)
    await endpoint.stop()
    samples = session.samples()  # custody holds, or it raises
    return row | {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(children_cpu_s() - before, 1),
        "peak_mb": round(peak[0]),
        "calls": len(session.calls),
        "samples": len(samples),
        "begins": dict(Counter(chain.begins for chain in session.chains)),
        "counts": endpoint.stats(),
        "errors": list(map(repr, errors)),
        "seen": endpoint.seen,
    }


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# -- the table ---------------------------------------------------------------------------------


def table_row(name: str, versions: dict[str, str], row: dict[str, Any]) -> str:
    """A row of the page: harness, way, dialect, samples and calls, outcome, fields without effect, cost."""
    taken = Counter(s["path"] for s in row["seen"] if s.get("status") == 200)
    dialects = [path.removeprefix("/v1/") for path in taken if path != "/v1/models"]
    refused = [refusal(s) for s in row["seen"] if s.get("status", 200) >= 400 and s["body"]]
    if row["failure"] is None and row["reward"] == 1 and row["calls"]:
        outcome = "works"
    else:
        outcome = f"no: {(row['failure'] or 'the answer is wrong').splitlines()[-1][:160]}"
    if refused:
        outcome += f"; {len(refused)} refused: {refused[0]}"
    ignored = [n.removeprefix("ignored_") for n in row["counts"] if n.startswith("ignored_")]
    cells = [
        f"{name} {' / '.join(versions.values())}",
        " ".join(
            word for word in row["program"].split() if not word.endswith((".py", ".sh", ".mjs"))
        ),
        ", ".join(dialects),
        f"{row['samples']} / {row['calls']}",
        outcome,
        ", ".join(ignored),
        f"{row['cpu_s']:.1f} / {row['peak_mb']}",
    ]
    return f"| {' | '.join(cells)} |"


def refusal(seen: dict[str, Any]) -> str:
    """The text of a refused request's answer, its beginning."""
    return json.loads(seen["answer"])["error"]["message"].partition(":")[0][:120]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(HARNESSES), help="default: all")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/harnesses"))
    parser.add_argument(
        "--python", default=sys.executable, help="of the environments; some want 3.12"
    )
    parser.add_argument("--delay-s", type=float, default=0.0, help="of the first answer")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of a session")
    parser.add_argument("--remove", action="store_true", help="an environment after its rows")
    parser.add_argument("--only", default="", help="programs with this in their line")
    parser.add_argument("--env", nargs="*", default=[], help="as --agent-env")
    parser.add_argument("--output", type=Path, help="write all facts here, a line of JSON each")
    arguments = parser.parse_args()
    from r3train.cpu.torchvision_stub import declare_torchvision_ops

    declare_torchvision_ops()
    from r3train.engine.parser_process import Parser

    tokenizer = made_tokenizer()
    with contextlib.closing(Parser("qwen25", "qwen3", tokenizer, {})) as calls:
        calls.check()
        for name in arguments.names:
            directory = arguments.directory.absolute() / name
            versions = installed(name, directory, arguments.python)
            for program, says in HARNESSES[name].rows.items():
                if arguments.only not in program:
                    continue
                model = Model(tokenizer, calls)
                row = asyncio.run(played(program, says, directory, model, arguments))
                print(table_row(name, versions, row), flush=True)
                if arguments.output:
                    with arguments.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"name": name, "versions": versions} | row) + "\n")
            if arguments.remove:
                shutil.rmtree(directory)


if __name__ == "__main__":
    main()
