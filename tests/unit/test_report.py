"""The report: one self-contained page, runs side by side, whatever they lack."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.evidence.metrics import MetricsWriter
from r3train.evidence.report_command import names
from r3train.evidence.report_data import load_run
from r3train.evidence.report_html import render
from r3train.evidence.report_svg import Chart, Line, chart_svg, short, thinned, ticks
from tests.unit.evidence_dirs import write_run

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


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """One run with R3 and evidence, one without."""
    with_r3 = with_metrics(write_run(tmp_path / "with_r3", range(4)))
    without = with_metrics(tmp_path / "without", gap=0.04)
    (without / "config.toml").write_text("[replay]\nuse_rollout_routing_replay = false\n")
    return [with_r3, without]


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


def test_the_page_needs_no_other_file_and_runs_no_script(runs):
    text = render([load_run(path, path.name) for path in runs])
    page = Page(text)
    assert not page.open
    assert not {"script", "img", "iframe"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:")
    assert "url(" not in text and "@import" not in text
    assert "&lt;script&gt;alert(1)" in text  # the text of a sample is shown, not run


def test_what_r3_did_is_in_one_table_with_a_ratio(runs):
    text = render([load_run(path, path.name) for path in runs])
    row = re.search(r"<tr><td>log-prob gap, mean</td>(.*?)</tr>", text, re.S)[1]
    assert re.findall(r">([\d.]+(?: x)?)<", row) == ["0.01", "0.04", "4.00 x"]
    assert "no evidence: the run did not use R3" in text
    assert "passed: 4 steps" in text


def test_the_heat_map_holds_every_layer_and_step(runs):
    heat = load_run(runs[0], "a").heat
    assert heat.layers == [1, 2, 3] and heat.columns == [(s, s) for s in range(4)]
    assert heat.values == [[0.9] * 4] * 3 and heat.chance == pytest.approx(1 / 28)
    many = load_run(with_metrics(write_run(runs[0].parent / "m", range(250))), "m").heat
    assert len(many.columns) == 84 and many.columns[-1] == (249, 249)


def test_times_are_split_without_counting_log_probs_twice(runs):
    times = load_run(runs[0], "a").times()
    wanted = {"waiting for rollout": 2.0, "log-probs": 1.6, "training": 3.2, "other": 1.2}
    assert times == pytest.approx(wanted)


def test_a_failed_run_shows_what_failed_and_where(tmp_path):
    from dataclasses import replace

    def wrong(r):
        return replace(r, fingerprint=1) if (r.rank, r.layer_number) == (1, 2) else r

    run = write_run(tmp_path / "run", change=wrong)
    text = render([load_run(run, "run")])
    assert "step 0, rank 1, old_log_prob/replay_forward, layer 2: route fingerprint" in text


def test_a_run_with_one_step_and_few_metrics_is_no_problem(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        metrics.write(0, {"rollout/reward_mean": 0.5})
    assert "<circle" in render([load_run(tmp_path / "run", "run")])


def test_the_command_writes_page_and_pictures(runs, tmp_path):
    args = ["report", *map(str, runs), "--output", str(tmp_path / "r.html")]
    result = CliRunner().invoke(main, [*args, "--png", str(tmp_path / "png")])
    assert result.exit_code == 0, result.output
    for name in ("reward", "routing_agreement_of_layers_with_r3"):
        assert (tmp_path / "png" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert not list((tmp_path / "png").glob("*layers_without*"))
    assert CliRunner().invoke(main, ["report", str(tmp_path / "nowhere")]).exit_code == 2


def test_runs_of_one_name_are_told_apart():
    assert names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert names([Path("/a/one")]) == ["one"]


def test_the_slowest_samples_of_the_run_are_those_with_the_most_seconds(runs):
    samples = load_run(runs[0], "a").samples
    slowest = [s["generation_s"] for s in samples if s["kind"] == "slowest"]
    assert slowest == [3.25, 2.25, 1.25]
    assert "3 tokens in 3.25 s" in render([load_run(runs[0], "a")])


def test_axes_have_round_numbers_within_the_range():
    assert ticks(0.03, 0.97, False) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(1e-6, 1.0, True) == pytest.approx([1e-6, 1e-4, 1e-2, 1.0])
    assert ticks(1.1e-6, 1.9e-6, True) == pytest.approx([1.2e-6, 1.4e-6, 1.6e-6, 1.8e-6])
    assert short(1.2e-6) == "1.2e-6"
    assert [short(v) for v in (0, 0.25, 1e-5, 20000)] == ["0", "0.25", "1e-5", "20k"]
    assert len(thinned(range(100000), [1.0] * 100000)) <= 500
    assert "no numbers" in chart_svg(Chart("x", "", [Line(0, "a", [1], [0.0])], log=True))
