"""A job whose reward returns a table: each number is weighed, kept with its sample, and trained on."""

from __future__ import annotations

import numpy as np
import pytest
from tests.e2e import jobs

from r3train.loop.replay_source import load_rollout
from r3train.types import Prompt

pytestmark = pytest.mark.e2e

STEPS = 2
WEIGHTS = 1.0, 0.25


def even_and_small(prompt: Prompt, response_text: str, response_ids: list[int]) -> dict[str, float]:
    """The share of even tokens, and how small the first token is; a third number is not asked for."""
    even = float(np.mean([token % 2 == 0 for token in response_ids]))
    return {"even": even, "small": -response_ids[0] / 10, "unused": 1e6}


def test_gdpo_learns_from_the_rewards_at_two_keys_each_with_its_weight(
    tmp_path, tiny_flags, engine
):
    flags = [
        *(*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", str(STEPS)),
        *("--custom-rm-path", f"{__name__}:even_and_small", "--reward-keys", "even", "small"),
        *("--advantage-estimator", "gdpo"),
    ]
    job = jobs.run(
        tmp_path / "run",
        *(*flags, "--reward-weights", *map(str, WEIGHTS)),
        *("--rollout-external-engine-addrs", engine, "--dump-rollouts", "--peak-tflops", "0.5"),
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    for step, m in enumerate(metrics):
        scored = [s for group in load_rollout(job.run_dir / "rollouts", step) for s in group]
        parts = np.array([sample.reward_parts for sample, _ in scored])
        tables = [
            even_and_small(s.prompt, s.text, s.token_ids[s.prompt_len :].tolist())
            for s, _ in scored
        ]
        np.testing.assert_allclose(parts, [[t["even"], t["small"]] for t in tables], rtol=1e-6)
        np.testing.assert_allclose([r for _, r in scored], parts @ WEIGHTS, rtol=1e-6)
        means = [m["rollout/reward_mean_even"], m["rollout/reward_mean_small"]]
        np.testing.assert_allclose(means, parts.mean(axis=0), rtol=1e-6)
        assert m["rollout/reward_mean"] == pytest.approx(np.dot(means, WEIGHTS))
        assert m["perf/mfu"] == pytest.approx(m["perf/train_tflops_per_gpu"] / 0.5)

    def replayed(name: str, *weights: float) -> list[dict]:
        again = jobs.run(
            tmp_path / name,
            *(*flags, "--reward-weights", *map(str, weights)),
            *("--replay-rollouts", str(job.run_dir / "rollouts")),
        )
        assert again.code == 0, again.output
        return again.metrics()

    jobs.same_numbers(metrics, replayed("same", *WEIGHTS))
    weighed_alike = replayed("alike", 1.0, 1.0)
    assert weighed_alike[0]["train/grad_norm"] != metrics[0]["train/grad_norm"]
