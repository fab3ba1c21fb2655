"""The report: one self-contained page, runs side by side, whatever they lack."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from r3train.cli import main
from r3train.observe.metrics import MetricsWriter
from r3train.observe.report_command import names
from r3train.observe.report_data import load_run
from r3train.observe.report_html import render
from r3train.observe.report_svg import Chart, Line, chart_svg, short, thinned, ticks
from tests.unit.evidence_dirs import write_run
from tests.unit.report_runs import Page, report, with_metrics


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """One run with R3 and evidence, one without."""
    with_r3 = with_metrics(write_run(tmp_path / "with_r3", range(4)))
    without = with_metrics(tmp_path / "without", gap=0.04)
    (without / "config.toml").write_text("[replay]\nuse_rollout_routing_replay = false\n")
    return [with_r3, without]


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
    row = re.search(r"<tr><td[^>]*>log-prob gap, mean</td>(.*?)</tr>", text, re.S)[1]
    assert re.findall(r">([\d.]+(?: x)?)<", row) == ["0.01", "0.04", "4.00 x"]
    assert "no evidence: the run did not use R3" in text
    assert "passed: 4 steps" in text


def test_the_heat_map_holds_every_layer_and_step(runs):
    heat = load_run(runs[0], "a").heat
    assert heat.layers == [1, 2, 3] and heat.columns == [(s, s) for s in range(4)]
    assert heat.values == [[0.9] * 4] * 3 and heat.chance == pytest.approx(1 / 28)
    many = load_run(with_metrics(write_run(runs[0].parent / "m", range(250))), "m").heat
    assert len(many.columns) == 84 and many.columns[-1] == (249, 249)


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
    for name in ("reward", "routing_agreement_of_layers_1_with_r3"):
        assert (tmp_path / "png" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert not list((tmp_path / "png").glob("*layers_without*"))
    assert CliRunner().invoke(main, ["report", str(tmp_path / "nowhere")]).exit_code == 2


def test_pictures_of_runs_with_alike_names_are_files_of_their_own(tmp_path):
    runs = [with_metrics(write_run(tmp_path / name)) for name in ("run_a", "run a", "run-A")]
    args = ["report", *map(str, runs), "--png", str(tmp_path / "png")]
    printed = CliRunner().invoke(main, args).output.splitlines()
    maps = [f"{tmp_path}/png/routing_agreement_of_layers_{n}_run_a.png" for n in (1, 2, 3)]
    assert [line for line in printed if "layers" in line] == maps
    assert len(set(printed)) == len(printed)
    assert sorted(map(str, (tmp_path / "png").iterdir())) == sorted(printed[1:])


def test_nothing_is_cut_off_at_the_edge_of_a_picture(tmp_path):
    run = with_metrics(write_run(tmp_path / "run", range(4)))
    assert report(run, "--png", tmp_path / "png").exit_code == 0
    for picture in (tmp_path / "png").iterdir():
        pixels = imread(picture)[..., :3]
        for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
            assert (edge == 1).all(), picture


def test_runs_of_one_name_are_told_apart():
    assert names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert names([Path("/a/one")]) == ["one"]
    deep = [Path(f"/{top}/b/c/d/e/run") for top in "xy"]
    assert names(deep) == ["x/b/c/d/e/run", "y/b/c/d/e/run"]


def test_the_slowest_samples_of_the_run_are_those_with_the_most_seconds(runs):
    samples = load_run(runs[0], "a").samples
    slowest = [s.generation_s for s in samples if s.kind == "slowest"]
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
