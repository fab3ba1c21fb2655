"""Words about settings: ``--help``, ``r3train explain``, docs/reference/configuration.md."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from r3train.config.cross_checks import requirements_of
from r3train.config.run import RunConfig
from r3train.config.section import Section
from r3train.config.peers import PEERS
from r3train.config.sources import (
    ALIASES,
    FILE_FIELD,
    ConfigError,
    Place,
    flag_name,
    nearest,
    places,
)

# settings of ``--help``; the others are in its sections
MOST_USED = tuple(
    """
    hf_checkpoint prompt_data input_key label_key apply_chat_template rm_type custom_rm_path num_rollout
    rollout_batch_size n_samples_per_prompt rollout_max_response_len max_weight_staleness colocate
    advantage_estimator lr kl_loss_coef lora_rank tensor_model_parallel_size pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size max_tokens_per_gpu use_rollout_routing_replay
    enable_r3_correctness_check eval_prompt_data eval_interval save save_interval auto_resume dry_run
    """.split()
)
# the section of settings for tests, which are in the tables of other sections
HOOKS = "hooks"
HOOKS_TITLE = "Test hooks"
# tables of names of Megatron's -> the flag that adds an entry
OVERRIDES = {
    "transformer_overrides": "--transformer-override",
    "optimizer_overrides": "--optimizer-override",
}
PASSTHROUGH_HELP = {
    **{name: (f"{flag} NAME=VALUE", "Repeatable.") for name, flag in OVERRIDES.items()},
    "sglang": ("--sglang-FLAG [VALUE]...", "No value means on."),
    FILE_FIELD: (f"[[eval.{FILE_FIELD}]] in the file", ""),
}
# docs/ of a checkout, which a wheel carries
PAGES = Path(__file__).resolve().parents[1] / "pages"
Rows = list[tuple[str, str]]


@cache
def _places() -> dict[str, Place]:
    return places(RunConfig)


def sections() -> dict[str, str]:
    """Map the name of each section of ``--help`` to its title: the TOML tables, and the test hooks."""
    titles = {name: info.annotation.title for name, info in RunConfig.model_fields.items()}
    return {**titles, HOOKS: HOOKS_TITLE}


def settings_of(section: str) -> list[Place]:
    """Return the settings of a section as they are listed: test hooks are in a section of their own."""
    return [
        place
        for place in _places().values()
        if section == (HOOKS if is_hook(place) else place.section)
    ]


def is_hook(place: Place) -> bool:
    """Return True for a setting that only tests need."""
    return place.name in RunConfig.model_fields[place.section].annotation.test_hooks


def heading(section: str) -> str:
    """Return the title of a section with its TOML table."""
    tables = dict.fromkeys(place.section for place in settings_of(section))
    return f"{sections()[section]}, {' '.join(f'[{name}]' for name in tables)} in the file"


def rows_of(section: str) -> Rows:
    """Return each setting of a section as it is given, with its meaning and default."""
    rows = []
    for place in settings_of(section):
        note = PASSTHROUGH_HELP.get(place.name, ("", ""))[1] or _default_in_help(place)
        rows.append((usage(place), f"{place.info.description} {note}"))
    return rows


def most_used() -> Rows:
    """Return the settings that most runs give, each with the beginning of its meaning."""
    found = (_places()[name] for name in MOST_USED)
    return [(usage(place).replace("[no-]", ""), gist(place.info.description)) for place in found]


def section_rows() -> Rows:
    """Return the sections, each with what it is about and its number of settings."""
    abouts = {name: info.annotation.__doc__ for name, info in RunConfig.model_fields.items()}
    abouts[HOOKS] = "Deliberate bugs and faults, and stricter checks."
    return [
        (name, f"{text.splitlines()[0].rstrip('.')} ({len(settings_of(name))})")
        for name, text in abouts.items()
    ]


def gist(text: str) -> str:
    """Return the beginning of a text, up to its first stop, comma, colon or bracket."""
    return re.split(r"[.;:,(](?: |$)", " ".join(text.split()))[0].strip()


def usage(place: Place) -> str:
    """Return a setting as it is given on the command line."""
    if place.name in PASSTHROUGH_HELP:
        return PASSTHROUGH_HELP[place.name][0]
    kind = without_none(place.info.annotation)[1]
    if kind is bool:
        return f"--[no-]{place.flag[2:]}"
    if get_origin(kind) is tuple:
        return f"{place.flag} {metavar(get_args(kind)[0])}..."
    return f"{place.flag} {metavar(kind)}"


def without_none(annotation: Any) -> tuple[bool, Any]:
    """Return (True if the annotation allows None, the annotation without None)."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        if len(kinds) < len(get_args(annotation)) and len(kinds) == 1:
            return True, kinds[0]
    return False, annotation


