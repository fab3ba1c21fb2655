"""Parameters that production fills from a setting have no default: a setting that is not handed over is a TypeError."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import r3train
from r3train.config import RunConfig

PACKAGE = Path(r3train.__file__).parent
SETTINGS = {
    name
    for section in RunConfig.model_fields.values()
    if isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel)
    for name in section.annotation.model_fields
} | {name for name, value in vars(RunConfig).items() if isinstance(value, property)}
# many tests call these with few arguments
CALLED_BY_MANY_TESTS = {
    "EngineControl",
    "Producer",
    "RankTopology",
    "SGLangClient",
    "SGLangServer",
    "Scorer",
    "check_server_flags",
    "require_settings",
}
# None, or all ranks' own, where there is none of it
OF_DATA = {("LossRows", "teacher_log_probs"), ("DumpedRollouts", "steps_per_rollout")}


def name_of(call: ast.expr) -> str:
    """The name that is called: of a function, a class or a method."""
    return getattr(call, "id", getattr(call, "attr", ""))


def defaults(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each function or class, and a parameter or field of it with a default."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            places = node.args.posonlyargs + node.args.args
            names = places[len(places) - len(node.args.defaults) :]
            keywords = zip(node.args.kwonlyargs, node.args.kw_defaults)
            for parameter in [*names, *(k for k, default in keywords if default is not None)]:
                yield node.name, parameter.arg
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and part.value is not None:
                    yield node.name, part.target.id
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    yield from (
                        (node.name, p)
                        for n, p in defaults(ast.Module([part], []))
                        if n == "__init__"
                    )


def not_needed(trees: list[ast.Module]) -> set[tuple[str, str]]:
    """Defaults that no call takes, of arguments that calls read from a setting."""
    with_default = {pair for tree in trees for pair in defaults(tree)}
    calls = defaultdict(list)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                calls[name_of(node.func)].append(node)
    found = set()
    for name, parameter in with_default:
        given = [k.value for call in calls[name] for k in call.keywords if k.arg == parameter]
        if given and len(given) == len(calls[name]):
            reads = {n.attr for v in given for n in ast.walk(v) if isinstance(n, ast.Attribute)}
            if reads & SETTINGS:
                found.add((name, parameter))
    return found


def test_what_is_filled_from_a_setting_has_no_default():
    trees = [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    found = {pair for pair in not_needed(trees) if pair[0] not in CALLED_BY_MANY_TESTS} - OF_DATA
    assert not found, f"{sorted(found)}: these defaults hide a setting that is not handed over"


@pytest.mark.parametrize(
    "code, found",
    [
        ("def f(*, n=1): ...\nf(n=config.agent.agent_max_calls)", {("f", "n")}),
        ("class A:\n n: int = 1\nA(n=config.agent.agent_max_calls)", {("A", "n")}),
        ("def f(*, n): ...\nf(n=config.agent.agent_max_calls)", set()),
        ("def f(*, n=1): ...\nf(n=config.agent.agent_max_calls)\nf()", set()),
        ("def f(*, n=1): ...\nf(n=7)", set()),
    ],
)
def test_a_default_that_hides_a_setting_is_found(code, found):
    assert not_needed([ast.parse(code)]) == found
