"""``r3train report``: one or several runs as a page that needs no other file, and as pictures."""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import click
import jinja2
from plotly.offline import get_plotlyjs

from r3train.config.files import write_atomically
from r3train.config.sources import plain
from r3train.report.charts import Chart, charts, Line, PALETTE
from r3train.report.report_data import load_run, RunReport, step_words
from r3train.report.run_record import facts, settings
from r3train.observe.metrics import METRICS_FILE
from r3train.observe.step_line import duration
from r3train.audit.check_evidence import claim_facts, headline
from r3train.proof.verdicts import FAILED, NO_EVIDENCE, PASSED, SUSPECT

# name, metric, whether the last tenth of the steps counts instead of all
_MEANS = (
    ("reward, last tenth of the steps", "rollout/reward_mean", True),
    ("loss, last tenth of the steps", "train/loss", True),
    ("log-prob gap, nats, mean", "train/log_prob_gap_mean", False),
    ("KL(engine, actor), k3, mean", "train/log_prob_gap_k3", False),
    ("seconds per step, mean", "perf/step_s", False),
    ("tokens per second, mean", "perf/tokens_per_s", False),
)
_KINDS = {"worst": "Lowest reward", "slowest": "Slowest", "best": "Highest reward"}
_ENDINGS = {"length": "cut at the longest length", "stop": "ended by the model"}
_VERDICTS = {
    PASSED: "passed",
    SUSPECT: "suspect",
    FAILED: "failed",
    NO_EVIDENCE: "without evidence",
}
_MAX_MARKED = 60  # points of a line that has a mark at each
# of --watch: between two looks at a run's files, and between two looks at the page
_LOOK_S, _SHOW_ANEW_S = 2.0, 20
# Half of a character beyond 16 bits, only: no encoding has it.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page.  [default: report.html in the first RUN_DIR]",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Write the page again whenever a run has another step, until Ctrl-C; the page shows itself anew.",
)
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    help="Also write each chart to this directory.",
)
def report(run_dirs: tuple[Path, ...], output: Path | None, watch: bool, png: Path | None) -> None:
    """Write RUN_DIRS side by side as one self-contained HTML page."""
    try:
        while watch:
            seen = _sizes(run_dirs)
            _write(run_dirs, output, png, watch=True)
            while _sizes(run_dirs) == seen:
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        pass  # the page that stays need not be shown anew
    _write(run_dirs, output, png)


def _sizes(run_dirs: Sequence[Path]) -> list[int]:
    """The bytes of each run's metrics; 0 without the file."""
    paths = (path / METRICS_FILE for path in run_dirs)
    return [path.stat().st_size if path.is_file() else 0 for path in paths]


def _write(
    run_dirs: Sequence[Path], output: Path | None, png: Path | None, watch: bool = False
) -> None:
    try:
        runs = [load_run(path, name) for path, name in zip(run_dirs, names(run_dirs))]
    except ValueError as error:
        raise click.UsageError(plain(str(error))) from None
    except OSError as error:
        raise click.UsageError(plain(f"{error.filename}: {error.strerror}")) from None
    page = render(runs, watch)
    hint = "" if output else ": give --output"
    # a link of that name in a stranger's directory is replaced; one that --output names is followed
    at_default_place = output is None
    output = output or run_dirs[0] / "report.html"
    _make_directory(output.parent, hint)
    if png is not None:
        _make_directory(png)
    with _writing(output, hint):
        if at_default_place:
            write_atomically(output, page)
        else:
            output.write_text(page, encoding="utf-8")
    click.echo(click.format_filename(output))
    if png is not None:
        _write_pictures(runs, png)


def names(paths: Sequence[Path]) -> list[str]:
    """A short name a run: the last part of its path, more parts where two would be alike."""
    parts = [path.absolute().parts for path in paths]
    depth = 1
    while len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    return [click.format_filename("/".join(p[-depth:])) for p in parts]


def render(runs: Sequence[RunReport], watch: bool = False) -> str:
    """The page, with plotly's script in it.  Texts of samples are escaped: strangers wrote them.

    watch: the page shows itself anew from time to time.
    """
    changed = settings(runs)
    text = _template().render(
        runs=runs,
        numbers=_numbers(runs),
        facts=facts(runs),
        settings=changed,
        differing=[setting for setting in changed if setting.differs],
        charts=charts(runs),
        show_anew_s=_SHOW_ANEW_S if watch else None,
        # Only scripts with this word run: what a sample's text might smuggle in does not know it.
        nonce=secrets.token_urlsafe(16),
        plotly_js=jinja2.filters.do_mark_safe(get_plotlyjs()),
    )
    return _LONE_SURROGATE.sub("\ufffd", text)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"figure": figure, "css": lambda words: words.replace(" ", "-")}
    environment.globals |= {"endings": _ENDINGS, "kinds": _KINDS, "palette": PALETTE}
    environment.globals |= {"headline": headline, "claim_facts": claim_facts, "counts": _counts}
    return environment.get_template("report.html.j2")


