"""plot.png: the charts of a report for a glance, of whatever a run's metrics hold."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from r3train.observe.metrics import MetricsWriter
from r3train.report.plot import moving_mean, plot_run

FULL = {
    "rollout/reward_mean": 0.5,
    "train/log_prob_gap_mean": 1e-6,
    "train/log_prob_gap_max": 1e-4,
    "r3/passed": True,
    "r3/agreement": 0.97,
    "r3/agreement_chance_equal": 0.03,
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


def words(figure: Figure) -> str:
    return " | ".join(text.get_text() for text in figure.findobj(Text))


def test_a_run_is_drawn_with_its_numbers_and_the_verdict_of_each_step(drawn):
    rewards = [0.25, 0.5, 1.0]
    figure = drawn([FULL | {"rollout/reward_mean": reward} for reward in rewards])
    reward, gap, agreement, strip = figure.axes
    assert list(reward.lines[0].get_ydata()) == rewards
    assert list(reward.lines[-1].get_ydata()) == [0.25, 0.375, 0.75]  # of the last two
    assert [list(line.get_ydata()) for line in gap.lines] == [[1e-6] * 3, [1e-4] * 3]
    assert list(agreement.lines[0].get_ydata()) == [0.97] * 3
    assert "R3: passed at all 3 steps" in words(figure) and len(strip.patches) == 3


@pytest.mark.parametrize(
    "steps, said",
    [
        ([], "R3: check off, no verdict"),
        ([{}], "no numbers"),
        ([FULL], "passed at its one step"),
        ([{"rollout/reward_mean": 0.5}] * 2, "check off, no verdict"),
        ([FULL, FULL | {"r3/passed": False}, FULL], "FAILED at step 1"),
        ([FULL, {}], "no verdict at 1 of 2 steps"),
        ([FULL, {"r3/unchecked": True}], "passed at all 1 steps that were checked, of 2"),
        ([{key: math.nan for key in FULL}] * 2, "not drawn: nan at steps 0..1"),
        ([{key: math.inf for key in FULL if key != "r3/passed"}] * 2, "not drawn: inf at steps 0"),
        ([{key: 0 for key in FULL}] * 2, "not drawn (logarithmic axis): 0 at steps 0..1"),
    ],
)
def test_the_picture_says_what_the_run_lacks(drawn, steps, said):
    assert said in words(drawn(steps))


def test_no_metrics_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        plot_run(tmp_path)


def test_the_moving_mean_equals_the_hand_worked_and_leaves_nan_out():
    np.testing.assert_allclose(moving_mean([1, 3, math.nan, 8], 2), [1, 2, 3, 8])
    assert math.isnan(moving_mean([math.nan], 3)[0])
    assert moving_mean([], 3).shape == (0,)
