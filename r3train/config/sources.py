"""Sources of values (a TOML file, flags, the environment), merged into one RunConfig."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from r3train.config.files import MAX_TOML_BYTES, parse_toml
from r3train.config.peers import ANSWERS, removed, REMOVED_DEFAULTS

if TYPE_CHECKING:
    from r3train.config.run import RunConfig

THRESHOLD_VARIABLES = ("R3_MISMATCH_THRESHOLD", "MILES_TEST_R3_THRESHOLD")
# what a text must look like -> the same in words
IMPORT_PATH, URL = r"^[\w.]+:\w+$", r"^https?://\S+$"
FILE_NAME, SET_NAME, HOST = r"^[\w.-]+$", r"^\w[\w.-]*$", r"^[\w.:%-]+$"
PATTERNS = {
    IMPORT_PATH: "module:function, such as rewards_here:short_answer",
    URL: "http://HOST:PORT or https://HOST",
    FILE_NAME: "letters, digits, _, . and - only",
    HOST: "an address or the name of a host or network interface",
    SET_NAME: "letters, digits, _, . and -, and neither . nor - first",
}
_PYTHON_FILE = re.compile(r"(\w+)\.py\b")
# fields that are tables: a flag adds an entry to those of the file
TABLE_FIELDS = ("transformer_overrides", "optimizer_overrides", "sglang")
# characters of a refused value
MOST_SHOWN = 1000
# a field that only a TOML file can set
FILE_FIELD = "datasets"
# ways to name the servers: a flag of one takes the place of a file's other
_SERVERS = {"rollout_engines_file", "rollout_external_engine_addrs"}
# further names of settings, as flags and as keys of a file -> their names
ALIASES = {"r3_audit_share": "r3_recheck_share", "use_tensorboard": "tensorboard"}


class ConfigError(ValueError):
    """A bad configuration.  Each line is one problem and names its flag, or its file and key."""


def raise_all(complaints: Iterable[str]) -> None:
    """Raise ConfigError with all complaints; do nothing without one."""
    if found := "\n".join(complaints):
        raise ConfigError(found)


@dataclass(frozen=True, slots=True)
class Place:
    """A field with its section (the TOML table) and its pydantic description."""

    section: str
    name: str
    info: FieldInfo

    @property
    def flag(self) -> str:
        return flag_name(self.name)


def plain(text: str) -> str:
    """Return text on one line in which a terminal finds no command: what does not print is escaped."""
    if text.isprintable():
        return text
    return "".join(c if _prints(c) else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Return a text of several lines as ``plain`` has each; tabs become spaces.

    Answers of models and lines of servers' logs may hold escape sequences.
    """
    return "\n".join(map(plain, text.expandtabs().split("\n")))


