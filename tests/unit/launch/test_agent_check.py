"""``r3train agent-check``: what a harness does is in a column, and what is wrong with it too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.e2e.tool_calculator import use_template

from r3train.cli import main
from r3train.launch.job.agents import fitting
from r3train.verify.tiny import build, TinyOptions

SOUND = """
import json, os
from openai import OpenAI
client, messages = OpenAI(), [{"role": "user", "content": json.load(open(os.environ["R3TRAIN_TASK_FILE"]))["prompt"]}]
add = {"type": "object", "properties": {"a": {"type": "integer"}, "how": {"enum": ["up"]}}, "required": ["a", "how"]}
look = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in (("add", add), ("look", look))]
made = {}
while True:
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=tools, temperature=0.5)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        made[call.function.name] = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
print("made", json.dumps(made))
open(os.environ["R3TRAIN_REWARD_FILE"], "w").write("0.5")
"""
# a client of four lines, for what goes wrong
BARE = """
import json, os, sys, time, urllib.request
def ask(body, path="/chat/completions", key=os.environ["OPENAI_API_KEY"]):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    try:
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        print("got", error.code)
def user(text): return {"role": "user", "content": text}
def reward(text): open(os.environ["R3TRAIN_REWARD_FILE"], "w").write(text)
"""
SOUND_OF_WORDS = "task = json.load(open(os.environ['R3TRAIN_TASK_FILE']))\nprint(task['prompt'])\n"
SOUND_OF_WORDS += "ask({'messages': [user(task['prompt'])]})"


def checked(tmp_path: Path, program: str, *flags: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the columns by name."""
    file = tmp_path / "harness.py"
    file.write_text(program)
    words = ["agent-check", *flags, "--", sys.executable, str(file)]
    result = CliRunner().invoke(main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    columns: dict[str, str] = {}
    for line in result.output.splitlines():
        if name := line[:14].strip():
            columns[name] = line[14:]
        else:
            columns[list(columns)[-1]] += "\n" + line[14:]
    return result.exit_code, columns


def test_a_sound_harness_is_shown_with_all_that_it_does(tmp_path):
    code, shown = checked(tmp_path, SOUND)
    assert code == 0 and shown["result"] == "works", shown
    assert shown["connects"] == "POST /v1/chat/completions ×3 (OpenAI)"
    assert shown["models"] == "r3train ×3" and shown["ignored"] == "temperature ×3"
    assert shown["calls"].startswith("3, with 2 ") and "1 roots, 0 forks" in shown["samples"]
    assert shown["samples"].startswith("1 of 3 calls: ") and shown["refused"] == "none"
    assert shown["reward"] == "0.5" and float(shown["CPU, memory"].split()[0]) > 0
    made = json.loads(shown["last lines"].removeprefix("made "))
    assert made == {"add": {"a": 1, "how": "up"}, "look": {"at": "x"}}


def test_the_models_own_template_and_the_datas_own_task_are_used(tmp_path):
    build(tmp_path / "tiny", TinyOptions())
    use_template(tmp_path / "tiny" / "model")
    flags = f"--hf-checkpoint {tmp_path}/tiny/model --prompt-data {tmp_path}/tiny/prompts.jsonl"
    flags += " --rollout-max-context-len 128 --rollout-max-response-len 64 --agent-history template"
    program = (
        BARE + "task = json.load(open(os.environ['R3TRAIN_TASK_FILE']))\nprint(task['prompt'])"
    )
    program += (
        "\nask({'messages': [user(task['prompt'])]})\nask({'messages': [user('red ' * 200)]})"
    )
    code, shown = checked(tmp_path, program, *flags.split())
    assert code == 0 and shown["last lines"].startswith("name animals\ngot 400")
    assert "400 context_length_exceeded" in shown["refused"]


@pytest.mark.parametrize(
    "program, flags, works, column, said",
    [
        ("ask({'input': 'x'}, '/embeddings')", "", False, "refused", "POST /v1/embeddings"),
        ("ask({'input': 'x'}, '/embeddings')", "", False, "connects", "none"),
        ("ask({'messages': [user('x')]}, key='sk-wrong')", "", False, "result", "401 ×1"),
        ("ask({'messages': [user('x')]}, key='sk-wrong')", "", False, "last lines", "got 401"),
        (
            "ask({'messages': [user('x')], 'model': 'gpt-4.1'})",
            "",
            False,
            "refused",
            "404 model_not_found: the model 'gpt-4.1'",
        ),
        ("ask({'messages': [user('x')], 'model': 'gpt-4.1'})", "", False, "models", "gpt-4.1 ×1"),
        ("ask({'messages': [user('x')], 'n': 2})", "", True, "ignored", "n ×1"),
        ("ask({'messages': [user('x')], 'n': 2})", "--agent-strict", False, "refused", "400 n: n "),
        ("ask({'messages': []})", "", False, "refused", "400 messages: messages"),
        (
            "for text in 'xy': ask({'messages': [user(text)]})",
            "",
            True,
            "samples",
            "2 of 2 calls: 2 roots, 0 forks",
        ),
        (
            "m = [user('x')]; m.append(ask({'messages': m}))\n"
            "for text in 'yz': ask({'messages': [*m, user(text)]})",
            "",
            True,
            "samples",
            "2 of 3 calls: 1 roots, 1 forks",
        ),
        ("ask({'messages': [user('x')]})", "", True, "reward", "none"),
        ("ask({'messages': [user('x')]}); reward('good')", "", False, "result", "b'good'"),
        ("print('why'); sys.exit(3)", "", False, "result", "exit code 3"),
        ("print('why'); sys.exit(3)", "", False, "last lines", "why"),
        ("print('hm')", "", False, "result", "it never called the model"),
        ("time.sleep(600)", "--agent-timeout-s 2", False, "result", "longer than 2 s"),
        (
            "ask({'messages': [user('x')], 'max_tokens': 2})",
            "--agent-max-calls 1",
            True,
            "calls",
            "1, with 0",
        ),
    ],
)
def test_what_is_wrong_with_a_harness_is_in_its_column(
    tmp_path, program, flags, works, column, said
):
    code, shown = checked(tmp_path, BARE + program, *flags.split())
    assert said in shown[column], shown
    assert code == (not works) and (shown["result"] == "works") == works, shown


@pytest.mark.parametrize("megabytes, least, most", [(0, 10, 200), (300, 300, 600)])
def test_the_memory_of_a_harness_is_that_of_its_processes(tmp_path, megabytes, least, most):
    hold = f"import time; held = bytearray(b'x') * ({megabytes} << 20); time.sleep(1)"
    program = f"import subprocess\nsubprocess.run([sys.executable, '-c', {hold!r}])\n"
    _, shown = checked(tmp_path, BARE + program + "ask({'messages': [user('x')]})")
    assert least < int(shown["CPU, memory"].split()[2]) < most, shown


def test_an_agents_function_is_checked_and_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "checked_agent.py").write_text(
        "from openai import AsyncOpenAI\nasync def run(task):\n"
        "    async with AsyncOpenAI(base_url=task.base_url, api_key=task.key) as client:\n"
        "        await client.responses.create(model=task.model, input=task.prompt)\n    return 1.0\n"
    )
    result = CliRunner().invoke(main, ["agent-check", "--agent", "checked_agent:run"])
    assert result.exit_code == 0 and "POST /v1/responses ×1 (OpenAI Responses)" in result.output
    result = CliRunner().invoke(main, ["agent-check"])
    assert result.exit_code == 2 and "no agent" in result.output


