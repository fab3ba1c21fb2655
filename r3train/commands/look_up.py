"""``r3train recipes``, ``explain`` and ``docs``: what can be looked up."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import click

from r3train.config import RunConfig
from r3train.config.help_text import explained, find_setting, PAGES
from r3train.config.options import usage_errors
from r3train.config.recipes import recipe_line, recipe_names
from r3train.config.sources import closest, places
from r3train.observe.metric_table import row_of


@click.command()
def recipes() -> None:
    """List the recipes that --config knows by name, with one line each."""
    width = min(shutil.get_terminal_size().columns, 120)
    for name in recipe_names():
        line = f"{name:28s}{recipe_line(name)}"
        click.echo(textwrap.fill(line, width, subsequent_indent=" " * 28))


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


@click.command()
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Show a page of the documentation (docs/ of a checkout), or list them: r3train docs models.

    The last part of a page's path is enough where no other page has it.
    """
    names = sorted(str(file.relative_to(PAGES).with_suffix("")) for file in PAGES.rglob("*.md"))
    if page is None:
        width = max(map(len, names))
        for each in names:
            with (PAGES / f"{each}.md").open(encoding="utf-8") as file:
                title = next(line for line in file if line.startswith("# "))
            click.echo(f"{each:{width}s}  {title.strip('# ')}", nl=False)
        return
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in names:
        named = [each for each in names if each.rpartition("/")[2] == name]
        name = named[0] if len(named) == 1 else name
    if name not in names:
        short = [each.rpartition("/")[2] for each in names]
        near = closest(name, [*names, *short])
        raise click.UsageError(f"{page}: no such page.{near} r3train docs lists them")
    click.echo_via_pager((PAGES / f"{name}.md").read_text(encoding="utf-8"))
