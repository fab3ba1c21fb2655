"""``r3train docs``: a page of the documentation."""

from __future__ import annotations

import click

from r3train.config.help_text import PAGES
from r3train.config.sources import closest


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
