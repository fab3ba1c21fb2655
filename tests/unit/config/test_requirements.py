"""Each declared requirement is broken by the smallest settings that its annotation describes, and met by as few."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest

from r3train.config import RunConfig
from r3train.config.cross_checks import broken, requirements_of
from r3train.config.requirements import Condition, only_with, Requirement, requires
from r3train.config.sources import ConfigError, flag_name, places
from tests.unit.config.test_config import config

PLACES = places(RunConfig)
CHECKED = {"use_rollout_routing_replay": True, "enable_r3_correctness_check": True}
# properties of RunConfig -> settings that turn them either way
FACTS: dict[str, tuple[dict, ...]] = {
    "has_engines": ({"replay_rollouts": "."}, {"replay_rollouts": None}),
    "learns_conversations": ({"loss_type": "sft", "n_samples_per_prompt": 1}, {}),
    "steps_per_rollout": ({"global_batch_size": 8}, {"global_batch_size": 16}),
    "recheck_share": (CHECKED | {"r3_recheck_share": 0.5}, {"r3_recheck_share": 0.0}),
    "canary_tokens": (CHECKED, {"r3_canaries": 0}),
}
NUMBERS = (1, 2, 3, 0, 4, 5, 8, 9, 10, 0.5, 0.1, 2.0, -1, 64)
TEXTS = ("x", "q_proj", "m:f", "http://h:1", "{rollout_id}", "0.0.0.0")
TABLES = (["x", "y"], {"a": 1}, {"name": "a", "path": "b"})
WITHIN = {"<=": lambda a, b: a <= b, "<": lambda a, b: a < b, ">=": lambda a, b: a >= b}
Settings = dict[str, Any]


def literals(annotation: Any) -> Iterator[Any]:
    for argument in get_args(annotation):
        if isinstance(argument, (str, int)):
            yield argument
        else:
            yield from literals(argument)


@cache
def values(name: str, patterns: str = "") -> tuple[Settings, ...]:
    """Settings of one field or entry of a table, each with a value that it takes; those like ``patterns`` first."""
    name, _, key = name.partition(".")
    if name in FACTS:
        return FACTS[name]
    tried = [text.replace("*:*", "m:f").replace("*", "") for text in patterns.split("|") if text]
    tried += [*literals(PLACES[name].info.annotation), True, False, *NUMBERS, *TEXTS, *TABLES]
    tried = [{key: value} for value in tried] if key else tried + [[value] for value in tried]
    found = []
    for value in tried:
        try:
            config(**{name: value})
        except ConfigError:
            continue
        found.append({name: value})
    return tuple(found)


def with_condition(condition: Condition, wanted: bool, settings: Settings) -> Settings:
    """The settings with the condition as wanted: as they are, or with one more."""
    patterns = condition.bound if condition.sign == "=" else ""
    for more in ({}, *values(condition.name, patterns)):
        both = settings | more
        if condition.holds(config(**both)) == wanted:
            return both
    raise AssertionError(f"no settings with {condition.text}: {wanted}")


def asking(name: str, asked: Requirement) -> Settings:
    """The field with the first value that asks."""
    for settings in values(name, asked.when):
        if asked.asked_by(PLACES[name], config(**settings)):
            return settings
    raise AssertionError(f"no value of {name} asks: {asked.words()}")


def compared(name: str, asked: Requirement, within: bool) -> Settings:
    """Two settings that are compared, next to the edge."""
    other = asked.conditions[0].name
    for own, bound in product(values(name), values(other)):
        near = abs(own[name] - bound[other]) <= 1
        if near and WITHIN[asked.verb](own[name], bound[other]) == within:
            return own | bound
    raise AssertionError(f"no values of {name} and {other} with {asked.verb}: {within}")


def breaking(name: str, asked: Requirement) -> Iterator[tuple[Condition, Settings]]:
    """The smallest settings that break the requirement, for each condition that a complaint is about."""
    first = asked.conditions[0]
    if asked.verb in WITHIN:
        yield first, compared(name, asked, within=False)
    elif asked.verb == "cannot go with":
        for condition in asked.conditions:
            yield condition, with_condition(condition, True, asking(name, asked))
    else:
        settings = asking(name, asked)
        for condition in asked.conditions:
            settings = with_condition(condition, False, settings)
        yield first, settings


def meeting(name: str, asked: Requirement) -> Iterator[Settings]:
    """Settings that ask the same and meet it, for each way to meet it."""
    if asked.verb in WITHIN:
        yield compared(name, asked, within=True)
    elif asked.verb == "cannot go with":
        settings = asking(name, asked)
        for condition in asked.conditions:
            settings = with_condition(condition, False, settings)
        yield settings
    else:
        for condition in asked.conditions:
            yield with_condition(condition, True, asking(name, asked))


def named(condition: Condition) -> str:
    """The words by which a complaint names the other setting."""
    return condition.words() if condition.name in FACTS else written(condition.name)


def written(name: str) -> str:
    return name if "." in name or name == "datasets" else flag_name(name).removeprefix("--")


def check(name: str, asked: Requirement) -> None:
    """Break the requirement, and meet it; what is said of others that are broken as well does not count."""

    def complaints(settings: Settings) -> list[tuple[Condition | None, str]]:
        of_all = broken(config(**settings))
        of_this = (rule for rule in of_all if (rule.name, rule.asked) == (name, asked))
        return [(rule.condition, rule.complaint) for rule in of_this]

    for condition, settings in breaking(name, asked):
        said = [text for about, text in complaints(settings) if about == condition]
        assert len(said) == 1 and "\n" not in said[0], (settings, said)
        assert written(name) in said[0] and named(condition) in said[0], said
        assert said[0].endswith(asked.why), said
    for settings in meeting(name, asked):
        assert complaints(settings) == [], settings


def breaks_by_itself(name: str, asked: Requirement) -> bool:
    """False where the setting is itself a way to meet what its section asks."""
    own = any(condition.name == name for condition in asked.conditions)
    return not own or asked.verb == "cannot go with"


DECLARED = {
    f"{name}: {asked.words()} {asked.why}": (name, asked)
    for name in PLACES
    for asked in requirements_of(name)
    if breaks_by_itself(name, asked)
}


@pytest.mark.parametrize("declared", DECLARED)
def test_a_broken_requirement_is_one_line_that_names_both_settings_and_a_met_one_is_none(declared):
    check(*DECLARED[declared])


def test_a_requirement_that_nothing_breaks_is_found():
    with pytest.raises(AssertionError, match="no settings with num_rollout > 0: False"):
        check("save_interval", requires("num_rollout > 0"))


def test_a_requirement_of_which_nothing_is_said_is_found():
    with pytest.raises(AssertionError):
        check("save_interval", only_with("async_save"))  # no field declares it


def test_every_name_that_a_requirement_asks_of_is_known():
    for name in PLACES:
        for asked in requirements_of(name):
            assert "unset" not in asked.words() and asked.words()[-1] == "."
