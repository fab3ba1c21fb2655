"""Generation only, and training on its recording while servers generate, with traces of a rank."""

from __future__ import annotations

import gzip
import json

import pytest
from tests.e2e import jobs

from r3train.loop.replay_source import load_rollout

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GREEDY = ("--rollout-top-k", "1", "--num-rollout", "2", "--entropy-coef", "0.01")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, tiny_flags) -> jobs.Job:
    """Greedy answers of the checkpoint's weights: they are the same in every run."""
    flags = [*tiny_flags, *jobs.R3_FLAGS, *GREEDY, "--debug-rollout-only"]
    return jobs.run(tmp_path_factory.mktemp("recorded") / "run", *flags)


@pytest.fixture
def injecting(recorded, served_flags) -> list[str]:
    return [
        *served_flags,
        *jobs.R3_FLAGS,
        *GREEDY,
        "--ci-inject-rollout-data-path",
        str(recorded.run_dir / "rollouts"),
    ]


def test_generation_alone_dumps_every_rollout_of_the_checkpoints_weights_and_builds_no_actor(
    recorded,
):
    assert recorded.code == 0, recorded.output
    assert "building the Megatron actor" not in recorded.output
    for step, metrics in enumerate(recorded.metrics()):
        assert metrics["rollout/num_samples"] == 16 and "train/loss" not in metrics
        groups = load_rollout(recorded.run_dir / "rollouts", step)
        versions = [s.weight_versions[s.loss_mask] for group in groups for s, _ in group]
        assert len(versions) == 16 and all((v == 0).all() for v in versions)
        assert all(s.routed_experts is not None for group in groups for s, _ in group)
    assert len(recorded.metrics()) == 2


def test_a_recording_is_trained_while_servers_with_the_same_weights_generate_it_again(
    recorded, injecting, tmp_path
):
    profile = ["--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "2"]
    job = jobs.run(
        tmp_path / "run", *injecting, *profile, "--profile-ranks", "1", "--lr", "0", "--min-lr", "0"
    )
    assert job.code == 0, job.output
    assert all(m["rollout/inject_match"] >= 0.95 and m["r3/passed"] for m in job.metrics())
    assert [m["rollout/reward_mean"] for m in job.metrics()] == [
        m["rollout/reward_mean"] for m in recorded.metrics()
    ]
    traces = sorted((job.run_dir / "profile").iterdir())
    assert [trace.name for trace in traces] == ["trace_rank_00001.json.gz"]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_servers_with_other_weights_than_the_recordings_end_the_run(injecting, tmp_path):
    # answers of the second rollout begin after the first update
    moved = ("--lr", "0.05", "--lr-warmup-iters", "0", "--max-weight-staleness", "0")
    job = jobs.run(tmp_path / "run", *injecting, *moved)
    assert job.code == 1, job.output
    assert "(--ci-inject-rollout-data-min-match-ratio)" in " ".join(job.output.split())
    assert len(job.metrics()) == 1
