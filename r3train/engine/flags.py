"""SGLang's server flags, read from its source so that a wrong one is found at once.

Importing SGLang's argument parser takes seconds and loads its kernels, so its source is parsed: a flag
is an annotated field of ``srt/arg_groups/fields`` with its aliases, or an ``add_argument`` of
``srt/server_args.py``.

Source: SGLang 0.5.23, ``ServerArgs``.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from r3train.config.requirements import is_on
from r3train.config.sources import raise_all
from r3train.engine.key import ENGINE_KEY_VARIABLE
from r3train.engine.refusals import DECIDED_BY_THE_RUN, refused

_SIZES = ("tp_size", "dp_size", "pp_size", "ep_size")
_KEY_FLAGS = ("api_key", "admin_api_key")


@cache
def known_flags() -> Mapping[str, str]:
    """Map each of SGLang's flags, with underscores, to its field of ``ServerArgs``.

    Empty if SGLang or its known layout is missing.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return MappingProxyType({})
    root = Path(spec.submodule_search_locations[0]) / "srt"
    flags: dict[str, str] = {}
    for file in sorted((root / "arg_groups" / "fields").glob("*.py")):
        flags |= _fields(ast.parse(file.read_text(encoding="utf-8")))
    if "model_path" not in flags:
        return MappingProxyType({})
    flags |= _arguments(ast.parse((root / "server_args.py").read_text(encoding="utf-8")))
    return MappingProxyType(flags)


@cache
def _choices() -> Mapping[str, tuple[str, ...]]:
    """Map fields of ``ServerArgs`` to the texts that their flags take, where the source lists them."""
    spec = find_spec("sglang")
    places = () if spec is None else spec.submodule_search_locations or ()
    found = {}
    for file in (f for place in places for f in Path(place).glob("srt/arg_groups/fields/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                listed = _given(node).get("choices")
                if isinstance(listed, ast.List):
                    found[node.target.id] = tuple(map(_text, listed.elts))
    return MappingProxyType(found)


def _text(node: ast.expr) -> str:
    return str(getattr(node, "value", None))


def _wrong_values(fields: Mapping[str, Any]) -> Iterator[str]:
    for field, value in fields.items():
        allowed = _choices().get(field, ()) if isinstance(value, str) and is_on(value) else ()
        if allowed and value not in allowed:
            yield f"{_flag(field)} {value}: expected one of {', '.join(allowed)}"
        if field in _SIZES and not (type(value) is int and value > 0):
            yield f"{_flag(field)} {value}: expected a number from 1 up"
    share = fields.get("mem_fraction_static")
    if share is not None and not (isinstance(share, (int, float)) and 0 < share < 1):
        yield f"--sglang-mem-fraction-static {share}: expected a share above 0 and below 1"


def _fields(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the flags of annotated fields: ``name: A[type, Arg(cli_name=..., aliases=[...])]``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if getattr(getattr(node.annotation, "value", None), "id", None) != "A":
            continue
        field, given = node.target.id, _given(node)
        if "no_cli" in given:
            continue
        yield _literal(given.get("cli_name")) or field, field
        if getattr(given.get("action"), "attr", None) == "BooleanOptionalAction":
            yield f"no_{field}", field
        for alias in ast.walk(given.get("aliases", ast.List([]))):
            if _literal(alias):
                yield _literal(alias), field


def _given(node: ast.AnnAssign) -> dict[str | None, ast.expr]:
    return {
        keyword.arg: keyword.value
        for call in ast.walk(node.annotation)
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "Arg"
        for keyword in call.keywords
    }


def _arguments(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the flags of ``add_argument("--name", dest=...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
            name = _literal(node.args[0]) if node.args else None
            if name:
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                yield name, _literal(given.get("dest")) or name


def _literal(node: ast.AST | None) -> str | None:
    text = getattr(node, "value", None)
    return _spelled(text) if isinstance(text, str) else None


def _spelled(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def server_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags by their fields of ``ServerArgs``, whatever alias or prefix named them.

    The last of two names of a field counts, as for SGLang's parser.  Without an installed SGLang the
    names stay as they are.  Raises ConfigError for a flag that SGLang does not have.
    """
    flags = known_flags()
    fields: dict[str, Any] = {}
    problems = []
    for name, value in given.items():
        flag = _spelled(name)
        # SGLang's parser takes a prefix that only one flag has
        near = [flag] if flag in flags else [f for f in flags if f.startswith(flag)]
        if flags and len(near) != 1:
            close = difflib.get_close_matches(flag, flags, n=1)
            hint = f" Did you mean {_flag(close[0])}?" if close else ""
            problems.append(f"{_flag(flag)}: the installed SGLang has no such server flag.{hint}")
            continue
        fields[flags[near[0]] if flags else flag] = value
    raise_all(problems)
    return fields


def _flag(name: str) -> str:
    return f"--sglang-{name.replace('_', '-')}"


def check_server_flags(
    given: Mapping[str, Any],
    *,
    replay: bool = False,
    indexer: bool = False,
    kept_top_k: int | None = None,
    adapters: bool = False,
) -> None:
    """Check the flags of servers of our own; raises ConfigError with a line for each that is wrong.

    Wrong are a key among the flags, a flag that SGLang does not have, a setting that the run decides,
    with ``replay`` (routing replay is on) one whose routes would be wrong, with ``indexer`` (what an
    indexer chose is replayed too) one with which SGLang does not say it, with ``kept_top_k`` (the
    tokens that this top-k keeps are replayed) one with which SGLang does not say them, and with
    ``adapters`` (--lora-serving adapter) one that does not go with them.
    """
    problems = [
        # SGLang's parser takes an unambiguous prefix
        f"{_flag(_spelled(name))}: a key among the flags is shown by ps and written to config.toml;"
        f" set the environment variable {ENGINE_KEY_VARIABLE}, which all servers of the job take, and"
        " the trainer sends"
        for name in given
        if any(key.startswith(_spelled(name)) for key in _KEY_FLAGS)
    ]
    raise_all(problems)
    fields = server_fields(given)
    problems = list(_wrong_values(fields))
    problems += [
        f"sglang.{field}: {DECIDED_BY_THE_RUN[field]}"
        for field in fields
        if field in DECIDED_BY_THE_RUN
    ]
    problems += [
        f"sglang.{field} = {value!r} {reason}"
        for field, value, reason in refused(
            fields, replay=replay, indexer=indexer, kept_top_k=kept_top_k, adapters=adapters
        )
    ]
    raise_all(problems)
