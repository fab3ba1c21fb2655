"""Write docs/configuration.md from the models in r3train/config; --check fails where it is stale."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from r3train.config import RunConfig
from r3train.config.section import Section

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

<!-- Written by docs/write_configuration.py (`make docs`) from r3train/config. Do not edit. -->

A run is described by one TOML file and any flags: `r3train train --config FILE.toml --flag ...`.
A field is a flag with dashes for underscores (`num_rollout`, `--num-rollout`), and flags win over
the file. The heading of a section names its TOML table. A switch is turned off with `--no-` before
its name. `none` unsets a field that may be unset. A list takes several values, commas or both.
`--dry-run` checks everything, prints the resolved configuration and stops; every run saves its own.

Three tables take names that are not ours:

- `transformer_overrides`: fields of Megatron's `TransformerConfig` without a flag here. A table
  in the file; `--transformer-override NAME=VALUE`, repeatable, on the command line. A field that the
  checkpoint, the actor or R3 decides is refused with the reason, and so is one that Megatron lacks.
- `optimizer_overrides`: the same for Megatron's `OptimizerConfig`: `[trainer.optimizer_overrides]`, or
  `--optimizer-override NAME=VALUE`.
- `sglang`: flags of the SGLang server. `[rollout.sglang]` in the file; `--sglang-FLAG [VALUE]`
  on the command line (`--sglang-mem-fraction-static 0.3`). A flag without a value is on. Weights,
  their format, their version and seeds belong to the run: such flags are refused, under any alias.

`r3_mismatch_threshold` may also come from the environment, as `R3_MISMATCH_THRESHOLD` or its alias
`MILES_TEST_R3_THRESHOLD`: below flags and file, above the default. Keys alone are read from other
variables: `R3TRAIN_ENGINE_API_KEY` (slurm.md), `R3TRAIN_JUDGE_API_KEY` (data.md) and
`R3TRAIN_TEACHER_API_KEY` (algorithms.md).
Unknown flags, tables and keys are errors that name the nearest known one."""


def page() -> str:
    """The whole page as text."""
    parts = [HEAD]
    for section, info in RunConfig.model_fields.items():
        model = info.annotation
        parts.append(f"\n## {model.title}: `[{section}]`\n")
        parts.append("| field | value | default | meaning |\n|---|---|---|---|")
        for name, field in model.model_fields.items():
            cells = [f"`{name}`", value_of(field), default_of(field), field.description or ""]
            cells = [" ".join(cell.split()) for cell in cells]  # a row of a table is one line
            escaped = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)
            parts.append("| " + " | ".join(escaped) + " |")
    return "\n".join(parts) + "\n"


def value_of(field: FieldInfo) -> str:
    """Return the values that a field takes, with its bounds."""
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


def default_of(field: FieldInfo) -> str:
    """The default as a reader writes it."""
    if field.is_required():
        return "**required**"
    default = field.default
    if default is None:
        return "unset"
    if default == () or default == {}:
        return "empty"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default}`"


def main() -> None:
    """Write the page, or with --check exit with 1 where the one on disk differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is not what r3train/config says: run `make docs`")


if __name__ == "__main__":
    main()
