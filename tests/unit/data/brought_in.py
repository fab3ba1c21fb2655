"""Chat templates as published models have them, and files as libraries write them, for tests."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

from tests.unit.launch.test_preflight import start
from tests.unit.reward_functions import PATH

_ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
_CALL = '<call>{"name": "{{ c.function.name }}", "arguments": ARGUMENTS}</call>'
_CALLS = "{% for c in m.tool_calls or [] %}" + _CALL + "{% endfor %}"
_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"


def _turns(body: str, arguments: str = "{{ c.function.arguments | tojson }}") -> str:
    calls = _CALLS.replace("ARGUMENTS", arguments)
    return (
        f"{_TOOLS}{{% for m in messages %}}{body.replace('CALLS', calls)}<eos>{{% endfor %}}{_ASK}"
    )


_ANY = "<{{ m.role }}>{{ m.content }}CALLS"
TEMPLATES = {
    "any role, arguments as JSON": _turns(_ANY),
    "arguments by items": _turns(
        _ANY,
        "{ {%- for k, v in c.function.arguments | items %}{{ ', ' if not loop.first }}"
        '"{{ k }}": {{ v | tojson }}{% endfor -%} }',
    )
    .replace("{ {%-", "{{ '{' }}{%-")
    .replace("{% endfor -%} }", "{% endfor %}{{ '}' }}"),
    "arguments joined as text": _turns(_ANY, "{{ '' + c.function.arguments }}"),
    "arguments printed": _turns(_ANY, "{{ c.function.arguments }}"),
    "a branch for each role": _turns(
        "{% if m.role == 'system' %}<system>{{ m.content }}{% elif m.role == 'user' %}<user>"
        "{{ m.content }}{% elif m.role == 'assistant' %}<assistant>{{ m.content }}CALLS"
        "{% elif m.role == 'tool' %}<tool>{{ m.content }}{% endif %}"
    ),
    "content that is text alone": _turns(
        "<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% endif %}CALLS"
    ),
    "content trimmed": _turns("<{{ m.role }}>{{ m.content | trim }}CALLS"),
    "results as JSON": _turns(
        "<{{ m.role }}>{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}CALLS"
    ),
    "the system within the user's": (
        _TOOLS + "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}<{{ m.role }}>{% if loop.first and s %}{{ s }}\n{% endif %}{{ m.content }}"
        + _CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
        + "<eos>{% endfor %}"
        + _ASK
    ),
    "thoughts of old answers left out": _turns(
        "<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}CALLS"
    ),
}
TEMPLATE = TEMPLATES["any role, arguments as JSON"]


def with_template(model: Path, directory: Path, template: str = TEMPLATE) -> Path:
    """A copy of a checkpoint with a chat template."""
    copy = Path(shutil.copytree(model, directory / "model", dirs_exist_ok=True))
    (copy / "chat_template.jinja").write_text(template)
    return copy


def jsonl(directory: Path, *rows: Any) -> Path:
    path = directory / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(directory: Path, *rows: Any) -> Path:
    """Rows as Arrow keeps them: every table has the keys of all in its column."""
    import pyarrow
    import pyarrow.parquet

    path = directory / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def padded_jsonl(directory: Path, *rows: Any) -> Path:
    """Rows as ``datasets.to_json`` writes what Arrow keeps."""
    import pyarrow

    return jsonl(directory, *pyarrow.Table.from_pylist(list(rows)).to_pylist())


FORMS = {"jsonl": jsonl, "parquet": parquet, "padded jsonl": padded_jsonl}


def dry(model: Path, file: Path, *flags: str) -> Any:
    """The result of a dry run with these prompts."""
    flags = ("--prompt-data", str(file), "--custom-rm-path", f"{PATH}number", *flags)
    return start(model.parent, "--dry-run", "--hf-checkpoint", str(model), *flags)


def shown(result: Any, which: str = "first") -> str:
    """The text of the prompt that a dry run shows."""
    assert result.exit_code == 0, result.output
    (text,) = re.findall(rf"^# {which} prompt \(.*? tokens\): (.*)$", result.stdout, re.MULTILINE)
    return ast.literal_eval(text)


def refusal(result: Any) -> str:
    """The one line of a dry run that was refused."""
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.split())
    assert "Traceback" not in said
    return said
