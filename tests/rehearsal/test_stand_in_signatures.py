"""The stand-in for Transformer Engine takes every keyword that megatron-core's layers give it by name."""

import ast
from importlib.util import find_spec
from pathlib import Path

STAND_IN = Path(__file__).parent / "stand_ins/transformer_engine.py"
LAYERS = {"Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention"}


def classes(source: str) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def called() -> dict[str, set[str]]:
    """By layer: keywords written in calls of its __init__ by the subclasses of megatron-core."""
    root = Path(find_spec("megatron.core").submodule_search_locations[0])
    found: dict[str, set[str]] = {}
    for own in classes((root / "extensions/transformer_engine.py").read_text(encoding="utf-8")):
        for base in map(ast.unparse, own.bases):
            if base.startswith("te.pytorch.") and (name := base.split(".")[-1]) in LAYERS:
                calls = [n for n in ast.walk(own) if isinstance(n, ast.Call)]
                inits = [n for n in calls if ast.unparse(n.func) == "super().__init__"]
                words = {k.arg for n in inits for k in n.keywords if k.arg}
                found[name] = found.get(name, set()) | words
    return found


def taken(source: str) -> dict[str, set[str]]:
    """By layer of the stand-in: names of its __init__'s arguments, with its base's where it passes others on."""
    there: dict[str, set[str]] = {}
    for own in classes(source):
        for init in own.body:
            if isinstance(init, ast.FunctionDef) and init.name == "__init__":
                words = {a.arg for a in (*init.args.args, *init.args.kwonlyargs)}
                passed = map(ast.unparse, own.bases if init.args.kwarg else ())
                there[own.name] = words.union(*(there.get(base, set()) for base in passed))
    return there


def lacking(source: str) -> dict[str, set[str]]:
    there = taken(source)
    return {name: lack for name, words in called().items() if (lack := words - there[name])}


def test_the_stand_in_takes_every_keyword_of_megatron_core():
    assert set(called()) == LAYERS
    assert lacking(STAND_IN.read_text(encoding="utf-8")) == {}


def test_a_keyword_of_another_name_is_seen():
    source = STAND_IN.read_text(encoding="utf-8").replace(
        "        kv_channels:", "        channels:"
    )
    assert lacking(source) == {"DotProductAttention": {"kv_channels"}}
