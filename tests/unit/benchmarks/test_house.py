"""The counter of code lines, climbing imports and traced code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.house import circles, climbs, code_lines, measure, ran

SOURCE = '''"""A file."""

import os  # for the name


def name(
    one,
    *,
    two=""" text
in two lines""",
):
    """Return it."""
    # a remark
    from r3train import loop

    return os.name


class Kind:
    def many(self, a, b, c, d, e, f, g, *, h): ...
'''
LAYERS = """
[tool.importlinter]
[[tool.importlinter.contracts]]
type = "layers"
layers = ["loop", "engine : proof", "types"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": LAYERS,
        "r3train/__init__.py": "",
        "r3train/types.py": "from r3train.loop import story\n",
        "r3train/loop/__init__.py": "",
        "r3train/loop/story.py": "from r3train.engine import client\n\n\ndef step():\n    return 1\n",
        "r3train/engine/__init__.py": "",
        "r3train/engine/client.py": SOURCE + "\nfrom r3train.types import X\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_blanks_comments_and_docstrings_are_no_code():
    assert sorted(code_lines(SOURCE)) == [3, 6, 7, 8, 9, 10, 11, 14, 16, 19, 20]


def test_functions_arguments_and_imports_are_counted(tree):
    house = measure([tree / "r3train"])
    assert (house.inner_imports, house.long_functions) == (1, [])
    assert house.many_arguments == ["engine/client.py:20 many 8"]
    assert house.rooms == {"engine": 12, "loop": 3, "(top level)": 1}


def test_an_import_that_climbs_and_a_ring_are_found(tree):
    house = measure([tree / "r3train"])
    assert climbs(house, tree, "r3train") == [
        ("r3train.engine.client", "r3train.loop"),
        ("r3train.types", "r3train.loop.story"),
    ]
    assert circles(house.imports) == [
        ["r3train.engine.client", "r3train.loop.story", "r3train.types"]
    ]


def test_of_what_ran_the_lines_of_code_are_counted_once(tree):
    for rank, ways in enumerate((["routes"], ["routes", "update"])):
        trace = {"loop/story.py": {"4": ways}}
        (tree / f"rank_{rank}.json").write_text(json.dumps(trace))
    found = ran(sorted(tree.glob("rank_*.json")), tree / "r3train")
    assert found["step"] == found["routes"] == found["update"] == {"loop/story.py": {4, 5}}
    assert found["prompt"] == {}
