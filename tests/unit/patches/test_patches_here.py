"""Every patch is made on the versions that are installed, through the checked call, and is in the doctor's list."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from r3train.doctor import patch_list
from r3train.launch.job.finding import OK, PROBLEM
from r3train.doctor.patch_list import PatchList

ROOM = Path(patch_list.__file__).parents[1]
# files of which the doctor's two processes run nothing
ELSEWHERE = {
    "torchrun_start.py": "torchrun's process",
    "observe/logging_setup.py": "a run's log files",
    "launch/start/train.py": "a rank's terminal",
    "trainer/megatron/fused_adam.py": "an optimizer of Transformer Engine's",
}


@pytest.fixture(scope="module")
def places() -> list[str]:
    """The names that ranks and servers change; each meets the original that it expects."""
    found = []
    for who in ("ranks", "servers"):
        program = [sys.executable, "-W", "ignore", "-m", patch_list.__name__, who]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        for place, why, wrong in json.loads(done.stdout):
            assert not wrong, (place, why, wrong)
            found.append(place)
    return found


def test_every_original_is_the_one_that_is_replaced(places):
    assert len(places) >= (60 if not torch.cuda.is_available() else 8)


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of the room's functions with a name in its text, and the file of it."""
    for path in sorted(ROOM.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if "expects" in {keyword.arg for keyword in node.keywords}:
                    yield str(path.relative_to(ROOM)), node


def test_the_list_has_every_name_that_is_patched(places):
    if torch.cuda.is_available():
        pytest.skip("not run: those of a CPU are not made here")
    names = {place.rsplit(".", 1)[-1] for place in places}
    asked = {
        node.args[1].value
        for file, node in calls()
        if file not in ELSEWHERE and isinstance(node.args[1], ast.Constant)
    }
    assert len(asked) >= 20 and asked <= names, asked - names


def test_what_does_not_fit_is_a_problem_and_so_is_a_process_that_fails(monkeypatch):
    rows = [["a.b", "it is slow", "it is (x), expected (y)"], ["a.c", "it is wrong", ""]]
    code = f"import sys; print({json.dumps(rows)!r}) if sys.argv[1] == 'ranks' else sys.exit('no SGLang')"
    popen = patch_list.subprocess.Popen
    monkeypatch.setattr(
        patch_list.subprocess,
        "Popen",
        lambda command, **given: popen([command[0], "-c", code, command[-1]], **given),
    )
    assert [(f.level, f.text) for f in PatchList().findings()] == [
        (PROBLEM, "a.b: it is (x), expected (y) (it is slow)"),
        (PROBLEM, "those of servers cannot be made: no SGLang"),
        (OK, "1 apply"),
    ]


# assignments to what is imported from elsewhere, and why they are no patches
ALLOWED = {
    ("engine/launch_server.py", "sys.argv"): "the flags of the program that runs next",
    ("rewards/code_launcher.py", "sys.argv"): "a program of the model's, in a process of its own",
    ("rewards/code_launcher.py", "sys.unraisablehook"): "the same",
    ("rewards/worker.py", "sys.path"): "the user's path, in a process of its own",
    ("engine/publish.py", "_world.pg_group_ranks"): "torch's table of groups, as SGLang fills it",
    ("cpu/platform_class.py", "ALLOC_MEMORY_FUNCS"): "SGLang's table, which is noted",
}


def foreign(tree: ast.Module) -> set[str]:
    """Names that a file imports from outside of the package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name for a in node.names}
    return {name for name in found if name != "r3train"} - own(tree)


def own(tree: ast.Module) -> set[str]:
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom))
    ours = (n for n in nodes if (n.module or "").split(".")[0] == "r3train")
    return {a.asname or a.name for n in ours for a in n.names}


def assigned(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what is assigned to, deleted or set by ``setattr``, tuples taken apart."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "attribute")]
        else:
            continue
        for target in targets:
            yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]


def changes(text: str) -> set[str]:
    """Return what a file's text changes of that which it imports from elsewhere, the environment apart."""
    tree = ast.parse(text)
    names, found = foreign(tree), set()
    for target in assigned(tree):
        if not isinstance(target, (ast.Attribute, ast.Subscript)):
            continue
        root = target
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        if isinstance(root, ast.Name) and root.id in names:
            changed = target.value if isinstance(target, ast.Subscript) else target
            found.add(ast.unparse(changed))
    return found - {"os.environ"}


@pytest.mark.parametrize(
    "text, found",
    [
        ("import torch\ntorch.cuda.stream = None", {"torch.cuda.stream"}),
        ("from torch import cuda as c\nc.a, c.b = 1, 2", {"c.a", "c.b"}),
        ("import sys\nsys.modules['a'] = None", {"sys.modules"}),
        (
            "import torch\ndel torch.x\nsetattr(torch.Tensor, name, f)",
            {"torch.x", "torch.Tensor.attribute"},
        ),
        ("import os\nos.environ['A'] = '1'", set()),
        ("from r3train import patches\npatches.x = 1\nself.torch = 2", set()),
    ],
)
def test_a_change_of_a_foreign_module_is_seen(text, found):
    assert changes(text) == found


def test_nothing_else_is_changed_but_by_the_checked_call():
    found = {
        (str(path.relative_to(ROOM)), change)
        for path in ROOM.rglob("*.py")
        if path.parent.name != "patches"
        for change in changes(path.read_text())
    }
    assert found == set(ALLOWED)
