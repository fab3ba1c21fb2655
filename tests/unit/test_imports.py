"""An import inside a function says why it is there, unless it is of a package that takes seconds or may be missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import r3train

PACKAGE = Path(r3train.__file__).parent
HEAVY = {"torch", "megatron", "sglang", "transformers", "transformer_engine", "tokenizers"}
HEAVY |= {"safetensors", "pyarrow", "wandb", "mlflow"}
MOST = 57


def inner_imports(source: str) -> Iterator[tuple[int, bool]]:
    """The line of each import of another package inside a function, and whether a comment stands at its group."""
    lines, seen = source.splitlines(), set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = [n for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)]
        ends = {node.end_lineno: node.lineno for node in nodes}
        for node in nodes:
            name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if node.lineno in seen or name.partition(".")[0] in HEAVY:
                continue
            seen.add(node.lineno)
            first = node.lineno
            while first - 1 in ends:
                first = ends[first - 1]
            last = node.end_lineno
            yield node.lineno, any("#" in line for line in lines[first - 2 : last])


def test_an_import_inside_a_function_says_why():
    found = {
        f"{file.relative_to(PACKAGE)}:{line}": says
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, says in inner_imports(file.read_text(encoding="utf-8"))
    }
    assert [place for place, says in found.items() if not says] == []
    assert len(found) <= MOST, "most can stand at the head of a file"


@pytest.mark.parametrize(
    "body, says",
    [
        ("from r3train import ids", [False]),
        ("from r3train import ids  # it is large", [True]),
        (
            "# they are large\n    from r3train import ids\n    from r3train import types",
            [True, True],
        ),
        ("import torch", []),
    ],
)
def test_an_import_without_a_reason_is_found(body, says):
    assert [found for _, found in inner_imports(f"def f():\n    {body}\n")] == says
