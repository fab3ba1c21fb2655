"""--rollout-top-k and --rollout-top-p in whole jobs: SGLang's sampling masks are replayed, and that is proved."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.loop.replay_source import load_rollout
from tests.e2e import jobs

pytestmark = pytest.mark.e2e

AMONG_20 = ("--rollout-top-k", "20", "--rollout-top-p", "0.9")


def test_log_probs_are_the_servers_own_and_every_kept_token_is_proved(tmp_path, served_flags):
    """Tensor-parallel ranks, a KL reference, and a temperature at which sets are of every size."""
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *jobs.R3_FLAGS,
        "--ci-test",
        *AMONG_20,
        *"--num-rollout 2 --dump-rollouts --tensor-model-parallel-size 2".split(),
        *"--sequence-parallel --reuse-log-probs off --kl-loss-coef 0.01".split(),
        *"--entropy-coef 0.001 --lr-warmup-iters 0 --rollout-max-response-len 24".split(),
        *"--rollout-temperature 0.3".split(),
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert metrics[0]["train/log_prob_gap_max"] <= 1e-4 and metrics[0]["train/kl"] == 0
    assert metrics[-1]["train/kl"] != 0
    for m in metrics:
        assert m["r3/passed"] is True and m["recheck/passed"] is not False
        assert m["r3/num_calls"] == m["r3/num_calls_expected"]
    assert metrics[0]["r3/agreement_kept_equal"] > 0.99
    samples = [
        s for n in range(2) for group in load_rollout(job.run_dir / "rollouts", n) for s, _ in group
    ]
    sampled = sum(int(s.loss_mask.sum()) for s in samples)
    counts = [int(n) for s in samples for n in s.mask_counts[s.loss_mask]]
    assert min(counts) >= 1 and max(counts) <= 20 and len(set(counts)) > 3
    checked = CliRunner().invoke(main, ["check-evidence", str(job.run_dir), "--json"])
    (audit,) = json.loads(checked.stdout)["audits"]
    assert audit["verdict"] == "passed", audit["findings"]
    assert audit["numbers"]["rows_of_sampling_mask"] == 3 * sampled  # in three passes


# tests/oracle/test_sampling_mask.py plants the same bug in ranks
@pytest.mark.slow
def test_without_the_sampling_mask_log_probs_are_off_and_the_proof_fails(tmp_path, served_flags):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *jobs.R3_FLAGS,
        *AMONG_20,
        *"--num-rollout 1".split(),
        program=("-m", "tests.e2e.train_with_bug", "sampling_mask_not_applied"),
    )
    assert job.code != 0 and "sampling_mask/replay_forward layer 1" in job.output
    (metrics,) = job.metrics()
    assert metrics["train/log_prob_gap_max"] > 0.5 and metrics["r3/passed"] is False
