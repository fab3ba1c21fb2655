import math

import numpy as np
import pytest

from r3train.observe.metrics import MetricsWriter
from r3train.report.plot import moving_mean, plot_run, r3_verdict

PNG = b"\x89PNG\r\n\x1a\n"
FULL = {
    "rollout/reward_mean": 0.5,
    "rollout/reward_min": 0.0,
    "rollout/reward_max": 1.0,
    "train/log_prob_gap_mean": 1e-6,
    "train/log_prob_gap_max": 1e-4,
    "train/log_prob_gap_k3": 1e-9,
    "r3/rows_replayed": 4000,
    "r3/rows_filled": 3,
    "r3/rows_mismatch": 0,
    "r3/passed": True,
    "r3/agreement": 0.97,
}


def draw(run_dir, steps):
    with MetricsWriter(run_dir, tensorboard=False) as writer:
        for step, metrics in enumerate(steps):
            writer.write(step, metrics)
    path = plot_run(run_dir)
    assert path == run_dir / "plot.png"
    assert path.read_bytes().startswith(PNG)


def words_in(monkeypatch, run_dir, steps):
    """Every text that lands on the figure, read from the figure before it is saved."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    words = []

    def keep_words(figure, path, **_):
        words.extend(text.get_text() for text in figure.findobj(Text))
        path.write_bytes(PNG)

    monkeypatch.setattr(Figure, "savefig", keep_words)
    draw(run_dir, steps)
    return " | ".join(words)


def test_a_whole_run_becomes_a_picture(tmp_path):
    draw(tmp_path, [FULL | {"rollout/reward_max": 1.0 + i} for i in range(5)])


@pytest.mark.parametrize("missing", sorted(FULL))
def test_any_key_may_be_missing(tmp_path, missing, monkeypatch):
    words_in(monkeypatch, tmp_path, [{k: v for k, v in FULL.items() if k != missing}] * 3)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [{}],
        [FULL],
        [{key: math.nan for key in FULL}] * 2,
        [{key: math.inf for key in FULL if key != "r3/passed"}] * 2,
        [{key: 0 for key in FULL}] * 2,
        [{}, FULL, {}, FULL | {"r3/passed": False}],
    ],
    ids=["no_steps", "no_keys", "one_step", "nan", "inf", "zeros", "gaps"],
)
def test_odd_runs_are_drawn_too(tmp_path, steps):
    draw(tmp_path, steps)


def test_a_run_without_r3_says_so(tmp_path, monkeypatch):
    words = words_in(monkeypatch, tmp_path, [{"rollout/reward_mean": 0.5}] * 2)
    assert "R3 unchecked" in words and "not measured" in words and "verdict" not in words


def test_a_run_whose_check_was_off_shows_its_counts_without_a_verdict(tmp_path, monkeypatch):
    words = words_in(monkeypatch, tmp_path, [{"r3/rows_replayed": 10, "r3/rows_filled": 0}] * 2)
    assert "check off, no verdict" in words and "passed" not in words


def test_the_picture_names_the_steps_that_failed(tmp_path, monkeypatch):
    words = words_in(monkeypatch, tmp_path, [FULL, FULL | {"r3/passed": False}, FULL])
    assert "FAILED at step 1" in words


def test_silence_at_some_steps_is_not_called_a_pass():
    words, _ = r3_verdict([{"step": 0, "r3/passed": True}, {"step": 1}])
    assert words == "no verdict at 1 of 2 steps"


def test_a_gap_of_zero_is_stated_and_not_drawn_on_the_log_scale(tmp_path, monkeypatch):
    words = words_in(monkeypatch, tmp_path, [{"train/log_prob_gap_mean": 0.0}] * 2)
    assert "exactly 0 at every step" in words


def test_no_metrics_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        plot_run(tmp_path)


def test_the_moving_mean_equals_the_hand_worked_and_leaves_nan_out():
    np.testing.assert_allclose(moving_mean([1, 3, math.nan, 8], 2), [1, 2, 3, 8])
    assert math.isnan(moving_mean([math.nan], 3)[0])
    assert moving_mean([], 3).shape == (0,)
