"""Requirements of a setting on others, declared next to its field.

``Annotated[bool, requires("lora_rank > 0 or save: why")]`` declares a requirement: conditions, and why.  It is
checked where the field is not at its default, or has a value like ``when``.  A condition is ``NAME`` (it is on),
``NAME > X``, or ``NAME = PATTERN|PATTERN``.  NAME is a field of any section, an entry of a table
(``sglang.tp_size``) or a property of RunConfig.  X is a number, or the name of a field.  ``*:*`` is a
module:function of the user.  cross_checks.py has the engine.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from r3train.config.sources import FILE_FIELD, flag_name, MOST_SHOWN, Place, places, plain

if TYPE_CHECKING:
    from r3train.config.run import RunConfig

_COMPARED = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_BEYOND = {"<=": "exceeds", "<": "is not below", ">=": "is below"}
_IN_WORDS = {"=": "", ">": "above ", ">=": "at least "}
# conditions on properties of RunConfig, as a reader knows them
_FACTS = {
    "has_engines": "a server (--replay-rollouts and --loss-type sft have none)",
    "learns_conversations": "--loss-type sft without --replay-rollouts",
    "steps_per_rollout = 1": "one optimizer step per rollout (--global-batch-size)",
    "steps_per_rollout > 1": "several optimizer steps per rollout (--global-batch-size)",
    "recheck_share > 0": "--r3-recheck-share above 0, --flush-cache-on-update and a server",
    "canary_tokens > 0": "canaries (--r3-canaries with the R3 check)",
}


def is_on(value: Any) -> bool:
    """Return True for a setting that is on; one of another program may be text or a list."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "none", "false", "0")
    return bool(value)


def shown(value: Any) -> str:
    """Return a value as a flag takes it, on one line: a list's values with spaces, 1.0 as 1."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(shown, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else plain(str(value))


def value_of(run: RunConfig, name: str) -> Any:
    """Return the value of a field, of a table's entry (None: not set), or of a property of RunConfig."""
    name, _, key = name.partition(".")
    place = places(type(run)).get(name)
    value = getattr(run if place is None else getattr(run, place.section), name)
    return value.get(key) if key else value


def _said(name: str, value: Any) -> str:
    """Return a setting with its value, as it is given."""
    if "." in name:
        return f"{name} = {value!r}"
    if isinstance(value, bool):
        return flag_name(name if value else f"no_{name}")
    return _in_a_file(name) or f"{flag_name(name)} {shown(value)[:MOST_SHOWN]}"


