"""Settings of other frameworks by the names that they have there (peers.toml, megatron.toml), and settings that were removed.

Messages answer with them, and docs/reference/compare.md is written from them (docs/write_compare.py).
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from importlib.resources import files
from typing import Any


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(files("r3train.config").joinpath(name).read_text(encoding="utf-8"))


# framework -> {its setting: ours, fields as words with underscores}
FRAMEWORKS = _table("peers.toml")
_TRIED = FRAMEWORKS.pop("tried")
_WHOLE = {name: here for names in FRAMEWORKS.values() for name, here in names.items()}
# without its tables a name may be a flag, or end a longer one: train_files.  One of two meanings (path) is left out
_MEANINGS = defaultdict(set)
for _name, _here in _WHOLE.items():
    _MEANINGS[_name.rpartition(".")[2]].add(_here)
PEERS = {short: here.pop() for short, here in _MEANINGS.items() if len(here) == 1} | _TRIED | _WHOLE
# name -> what is said of it: Megatron's own names, and those of other frameworks
ANSWERS = {
    name: answer.replace("NAME", name)
    for answer, names in _table("megatron.toml").items()
    for name in names.split()
} | {name: f"Here it is {here}." for name, here in PEERS.items()}
# what r3train had a release ago -> what to use instead
_REMOVED = _table("removed.toml")
REMOVED_DEFAULTS = {name: row["default"] for name, row in _REMOVED["settings"].items()}


def removed(name: str, command: str = "") -> str:
    """Return what to use in place of a setting, a command or a flag of a command that was removed.

    "" for a name that never was, or is still there.
    """
    word = name.removeprefix("--").replace("-", "_")
    setting = _REMOVED["settings"].get(word, {})
    here = setting.get("instead") or _REMOVED["commands"].get(f"{command} {name}".strip())
    return f" It was removed in this release. {here}" if here else ""
