"""``r3train report``: one or several runs as a page, and as pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page.  [default: report.html in the first RUN_DIR]",
)
@click.option(
    "--png", type=click.Path(path_type=Path), help="Also write each chart to this directory."
)
def report(run_dirs: tuple[Path, ...], output: Path | None, png: Path | None) -> None:
    """Write RUN_DIRS side by side as one self-contained HTML page."""
    from r3train.evidence.report_data import load_run
    from r3train.evidence.report_html import charts, render

    try:
        runs = [load_run(path, name) for path, name in zip(run_dirs, names(run_dirs))]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    output = output or run_dirs[0] / "report.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(runs), encoding="utf-8")
    click.echo(str(output))
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for chart in charts(runs):
            click.echo(str(_draw(chart, png)))


def names(paths: Sequence[Path]) -> list[str]:
    """A short name a run: the last part of its path, more parts where two would be alike."""
    parts = [path.absolute().parts for path in paths]
    depth = 1
    while depth < 4 and len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def _draw(chart, directory: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=140, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#56B4E9")
    for line in chart.lines:
        if line.values:
            style = {"ls": "--", "alpha": 0.6} if line.dashed else {"label": line.name}
            axes.plot(line.steps, line.values, color=colours[line.run % 6], lw=1.6, **style)
    if chart.log and any(v > 0 for line in chart.lines for v in line.values):
        axes.set_yscale("log")
    axes.set_title(chart.title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(chart.note)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path = directory / f"{re.sub(r'[^a-z0-9]+', '_', chart.title.lower()).strip('_')}.png"
    figure.savefig(path)
    return path
