"""``r3train recipes``: the recipes that --config knows by name."""

from __future__ import annotations

import shutil
import textwrap

import click

from r3train.config.recipes import recipe_line, recipe_names


@click.command()
def recipes() -> None:
    """List the recipes that --config knows by name, with one line each."""
    width = min(shutil.get_terminal_size().columns, 120)
    for name in recipe_names():
        line = f"{name:28s}{recipe_line(name)}"
        click.echo(textwrap.fill(line, width, subsequent_indent=" " * 28))
