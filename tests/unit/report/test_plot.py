"""plot.png: the charts of a report for a glance, of whatever a run's metrics hold."""

import math

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from r3train.observe.metrics import MetricsWriter
from r3train.report.plot import plot_run

FULL = {
    "rollout/reward_mean": 0.5,
    "train/log_prob_gap_mean": 1e-6,
    "r3/passed": True,
    "r3/agreement": 0.97,
}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw the metrics of some steps; returns the figure, which is saved too."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, p: (figures.append(self), save(self, p)))

    def draw(steps) -> Figure:
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            for step, metrics in enumerate(steps):
                writer.write(step, metrics)
        path = plot_run(tmp_path)
        assert path == tmp_path / "plot.png" and path.read_bytes().startswith(b"\x89PNG\r\n")
        return figures[-1]

    return draw


def test_a_run_is_drawn_with_its_numbers_and_its_verdict(drawn):
    rewards = [0.25, 0.5, 1.0]
    figure = drawn([FULL | {"rollout/reward_mean": reward} for reward in rewards])
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}
    assert list(panels) == ["Reward", "Log-prob gap", "R3 verdict", "Routing agreement"]
    assert list(panels["Reward"].lines[0].get_ydata()) == rewards
    assert list(panels["Log-prob gap"].lines[0].get_ydata()) == [1e-6] * 3
    assert panels["Log-prob gap"].get_yscale() == "log"


def test_a_run_of_sft_shows_its_loss_alone(drawn):
    step = {"train/loss": 7.2, "train/log_prob_gap_mean": 0.0, "rollout/staleness_mean": 0.0}
    figure = drawn([step, step])
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == ["Loss"]


@pytest.mark.parametrize(
    "steps, words",
    [
        ([], "R3: check off, no verdict"),
        ([FULL], "passed at its one step"),
        ([FULL] * 3, "passed at all 3 steps"),
        ([{"rollout/reward_mean": 0.5}] * 2, "check off, no verdict"),
        ([FULL, FULL | {"r3/passed": False}, FULL], "FAILED at step 1"),
        ([FULL, {}], "no verdict at 1 of 2 steps"),
        ([FULL, {"r3/unchecked": True}], "passed at all 1 steps that were checked, of 2"),
        ([{key: math.nan for key in FULL}] * 2, "not drawn: nan at steps 0..1"),
        ([{key: math.inf for key in FULL if key != "r3/passed"}] * 2, "not drawn: inf at steps 0"),
    ],
)
def test_the_picture_names_what_the_run_lacks(drawn, steps, words):
    assert words in " | ".join(text.get_text() for text in drawn(steps).findobj(Text))


def test_no_metrics_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no metrics.jsonl"):
        plot_run(tmp_path)
