"""``r3train report``: one or several runs as a page, and as pictures."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from r3train.observe.report_evidence import HeatMap
    from r3train.observe.report_svg import Chart


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page.  [default: report.html in the first RUN_DIR]",
)
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    help="Also write each chart and heat map to this directory.",
)
def report(run_dirs: tuple[Path, ...], output: Path | None, png: Path | None) -> None:
    """Write RUN_DIRS side by side as one self-contained HTML page."""
    from r3train.observe.report_data import load_run
    from r3train.observe.report_html import charts, render

    try:
        runs = [load_run(path, name) for path, name in zip(run_dirs, names(run_dirs))]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    for run in runs:
        for notice in run.notices:
            click.echo(f"{run.name}: {notice}", err=True)
    page = render(runs)
    hint = "" if output else ": give --output"
    output = output or run_dirs[0] / "report.html"
    _make_directory(output.parent, hint)
    if png is not None:
        _make_directory(png)
    with _writing(output, hint):
        output.write_text(page, encoding="utf-8")
    click.echo(click.format_filename(output))
    if png is not None:
        for chart in charts(runs):
            click.echo(click.format_filename(draw_chart(chart, png)))
        for number, run in enumerate(runs, 1):
            if run.heat is not None:
                path = draw_heat(run.heat, number, run.name, png)
                click.echo(click.format_filename(path))


@contextlib.contextmanager
def _writing(path: Path, hint: str = "") -> Iterator[None]:
    """What cannot be written is the user's to change: path and cause as a usage error."""
    try:
        yield
    except OSError as error:
        shown = click.format_filename(path)
        raise click.UsageError(f"{shown}: cannot be written: {error.strerror}{hint}") from None


def _make_directory(path: Path, hint: str = "") -> None:
    with _writing(path, hint):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # a file has the name
            raise NotADirectoryError(error.errno, "it is no directory") from None


def names(paths: Sequence[Path]) -> list[str]:
    """A short name a run: the last part of its path, more parts where two would be alike."""
    parts = [path.absolute().parts for path in paths]
    depth = 1
    while len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    return [click.format_filename("/".join(p[-depth:])) for p in parts]


def draw_chart(chart: Chart, directory: Path) -> Path:
    """A line chart as a PNG; returns its path."""
    figure, axes = _figure(3.6)
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#56B4E9")
    for line in chart.lines:
        if line.values:
            # a space first: matplotlib leaves out what begins with an underscore
            style = {"ls": "--", "alpha": 0.6} if line.dashed else {"label": f" {line.name}"}
            if len(line.values) == 1:
                style["marker"] = "o"
            axes.plot(line.steps, line.values, color=colours[line.run % 6], lw=1.6, **style)
    if chart.log and any(v > 0 for line in chart.lines for v in line.values):
        axes.set_yscale("log")
    axes.set_title(chart.title, loc="left", fontweight="bold", pad=18)
    small = {"fontsize": 8, "color": "#6b7280"}
    axes.text(0, 1.02, chart.note, transform=axes.transAxes, **small)
    missing = [part for text in chart.missing for part in textwrap.wrap(text, 100)]
    axes.set_xlabel("\n".join(["step", *missing[:4]]), parse_math=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        for text in axes.legend(handles, labels, framealpha=0.8, edgecolor="none").get_texts():
            text.set_parse_math(False)  # a run's name may hold a $
    return _save(figure, directory, chart.title)


def draw_heat(heat: HeatMap, number: int, name: str, directory: Path) -> Path:
    """Agreement by layer and step as a PNG, from chance to all rows; returns its path.

    number: of the run, which tells files of alike names apart.
    """
    low = heat.chance or 0.0
    rows = [[float("nan") if v is None else v for v in row] for row in heat.values]
    figure, axes = _figure(min(9.0, max(2.4, 1.4 + 0.16 * len(rows))))
    image = axes.imshow(
        rows, aspect="auto", interpolation="nearest", cmap="Greens", vmin=low, vmax=1.0
    )
    for setter, labels, words in (
        (axes.set_xticks, [first for first, _ in heat.columns], axes.set_xlabel),
        (axes.set_yticks, heat.layers, axes.set_ylabel),
    ):
        stride = max(1, -(-len(labels) // 10))
        setter(range(0, len(labels), stride), [str(label) for label in labels[::stride]])
        words("step" if words == axes.set_xlabel else "layer")
    title = f"Routing agreement: {name}"
    axes.set_title(title, loc="left", fontweight="bold", parse_math=False)
    bar = figure.colorbar(image, ax=axes, label="share of rows")
    ticks = [low, (1 + low) / 2, 1.0]
    bar.set_ticks(ticks, labels=[f"chance {low:.1%}", f"{ticks[1]:.1%}", "100%"])
    return _save(figure, directory, f"routing agreement of layers {number} {name}")


def _figure(height: float) -> tuple[Figure, Axes]:
    # imported late: --help needs no matplotlib; no pyplot, which looks for a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), dpi=140, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Figure, directory: Path, title: str) -> Path:
    path = directory / f"{re.sub(r'[^a-z0-9]+', '_', title.lower()).strip('_')}.png"
    with _writing(path):
        figure.savefig(path)
    return path
