"""The report: one self-contained page, runs side by side, whatever they lack."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects
import pytest
from matplotlib.image import imread

from r3train.observe.metrics import MetricsWriter
from r3train.report.charts import CHARTS, thinned
from r3train.report.report_page import names
from r3train.report.report_data import load_run
from tests.unit.evidence_dirs import comparison, edit, rows_apart, write_run
from tests.unit.report_runs import EVIL, page_of, Page, report, with_metrics, with_steps


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """One run with R3 and evidence, one without."""
    with_r3 = with_metrics(write_run(tmp_path / "with_r3", range(4)))
    without = with_metrics(tmp_path / "without", gap=0.04)
    (without / "config.toml").write_text("[replay]\nuse_rollout_routing_replay = false\n")
    return [with_r3, without]


# -- the page ------------------------------------------------------------------------------------


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


def test_runs_are_side_by_side_with_their_verdicts(runs):
    page = page_of(*runs)
    row = re.search(r"<tr><td[^>]*>log-prob gap, nats, mean</td>(.*?)</tr>", page.text, re.S)[1]
    assert re.findall(r">([\d.]+)<", row) == ["0.01", "0.04"]
    assert "no evidence: the run did not use R3" in page.words
    assert "passed: 4 steps" in page.words


def test_a_reward_of_the_last_tenth_is_that_of_the_newest_steps(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        for step in range(20):
            metrics.write(step, {"rollout/reward_mean": float(step)})
    page = page_of(tmp_path / "run")
    row = re.search(r"<tr><td[^>]*>reward, last tenth of the steps</td>(.*?)</tr>", page.text, re.S)
    assert re.findall(r">([\d.]+)<", row[1]) == ["18.5"]  # of steps 18 and 19


def test_runs_of_one_name_are_told_apart():
    assert names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert names([Path("/a/one")]) == ["one"]


def test_a_sample_shows_prompt_answer_and_how_it_ended_and_keeps_the_label_folded(runs):
    text = page_of(runs[0]).text
    card = text[text.index("Lowest reward") :]
    folded = card[card.index("<details>") : card.index("</details>")]
    assert "label</summary>" in folded and "alert(1)" in folded and EVIL not in text
    shown = card[: card.index("<details>")]
    assert "<b>say</b>" in shown and "3 tokens in 3.25 s, ended by the model" in shown
    samples = load_run(runs[0], "a").samples
    assert [s.generation_s for s in samples if s.kind == "slowest"] == [3.25, 2.25, 1.25]


def test_the_worst_samples_of_a_run_are_those_of_lowest_reward_and_the_best_of_highest(tmp_path):
    run = with_steps(tmp_path / "run", 5, rollout__reward_mean=0.5)
    with MetricsWriter(run, tensorboard=False) as metrics:
        for step, reward in enumerate((0.4, 0.1, 0.3, 0.2, 0.5)):
            sample = {"response_len": 3, "text": "", "reward": reward}
            metrics.write_samples(step, [{**sample, "kind": kind} for kind in ("worst", "best")])
    shown = load_run(run, "run").samples
    assert [s.reward for s in shown if s.kind == "worst"] == [0.1, 0.2, 0.3]
    assert [s.reward for s in shown if s.kind == "best"] == [0.5, 0.4, 0.3]


def test_the_command_writes_page_and_pictures(runs, tmp_path):
    result = report(*runs, "--output", tmp_path / "r.html", "--png", tmp_path / "png")
    assert result.exit_code == 0, result.output
    pictures = sorted((tmp_path / "png").iterdir())
    assert {"reward.png", "time_of_a_step_without.png"} <= {path.name for path in pictures}
    assert sorted(result.output.splitlines()[1:]) == [str(path) for path in pictures]
    for picture in pictures:  # nothing is cut off at an edge
        pixels = imread(picture)[..., :3]
        for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
            assert (edge == 1).all(), picture
    assert report(tmp_path / "nowhere").exit_code == 2


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


# -- R3 ------------------------------------------------------------------------------------------


def counts_of(page: Page) -> list[str]:
    shown = re.search(r'<p class="counts">(.*?)</p>', page.text, re.S)[1]
    return re.findall(r">([^<]+)</span>", shown)


def test_a_failed_step_is_named_with_its_finding(tmp_path):
    def wrong(r):
        return replace(r, fingerprint=1) if (r.step, r.rank) == (2, 1) else r

    page = page_of(write_run(tmp_path / "run", range(5), change=wrong))
    assert counts_of(page) == ["2 steps passed", "1 step failed: step 2"]
    assert "step 2, old_log_prob/replay_forward, layer 1: fingerprint is 0x" in page.words


def test_steps_whose_calls_are_missing_fail_each_though_one_finding_names_them(tmp_path):
    run = write_run(tmp_path / "run", range(6))
    edit(run, 1, lambda records: [r for r in records if r["step"] not in (2, 4)])
    assert "2 steps failed: steps 2, 4" in counts_of(page_of(run))


def test_a_step_without_evidence_is_none_that_passed(tmp_path):
    run = write_run(tmp_path / "run", range(2))
    (run / "metrics.jsonl").unlink()
    page = page_of(with_steps(run, 4, r3__passed=True))
    assert counts_of(page) == ["2 steps passed", "2 steps without evidence: steps 2..3"]


def test_a_step_that_the_run_called_failed_is_so_without_its_evidence_too(tmp_path):
    page = page_of(with_steps(tmp_path / "run", 2, r3__passed=False))
    assert counts_of(page) == ["2 steps failed: steps 0..1"]
    assert page.lines("R3 verdict") == {"run": [(0, 0.0), (1, 0.0)]}


def test_the_page_says_whether_the_samples_were_true_to_their_servers(tmp_path):
    wrong = {"decoded": rows_apart({2: 90})}
    right, bad = (
        write_run(tmp_path / name, rechecked=lambda step: [comparison(step, **changes)])
        for name, changes in (("right", {}), ("bad", wrong))
    )
    page = page_of(with_metrics(right), with_metrics(bad))
    facts = "3 samples rechecked: other experts in 0 of 1,080 rows, log-probs 3e-07 nats apart on average"
    assert facts in page.words
    verdicts = r"recheck</td><td[^>]*>(\w+)</td>"
    assert re.findall(verdicts, page.text) == ["passed", "failed"]
    assert "layer 2: decoded rows with different experts in 100 rows" in page.words


# -- the table of charts -------------------------------------------------------------------------


def test_every_row_of_the_table_is_a_figure_that_plotly_knows_with_a_line_a_run(tmp_path):
    keys = {key.replace("_N", "_4") for row in CHARTS for key in (*row.keys, row.total) if key}
    values = {key.replace("/", "__"): 0.5 for key in keys if "NAME" not in key}
    page = page_of(with_steps(tmp_path / "a", 2, **values), with_steps(tmp_path / "b", 2, **values))
    titles = {title.partition(":")[0] for title in page.figures}
    assert titles == {row.title for row in CHARTS if "NAME" not in row.title}
    for figure in page.figures.values():
        plotly.graph_objects.Figure(figure)
    assert page.lines("Reward") == {"a": [(0, 0.5), (1, 0.5)], "b": [(0, 0.5), (1, 0.5)]}
    assert set(page.lines("pass@k")) == {f"{run}, pass_at_{k}" for run in "ab" for k in (1, 4)}
    headings = [attributes.get("title") for tag, attributes in page.tags if tag == "h3"]
    assert "train/loss: the optimized loss" in " ".join(filter(None, headings))


def test_a_run_of_sft_has_its_loss_and_no_chart_of_what_it_does_not_use(tmp_path):
    unused = {"train__log_prob_gap_mean": 0.0, "train__clip_share": 0.0}
    unused |= {"rollout__staleness_mean": 0.0, "rollout__truncated_share": 0.0}
    page = page_of(with_steps(tmp_path / "run", 3, train__loss=7.2, **unused))
    assert list(page.figures) == ["Loss"] and "log-prob gap" not in page.words


def test_a_reward_of_nothing_is_drawn(tmp_path):
    page = page_of(with_steps(tmp_path / "run", 2, rollout__reward_mean=0.0))
    assert page.lines("Reward") == {"run": [(0, 0.0), (1, 0.0)]}


def test_every_evaluation_set_has_a_chart_over_versions_with_its_standard_error(tmp_path):
    with MetricsWriter(with_metrics(tmp_path / "run"), tensorboard=False) as metrics:
        for version, mean in ((0, 0.125), (2, 0.25), (2, 0.5)):
            numbers = {"mean": mean, "standard_error": 0.0625, "pass_at_1": mean, "pass_at_4": 0.75}
            metrics.write_evaluation(version, "held-out", "fingerprint", [], numbers)
        metrics.write_evaluation(0, "other", "fingerprint", [], {"mean": 3.0})
    page = page_of(tmp_path / "run")
    lines = page.lines("Evaluation: held-out")
    assert lines["run, mean"] == [(0, 0.125), (2, 0.5)]  # of two lines for one version the later
    assert lines["run, pass_at_4"] == [(0, 0.75), (2, 0.75)]
    assert len(lines) == 3 and (0, 0.125 + 0.0625) in lines["run, mean, deviation"]
    assert page.lines("Evaluation: other") == {"run, mean": [(0, 3.0)]}
    assert list(page.figures)[:3] == ["Evaluation: held-out", "Evaluation: other", "Reward"]


def test_the_reward_has_a_band_of_one_standard_deviation(tmp_path):
    run = with_steps(tmp_path / "run", 2, rollout__reward_mean=0.25, rollout__reward_std=0.5)
    page = page_of(run)
    around = [(0, 0.75), (1, 0.75), (1, -0.25), (0, -0.25)]
    assert page.lines("Reward") == {"run, deviation": around, "run": [(0, 0.25), (1, 0.25)]}
    low, high = page.figures["Reward"]["layout"]["yaxis"]["range"]
    assert low < -0.25 and 0.75 < high, "the band is cut"
    # one value less, and it would be at the wrong steps
    with MetricsWriter(run, tensorboard=False) as metrics:
        metrics.write(3, {"rollout/reward_mean": 0.5})
    assert list(page_of(run).lines("Reward")) == ["run"]


def test_the_parts_of_the_gap_are_drawn_one_upon_another_and_none_below_0(tmp_path):
    with MetricsWriter(tmp_path / "run", tensorboard=False) as metrics:
        for step in range(3):
            parts = {"server": 1e-4, "staleness": 3e-4 * step, "rest": -1e-5, "routing": 9e-3}
            metrics.write(step, {f"gap/{part}_k3": k3 for part, k3 in parts.items()})
    figure = page_of(tmp_path / "run").figures["Budget of the log-prob gap"]
    drawn = {trace["name"]: trace["y"] for trace in figure["data"]}
    # R3 has taken the part of routing out of the gap
    assert drawn == {"server_k3": [1e-4] * 3, "staleness_k3": [0, 3e-4, 6e-4]}
    assert {trace["stackgroup"] for trace in figure["data"]} == {"parts"}
    (tmp_path / "run" / "config.toml").write_text("[replay]\nuse_rollout_routing_replay = false\n")
    assert "routing_k3" in page_of(tmp_path / "run").lines("Budget of the log-prob gap")


def test_the_phases_of_a_step_and_the_rest_are_its_whole_time(tmp_path):
    phases = {"perf__rollout_wait_s": 3.0, "perf__train_s": 5.0, "perf__publish_s": 1.5}
    lines = page_of(with_steps(tmp_path / "run", 1, perf__step_s=10.0, **phases)).lines(
        "Time of a step"
    )
    assert {name: points[0][1] for name, points in lines.items()} == {
        "rollout_wait_s": 3.0,
        "train_s": 5.0,
        "publish_s": 1.5,
        "other": 0.5,
    }


def test_thousands_of_steps_become_at_most_a_thousand_points(tmp_path):
    points = thinned([(step, 1.0) for step in range(100_000)])
    assert len(points) == 1000 and points[0] == (49.5, 1.0)
    page = page_of(with_steps(tmp_path / "run", 3000, rollout__reward_mean=0.5))
    assert len(page.lines("Reward")["run"]) == 1000 and len(page.text) < 80_000


# -- agents --------------------------------------------------------------------------------------


AGENT = {"sessions": 16, "failures": 2, "calls_mean": 3, "tool_calls_mean": 2, "session_s_mean": 4}
AGENT |= {"session_s_max": 9, "roots_mean": 1, "forks_mean": 0.5, "refused": 3, "unread_calls": 1}


def test_a_run_of_agents_has_charts_of_its_sessions_and_another_has_none(tmp_path):
    run = with_steps(tmp_path / "run", 3, **{f"agent__{key}": n for key, n in AGENT.items()})
    page = page_of(run)
    found = {title for title in page.figures if title.startswith("Agents")}
    assert len(found) == 6
    assert page.lines("Agents' refusals")["run"] == [(0, 3), (1, 3), (2, 3)]
    assert page.lines("Agents' samples")["run, forks_mean"][0] == (0, 0.5)
    sound = {f"agent__{key}": n for key, n in (AGENT | {"refused": 0, "unread_calls": 0}).items()}
    assert "Agents' refusals" not in page_of(with_steps(tmp_path / "sound", 3, **sound)).figures
    plain = page_of(with_steps(tmp_path / "plain", 3, rollout__reward_mean=0.5))
    assert not any(title.startswith("Agents") for title in plain.figures)


def test_a_sample_of_an_agent_shows_its_conversations_whole(tmp_path):
    run = with_steps(tmp_path / "run", 1, rollout__reward_mean=0.5)
    talks = [["user: add", f"assistant: {EVIL}", "tool: it is 3"], ["user: or", "assistant: four"]]
    sample = {"kind": "best", "reward": 1.0, "response_len": 3, "text": "not shown twice"}
    with MetricsWriter(run, tensorboard=False) as metrics:
        metrics.write_samples(0, [{**sample, "conversations": talks, "left_out": 2}])
    page = page_of(run)
    assert "user: add" in page.words and "tool: it is 3 " in page.words and EVIL in page.words
    assert "assistant: four" in page.words and "not shown twice" not in page.words
    assert "2 earlier conversations" in page.words and EVIL not in page.text


def test_a_conversation_that_is_none_is_told_with_its_line(tmp_path):
    run = with_steps(tmp_path / "run", 1, rollout__reward_mean=0.5)
    sample = {"step": 0, "kind": "best", "reward": 1.0, "response_len": 3, "text": ""}
    (run / "samples.jsonl").write_text(
        json.dumps(sample | {"conversations": [[{"role": 1}]]}) + "\n"
    )
    result = report(run)
    assert result.exit_code == 2 and "samples.jsonl:1" in result.output