def _prints(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


@cache
def places(config: type[RunConfig]) -> dict[str, Place]:
    """Map each field's name to its place; names are unique over all sections."""
    found: dict[str, Place] = {}
    for section, section_info in config.model_fields.items():
        for name, info in section_info.annotation.model_fields.items():
            assert name not in found, f"{name} is in [{section}] and in [{found[name].section}]"
            found[name] = Place(section, name, info)
    return found


def nearest(name: str, known: Iterable[str], likeness: float = 0.8) -> str:
    """Return " Did you mean X?" for the known name nearest to ``name``, or an empty text.

    A peer's name is answered with ours: " Here it is X.", Megatron's with what it follows from; that of a setting that was removed with what to use instead.
    """
    if instead := removed(name):
        return instead
    if name in ANSWERS:
        return f" {ANSWERS[name]}"
    return closest(name, known, likeness) or misspelt(name)


def closest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return " Did you mean X?" for the known name that begins so or is nearest, or an empty text.

    likeness: the least, of 1 for the same.  Among many settings one of less than 0.8 misleads more than it helps.
    """
    known = list(known)
    begun = [other for other in known if len(name) > 3 and other.startswith(name)]
    close = begun or difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f" Did you mean {close[0]}?" if close else ""


def misspelt(name: str) -> str:
    """Return what is said of another framework's setting that is nearly of this name, or an empty text."""
    close = difflib.get_close_matches(name, ANSWERS, n=1, cutoff=0.9)
    return f" Did you mean {close[0]}? {ANSWERS[close[0]]}" if close else ""


def merge(
    config: type[RunConfig],
    *,
    file: Path | str | None,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
) -> RunConfig:
    """Build a RunConfig; see ``RunConfig.from_sources``."""
    known = places(config)
    tables = {} if file is None else read_tables(config, known, Path(file))
    origin: dict[str, str] = {
        name: f"{file}: [{section}] {name}" for section, table in tables.items() for name in table
    }
    if "r3_mismatch_threshold" not in origin and "r3_mismatch_threshold" not in flags:
        for variable in THRESHOLD_VARIABLES:
            if variable in environ:
                value = _number(variable, environ[variable])
                tables.setdefault("replay", {})["r3_mismatch_threshold"] = value
                origin["r3_mismatch_threshold"] = f"environment variable {variable}"
                break
    if given := _SERVERS & flags.keys():
        for name in _SERVERS - given:
            tables.get(known[name].section, {}).pop(name, None)
    for name, value in flags.items():
        if name not in known:
            raise ConfigError(f"unknown setting {name}.{nearest(name, known)}")
        table = tables.setdefault(known[name].section, {})
        before = table.get(name)
        if name in TABLE_FIELDS and isinstance(before, dict):
            spelled = {str(key).replace("-", "_"): held for key, held in before.items()}
            value = {**spelled, **value}
        table[name] = value
        origin[name] = known[name].flag
    # With every section present, pydantic reports a missing field by its own name.
    complete = {section: tables.get(section, {}) for section in config.model_fields}
    try:
        return config.model_validate(complete)
    except ValidationError as error:
        raise ConfigError(_readable(error, known, origin, file)) from None


def read_tables(
    config: type[RunConfig], known: Mapping[str, Place], path: Path
) -> dict[str, dict[str, Any]]:
    """Read a TOML file whose tables are sections and whose keys are their fields.

    Raises ConfigError for a file that cannot be read or parsed, and for every unknown name, with
    the nearest known one.
    """
    try:
        with path.open("rb") as stream:  # not a regular one only: a shell's <(...) is a pipe
            content = stream.read(MAX_TOML_BYTES + 1)
        if len(content) > MAX_TOML_BYTES:
            raise ConfigError(f"{path}: holds more than {MAX_TOML_BYTES} bytes of configuration")
        content = parse_toml(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    problems = []
    for table in filter(lambda value: isinstance(value, dict), content.values()):
        for alias in sorted(table.keys() & ALIASES.keys()):
            name = ALIASES[alias]
            if name in table:
                problems.append(
                    f"{path}: {alias} is {name}, which is given too: give one of the two"
                )
            table.setdefault(name, table.pop(alias))
        for name, default in REMOVED_DEFAULTS.items():
            if name in table and table[name] == default:
                del table[name]  # a run's own config.toml names every setting of its release
    sections = list(config.model_fields)
    for section, table in content.items():
        if section in known and not (section in sections and isinstance(table, dict)):
            problems.append(f"{path}: {section} belongs in the table [{known[section].section}]")
        elif section not in sections and (answers := _answers(section, table)):
            problems += [f"{path}: {answer}" for answer in answers]
        elif section not in sections:
            hint = nearest(section, [*sections, *known])
            problems.append(f"{path}: unknown table or key {section}.{hint}")
        elif not isinstance(table, dict):
            problems.append(f"{path}: [{section}] must be a table, got {table!r}")
        else:
            problems += _unknown_keys(path, section, table, known)
    raise_all(problems)
    return {section: dict(table) for section, table in content.items()}


def _unknown_keys(
    path: Path, section: str, table: Mapping[str, Any], known: Mapping[str, Place]
) -> list[str]:
    problems = []
    for key in table:
        if key not in known and (answers := _answers(f"{section}.{key}", table[key])):
            problems += [f"{path}: {answer}" for answer in answers]
        elif key not in known:
            problems.append(f"{path}: [{section}] unknown key {key}.{nearest(key, known)}")
        elif known[key].section != section:
            problems.append(
                f"{path}: [{section}] {key} belongs in the table [{known[key].section}]"
            )
    return problems


def _answers(name: str, value: Any) -> list[str]:
    """Lines for a key of another framework's file by its name with its tables, or for those of its table."""
    if name in ANSWERS and "." in name:
        return [f"unknown key {name}. {ANSWERS[name]}"]
    table = value if isinstance(value, dict) else {}
    return [line for key, part in table.items() for line in _answers(f"{name}.{key}", part)]


def _number(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"environment variable {variable}: not a number: {text!r}") from None


def _readable(
    error: ValidationError,
    known: Mapping[str, Place],
    origin: Mapping[str, str],
    file: Path | str | None,
) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][1])
        inside = "".join(f".{part}" for part in problem["loc"][2:] if isinstance(part, int))
        if name in TABLE_FIELDS and len(problem["loc"]) > 2:
            inside = f".{problem['loc'][2]}"
        if name == FILE_FIELD:
            inside = "".join(f".{part}" for part in problem["loc"][2:])
        if problem["type"] == "missing" and not inside:
            where = f" in {file}" if file is not None else " in a --config file"
            lines.append(
                f"{known[name].flag} is required"
                f" (or {name} under [{known[name].section}]{where})"
            )
            continue
        if problem["type"] == "extra_forbidden":
            key, table = str(problem["loc"][-1]), known[name].info.annotation
            hint = nearest(key, get_args(table)[0].model_fields)
            lines.append(f"{origin.get(name, name)}{inside}: unknown key {key}.{hint}")
            continue
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "string_pattern_mismatch":
            reason = f"expected {PATTERNS[problem['ctx']['pattern']]}"
            if file_of_code := _PYTHON_FILE.search(str(problem["input"])):
                reason += (
                    f" (a file is named as {file_of_code[1]}:FUNCTION, in the working directory or in one of"
                    " PYTHONPATH)"
                )
        reason = reason[0].lower() + reason[1:]
        got = repr(problem["input"])
        got = got if len(got) <= MOST_SHOWN else f"{got[:MOST_SHOWN]}..."
        lines.append(f"{origin.get(name, name)}{inside}: {reason}, got {got}")
    return "\n".join(dict.fromkeys(lines))


def to_toml(config: RunConfig, *, exclude_defaults: bool = False) -> str:
    """Return the configuration as TOML, without unset fields: TOML has no null."""
    fields = config.model_dump(mode="json", exclude_none=True, exclude_defaults=exclude_defaults)
    return tomli_w.dumps(fields)
