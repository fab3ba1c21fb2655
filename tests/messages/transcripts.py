"""Transcripts: what commands print, as text files that ``make messages`` writes anew and that are read in review.

A paragraph of a file is one case: its first line says what is the matter, lines that begin with ``$`` are commands,
and the lines that follow a command are what it prints.  Each case has a directory of its own with the demo's
``model``, ``prompts.jsonl`` and a ``dense`` model.  ``train`` stands for rank 0 of ``torchrun --nproc-per-node 2
train_async.py --config tiny_cpu --use-rollout-routing-replay --hf-checkpoint model --prompt-data prompts.jsonl``,
on a machine without a GPU; ``r3train`` is the program; any other command is bash's.  Of ``train`` the error is
shown, or the warnings of a dry run that goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from click.testing import CliRunner, Result

import train_async
from r3train.cli import main
from r3train.verify.tiny import TinyOptions, build

MESSAGES = Path(__file__).resolve().parent
ROOT = MESSAGES.parents[1]
RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
# what a change elsewhere would alter -> what a transcript has in its place
SHOWN = ((r"(\w+\.py):\d+", r"\1:LINE"), (r"\b[0-9a-f]{12}\b", "HASH"))
GOES_ON = "(goes on)"


class Ended(BaseException):
    """torchrun ends the rank."""


def start(tiny: Path, *flags: str, environment: dict | None = None) -> Result:
    """Run ``train_async.py`` with the demo's files, as a rank of torchrun would; None takes a variable away."""
    recipe = () if "--config" in flags else ("--config", str(ROOT / "configs/tiny_cpu.toml"))
    files = ("--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl"))
    words = [*files, *recipe, "--use-rollout-routing-replay", *flags]
    ranks = {"RANK": None, "WORLD_SIZE": None, **(environment or {})}
    return CliRunner().invoke(train_async.main, words, env=ranks)


@dataclass(frozen=True)
class Case:
    """A paragraph: what is the matter, and (command, what it prints) of each line that begins with ``$``."""

    name: str
    said: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [self.name]
        for command, output in self.said:
            lines += [f"$ {command}", *([output] if output else [])]
        return "\n".join(lines)


def read(text: str) -> tuple[str, list[Case]]:
    """Split the text of a file into its first paragraph and its cases."""
    head, *paragraphs = text.rstrip("\n").split("\n\n")
    return head, [_case(paragraph.split("\n")) for paragraph in paragraphs]


def _case(lines: list[str]) -> Case:
    said: list[tuple[str, list[str]]] = []
    for line in lines[1:]:
        if line.startswith("$ "):
            said.append((line[2:], []))
        else:
            said[-1][1].append(line)
    return Case(lines[0], tuple((command, "\n".join(output)) for command, output in said))


def written(head: str, cases: list[Case]) -> str:
    return "\n\n".join([head, *map(str, cases)]) + "\n"


def make_models(directory: Path) -> None:
    """Write what the directory of a case is copied from."""
    build(directory, TinyOptions(), force=True)
    build(directory / "of_dense", TinyOptions(num_experts=0), force=True)
    (directory / "of_dense/model").rename(directory / "dense")
    shutil.rmtree(directory / "of_dense")
    (directory / "configs").symlink_to(ROOT / "configs")


def answered(case: Case, files: Path, directory: Path) -> Case:
    """Run the commands of a case; returns it with what they print.

    files: see ``make_models``.  directory: it must not be there yet.
    Raises AssertionError where a refused start has made a file, started anything or spoken twice.
    """
    shutil.copytree(files, directory, symlinks=True)
    with contextlib.chdir(directory), _nothing_starts():
        said = [(command, _printed(command, directory)) for command, _ in case.said]
    return Case(case.name, tuple(said))


@contextlib.contextmanager
def _nothing_starts() -> Iterator[None]:
    """Let a start without a GPU get as far as its ranks and servers, and no further."""

    def not_now(*_a, **_k):
        raise AssertionError("something was started")

    with (
        patch("r3train.launch.start.train.start_servers", not_now),
        patch("r3train.launch.start.rank.run", not_now),
        patch(
            "r3train.config.options.time.sleep", lambda _: None
        ),  # of the ranks that let rank 0 speak
        patch("r3train.launch.job.limits.visible_gpus", lambda: 0),
        patch("r3train.launch.job.limits.find_spec", lambda name: None),
    ):
        yield


def _printed(command: str, directory: Path) -> str:
    words = shlex.split(command)
    environment = {}
    while "=" in words[0] and words[0].partition("=")[0].isidentifier():
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if words[0] == "train":
        output = _of_a_start(words[1:], environment)
    elif words[0] == "r3train":
        output = CliRunner().invoke(main, words[1:]).output
        output = output[max(0, output.find("Error: ")) :]
    else:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
    for shown, words in SHOWN:
        output = re.sub(shown, words, output)
    # the relative way to the root can hold the absolute one: it goes first
    for place in (directory, os.path.relpath(ROOT, directory), ROOT):
        output = output.replace(f"{place}/", "")
    return output.strip()


def _of_a_start(flags: list[str], environment: dict[str, str]) -> str:
    before = set(Path().rglob("*"))
    result = start(Path(), *flags, environment=RANK_0 | environment)
    made = set(Path().rglob("*")) - before
    assert not made, f"{flags}: made {made}"
    assert result.exit_code in (0, 2), result.output
    if result.exit_code == 0:
        assert "--dry-run" in flags
        warnings = [line for line in result.output.splitlines() if line.startswith("warning: ")]
        return "\n".join(warnings) or GOES_ON
    _, error, text = result.output.partition("Error: ")
    assert error and "Traceback" not in result.output, result.output
    if "--dry-run" not in flags:
        _other_rank_is_silent(flags, environment)
    return f"Error: {text.strip()}"


def _other_rank_is_silent(flags: list[str], environment: dict[str, str]) -> None:
    """The node's other rank finds the same and is ended before it speaks, or leaves it to rank 0."""

    def ended(_seconds):
        raise Ended

    other = RANK_0 | {"RANK": "1", "LOCAL_RANK": "1"} | environment
    with patch("r3train.config.options.time.sleep", ended), contextlib.suppress(Ended):
        result = start(Path(), *flags, "--dry-run", environment=other)
        assert result.exit_code == 0 and "Error: " not in result.output, result.output


def write_all(directory: Path) -> None:
    """Rewrite every transcript with what its commands print now.

    directory: an empty one.
    """
    make_models(directory / "files")
    for path in sorted(MESSAGES.glob("*.txt")):
        head, cases = read(path.read_text())
        found = [
            answered(case, directory / "files", directory / f"{path.stem}{number}")
            for number, case in enumerate(cases)
        ]
        path.write_text(written(head, found))
