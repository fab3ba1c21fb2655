"""A job whose reward returns a table: each number is weighed, and kept with its sample."""

from __future__ import annotations

import numpy as np
import pytest
from tests.e2e import jobs

from r3train.loop.replay_source import load_rollout
from r3train.types import Prompt

pytestmark = pytest.mark.e2e

WEIGHTS = 1.0, 0.25


def even_and_small(prompt: Prompt, response_text: str, response_ids: list[int]) -> dict[str, float]:
    """The share of even tokens, and how small the first token is; a third number is not asked for."""
    even = float(np.mean([token % 2 == 0 for token in response_ids]))
    return {"even": even, "small": -response_ids[0] / 10, "unused": 1e6}


# tests/oracle/test_algorithm.py holds what gdpo learns from them against float64 (its rule dppo_kl)
def test_the_rewards_at_two_keys_are_kept_and_added_each_with_its_weight(
    tmp_path, tiny_flags, engine
):
    job = jobs.run(
        *(tmp_path / "run", *tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "2"),
        *("--custom-rm-path", f"{__name__}:even_and_small", "--reward-keys", "even", "small"),
        *("--reward-weights", *map(str, WEIGHTS), "--advantage-estimator", "gdpo"),
        *("--rollout-external-engine-addrs", engine, "--dump-rollouts", "--peak-tflops", "0.5"),
    )
    assert job.code == 0, job.output
    for step, m in enumerate(job.metrics()):
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
