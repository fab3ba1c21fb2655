"""Run directories for the report, and what a test reads from its page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from click.testing import CliRunner, Result

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
    """Tags with their attributes, and whether every tag was closed."""

    VOID = {"meta", "link", "br", "img", "line", "rect", "circle", "polyline"}

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag
