"""The pages that the benchmarks write: a template of Markdown each, and how its figures are spelled.

Pure: no clock, no machine.  A figure is the median of its rounds with the smallest and the largest in
brackets.  A benchmark that failed is named with its error in the place of its figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import jinja2

INTERNALS = Path(__file__).resolve().parents[1] / "docs" / "internals"
PERFORMANCE_PAGE = INTERNALS / "performance.md"
RESULTS_PAGE = INTERNALS / "results.md"
ALGORITHMS_PAGE = INTERNALS.parent / "algorithms.md"

# of results.md, by other benchmarks than the page's own
EFFECT_SECTIONS = (
    "## What it does to the gradient",
    "## What it does to a policy",
    "## What it does to weights of whole answers",
)
# 0.975 quantiles of Student's t, by degrees of freedom from 1 on
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)

Result = Mapping[str, Any]


def performance_page(results: Result) -> str:
    """docs/internals/performance.md from {benchmark: its result, or {"error": ...}} and ``machine``."""
    done = {name: r for name, r in results.items() if "error" not in r}
    return render("performance", machine=results["machine"], results=results, done=done)


def results_page(result: Result, earlier: str = "") -> str:
    """docs/internals/results.md from the result of the agreement study, with others' sections of the page before."""
    return with_sections_of(render("results", **result), earlier, EFFECT_SECTIONS)


def learning_section(result: Result) -> str:
    """A section of docs/algorithms.md from the result of benchmarks/learning_rules.py."""
    return render("learning_rules", **result)


def gradient_section(result: Result) -> str:
    """A section of docs/internals/results.md from the result of benchmarks/replay_arms.py."""
    runs = result["runs"]
    widest = max(run["initializer_range"] for run in runs)
    layered = [run for run in runs if run["initializer_range"] == widest]
    layered = [run for run in layered if run["server_dtype"] == "bfloat16"]
    return render("replay_arms", layered=layered, **result)


def replay_learning_section(result: Result) -> str:
    """A section of docs/internals/results.md from the result of benchmarks/replay_learning.py."""
    return render("replay_learning", **result)


def replay_weights_section(result: Result) -> str:
    """A section of docs/internals/results.md from the result of benchmarks/replay_weights.py."""
    return render("replay_weights", **result)


def with_sections_of(page: str, earlier: str, headings: Iterable[str]) -> str:
    """The page with those sections of an earlier one that other benchmarks wrote."""
    for heading in headings:
        _, found, rest = earlier.partition(f"\n{heading}\n")
        if found:
            page = with_section(page, f"{heading}\n{rest.partition(chr(10) + '## ')[0].rstrip()}\n")
    return page


def with_section(page: str, section: str) -> str:
    """The page with the section in the place of the one of its heading, or at its end."""
    heading = section.splitlines()[0]
    before, _, rest = page.partition(f"\n{heading}\n")
    _, mark, behind = rest.partition("\n## ")
    return f"{before.rstrip()}\n\n{section}" + (f"\n## {behind}" if mark else "")


def number(value: float) -> str:
    """Three significant digits: 1,234 or 12.3 or 0.0123 or 1.2e-05."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def figure(spread: Result) -> str:
    """Median, and the range that the rounds took."""
    return f"{number(spread['median'])} ({number(spread['low'])} to {number(spread['high'])})"


def range_of(values: Iterable[float]) -> str:
    """The figure of values that were measured."""
    values = list(values)
    return figure(dict(median=median(values), low=min(values), high=max(values)))


def half_interval(values: list[float]) -> float:
    """Half of the 95% interval of a mean, by Student's t; of 2 to 12 values."""
    return T_975[len(values) - 2] * stdev(values) / len(values) ** 0.5


def mean(values: Iterable[float]) -> float:
    return fmean(values)


def cosine(values: Iterable[float]) -> str:
    """The interval of cosines, which lie near 1."""
    values = list(values)
    return f"{fmean(values):.4f}" + (f" ± {half_interval(values):.4f}" if len(values) > 1 else "")


def interval(values: Iterable[float]) -> str:
    """The mean and half of its 95% interval."""
    values = list(values)
    if len(values) < 2:
        return number(values[0])
    return f"{number(fmean(values))} ± {number(half_interval(values))}"


def apart(values: Iterable[float]) -> bool:
    """True where the 95% interval of the mean leaves out 0."""
    values = list(values)
    return abs(fmean(values)) > half_interval(values)


def places(value: float, digits: int = 0) -> str:
    """A fixed number of decimal places, and commas between thousands."""
    return f"{value:,.{digits}f}"


def short(value: float) -> str:
    return f"{value:g}"


def percent(share: float, digits: int = 0) -> str:
    return f"{share:.{digits}%}"


def over(values: Iterable[float], base: Iterable[float]) -> list[float]:
    """Each value over the base of the same round or seed."""
    return [a / b for a, b in zip(values, base, strict=True)]


def shares_of_time(rates: Result) -> dict[str, float]:
    """Each stage's share of the time of a path whose stages have these rates."""
    total = sum(1 / rate for rate in rates.values())
    return {stage: 1 / rate / total for stage, rate in rates.items()}


def mean_of(job: Result, key: str) -> float:
    """The mean of a metric over a job."""
    return fmean(job["curves"][key])


def sum_of(job: Result, key: str) -> float:
    """The sum of a metric over a job."""
    return sum(job["curves"][key])


def lowest(job: Result, key: str) -> float:
    """The smallest value of a metric over a job."""
    return min(job["curves"][key])


def late(job: Result, key: str) -> float:
    """The mean of a metric over a job's last ten rollouts."""
    return fmean(job["curves"][key][-10:])


def early(job: Result, key: str) -> float:
    """A metric of a job's first rollout."""
    return job["curves"][key][0]


def less(values: Iterable[float], base: Iterable[float]) -> list[float]:
    """Each value less the base of the same seed."""
    return [a - b for a, b in zip(values, base, strict=True)]


def rollouts_to(job: Result, reward: float) -> int | str:
    """Rollouts until the mean of three rewards reaches this, or "never"."""
    rewards = job["curves"]["rollout/reward_mean"]
    reached = (i for i in range(3, len(rewards) + 1) if fmean(rewards[i - 3 : i]) >= reward)
    return next(reached, "never")


def render(template: str, **values: Any) -> str:
    """A page from benchmarks/pages; a name that the values lack is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("pages")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (
        number,
        figure,
        interval,
        cosine,
        apart,
        mean,
        range_of,
        places,
        short,
        percent,
        over,
        median,
    )
    filters += (shares_of_time, mean_of, sum_of, rollouts_to, lowest, late, early, less)
    environment.filters |= {each.__name__: each for each in filters}
    return environment.get_template(f"{template}.md.j2").render(values).rstrip() + "\n"
