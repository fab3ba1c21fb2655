"""The names of SGLang's server flags, read from its source so that a typo is found at once.

Importing SGLang's argument parser takes seconds and loads its kernels, so its source is parsed: the
flags are the annotated fields of ``srt/arg_groups/fields`` and the literal ``--flags`` of parsers.

Source: SGLang 0.5.23, ``ServerArgs``.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from r3train.engine.key import ENGINE_KEY_VARIABLE

_KEY_FLAGS = ("api_key", "admin_api_key")


@cache
def known_flags() -> frozenset[str]:
    """SGLang's flags, with underscores; empty if SGLang or its known layout is missing."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    root = Path(spec.submodule_search_locations[0]) / "srt"
    groups = sorted((root / "arg_groups").rglob("*.py"))
    names = {name for file in [root / "server_args.py", *groups] for name in _names(file)}
    return frozenset(names) if "model_path" in names else frozenset()


def _names(file: Path) -> Iterator[str]:
    if not file.is_file():
        return
    is_fields = file.parent.name == "fields"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if is_fields and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value[2:].replace("-", "_")
            if node.value.startswith("--") and name.isidentifier():
                yield name


def _spelled(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def check_server_flags(given: Iterable[str]) -> None:
    """Raise ValueError for a key among the flags, and for a flag that SGLang does not have."""
    given = list(given)
    for name in given:
        # SGLang's parser takes an unambiguous prefix
        if any(key.startswith(_spelled(name)) for key in _KEY_FLAGS):
            raise ValueError(
                f"--sglang-{_spelled(name).replace('_', '-')}: a key among the flags is shown by ps"
                f" and written to config.toml; set the environment variable {ENGINE_KEY_VARIABLE},"
                " which all servers of the job take, and the trainer sends"
            )
    known = known_flags()
    if not known:
        return
    for name in given:
        wanted = _spelled(name)
        # SGLang's parser takes a prefix that only one flag has (--tp)
        if wanted in known or sum(flag.startswith(wanted) for flag in known) == 1:
            continue
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f" Did you mean --sglang-{near[0].replace('_', '-')}?" if near else ""
        flag = f"--sglang-{wanted.replace('_', '-')}"
        raise ValueError(f"{flag}: the installed SGLang has no such server flag.{hint}")
