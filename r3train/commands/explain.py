"""``r3train explain``: all about one setting or metric, or what a run's log-prob gap is made of."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import click

from r3train.config import RunConfig
from r3train.config.help_text import explained, find_setting
from r3train.config.options import usage_errors
from r3train.config.sources import places
from r3train.observe.metric_table import row_of


def _settings(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the settings that begin with a word, for the shell."""
    word = incomplete.replace("-", "_")
    return [name for name in places(RunConfig) if name.startswith(word)]


def _is_run(name: str) -> bool:
    """True for a directory, unless its name is a bare word, which may be that of a setting, and it is no run."""
    path = Path(name)
    return path.is_dir() and (len(path.parts) > 1 or (path / "metrics.jsonl").exists())


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", shell_complete=_settings)
def explain(name: str) -> None:
    """Say all about the setting NAME: --tis-clip, tis_clip and algorithm.tis_clip are the same one.

    Of a metric, such as train/ess, say what it means.  Of a run directory, say what its log-prob gap is made of: which part dominates, since when, and which settings
    act on it.
    """
    if _is_run(name):
        from r3train.report.explain_run import explain_run  # it reads a run by numpy

        try:
            lines = explain_run(Path(name))
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        click.echo("\n".join(lines))
        return
    if "/" in name and (metric := row_of(name)) is not None:
        click.echo(f"{name}: {metric.meaning}" + (f" [{metric.unit}]" if metric.unit else ""))
        return
    with usage_errors():
        place = find_setting(name)
    width = min(shutil.get_terminal_size().columns, 100)
    for line in explained(place):
        indent = " " * 11 * line.startswith(" ")
        click.echo(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))