def figure(chart: Chart) -> dict[str, Any]:
    """A chart as a figure of plotly: plain dicts of ``data`` and ``layout``."""
    data = []
    for line in chart.lines:
        if line.deviation:
            data.append(_band(line))
        trace = {
            "type": "scatter",
            "name": escape(line.name),  # plotly reads markup in names
            "x": [step for step, _ in line.points],
            "y": [value for _, value in line.points],
            "mode": "lines+markers" if len(line.points) <= _MAX_MARKED else "lines",
            "marker": {"size": 4 if len(line.points) > 1 else 8},
            "line": {"color": line.colour, "width": 2, "dash": "dot" if line.dashed else "solid"},
        }
        if chart.row.stacked:
            trace |= {"stackgroup": "parts", "mode": "lines"}
        data.append(trace)
    clear = "rgba(0,0,0,0)"  # the page's own colour shows, light or dark
    y_axis = {"automargin": True, "zeroline": False, "nticks": 6, "hoverformat": ".4~g"}
    if chart.row.log:
        y_axis |= {"type": "log", "exponentformat": "power"}
    elif not chart.row.stacked:
        y_axis["range"] = _range([value for trace in data for value in trace["y"]])
    layout = {
        "height": 230,
        "hovermode": "x unified",
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "margin": {"l": 8, "r": 8, "t": 10, "b": 30},
        "modebar": {"bgcolor": clear, "color": "#94a3b8", "activecolor": "#64748b"},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "xaxis": {"zeroline": False, "showgrid": False, "tickformat": "d", "nticks": 8},
        "yaxis": y_axis,
        "showlegend": chart.row.stacked,  # elsewhere a run has its colour all over the page
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    return {"data": data, "layout": layout}


def _range(values: Sequence[float]) -> list[float]:
    """The ends of an axis; what differs by less than it can label is drawn as a constant."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    pad = 0.06 * (high - low) if high - low > 1e-9 * largest else 0.1 * largest or 0.5
    return [low - pad, high + pad]


def _band(line: Line) -> dict[str, Any]:
    """The area within the deviations of a line."""
    steps = [step for step, _ in line.points]
    above = [value + width for (_, value), width in zip(line.points, line.deviation)]
    below = [value - width for (_, value), width in zip(line.points, line.deviation)]
    return {
        "type": "scatter",
        "name": f"{escape(line.name)}, deviation",
        "x": steps + steps[::-1],
        "y": above + below[::-1],
        "fill": "toself",
        "mode": "none",
        "fillcolor": f"{line.colour}24",
        "hoverinfo": "skip",
    }


def _counts(run: RunReport) -> list[tuple[str, str]]:
    """The number of steps of each verdict in words, and the steps that did not pass."""
    found: dict[str, list[int]] = {}
    for step, verdict in run.verdicts().items():
        found.setdefault(verdict, []).append(step)
    out = []
    for verdict in (verdict for verdict in _VERDICTS if verdict in found):
        steps = found[verdict]
        text = f"{len(steps)} step{'s' * (len(steps) != 1)} {_VERDICTS[verdict]}"
        out.append((verdict, text if verdict == PASSED else f"{text}: {step_words(steps)}"))
    return out


def _numbers(runs: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """Numbers of every run by name; those that no run has, or that are all 0, are left out."""
    rows = [(name, [run.mean(key, tenth) for run in runs]) for name, key, tenth in _MEANS]
    out = [(name, [_number(v) for v in values]) for name, values in rows if any(values)]
    seconds = [run.total("perf/step_s") for run in runs]
    times = [duration(s) if 0 < s < 1e9 else "-" for s in seconds]
    steps = [f"{len(run.records):,}" for run in runs]
    return [("steps", steps), ("time of the steps", times), *out]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def _write_pictures(runs: Sequence[RunReport], directory: Path) -> None:
    from r3train.report.plot import plot_chart  # late: a page needs no matplotlib

    for chart in charts(runs):
        path = directory / f"{re.sub(r'[^a-z0-9]+', '_', chart.title.lower()).strip('_')}.png"
        with _writing(path):
            plot_chart(chart).savefig(path)
        click.echo(click.format_filename(path))


@contextlib.contextmanager
def _writing(path: Path, hint: str = "") -> Iterator[None]:
    """Raise a usage error with path and cause where a file cannot be written."""
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
