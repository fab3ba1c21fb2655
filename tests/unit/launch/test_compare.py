"""``r3train compare`` on two run directories: what it names, and its exit code."""

import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.loop.replay_source import dump_rollout
from r3train.observe.metrics import MetricsWriter
from tests.unit.algo.rollouts import sample
from tests.unit.evidence_dirs import write_run


def run_dir(
    path,
    *,
    steps=range(8),
    lr=0.1,
    loss=lambda step: 1 / (step + 1),
    token=9,
    seconds=1.0,
    seldom=(1.0, 1.001),
):
    with MetricsWriter(path, tensorboard=False) as metrics:
        for step in steps:
            numbers = {"train/loss": loss(step), "perf/step_s": seconds}
            metrics.write(step, numbers | dict(zip(["train/seldom"], seldom[step : step + 1])))
    (path / "config.toml").write_text(f'[trainer]\nlr = {lr}\n[run]\nrun_dir = "{path}"\n')
    for rollout_id in range(2):
        one = sample(rollout_id, 6)
        tokens = one.token_ids.copy()
        if rollout_id == 1:
            tokens[-2] = token
        dump_rollout(path / "rollouts", rollout_id, [[(replace(one, token_ids=tokens), 1.0)]])
    return path


def compare(*arguments):
    result = CliRunner().invoke(main, ["compare", *map(str, arguments)])
    return result.exit_code, result.output


def test_two_equal_runs_are_equal_whatever_their_times_and_places(tmp_path):
    code, said = compare(
        run_dir(tmp_path / "a"), run_dir(tmp_path / "b", seconds=5.0), "--noise", 0
    )
    assert code == 0 and "setting" not in said
    assert "metrics: within the noise in all 8 steps" in said and "tokens: equal" in said


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"loss": lambda step: 1 / (step + 1) + 9 * (step > 4)},
            "metric train/loss: 0.166667, 9.16667 at step 5",
        ),
        (
            {"loss": lambda step: float("nan") if step == 3 else 1 / (step + 1)},
            "metric train/loss: 0.25, nan at step 3",
        ),
        ({"token": 8}, "tokens: rollout 1, sample 1 (p.jsonl:1): token 3 of the response is 9, 8"),
    ],
)
def test_the_first_difference_is_named_and_the_exit_code_is_1(change, words, tmp_path):
    code, said = compare(run_dir(tmp_path / "a"), run_dir(tmp_path / "b", **change))
    assert code == 1 and words in said, said


def test_a_difference_within_the_noise_counts_only_without_it(tmp_path):
    runs = run_dir(tmp_path / "a"), run_dir(tmp_path / "b", lr=0.2, loss=lambda s: 1.001 / (s + 1))
    code, said = compare(*runs)
    assert code == 0 and "setting trainer.lr: 0.1, 0.2" in said
    code, said = compare(*runs, "--noise", 0)
    assert code == 1 and "metric train/loss: 1, 1.001 at step 0" in said


def test_counts_that_seldom_change_have_noise_too(tmp_path):
    seldom = (lambda s: float(s == 2)), (lambda s: float(s == 5))
    runs = [run_dir(tmp_path / f"{i}", loss=loss) for i, loss in enumerate(seldom)]
    assert compare(*runs)[0] == 0
    assert compare(*runs, "--noise", 0)[0] == 1


def test_a_metric_of_two_steps_has_no_noise_and_counts_without_it_or_beside_none(tmp_path):
    run = run_dir(tmp_path / "a")
    for name, seldom, noise, expected in (
        ("b", (2.0, 2.001), 6, 0),
        ("c", (2.0, 2.001), 0, 1),
        ("d", (float("inf"), 1.1), 6, 1),
        ("e", (float("nan"), 1.1), 6, 1),
    ):
        code, said = compare(run, run_dir(tmp_path / name, seldom=seldom), "--noise", noise)
        assert code == expected and ("metric train/seldom: 1, " in said) == bool(code), said


def test_runs_too_short_to_know_their_noise_are_not_called_equal(tmp_path):
    runs = [run_dir(tmp_path / name, steps=range(2), loss=lambda s: 9.0) for name in "ab"]
    code, said = compare(*runs)
    assert code == 0 and "metrics: not compared, 2 steps do not tell their noise" in said
    code, said = compare(*runs, "--noise", 0)
    assert code == 0 and "within the noise in all 2 steps" in said


def test_tokens_that_were_not_dumped_are_not_called_equal(tmp_path):
    runs = [run_dir(tmp_path / name) for name in "ab"]
    shutil.rmtree(runs[1] / "rollouts")
    code, said = compare(*runs)
    assert code == 0 and "tokens: not compared" in said and "tokens: equal" not in said


def test_a_run_and_its_resume_in_another_directory_are_compared_in_the_steps_of_both(tmp_path):
    whole = run_dir(tmp_path / "whole")
    code, said = compare(whole, run_dir(tmp_path / "b", steps=range(5, 8)), "--noise", 0)
    assert code == 0 and "within the noise in all 3 steps of both" in said
    moved = run_dir(tmp_path / "c", steps=range(5, 8), loss=lambda step: 2 / (step + 1))
    code, said = compare(whole, moved, "--noise", 0)
    assert code == 1 and "metric train/loss: 0.166667, 0.333333 at step 5" in said


def test_the_routers_agreement_of_both_runs_is_told_by_layer(tmp_path):
    def apart(call):
        return replace(call, rows_equal=80, rows_overlap=19) if call.layer_number == 2 else call

    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", change=apart)
    code, said = compare(*runs)
    assert code == 0 and "agreement of layer 1: 0.9000, 0.9000 (+0.0000)" in said
    assert "agreement of layer 2: 0.9000, 0.8000 (-0.1000)" in said


def test_what_is_no_run_directory_is_wrong_usage(tmp_path):
    (tmp_path / "empty").mkdir()
    code, said = compare(run_dir(tmp_path / "a"), tmp_path / "empty")
    assert code == 2 and "is it a run directory?" in " ".join(said.split())