def _in_a_file(name: str) -> str:
    """Return a setting without a flag as it stands in a file, or an empty text."""
    return f"[[eval.{name}]]" if name == FILE_FIELD else name if "." in name else ""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one setting."""

    text: str
    name: str
    sign: str
    bound: str

    @classmethod
    def of(cls, text: str) -> Condition:
        return cls(text, *(text.split(" ", 2) + ["", ""])[:3])

    def holds(self, run: RunConfig) -> bool:
        """Return True where the setting is as the condition says."""
        value = value_of(run, self.name)
        if self.sign == "=":
            return any(fnmatchcase(shown(value), pattern) for pattern in self.bound.split("|"))
        if not self.sign or not isinstance(value, (int, float)) or isinstance(value, bool):
            return is_on(value)
        digits = self.bound.replace(".", "").isdigit()
        bound = float(self.bound) if digits else value_of(run, self.bound)
        return _COMPARED[self.sign](value, bound)

    def words(self, run: RunConfig | None = None) -> str:
        """Return the condition in words; run: say the value of a setting that is compared, too."""
        if self.text in _FACTS:
            return _FACTS[self.text]
        flag = _in_a_file(self.name) or flag_name(self.name)
        if not self.sign:
            return flag
        bound = self.bound.replace("*:*", "module:function").replace("*", "").replace("|", "/")
        if self.sign != "=" and bound[0].isalpha():
            bound = flag_name(bound)
        value = None if run is None else value_of(run, self.name)
        got = "" if run is None else f" (it is {'unset' if value is None else shown(value)})"
        return f"{flag} {_IN_WORDS[self.sign]}{bound}{got}"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement of a setting on others.

    verb: "needs" or "has no effect without" (any of the conditions), "cannot go with" (each of them), or
    a sign, by which the setting is compared with the one that the condition names.
    when: patterns of the values that ask it; empty: every value but the default.
    but: fields of the section that do not ask what its ``every_field`` does.
    """

    verb: str
    conditions: tuple[Condition, ...]
    why: str = ""
    when: str = ""
    but: tuple[str, ...] = ()

    def asked_by(self, place: Place, run: RunConfig) -> bool:
        """Return True where the field's value asks for this."""
        value = value_of(run, place.name)
        if self.verb in _COMPARED:
            return value is not None
        if self.when:
            return any(fnmatchcase(shown(value), pattern) for pattern in self.when.split("|"))
        return value != place.info.default

    def broken(self, place: Place, run: RunConfig) -> Iterator[tuple[Condition, str]]:
        """Yield each condition that is broken, with the complaint: one line."""
        if not self.asked_by(place, run):
            return
        given = _said(place.name, value_of(run, place.name))
        why = f": {self.why}" if self.why else ""
        first = self.conditions[0]
        if self.verb in _COMPARED:
            other = value_of(run, first.name)
            if other is not None and not _COMPARED[self.verb](value_of(run, place.name), other):
                yield first, f"{given} {_BEYOND[self.verb]} {_said(first.name, other)}{why}"
        elif self.verb == "cannot go with":
            for condition in self.conditions:
                if condition.holds(run):
                    other = _FACTS.get(condition.text)
                    other = other or _said(condition.name, value_of(run, condition.name))
                    yield condition, f"{given} {self.verb} {other}{why}"
        elif not any(condition.holds(run) for condition in self.conditions):
            conditions = " or ".join(condition.words(run) for condition in self.conditions)
            yield first, f"{given} {self.verb} {conditions}{why}"

    def words(self) -> str:
        """Return the requirement as a sentence, for the page and for editors."""
        verb = {"<=": "is at most", "<": "is below", ">=": "is at least"}.get(self.verb, self.verb)
        words = f"{verb} {' or '.join(condition.words() for condition in self.conditions)}."
        when = self.when.replace("|", ", ")
        when = (
            when.strip("*") if when[:1] == "*" else when.replace("*", "...")
        )  # a part, a beginning
        return f"{when}: {words}" if when else words[0].upper() + words[1:]


def requires(text: str, when: str = "") -> Requirement:
    """The setting cannot be kept unless one of the conditions holds."""
    return _requirement("needs", text, when)


def only_with(text: str, when: str = "") -> Requirement:
    """The setting changes nothing unless one of the conditions holds."""
    return _requirement("has no effect without", text, when)


def excludes(text: str, when: str = "", but: tuple[str, ...] = ()) -> Requirement:
    """The setting goes with none of the conditions.  A setting that breaks this rule is not checked further."""
    return _requirement("cannot go with", text, when, but)


def at_most(text: str) -> Requirement:
    """The setting, if set, is at most the other's value, if set."""
    return _requirement("<=", text)


def at_least(text: str) -> Requirement:
    """The setting, if set, is at least the other's value, if set."""
    return _requirement(">=", text)


def below(text: str) -> Requirement:
    """The setting, if set, is below the other's value, if set."""
    return _requirement("<", text)


def _requirement(verb: str, text: str, when: str = "", but: tuple[str, ...] = ()) -> Requirement:
    conditions, _, why = text.partition(": ")
    return Requirement(verb, tuple(map(Condition.of, conditions.split(" or "))), why, when, but)


def check(method: Callable[..., Iterator[str]]) -> Callable[..., Iterator[str]]:
    """Mark a method of a section that takes a RunConfig and yields complaints: arithmetic, files."""
    method.is_check = True
    return method
