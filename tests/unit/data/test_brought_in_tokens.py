"""Tokens around a prompt, and what a chat template does with its variables, through the dry run."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import Tokenizer, processors

from r3train.data.tokenizer import load_tokenizer
from r3train.hf_checkpoint import copy_all_but_weights
from tests.unit.data.brought_in import TEMPLATE, dry, jsonl, refusal, shown, with_template

EOS, PAD = 1, 0


def tokens(result, which: str = "first") -> list[str]:
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith(f"# {which} prompt (")]
    return re.findall(r"\d+ ('\S+?'|\"\S+?\")", lines[place + 1])


def adds(model, template: str) -> None:
    """Let a tokenizer write special tokens around every text ($A)."""
    file = str(model / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    special = [("<pad>", PAD), ("<eos>", EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    tokenizer.save(file)


@pytest.mark.parametrize(
    "template, beginning", [("<pad> $A", "<pad>"), ("<pad> <eos> $A", "<pad><eos>"), ("$A", "")]
)
@pytest.mark.parametrize("text", ["What", "{}What", "What {}"])
def test_a_text_begins_once(template, beginning, text, model, tmp_path):
    """S7"""
    adds(model, template)
    text = text.replace("{}", beginning)
    found = tokens(dry(model, jsonl(tmp_path, {"input": f"{text} is"})))
    specials = [token for token in found if token in ("'<pad>'", "'<eos>'")]
    times = 2 if text.startswith("What ") else 1
    assert specials == [repr(token) for token in re.findall(r"<\w+>", beginning)] * times


def test_a_prompt_that_ends_in_a_stop_token_is_refused(model, tmp_path):
    """A stop token of its own text, of the tokenizer, or of the template."""
    file = jsonl(tmp_path, {"input": "What"}, {"input": "What<eos>"})
    said = refusal(dry(model, file))
    assert (
        f"{file}:2: key input: the prompt ends in the stop token '<eos>' (1), of its own text"
        in said
    )
    file = jsonl(tmp_path, {"input": "What<pad>"})
    assert dry(model, file).exit_code == 0
    assert "stop token '<pad>'" in refusal(dry(model, file, "--rollout-stop-token-ids", "0"))
    with_template(model, tmp_path / "silent", TEMPLATE.replace("<assistant>{% endif", "{% endif"))
    said = refusal(dry(tmp_path / "silent/model", file, "--apply-chat-template"))
    assert "ends in the stop token '<eos>' (1)" in said
    adds(model, "$A <eos>")
    said = refusal(dry(model, jsonl(tmp_path, {"input": "What"})))
    assert "p.jsonl:1: key input" in said and "which the tokenizer adds to every text" in said


def test_special_tokens_in_messages_are_counted(model, tmp_path):
    """S7"""
    rows = [{"input": text} for text in ("say <eos>", "hi", "<eos> <pad>")]
    said = " ".join(dry(model, jsonl(tmp_path, *rows), "--apply-chat-template").output.split())
    file = tmp_path / "p.jsonl"
    assert (
        f"the special token '<eos>' stands in a message, in 2 of the rows (first {file}:1)" in said
    )
    assert (
        f"the special token '<pad>' stands in a message, in 1 of the rows (first {file}:3)" in said
    )
    assert "special token" not in dry(model, jsonl(tmp_path, *rows[:2])).output


STOPS = "and no server stops there: add --rollout-stop-token-ids"


@pytest.mark.parametrize(
    "end, token",
    [("<eos>", "'<eos>' (1)"), ("<eos>\n", "'<eos>' (1)"), ("<unk>", "'<unk>' (2)"), ("", None)],
)
def test_the_end_of_an_answer_is_a_stop_token(end, token, model, tmp_path):
    """S8"""
    stops_at(model, 0)
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("<eos>", end))
    file = jsonl(tmp_path, {"input": "What"})
    result = dry(model, file, "--apply-chat-template")
    assert result.exit_code == 0 and (STOPS in result.output) is (token is not None)
    if token:
        assert f"warning: answers end with {token}, {STOPS} {token[-2]}" in result.output
        flags = ("--apply-chat-template", "--rollout-stop-token-ids", token[-2])
        assert STOPS not in dry(model, file, *flags).output


def test_the_opening_of_the_next_message_may_end_an_answer(model, tmp_path):
    stops_at(model, 0)
    opens = "{% for m in messages %}{{ '<unk>' if m.role == 'user' else '<eos>' }}{{ m.content }}"
    (model / "chat_template.jinja").write_text(
        opens + "{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    file = jsonl(tmp_path, {"input": "What"})
    assert f"'<unk>' (2), {STOPS} 2" in dry(model, file, "--apply-chat-template").output


def test_without_a_template_the_tokenizers_end_is_a_stop_token(model, tmp_path):
    file = jsonl(tmp_path, {"input": "What"})
    assert STOPS not in dry(model, file).output
    stops_at(model, 0)
    assert f"'<eos>' (1), {STOPS} 1" in dry(model, file).output


def stops_at(model, token: int) -> None:
    for name in ("config.json", "generation_config.json"):
        file = model / name
        content = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(content | {"eos_token_id": token}))


THINKS = TEMPLATE.replace(
    "<assistant>{% endif",
    "<assistant>{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}{% endif",
)


@pytest.mark.parametrize(
    "variables, named",
    [
        ({"enable_thinking": False}, None),
        ({"thinking": False}, "thinking = False"),
        ({"enable_thinking": "false"}, "enable_thinking = 'false'"),
        ({"enable_thinking": 0}, "enable_thinking = 0"),
        ({"enable_thinking": False, "thinking": False}, "thinking = False"),
    ],
)
def test_a_variable_that_changes_nothing_is_refused(variables, named, model, tmp_path):
    """S15"""
    (model / "chat_template.jinja").write_text(THINKS)
    flags = ("--apply-chat-template", "--apply-chat-template-kwargs", json.dumps(variables))
    result = dry(model, jsonl(tmp_path, {"input": "What"}), *flags)
    if named is None:
        assert shown(result).endswith("<no>")
    else:
        said = refusal(result)
        assert f"--apply-chat-template-kwargs: {named} has no effect on this template" in said


@pytest.mark.parametrize(
    "reads",
    [
        "{% if tools and variable %}x{% endif %}",
        "{% for m in messages %}{% if m.reasoning_content and variable %}x{% endif %}{% endfor %}",
        "{% if messages[0].role == 'system' and variable %}x{% endif %}",
        "{% if messages[-1].role == 'tool' and variable %}x{% endif %}",
        "{% if not add_generation_prompt and variable %}x{% endif %}",
        "{% if variable %}{{ raise_exception('no') }}{% endif %}",
    ],
)
def test_a_variable_of_some_conversations_has_an_effect(reads, chat, tmp_path):
    model = with_template(chat, tmp_path, reads + TEMPLATE)
    flags = ("--apply-chat-template", "--apply-chat-template-kwargs", '{"variable": true}')
    assert "no effect" not in dry(model, jsonl(tmp_path, {"input": "What"}), *flags).output


def test_an_export_has_the_named_chat_templates(model, tmp_path):
    """S18"""
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("TOOL " + TEMPLATE)
    (model / ".cache").mkdir()
    (model / ".cache/lock").write_text("")
    (model / "original").mkdir()
    (model / "original/consolidated.00.pth").write_text("")
    export = tmp_path / "export"
    export.mkdir()
    copy_all_but_weights(model, export)
    assert {path.name for path in export.iterdir() if path.is_dir()} == {
        "additional_chat_templates"
    }
    tool = {"type": "function", "function": {"name": "search", "parameters": {}}}
    for directory in (model, export):
        text = load_tokenizer(directory).apply_chat_template(
            [{"role": "user", "content": "What"}], tools=[tool], tokenize=False
        )
        assert text.startswith("TOOL <tools>")
    rows = {"input": "What", "tools": [tool]}, {"input": "What"}
    flags = ("--apply-chat-template", "--tool-key", "tools")
    assert shown(dry(model, jsonl(tmp_path, *rows), *flags)).startswith("TOOL ")


def test_the_dry_run_shows_the_longest_prompt_and_one_at_random(model, tmp_path):
    rows = [{"input": f"{'What ' * (1 + 20 * (i == 7))}{i}"} for i in range(20)]
    result = dry(model, jsonl(tmp_path, *rows), "--apply-chat-template")
    assert shown(result) == "<user>What 0<eos><assistant>"
    assert shown(result, "longest").endswith("What 7<eos><assistant>")
    assert shown(result, "random") in {f"<user>What {i}<eos><assistant>" for i in range(1, 20)}
    assert tokens(result, "longest")[-1].endswith("'") and "'<eos>'" in tokens(result, "longest")
    (alone,) = re.findall(r"# \w+ prompt \(", dry(model, jsonl(tmp_path, rows[0])).stdout)
    assert alone == "# first prompt ("


def test_the_end_of_a_long_prompt_is_shown(model, tmp_path):
    result = dry(model, jsonl(tmp_path, {"input": "What " * 60 + "now?"}))
    assert re.search(r"# its tokens: \d+ 'What' .* and \d+ more, then .* \d+ '\?'\n", result.stdout)
