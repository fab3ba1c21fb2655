"""Settings that no job has: each ends in one line at once, whatever its size."""

from __future__ import annotations

import tomllib

import pytest
from click.testing import CliRunner

import train_async
from r3train.config.files import MAX_TOML_BYTES, parse_toml
from tests.unit.launch.test_preflight import ROOT, start


@pytest.mark.parametrize(
    "text, words",
    [
        ("x = " + "[" * 100_000, "nested too deeply for a configuration"),
        ("x = " + "{a = " * 5_000, "nested too deeply for a configuration"),
        ("a." * 20_000 + "a = 1", "line 1 has a key of more than 16 parts"),
        ("\n[" + "a . " * 20_000 + "a]", "line 2 has a key of more than 16 parts"),
        ("x = {" + "'a'." * 20_000 + "a = 1}", "line 1 has a key of more than 16 parts"),
        ("[run]\nrun_name = '" + "a" * 20_000_000 + "'", f"more than {MAX_TOML_BYTES} bytes"),
        ("x = " + "9" * 10_000, "not valid TOML"),
    ],
)
def test_a_configuration_that_takes_a_parser_minutes_is_refused_before_it_is_parsed(
    tmp_path, text, words, monkeypatch
):
    file = tmp_path / "config.toml"
    file.write_text(text)
    parsed, loads = [], tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or loads(text))
    result = CliRunner().invoke(train_async.main, ["--config", str(file), "--dry-run"])
    at_once = words.startswith(("nested", "not valid"))  # which the parser says itself
    assert (text in parsed) == at_once
    assert result.exit_code == 2, result.output[:2000]
    lines = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and f"{file}: " in lines[0] and words in lines[0], result.output[:2000]


def test_dots_that_are_no_keys_are_none_of_its_parts():
    dots = "a." * 40
    text = f'x = "{dots}"\ny = \'{dots}\'\nz = """\n{dots}\n\\"""{dots}"""\n# {dots}\n'
    text += "n = [" + "1.5, " * 40 + "]\n[a.b.'c.d']\n"
    assert parse_toml(text.encode())["n"] == [1.5] * 40


def test_names_of_a_hundred_characters_are_taken(tiny):
    prompts = str(tiny / "prompts.jsonl")
    assert (ROOT / "configs/tiny_cpu.toml").is_file()
    names = ("--run-name", "n" * 100, "--eval-prompt-data", "n" * 100, prompts)
    assert start(tiny, *names, "--dry-run").exit_code == 0


def test_a_refused_value_is_not_shown_whole(tiny):
    result = start(tiny, "--run-name", "n" * 100_000, "--dry-run")
    assert result.exit_code == 2 and len(result.output) < 5_000
