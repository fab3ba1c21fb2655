"""The report: one self-contained page, runs side by side, whatever they lack."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects
import pytest
from matplotlib.image import imread

from r3train.observe.metrics import MetricsWriter
from r3train.report.report_page import names
from r3train.report.report_data import load_run
from r3train.report.report_figures import thinned
from tests.unit.evidence_dirs import comparison, write_run
from tests.unit.report_runs import EVIL, page_of, Page, report, with_metrics


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """One run with R3 and evidence, one without."""
    with_r3 = with_metrics(write_run(tmp_path / "with_r3", range(4)))
    without = with_metrics(tmp_path / "without", gap=0.04)
    (without / "config.toml").write_text("[replay]\nuse_rollout_routing_replay = false\n")
    return [with_r3, without]


def test_the_page_needs_no_other_file_and_lets_the_browser_fetch_none(runs):
    page = page_of(*runs)
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe")
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:")
    assert "url(" not in page.text and "@import" not in page.text
    (policy,) = [a["content"] for _, a in page.tags if "http-equiv" in a]
    assert policy.startswith("default-src 'none'; script-src 'nonce-")


def test_no_text_of_a_stranger_becomes_a_script_or_markup(tmp_path):
    run = with_metrics(tmp_path / EVIL.replace("/", "'"))
    page = page_of(run)
    assert "&lt;script&gt;alert(1)" in page.text and f"{EVIL} 3" in page.words
    nonces = [attributes.get("nonce") for tag, attributes in page.tags if tag == "script"]
    assert len(nonces) == 2 and nonces[0] == nonces[1] and len(nonces[0]) > 20
    # plotly reads markup in names
    assert not any("<" in name for title in page.figures for name in page.lines(title))


def test_every_figure_is_one_that_plotly_knows(runs):
    figures = page_of(*runs).figures
    assert len(figures) == 5
    for figure in figures.values():
        plotly.graph_objects.Figure(figure)


def test_what_r3_did_is_in_one_table_with_a_ratio(runs):
    page = page_of(*runs)
    row = re.search(r"<tr><td[^>]*>log-prob gap, mean</td>(.*?)</tr>", page.text, re.S)[1]
    assert re.findall(r">([\d.]+(?: x)?)<", row) == ["0.01", "0.04", "4.00 x"]
    assert "no evidence: the run did not use R3" in page.words
    assert "passed: 4 steps" in page.words


def test_the_page_says_whether_the_samples_were_true_to_their_servers(tmp_path):
    wrong = {"rows_differ": {1: 0, 2: 90, 3: 0}}
    right, bad = (
        write_run(tmp_path / name, rechecked=lambda step: [comparison(step, **changes)])
        for name, changes in (("right", {}), ("bad", wrong))
    )
    page = page_of(with_metrics(right), with_metrics(bad))
    facts = "3 samples rechecked: other experts in 0 of 900 rows, 0 of 180 log-probs off"
    assert facts in page.words
    verdicts = r"recheck</td><td[^>]*>(\w+)</td>"
    assert re.findall(verdicts, page.text) == ["passed", "failed"]
    assert "layer 2: rows with different experts in 100 rows" in page.words


def test_a_chart_has_a_line_a_run_with_every_step(runs):
    points = [(step, step / 4) for step in range(4)]
    assert page_of(*runs).lines("Reward") == {"with_r3": points, "without": points}


def test_the_heat_map_holds_every_layer_and_step(runs):
    (cells,) = page_of(runs[0]).figures["agreement by layer and step"]["data"]
    assert cells["y"] == ["1", "2", "3"] and cells["x"] == ["0", "1", "2", "3"]
    assert cells["z"] == [[0.9] * 4] * 3 and cells["zmin"] == pytest.approx(1 / 28)
    many = load_run(with_metrics(write_run(runs[0].parent / "m", range(250))), "m").heat
    assert len(many.columns) == 84 and many.columns[-1] == (249, 249)


def drifting(run_dir: Path, steps: int) -> Path:
    """A run of two MoE layers, the second of which drifts by a thousandth a step; step 1 lacks it."""
    with MetricsWriter(run_dir, tensorboard=False) as metrics:
        for step in range(steps):
            layers = {2: 0.0, 3: step / 1000} if step != 1 else {2: 0.0}
            left = {f"r3/drift_left_layer_{layer}": share for layer, share in layers.items()}
            metrics.write(step, {"r3/drift_left": step / 2000, **left})
    return run_dir


def test_route_drift_is_drawn_for_every_layer_and_step(tmp_path):
    run = drifting(tmp_path / "run", 41)
    page = page_of(run)
    (cells,) = page.figures["route drift by layer and step"]["data"]
    assert cells["y"] == ["2", "3"] and cells["x"] == [str(step) for step in range(41)]
    assert cells["z"][0] == [0.0] * 41
    assert cells["z"][1] == [0.0, None, *(step / 1000 for step in range(2, 41))]
    # from none to the largest, in words too
    assert (cells["zmin"], cells["zmax"]) == (0.0, 0.04)
    assert cells["colorbar"]["ticktext"] == ["0.0%", "2.0%", "4.0%"]
    assert page.lines("Route drift")["run"][-1] == (40, 0.02)
    printed = report(run, "--png", tmp_path / "png").output
    assert "route_drift_of_layers_1_run.png" in printed and "agreement" not in printed


def test_drift_of_many_steps_is_a_mean(tmp_path):
    drift = load_run(drifting(tmp_path / "run", 240), "run").drift
    assert len(drift.columns) == 120 and drift.columns[5] == (10, 11)
    assert drift.values[1][5] == pytest.approx(0.0105)


def test_retractions_are_drawn_with_the_samples_that_were_trained_so(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        for step in range(3):
            counts = {"rollout/retracted": 2 * step, "rollout/retracted_samples": step}
            metrics.write(step, counts)
    assert page_of(tmp_path / "run").lines("Retractions") == {
        "run": [(0, 0), (1, 2), (2, 4)],
        "run, dashed": [(0, 0), (1, 1), (2, 2)],
    }


def test_a_failed_run_shows_what_failed_and_where(tmp_path):
    def wrong(r):
        return replace(r, fingerprint=1) if (r.rank, r.layer_number) == (1, 2) else r

    page = page_of(write_run(tmp_path / "run", change=wrong))
    assert "step 0, old_log_prob/replay_forward, layer 2: fingerprint is 0x" in page.words


def test_a_run_with_one_step_and_few_metrics_is_drawn_as_a_point(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        metrics.write(0, {"rollout/reward_mean": 0.5})
    page = page_of(tmp_path / "run")
    assert page.lines("Reward") == {"run": [(0, 0.5)]}
    assert page.figures["Reward"]["data"][0]["mode"] == "lines+markers"


def test_thousands_of_steps_become_at_most_a_thousand_points(tmp_path):
    points = thinned([(step, 1.0) for step in range(100_000)])
    assert len(points) == 1000 and points[0] == (49.5, 1.0)
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        for step in range(3000):
            metrics.write(step, {"rollout/reward_mean": 0.5})
    page = page_of(tmp_path / "run")
    assert len(page.lines("Reward")["run"]) == 1000 and len(page.text) < 80_000


def test_the_command_writes_page_and_pictures(runs, tmp_path):
    result = report(*runs, "--output", tmp_path / "r.html", "--png", tmp_path / "png")
    assert result.exit_code == 0, result.output
    pictures = list((tmp_path / "png").iterdir())
    assert {"reward.png", "routing_agreement_of_layers_1_with_r3.png"} <= {
        path.name for path in pictures
    }
    assert not any("layers_without" in path.name for path in pictures)
    for picture in pictures:  # nothing is cut off at an edge
        pixels = imread(picture)[..., :3]
        for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
            assert (edge == 1).all(), picture
    assert report(tmp_path / "nowhere").exit_code == 2


def test_pictures_of_runs_with_alike_names_are_files_of_their_own(tmp_path):
    runs = [with_metrics(write_run(tmp_path / name)) for name in ("run_a", "run a", "run-A")]
    printed = report(*runs, "--png", tmp_path / "png").output.splitlines()
    maps = [f"{tmp_path}/png/routing_agreement_of_layers_{n}_run_a.png" for n in (1, 2, 3)]
    assert [line for line in printed if "layers" in line] == maps
    assert sorted(map(str, (tmp_path / "png").iterdir())) == sorted(printed[1:])


def test_runs_of_one_name_are_told_apart():
    assert names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert names([Path("/a/one")]) == ["one"]
    deep = [Path(f"/{top}/b/c/d/e/run") for top in "xy"]
    assert names(deep) == ["x/b/c/d/e/run", "y/b/c/d/e/run"]


def test_a_sample_shows_prompt_answer_and_how_it_ended_and_keeps_the_label_folded(runs, tmp_path):
    page = tmp_path / "page.html"
    assert report(runs[0], "--output", page).exit_code == 0
    text = page.read_text()
    card = text[text.index("Lowest reward") :]
    folded = card[card.index("<details>") : card.index("</details>")]
    assert "label</summary>" in folded and "alert(1)" in folded and EVIL not in text
    shown = card[: card.index("<details>")]
    assert "<b>say</b>" in shown and "3 tokens in 3.25 s, ended by the model" in shown


def test_the_slowest_samples_of_the_run_are_those_with_the_most_seconds(runs):
    samples = load_run(runs[0], "a").samples
    slowest = [s.generation_s for s in samples if s.kind == "slowest"]
    assert slowest == [3.25, 2.25, 1.25]
    assert "3 tokens in 3.25 s" in page_of(runs[0]).words


def with_evaluations(run_dir: Path, final: float = 0.5) -> Path:
    rows = [
        {"reward": i / 8, "prompt": f"ask {i}", "label": 4, "answer": f"{EVIL} {i}"}
        for i in range(9)
    ]
    rows = [{**row, "response_len": 1200, "finish_reason": "length"} for row in rows]
    with MetricsWriter(with_metrics(run_dir), tensorboard=False) as metrics:
        for version, mean in ((0, 0.125), (2, 0.25), (2, final)):
            numbers = {"mean": mean, "standard_error": 0.0625, "pass_at_1": mean, "pass_at_4": 0.75}
            metrics.write_evaluation(version, "held-out", "fingerprint", rows, numbers)
        metrics.write_evaluation(0, "other", "fingerprint", rows, {"mean": 3.0, "pass_at_1": 0.0})
    return run_dir


def test_every_evaluation_set_has_a_chart_over_versions_with_its_standard_error(tmp_path):
    page = page_of(with_evaluations(tmp_path / "one"), with_evaluations(tmp_path / "two", 0.75))
    figure = page.figures["Evaluation: held-out"]
    plotly.graph_objects.Figure(figure)
    assert page.lines("Evaluation: held-out") == {
        "one": [(0, 0.125), (2, 0.5)],  # of two lines for one version the later
        "one, pass@4": [(0, 0.75), (2, 0.75)],
        "two": [(0, 0.125), (2, 0.75)],
        "two, pass@4": [(0, 0.75), (2, 0.75)],
    }
    assert [line.get("error_y", {}).get("array") for line in figure["data"]] == [
        *([0.0625, 0.0625], None, [0.0625, 0.0625], None)
    ]
    assert figure["layout"]["xaxis"]["title"]["text"] == "weight version"
    low, high = figure["layout"]["yaxis"]["range"]
    assert low < 0.125 - 0.0625 and 0.75 + 0.0625 < high, "a bar is cut"
    alone = page.figures["Evaluation: other"]["data"]
    assert [line["name"] for line in alone] == ["one", "two"], "pass@1 alone is no second line"
    assert "error_y" not in alone[0]
    titles = list(page.figures)
    assert titles.index("Evaluation: held-out") < titles.index("Reward")


def test_the_last_evaluation_of_a_set_shows_its_lowest_and_highest_answers(tmp_path):
    run = with_evaluations(tmp_path / "run")
    page = page_of(run)
    cards = page.words[page.words.index("Evaluation answers") :]
    assert re.findall(r"(Lowest|Highest) reward, weight version 2", cards) == 3 * ["Lowest"] + 3 * [
        "Highest"
    ]
    assert [int(n) for n in re.findall(r"ask (\d)", cards[: cards.index("run: other")])] == [
        *(0, 1, 2),
        *(8, 7, 6),
    ]
    assert "reward 1.000, 1,200 tokens, cut at the longest length" in cards
    assert EVIL not in page.text and f"{EVIL} 8" in cards
    # a name in a stranger's file leads nowhere
    (tmp_path / "outside.jsonl").write_text('{"answer": "not here"}\n')
    (run / "eval" / "0000002-x").mkdir()
    line = '{"step": 2, "name": "x/../../../outside", "eval/x/../../../outside/mean": 0.5}\n'
    with (run / "eval" / "metrics.jsonl").open("a") as file:
        file.write(line)
    assert "not here" not in page_of(run).words


def test_an_answer_that_is_none_is_named_with_its_file_and_line(tmp_path):
    run = with_evaluations(tmp_path / "run")
    path = run / "eval" / "0000002-held-out.jsonl"
    path.write_text(path.read_text() + '{"reward": "much"}\n')
    result = report(run)
    assert result.exit_code == 2 and "0000002-held-out.jsonl:10" in result.output


def test_the_reward_has_a_band_of_one_standard_deviation(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        for step in range(3):
            values = {"rollout/reward_mean": step / 4, "rollout/reward_std": 0.5}
            metrics.write(step, values)
    page = page_of(tmp_path / "run")
    lines = page.lines("Reward")
    assert lines["run"] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    around = [(0, 0.5), (1, 0.75), (2, 1.0), (2, 0.0), (1, -0.25), (0, -0.5)]
    assert lines["run, deviation"] == around
    low, high = page.figures["Reward"]["layout"]["yaxis"]["range"]
    assert low < -0.5 and 1.0 < high, "the band is cut"
    plotly.graph_objects.Figure(page.figures["Reward"])
    # one value less, and it would be at the wrong steps
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        metrics.write(3, {"rollout/reward_mean": 0.5})
    assert list(page_of(tmp_path / "run").lines("Reward")) == ["run"]


def test_what_a_record_of_training_has_is_drawn_and_a_title_says_what_it_is(tmp_path):
    drawn = {
        "Learning rate": "train/lr",
        "Clipped tokens": "train/clip_share",
        "Groups of equal rewards": "rollout/zero_variance_groups",
        "Truncated responses": "rollout/truncated_share",
    }
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        for step in range(2):
            passed = {f"rollout/pass_at_{k}": k / 16 for k in (1, 2, 4, 16)}
            metrics.write(step, dict.fromkeys(drawn.values(), step) | passed)
    page = page_of(tmp_path / "run")
    for title in drawn:
        assert page.lines(title) == {"run": [(0, 0), (1, 1)]}
    assert page.lines("pass@k of the rollouts") == {
        "run, pass@16": [(0, 1.0), (1, 1.0)],
        "run, pass@1": [(0, 0.0625), (1, 0.0625)],
    }
    titles = [attributes.get("title") for tag, attributes in page.tags if tag == "h3"]
    assert "train/lr: learning rate of the last optimizer step" in titles
    assert any(title and title.count("rollout/pass_at_") == 2 for title in titles)


def test_the_step_that_publishes_nothing_does_not_flatten_the_throughput(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        for step in range(4):
            values = {"perf/tokens_per_s": 500.0, "rollout/tokens": 1000, "perf/step_s": 2.0}
            last = {"perf/tokens_per_s": 10_000.0, "perf/step_s": 0.1}
            metrics.write(step, {**values, **(last if step == 3 else {"perf/published_bytes": 1})})
    page = page_of(tmp_path / "run")
    assert page.lines("Throughput") == {"run": [(0, 500.0), (1, 500.0), (2, 500.0)]}
    assert "not drawn: 10,000 of run at its last step, which publishes nothing" in page.words
    # over all steps, not a mean of rates
    assert "tokens per second of all steps655.7" in page.words


def test_watch_writes_the_page_again_with_each_step_until_it_is_stopped(tmp_path, monkeypatch):
    run = with_metrics(tmp_path / "run")
    looks, seen = [], []

    def wait(seconds):
        looks.append(seconds)
        seen.append(Page(run / "report.html"))
        if len(looks) == 3:
            raise KeyboardInterrupt
        if len(looks) == 2:
            with MetricsWriter(run, tensorboard=False) as metrics:
                metrics.write(4, {"rollout/reward_mean": 1.0})

    monkeypatch.setattr("time.sleep", wait)
    result = report(run, "--watch")
    assert result.exit_code == 0 and result.output.splitlines() == 3 * [f"{run}/report.html"]
    assert [len(page.lines("Reward")["run"]) for page in seen] == [4, 4, 5]
    assert all("location.reload()" in page.text for page in seen)
    assert "location.reload()" not in Page(run / "report.html").text


def test_rows_are_drawn_by_class_one_upon_another_and_the_gap_of_each_class(tmp_path):
    for name in "ab":
        with MetricsWriter(tmp_path / name, tensorboard=False) as metrics:
            for step in range(3):
                values = {"rows/decoded": 60, "rows/prefilled": 30, "rows/prefilled_again": 0}
                values |= {"rows/cached": 0 if step else 5, "rows/filled": 10}
                values |= {"train/log_prob_gap_mean_rows_decoded": 0.1}
                metrics.write(step, values)
    page = page_of(tmp_path / "a")
    rows = page.lines("Rows by class")
    assert {name: [y for _, y in points] for name, points in rows.items()} == {
        "decoded": [60 / 105, 0.6, 0.6],
        "prefilled": [30 / 105, 0.3, 0.3],
        "cached": [5 / 105, 0.0, 0.0],
        "filled": [10 / 105, 0.1, 0.1],
    }
    figure = page.figures["Rows by class"]
    assert {trace["stackgroup"] for trace in figure["data"]} == {"parts"}
    assert figure["layout"]["showlegend"] and figure["layout"]["yaxis"]["range"][1] >= 1
    plotly.graph_objects.Figure(figure)
    assert page.lines("Log-prob gap by class of row") == {"decoded": [(0, 0.1), (1, 0.1), (2, 0.1)]}
    # of several runs each has its own, for the colours are those of the parts
    both = page_of(tmp_path / "a", tmp_path / "b", args=("--png", tmp_path / "png"))
    assert {"Rows by class: a", "Rows by class: b"} <= both.figures.keys()
    assert (tmp_path / "png" / "rows_by_class_b.png").stat().st_size > 5000


def test_the_parts_of_the_gap_are_drawn_one_upon_another_and_none_below_0(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        for step in range(3):
            parts = {"server": 1e-4, "staleness": 3e-4 * step, "rest": -1e-5, "routing": 9e-3}
            metrics.write(step, {f"gap/{part}_k3": k3 for part, k3 in parts.items()})
    page = page_of(tmp_path / "run")
    figure = page.figures["Budget of the log-prob gap"]
    drawn = {trace["name"]: trace["y"] for trace in figure["data"]}
    # R3 has taken the part of routing out of the gap
    assert drawn == {"server": [1e-4] * 3, "staleness": [0, 3e-4, 6e-4], "rest": [0, 0, 0]}
    assert {trace["stackgroup"] for trace in figure["data"]} == {"parts"}
    assert figure["layout"]["yaxis"]["range"][1] >= 7e-4
    (tmp_path / "run" / "config.toml").write_text("[replay]\nuse_rollout_routing_replay = false\n")
    assert "routing" in page_of(tmp_path / "run").lines("Budget of the log-prob gap")
