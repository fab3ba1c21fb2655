"""The record of a run next to its numbers: how it was started, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from r3train.config.requirements import shown
from r3train.config.run import RunConfig
from r3train.report.report_data import flat, RunReport

_UNSET, _UNKNOWN = "unset", "-"
# of each run its own, and says nothing about what it computes
_NOT_A_DIFFERENCE = ("run.run_dir",)
_NUM_STEPS = "rollout.num_rollout"
_MOST_TIME = 1e11  # of a damaged line; the year 5138


@dataclass(frozen=True)
class Setting:
    """A setting that is not at its default in a run at least; all values as a flag takes them."""

    name: str
    default: str
    values: list[str]  # of each run

    @property
    def differs(self) -> bool:
        """True where the runs have different values."""
        return len({*self.values} - {_UNKNOWN}) > 1 and self.name not in _NOT_A_DIFFERENCE


def settings(runs: Sequence[RunReport]) -> list[Setting]:
    """The settings that are not at their default, of the runs whose settings are known."""
    known = [run.settings for run in runs if run.settings is not None]
    defaults = _defaults()
    out = []
    for name in dict.fromkeys(name for found in known for name in found):
        default = _words(defaults.get(name))
        values = [_words(found.get(name)) for found in known]
        if any(value != default for value in values):
            out.append(Setting(name, default, [_value(run, name) for run in runs]))
    return out


def _value(run: RunReport, name: str) -> str:
    return _UNKNOWN if run.settings is None else _words(run.settings.get(name))


@cache
def _defaults() -> dict[str, Any]:
    sections = {
        name: info.annotation.model_construct().model_dump(mode="json", exclude_none=True)
        for name, info in RunConfig.model_fields.items()
    }
    return flat(sections)


def _words(value: Any) -> str:
    if value is None:
        return _UNSET
    return shown(value).lower() if isinstance(value, bool) else shown(value) or "(empty)"


def facts(runs: Sequence[RunReport]) -> dict[str, list[str]]:
    """The facts of each run's start by name; of a run with several starts those of the last."""
    found = [_facts(run) for run in runs]
    names = dict.fromkeys(name for values in found for name in values)
    return {name: [values.get(name, _UNKNOWN) for values in found] for name in names}


def _facts(run: RunReport) -> dict[str, str]:
    out = {}
    if run.starts:
        first, *again = run.starts
        last = run.starts[-1]
        out["started"] = _time(first.time)
        if again:
            words = (f"{_time(start.time)}, from step {start.first_step}" for start in again)
            out["resumed"] = "; ".join(words)
        out["command"] = last.command
        out["in"] = last.directory
        out["on"] = f"{last.host}, {last.ranks} rank{'s' * (last.ranks != 1)}"
        out["GPU"] = last.gpu
        commits = (f"{commit} ({checkout})" for checkout, commit in last.commits.items())
        out["commit"] = ", ".join(commits)
        out["versions"] = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    if run.records and 0 < (seconds := run.records[-1].get("time", 0)) < _MOST_TIME:
        planned = (run.settings or {}).get(_NUM_STEPS, "an unknown number")
        done = f"{run.records[-1]['step'] + 1} of {planned} steps"
        out["last step"] = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC, {done}"
    return {name: words for name, words in out.items() if words}


def _time(stamp: str) -> str:
    return stamp.replace("T", " ").partition(".")[0] + " UTC"
