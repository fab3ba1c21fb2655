"""``r3train report``: one or several runs as a page, and as pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from r3train.evidence.report_data import HeatMap
    from r3train.evidence.report_svg import Chart


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
            click.echo(str(draw_chart(chart, png)))
        for run in runs:
            if run.heat is not None:
                click.echo(str(draw_heat(run.heat, run.name, png)))


def names(paths: Sequence[Path]) -> list[str]:
    """A short name a run: the last part of its path, more parts where two would be alike."""
    parts = [path.absolute().parts for path in paths]
    depth = 1
    while depth < 4 and len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def draw_chart(chart: Chart, directory: Path) -> Path:
    """A line chart as a PNG; returns its path."""
    figure, axes = _figure(3.6)
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#56B4E9")
    for line in chart.lines:
        if line.values:
            style = {"ls": "--", "alpha": 0.6} if line.dashed else {"label": line.name}
            if len(line.values) == 1:
                style["marker"] = "o"
            axes.plot(line.steps, line.values, color=colours[line.run % 6], lw=1.6, **style)
    if chart.log and any(v > 0 for line in chart.lines for v in line.values):
        axes.set_yscale("log")
    axes.set_title(chart.title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(chart.note)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return _save(figure, directory, chart.title)


def draw_heat(heat: HeatMap, name: str, directory: Path) -> Path:
    """Agreement by layer and step as a PNG, from chance to all rows; returns its path."""
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
    axes.set_title(f"Routing agreement: {name}", loc="left", fontweight="bold")
    bar = figure.colorbar(image, ax=axes, label="share of rows")
    ticks = [low, (1 + low) / 2, 1.0]
    bar.set_ticks(ticks, labels=[f"chance {low:.1%}", f"{ticks[1]:.1%}", "100%"])
    return _save(figure, directory, f"routing agreement of layers {name}")


def _figure(height: float) -> tuple[Figure, Axes]:
    # imported late: --help needs no matplotlib; no pyplot, which looks for a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), dpi=140, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Figure, directory: Path, title: str) -> Path:
    path = directory / f"{re.sub(r'[^a-z0-9]+', '_', title.lower()).strip('_')}.png"
    figure.savefig(path)
    return path