def metavar(kind: Any) -> str:
    """Return the word for a value: its choices, or its type."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is dict:
        return "JSON"
    return {int: "INT", float: "NUMBER", str: "TEXT"}.get(kind, "PATH")


def _default_in_help(place: Place) -> str:
    default = default_of(place.info)
    return {"required": "[required]", "unset": "", "empty": ""}.get(
        default, f"[default: {default}]"
    )


def default_of(field: FieldInfo) -> str:
    """Return the default as a reader writes it; "required", "unset" and "empty" are no values."""
    if field.is_required():
        return "required"
    default = field.default
    if default is None:
        return "unset"
    if default == () or default == {}:
        return "empty"
    if isinstance(default, bool):
        return "on" if default else "off"
    return json.dumps(default) if isinstance(default, tuple) else str(default)


def value_of(field: FieldInfo) -> str:
    """Return the values that a field takes, with its bounds; names of choices stand in backquotes."""
    words = type_words(field.annotation)
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for bound in field.metadata:
        for attribute, sign in signs.items():
            if hasattr(bound, attribute):
                words += f", {sign} {getattr(bound, attribute):g}"
    return words


def type_words(annotation: Any) -> str:
    """A type in words: choices are quoted code, None is left to the default."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(kind) for kind in arguments if kind is not type(None))
    if origin in (tuple, list):
        return f"list of {type_words(arguments[0])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "table"
    return {bool: "switch", int: "integer", float: "number", str: "text", Path: "path"}[annotation]


def find_setting(name: str) -> Place:
    """Return the setting of a flag, a key, or TABLE.KEY; raises ConfigError with the nearest one."""
    word = name.removeprefix("--").replace("-", "_")
    section, _, key = word.rpartition(".")
    key = key if key in _places() else key.removeprefix("no_")
    key = ALIASES.get(key, key)
    by_flag = {flag.replace("-", "_"): table for table, flag in OVERRIDES.items()}
    key = by_flag.get(f"__{key}", key)
    if key not in _places() and key.startswith("sglang_"):
        key = "sglang"
    if section in ("sglang", "rollout.sglang"):
        section, key = "", "sglang"
    elif section.rpartition(".")[2] in OVERRIDES:
        section, key = "", section.rpartition(".")[2]
    place = _places().get(key)
    if place is None and word in sections():
        raise ConfigError(f"{name}: a section: r3train train --help {word} shows its settings")
    if place is None:
        named = [each for each in _places() if f"_{key}_" in f"_{each}_"]
        hint = f" These have it in their name: {', '.join(named)}." if named else ""
        hint = nearest(key, ()) or hint or nearest(key, _places())
        raise ConfigError(f"{name}: no such setting.{hint}")
    if section not in ("", place.section):
        raise ConfigError(f"{name}: no such setting. Did you mean {place.section}.{key}?")
    return place


def explained(place: Place) -> Iterator[str]:
    """Yield paragraphs that say all about a setting; the lines of its table begin with two spaces."""
    yield f"{place.section}.{place.name}"
    yield f"  flag     {usage(place)}"
    if place.name not in PASSTHROUGH_HELP:
        yield f"  file     {place.name} in the table [{place.section}]"
    yield f"  value    {value_of(place.info).replace('`', '')}"
    yield f"  default  {default_of(place.info)}"
    if names := [name for name, here in PEERS.items() if place.name in re.split(r"\W+", here)]:
        yield f"  in other trainers  {', '.join(names)}"
    yield ""
    yield " ".join(place.info.description.split())
    yield from (
        requirement.words()
        for requirement in requirements_of(place.name)
        if all(condition.name != place.name for condition in requirement.conditions)
    )
    for name, other in _places().items():
        for requirement in other.info.metadata:
            about = [c for c in getattr(requirement, "conditions", ()) if c.name == place.name]
            if about and name != place.name:
                if (
                    requirement.verb == "cannot go with"
                ):  # each of its conditions, so this one alone
                    requirement = replace(requirement, conditions=tuple(about))
                words = requirement.words()
                yield f"{flag_name(name)}: {words[0].lower()}{words[1:]}"
    yield ""
    yield f"Pages: {', '.join([*pages_of(place), 'docs/reference/configuration.md'])}; r3train docs shows them."


@cache
def _guides() -> dict[str, str]:
    """Text of every page but the reference of all settings, by its path in a checkout."""
    files = (file for file in sorted(PAGES.rglob("*.md")) if file.stem != "configuration")
    return {f"docs/{f.relative_to(PAGES).as_posix()}": f.read_text(encoding="utf-8") for f in files}


def pages_of(place: Place) -> list[str]:
    """Return the guides that name a setting most, three at most, as they are called in a checkout."""
    flag = PASSTHROUGH_HELP.get(place.name, (place.flag,))[0].split()[0].removesuffix("FLAG")
    end = "" if flag.endswith("-") else r"(?![\w-])"
    named = re.compile(rf"(?<![\w-]){re.escape(flag)}{end}|`{place.name}`|\b{place.name} = ")
    counts = {page: len(named.findall(text)) for page, text in _guides().items()}
    return sorted(filter(counts.get, counts), key=lambda page: -counts[page])[:3]
