"""Docstrings begin with a noun or a verb, in every room of the repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUESTION = re.compile(r"(What|Where|How|Which|When|Who|Whose|Whom|Whether|Why)(ever)?\b")
NAMED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def headless(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, first line) of each docstring that begins with a question word."""
    for node in ast.walk(ast.parse(source)):
        docstring = ast.get_docstring(node) if isinstance(node, NAMED) else None
        if docstring and QUESTION.match(docstring):
            yield node.body[0].lineno, docstring.splitlines()[0]


def test_no_docstring_begins_with_a_question_word():
    folders = ("r3train", "tests", "benchmarks", "docs")
    files = [ROOT / "train_async.py"]
    files += [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files
        for line, text in headless(path.read_text(encoding="utf-8"))
    ]
    assert not found, "begin with a noun or a verb:\n" + "\n".join(found)


def test_a_question_word_at_the_beginning_is_found():
    source = 'def f():\n    """Whether it is so."""\n\n\ndef g():\n    """Whole rows."""\n'
    assert list(headless(source)) == [(2, "Whether it is so.")]
