"""Jobs of several turns: the calculator, with R3, as one sample an episode and one a turn."""

from __future__ import annotations

import pytest
from tests.e2e import jobs

from r3train.tiny import TinyOptions, build

pytestmark = pytest.mark.e2e

STEPS = 3


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    directory = tmp_path_factory.mktemp("calculator")
    build(directory, TinyOptions(task="calculator"), force=True)
    return directory


@pytest.mark.parametrize("samples", ["trajectory", pytest.param("turn", marks=pytest.mark.slow)])
def test_a_job_trains_on_turns_with_a_calculator_and_its_dump_replays_with_the_same_losses(
    samples, calculator, engine, tmp_path
):
    flags = [
        *("--hf-checkpoint", str(calculator / "model")),
        *("--prompt-data", str(calculator / "prompts.jsonl")),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--no-plot", *jobs.FEW_ROWS),
        *("--no-tensorboard", "--num-rollout", str(STEPS), *jobs.R3_FLAGS),
        *("--environment", "calculator", "--environment-max-turns", "3"),
        *("--environment-max-turn-len", "6", "--rollout-max-response-len", "40"),
        *("--environment-samples", samples),
    ]
    job = jobs.run(
        tmp_path / "run", *flags, "--rollout-external-engine-addrs", engine, "--dump-rollouts"
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert len(metrics) == STEPS and all(m["r3/passed"] is True for m in metrics)
    assert any(m["rollout/reward_mean"] > 0 for m in metrics)
    assert all(m["r3/rows_native"] == m["r3/duplicate_rows"] == 0 for m in metrics)
    # the actor's log-probs of the model's own tokens are the engine's: nothing was tokenised anew
    assert metrics[0]["train/log_prob_gap_max"] <= 1e-4
    counts = [m["rollout/num_samples"] for m in metrics]
    if samples == "trajectory":
        assert counts == [16] * STEPS
    else:
        assert all(16 < count <= 48 for count in counts)
    replayed = jobs.run(
        tmp_path / "replayed", *flags, "--replay-rollouts", str(job.run_dir / "rollouts")
    )
    assert replayed.code == 0, replayed.output
    assert not (replayed.run_dir / "logs" / "sglang.log").exists()
    jobs.same_numbers(metrics, replayed.metrics())
    assert [m["rollout/num_samples"] for m in replayed.metrics()] == counts
