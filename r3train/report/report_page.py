"""``r3train report``: one or several runs as a page that needs no other file, and as pictures."""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import jinja2
from plotly.offline import get_plotlyjs

from r3train.config.files import write_atomically
from r3train.config.sources import plain
from r3train.report.report_data import load_run, RunReport, STEP_S, StepCheck, TOKENS
from r3train.report.report_figures import (
    PALETTE,
    chart_figure,
    charts,
    heat_figure,
    strip_figure,
    thinned,
)
from r3train.report.run_record import facts, settings
from r3train.observe.metrics import METRICS_FILE
from r3train.observe.step_line import duration
from r3train.audit.check_evidence import claim_facts, headline
from r3train.audit.findings import MAX_FINDINGS, ranges
from r3train.proof.verdicts import FAILED, NO_EVIDENCE, PASSED

# name, metric, whether the last tenth of the steps counts instead of all
_COMPARED = (
    ("reward, last tenth of the steps", "rollout/reward_mean", True),
    ("log-prob gap, mean", "train/log_prob_gap_mean", False),
    ("k3 KL, mean", "train/log_prob_gap_k3", False),
    ("share of tokens with |gap| above ln 2", "train/log_prob_gap_far_share", False),
    (
        "p99.9 of the gap (largest of a step's optimizer steps), mean over steps",
        "train/log_prob_gap_p999",
        False,
    ),
    ("largest gap, mean over steps", "train/log_prob_gap_max", False),
    ("seconds per step, mean", "perf/step_s", False),
    ("seconds of rollout per step, mean", "perf/rollout_s", False),
)
# Dark enough for white words, and none of the runs' colours.
_PART_COLOURS = {
    "waiting for rollout": "#b45309",
    "route exchange": "#be123c",
    "log-probs": "#7c3aed",
    "training": "#0f766e",
    "evaluation": "#0369a1",
    "weight sync": "#be185d",
    "saving": "#4d7c0f",
    "other": "#64748b",
    "rollout": "#1d4ed8",
    "idle": "#64748b",
}
_KINDS = {"worst": "Lowest reward", "slowest": "Slowest", "best": "Highest reward"}
_ENDINGS = {"length": "cut at the longest length", "stop": "ended by the model"}
_VERDICTS = {PASSED: "passed", FAILED: "failed", NO_EVIDENCE: "without evidence"}
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
    help="Also write each chart and heat map to this directory.",
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
    at_own_place = output is None
    output = output or run_dirs[0] / "report.html"
    _make_directory(output.parent, hint)
    if png is not None:
        _make_directory(png)
    with _writing(output, hint):
        if at_own_place:
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
    of_runs = settings(runs)
    text = _template().render(
        runs=runs,
        facts=facts(runs),
        settings=of_runs,
        differing=[setting for setting in of_runs if setting.differs],
        progress=[_progress(run) for run in runs],
        show_anew_s=_SHOW_ANEW_S if watch else None,
        charts=charts(runs),
        compared=_compared(runs),
        palette=PALETTE,
        part_colours=_PART_COLOURS,
        many_findings=MAX_FINDINGS,
        **{"bars": _bars, "counts": _counts, "coverage": _coverage_words},
        **{"headline": headline, "claim_facts": claim_facts},
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
    environment.filters |= {"css": _css, "reward": _reward, "seconds": _seconds}
    environment.globals |= {"endings": _ENDINGS, "kinds": _KINDS}
    environment.filters |= {"chart": chart_figure, "heat": heat_figure, "strip": strip_figure}
    return environment.get_template("report.html.j2")


def _bars(run: RunReport) -> dict[str, list[tuple[str, float, float]]]:
    """Bars of times by title: a part's name, its seconds and its share of the bar.

    A part below a thousandth has no width and is left out.
    """
    bars = {"training loop": run.times(), "rollout, at the same time": run.rollout()}
    out = {}
    for title, parts in bars.items():
        total = sum(parts.values())
        shown = [(name, s, s / total) for name, s in parts.items() if s > total / 1000]
        if shown:
            out[title] = shown
    return out


def _progress(run: RunReport) -> dict[str, list[float]]:
    """The x-axes of a run: steps, and until each the tokens and the hours of all; [] of what is not known."""
    axes = {"tokens": run.until(TOKENS), "hours": run.until(STEP_S, 1 / 3600)}
    points = {name: thinned(axis) for name, axis in axes.items()}
    steps = [step for step, _ in points["tokens"] or points["hours"]]
    return {"steps": steps} | {name: [value for _, value in of] for name, of in points.items()}


def _counts(checks: Sequence[StepCheck]) -> list[tuple[str, str]]:
    """The number of steps of each verdict in words, and the steps that did not pass."""
    out = []
    for verdict, words in _VERDICTS.items():
        steps = [c.step for c in checks if c.verdict == verdict]
        if steps or verdict == PASSED:
            text = f"{len(steps)} step{'s' * (len(steps) != 1)} {words}"
            out.append((verdict, text if verdict == PASSED else f"{text}: {_steps(steps)}"))
    return out


def _coverage_words(checks: Sequence[StepCheck]) -> str:
    """Calls and rows over the steps with evidence."""
    judged = [c for c in checks if c.calls_share() is not None]
    if not judged:
        return ""
    calls = "every expected router call was made at every step with evidence"
    if short := [c for c in judged if c.calls_share() != 1]:
        worst = min(short, key=StepCheck.calls_share)
        calls = (
            f"router calls are not those expected at {_steps([c.step for c in short])}"
            f" (step {worst.step}: {worst.counts['num_calls']} of"
            f" {worst.counts['num_calls_expected']})"
        )
    shares = [share for c in judged if (share := c.rows_share()) is not None]
    if not shares:
        return calls
    low, high = (f"{share:.1%}" for share in (min(shares), max(shares)))
    span = low if low == high else f"{low} to {high}"
    rows = (
        f"{span} of a step's rows replayed as recorded, in the rest missing slots filled (no server"
        " routes the last token of a sample)"
    )
    return f"{calls}; {rows}"


def _compared(runs: Sequence[RunReport]) -> list[tuple[str, list[str], str]]:
    """Numbers of every run, and the last run's divided by the first's."""
    out = []
    for name, key, last_tenth in _COMPARED:
        values = [run.mean(key, last_tenth=last_tenth) for run in runs]
        if any(value is not None for value in values):
            out.append((name, [_number(v) for v in values], _ratio(values)))
    rates = [_rate(run) for run in runs]
    if any(rate is not None for rate in rates):
        out.append(("tokens per second of all steps", [_number(v) for v in rates], _ratio(rates)))
    return out


def _rate(run: RunReport) -> float | None:
    tokens, seconds = run.total(TOKENS), run.total(STEP_S)
    return tokens / seconds if tokens and seconds else None


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def _ratio(values: Sequence[float | None]) -> str:
    """The last value over the first, where there are both."""
    first, final = values[0], values[-1]
    return _times(final / first) if first and final is not None else ""


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' * (len(steps) != 1)} {ranges(steps)}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x" if 0.01 <= abs(ratio) < 1000 else f"{ratio:.2g} x"


def _reward(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return duration(value) if value < 1e9 else f"{value:.3g} s"


def _css(words: str) -> str:
    return words.replace(" ", "-")


def _write_pictures(runs: Sequence[RunReport], directory: Path) -> None:
    from r3train.report.plot import plot_chart, plot_heat  # late: a page needs no matplotlib

    pictures = [(chart.title, plot_chart(chart)) for chart in charts(runs)]
    for number, run in enumerate(runs, start=1):
        of_run = {"routing agreement": run.heat, "route drift": run.drift}
        for what, heat in of_run.items():
            if heat is not None:  # the number tells files of alike names apart
                title = f"{what.capitalize()}: {run.name}"
                pictures.append((f"{what} of layers {number} {run.name}", plot_heat(heat, title)))
    for name, figure in pictures:
        path = directory / f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.png"
        with _writing(path):
            figure.savefig(path)
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
