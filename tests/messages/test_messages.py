"""Transcripts of commands: each prints what the text files here say (``make messages`` writes them anew)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.messages.transcripts import answered, Case, make_models, MESSAGES, read, written

TEXTS = {path.stem: read(path.read_text()) for path in sorted(MESSAGES.glob("*.txt"))}
CASES = {f"{name}: {case.name}": case for name, (_, cases) in TEXTS.items() for case in cases}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("messages")
    make_models(directory)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_a_command_prints_what_its_transcript_says(name, files, tmp_path):
    found = answered(CASES[name], files, tmp_path / "here")
    assert str(found) == str(CASES[name]), "read what has changed; make messages writes it"


@pytest.mark.parametrize("name", TEXTS)
def test_a_transcript_is_written_as_it_is_read_and_names_each_case_once(name):
    head, cases = TEXTS[name]
    assert written(head, cases) == (MESSAGES / f"{name}.txt").read_text()
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize(
    "command, said",
    [
        ("train --num-rollout 0", "Error: --num-rollout: greater than 0, got 0"),
        ("train --dry-run --lr 0.1", "(goes on)"),
        ("cat prompts.jsonl | head -0", "a line"),
    ],
)
def test_another_answer_is_found(command, said, files, tmp_path):
    case = Case("x", ((command, said),))
    assert answered(case, files, tmp_path / "here") != case


def test_a_start_that_makes_a_file_is_found(files, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "r3train.launch.job.model_checks.check_class", lambda hf: Path("made").touch()
    )
    with pytest.raises(AssertionError, match="made.*PosixPath"):
        answered(Case("x", (("train --dry-run", ""),)), files, tmp_path / "here")
