"""Write docs/reference/configuration.md and r3train.schema.json from r3train/config; --check fails where they are stale.

Editors read the schema (``#:schema`` at the head of a recipe) to complete keys and to underline mistakes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from r3train.config import RunConfig
from r3train.config.cross_checks import requirements_of
from r3train.config.help_text import HOOKS, HOOKS_TITLE, default_of, settings_of, value_of
from r3train.config.sources import Place

PAGE = Path(__file__).parent / "reference/configuration.md"
SCHEMA = Path(__file__).parents[1] / "r3train.schema.json"
# a file may give these as text too
TEXT_TOO = ("prompt_data", "apply_chat_template_kwargs")
HEAD = """# Configuration

<!-- Written by docs/write_configuration.py (`make docs`) from r3train/config. Do not edit. -->

A run is described by one TOML file and any flags: `r3train train --config FILE.toml --flag ...`.
A field is a flag with dashes for underscores (`num_rollout`, `--num-rollout`), and flags win over
the file. The heading of a section names its TOML table. A switch is turned off with `--no-` before
its name. `none` unsets a field that may be unset. A list takes several values, commas or both.
`--dry-run` checks everything, prints the settings that are not at their defaults, and stops; every run saves all of its own.

Three tables take names of Megatron and SGLang:

- `transformer_overrides`: fields of Megatron's `TransformerConfig` without a flag here. A table
  in the file; `--transformer-override NAME=VALUE`, repeatable, on the command line. A field that the
  checkpoint, the actor or R3 decides is refused with the reason, and so is one that Megatron lacks.
- `optimizer_overrides`: the same for Megatron's `OptimizerConfig`: `[trainer.optimizer_overrides]`, or
  `--optimizer-override NAME=VALUE`.
- `sglang`: flags of the SGLang server. `[rollout.sglang]` in the file; `--sglang-FLAG [VALUE]`
  on the command line (`--sglang-mem-fraction-static 0.3`). A flag without a value is on. Weights,
  their format, their version and seeds belong to the run: such flags are refused, under any alias.

`r3_mismatch_threshold` may also come from the environment, as `R3_MISMATCH_THRESHOLD` or its alias
`MILES_TEST_R3_THRESHOLD`: below flags and file, above the default. Only keys are read from other
variables: `R3TRAIN_ENGINE_API_KEY` ([several_machines.md](../guide/several_machines.md)),
`R3TRAIN_JUDGE_API_KEY` ([data_and_rewards.md](../guide/data_and_rewards.md)) and `R3TRAIN_TEACHER_API_KEY`
([algorithms.md](../guide/algorithms.md)).
Unknown flags, tables and keys are errors that name the nearest known one. An editor that reads
`r3train.schema.json` (`#:schema r3train.schema.json` in a file's first line, as in configs/) finds them while
you write."""


def page() -> str:
    """The whole page as text."""
    parts = [HEAD]
    for section, info in RunConfig.model_fields.items():
        model = info.annotation
        parts.append(f"\n## {model.title}: `[{section}]`\n")
        for asked in model.every_field:
            but = f", but {', '.join(f'`{name}`' for name in asked.but)}" if asked.but else ""
            words = asked.words()
            parts.append(f"Each setting{but}: {words[0].lower()}{code(words[1:])}\n")
        parts.append("| field | value | default | meaning |\n|---|---|---|---|")
        parts += [row(place, f"`{place.name}`") for place in settings_of(section)]
    parts.append(f"\n## {HOOKS_TITLE}\n\nThey are for tests, in the tables that are named here.\n")
    parts.append("| table, field | value | default | meaning |\n|---|---|---|---|")
    parts += [row(place, f"`[{place.section}] {place.name}`") for place in settings_of(HOOKS)]
    return "\n".join(parts) + "\n"


def row(place: Place, name: str) -> str:
    """The row of a setting: name, value, default, and meaning with what it asks of others."""
    every = RunConfig.model_fields[place.section].annotation.every_field
    asked = (asks for asks in requirements_of(place.name) if asks not in every)
    meaning = " ".join([place.info.description, *(code(asks.words()) for asks in asked)])
    cells = [name, value_of(place.info), default_cell(place.info), meaning]
    cells = [" ".join(cell.split()) for cell in cells]  # a row of a table is one line
    escaped = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return "| " + " | ".join(escaped) + " |"


def code(words: str) -> str:
    """Set the flags and tables' entries of a sentence as code."""
    return re.sub(r"--[\w-]+|\b(?:sglang|transformer_overrides)\.\w+", r"`\g<0>`", words)


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe: a table for each section, and no key that must be there, as flags add some.

    What a setting asks of others is in its description: editors show it, and the run refuses it.
    """
    made = RunConfig.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"], made["description"] = (
        "r3train",
        "A recipe of r3train (docs/reference/configuration.md).",
    )
    del made["required"]
    for section, info in RunConfig.model_fields.items():
        made["properties"][section].pop("default", None)
        table = made["$defs"][info.annotation.__name__]
        table.pop("required", None)
        table["title"] = info.annotation.title
        hooks = info.annotation.test_hooks
        fields = table["properties"] = dict(  # test hooks last
            sorted(table["properties"].items(), key=lambda item: item[0] in hooks)
        )
        for name, field in fields.items():
            field.pop("title")
            if field.get("default", "") is None:  # TOML has none: the key is left out
                del field["default"]
            kinds = [kind for kind in field.pop("anyOf", ()) if kind != {"type": "null"}]
            field |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {}
            if name in TEXT_TOO:
                field["anyOf"] = [{"type": "string"}, {"type": field.pop("type")}]
            words = [field["description"], *(asked.words() for asked in requirements_of(name))]
            words += ["A test hook."] * (name in hooks)
            field["description"] = " ".join(" ".join(words).split())
    return made


def default_cell(field: FieldInfo) -> str:
    """The default as a cell of the table."""
    default = default_of(field)
    if default == "required":
        return "**required**"
    return default if default in ("unset", "empty", "on", "off") else f"`{default}`"


def main() -> None:
    """Write both files, or with --check exit with 1 where one on disk differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    check = parser.parse_args().check
    for file, text in ((PAGE, page()), (SCHEMA, json.dumps(schema(), indent=1) + "\n")):
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file} is not what r3train/config says: run `make docs`")


if __name__ == "__main__":
    main()