NESTED = {"$defs": {"n": {"type": "object", "properties": {"b": {"const": 7}}, "required": ["b"]}}}


@pytest.mark.parametrize(
    "schema, value",
    [
        ({"type": ["string", "null"], "minLength": 3}, "xxx"),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [True, True]),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, []),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, None),
        ({"allOf": [{"$ref": "#/$defs/n"}]}, {"b": 7}),
        ({"type": "object", "properties": {"a": {}}}, {}),
        ({"type": "number", "minimum": 2.5}, 2.5),
        ({"type": "null"}, None),
        (True, "x"),
        ({"$ref": "#/$defs/unheard_of"}, "x"),
    ],
)
def test_arguments_fit_their_schema(schema, value):
    assert fitting(schema, NESTED) == value


def test_a_schema_that_needs_no_argument_gets_them_all():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    assert fitting(schema, schema) == {"a": 1, "b": "x"}


@pytest.mark.parametrize("program, works", [("reward('1')", False), (SOUND_OF_WORDS, True)])
def test_a_dry_run_plays_a_session_of_the_command_on_the_first_prompt(tmp_path, program, works):
    build(tmp_path / "tiny", TinyOptions())
    use_template(tmp_path / "tiny" / "model")
    (tmp_path / "harness.py").write_text(BARE + program)
    flags = f"--hf-checkpoint {tmp_path}/tiny/model --prompt-data {tmp_path}/tiny/prompts.jsonl"
    flags += " --config configs/tiny_cpu.toml --dry-run --apply-chat-template"
    flags += " --agent-tool-call-parser none --agent-reasoning-parser none"
    command = ["--agent-command", f"{sys.executable} {tmp_path}/harness.py"]
    result = CliRunner().invoke(main, ["train", *flags.split(), *command])
    assert result.exit_code == 0, result.output
    assert ("a session against a scripted model failed" in result.output) != works
    said = "POST /v1/chat/completions ×1 (OpenAI)" if works else "it never called the model"
    assert (
        said in result.output
        and ("agent-check, last lines: name animals" in result.output) == works
    )


WORKER = """
import json, sys, urllib.request
for line in sys.stdin:
    task = json.loads(line)
    body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
    urllib.request.urlopen(task["session_url"] + "/chat/completions", body).read()
    print(json.dumps({"id": task["id"], "reward": 0.5}), flush=True)
"""


def test_a_worker_is_checked_as_a_run_would_use_it(tmp_path):
    code, shown = checked(tmp_path, WORKER, "--agent-workers", "1")
    assert code == 0 and shown["reward"] == "0.5" and shown["result"] == "works", shown
