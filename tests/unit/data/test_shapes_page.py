"""Every example of docs/guide/shapes.md, through the dry run: taken, or refused with the words that the page has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.brought_in import refusal, start
from tests.unit.reward_functions import PATH

PAGE = (Path(__file__).parents[3] / "docs/guide/shapes.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.S | re.M))
TAKEN = {
    name: lines
    for name, text in SECTIONS.items()
    for lines in re.findall(r"```json\n(.*?)```", text, re.S)
}
KEYS = dict(zip(TAKEN, ("input", "label", "tools", "metadata", "messages")))
REFUSED = [
    (name, *found)
    for name, text in SECTIONS.items()
    for found in re.findall(r"^- `([^`]*)`: `([^`]+)`(.*)$", text, flags=re.M)
]
(CODE,) = re.findall(r"```python\n# shapes.py\n(.*?)```", PAGE, re.S)
REWARDS = re.findall(r"^def (\w+)\(.*?\):(?:  # refused: write (.*))?$", CODE, flags=re.M)


def read(name: str, model: Path, lines: str, *reward: str, chat: bool = True) -> tuple[Path, Any]:
    """The file of these lines and the result of its dry run, with the flags of the page's section."""
    file = model.parent / "p.jsonl"
    file.write_text(lines)
    flags = ["--hf-checkpoint", str(model), "--prompt-data", str(file), "--dry-run"]
    flags += ["--rollout-max-response-len", "99"]
    if name == "Conversations":
        flags += ["--config", "configs/tiny_sft.toml", "--no-use-rollout-routing-replay"]
    else:
        flags += reward or ("--custom-rm-path", f"{PATH}number")
        flags += ["--apply-chat-template"] * chat + ["--tool-key", "tools"]
    return file, start(model.parent, *flags)


def test_the_page_shows_every_shape():
    assert [*TAKEN, "Reward functions"] == list(SECTIONS)
    assert {name for name, *_ in REFUSED} == set(TAKEN)
    assert len(REFUSED) == PAGE.count("\n- `")
    assert len(REWARDS) == CODE.count("def ") and sum(bool(write) for _, write in REWARDS) == 2


@pytest.mark.parametrize("name", TAKEN)
def test_what_the_page_shows_is_taken(name, model):
    file, result = read(name, model, TAKEN[name])
    assert result.exit_code == 0, result.output
    warnings = re.findall(rf"warning: {file}: (.*)", result.output)
    assert [text for text in warnings if not text.startswith("no row has tools")] == []


@pytest.mark.parametrize("name, value, said, more", REFUSED)
def test_what_the_page_says_is_refused(name, value, said, more, model):
    row = json.dumps({"input": "name fruits", KEYS[name]: json.loads(value)})
    reward = ("--rm-type", "exact_match") if name == "Labels" else ()
    chat = "without `--apply-chat-template`" not in more
    file, result = read(name, model, f"{row}\n", *reward, chat=chat)
    words = refusal(result)
    assert said in words and f"{file.name}:1: " in words


@pytest.mark.parametrize("name, write", REWARDS)
def test_the_rewards_of_the_page_are_called_as_their_parameters_say(
    name, write, model, tmp_path, monkeypatch
):
    (tmp_path / "shapes.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    row = '{"input": "name fruits", "label": "apple"}\n'
    _, result = read("Reward functions", model, row, "--custom-rm-path", "shapes:" + name)
    if write:
        words = refusal(result)
        assert "another trainer" in words or "slime's" in words
        assert write in words
    else:
        said = "reward of the first prompt: 1.0 for its label, 0.0 for no answer"
        assert result.exit_code == 0 and said in result.output, result.output
