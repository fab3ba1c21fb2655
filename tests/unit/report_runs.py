"""Run directories for the report, and what a test reads from its page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from plotly.offline import get_plotlyjs

from r3train.cli import main
from r3train.observe.metrics import MetricsWriter

EVIL = "<script>alert(1)</script><img src=http://example.com/x>"


def with_metrics(run_dir: Path, *, gap: float = 0.01) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    with MetricsWriter(run_dir, tensorboard=False) as metrics:
        for step in range(4):
            values = {"rollout/reward_mean": step / 4, "train/log_prob_gap_mean": gap}
            values |= {"perf/step_s": 2.0, "perf/train_s": 1.2, "perf/log_prob_s": 0.4}
            values |= {"perf/rollout_wait_s": 0.5, "train/loss": float("nan")}
            metrics.write(step, values)
            sample = {"kind": "worst", "reward": 0.1, "response_len": 3, "finish_reason": "stop"}
            sample |= {"prompt": "say", "text": f"{EVIL} {step}", "generation_s": step + 0.25}
            sample |= {"label": [EVIL, 4]}
            metrics.write_samples(step, [sample, {**sample, "kind": "slowest"}])
    return run_dir


def report(*args: object) -> Result:
    """``r3train report``, which ends with a page or a usage error whatever it is given."""
    result = CliRunner().invoke(main, ["report", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 2), result.output
    return result


class Page(HTMLParser):
    """A page without plotly's script: tags with their attributes, its texts, and its figures by title."""

    VOID = {"meta", "link", "br", "img"}

    def __init__(self, path: Path):
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        assert self.text.count(get_plotlyjs()) == 1
        self.text = self.text.replace(get_plotlyjs(), "")
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self.words, self.open = "", []
        self.feed(self.text)
        assert not self.open
        self.words = " ".join(self.words.split())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in self.VOID:
            self.open.append(tag)
        if "data-figure" in attributes:
            self.figures[attributes["aria-label"]] = json.loads(attributes["data-figure"])

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.words += data

    def lines(self, title: str) -> dict[str, list[tuple[float, float]]]:
        """The points of a chart by the line's name."""
        traces = self.figures[title]["data"]
        return {trace["name"]: list(zip(trace["x"], trace["y"])) for trace in traces}


def with_steps(run_dir: Path, steps: int, **values: float) -> Path:
    """A run of so many steps of the same metrics, in whose names "__" stands for "/"."""
    with MetricsWriter(run_dir, tensorboard=False) as metrics:
        for step in range(steps):
            metrics.write(step, {key.replace("__", "/"): value for key, value in values.items()})
    return run_dir


def page_of(*runs: Path, args: tuple[object, ...] = ()) -> Page:
    """The page that must come of runs, written to the first of them."""
    result = report(*runs, *args)
    assert result.exit_code == 0, result.output
    return Page(runs[0] / "report.html")
