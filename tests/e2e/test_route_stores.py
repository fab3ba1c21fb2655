"""--route-stores in whole jobs: the proof stands as before, and no route passes through rank 0's client."""

from __future__ import annotations

import json

import pytest

from r3train.verify.tiny import TinyOptions, build
from r3train.types import RowClass
from tests.e2e import jobs

# in the gate by test_agents.py; tests/oracle/test_route_exchange.py holds what is sent and freed
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# the demo learns in big steps: what is claimed here is exact, and not how far a stale router drifts
R3 = [*jobs.R3_FLAGS, "--r3-mismatch-threshold", "1"]
STORES = [*R3, "--route-stores"]


def verdicts(job: jobs.Job) -> list[dict]:
    return [json.loads(line) for line in (job.run_dir / "evidence/steps.jsonl").open()]


@pytest.fixture(scope="module")
def stored(tmp_path_factory, served_flags) -> jobs.Job:
    """Three steps on two data-parallel ranks with stores, their rollouts dumped."""
    return jobs.run(
        tmp_path_factory.mktemp("stored") / "run",
        *served_flags,
        *STORES,
        *"--num-rollout 3 --dump-rollouts".split(),
    )


def test_every_step_is_proved_and_no_route_comes_to_rank_0s_client(stored):
    assert stored.code == 0, stored.output
    assert [v["passed"] for v in verdicts(stored)] == [True] * 3
    for m in stored.metrics():
        assert m["r3/passed"] is True and m["r3/rows_replayed"] > 0
        assert m["perf/route_wire_bytes_rank0"] == 0
    assert sum(m["perf/route_store_wire_bytes_max"] for m in stored.metrics()) > 0
    assert sum(m["perf/route_store_fetched_bytes_max"] for m in stored.metrics()) > 0
    # nothing is buffered after the last step: all but its own rows have been freed
    last = stored.metrics()[-1]
    row_bytes = 4 * 2  # layers, experts per token; one byte each
    tokens = last["r3/rows_replayed"] / 4  # over layers, in the train pass alone
    assert 0 < last["perf/route_store_held_bytes_max"] <= tokens * row_bytes


# tests/oracle/test_route_exchange.py compares the very bytes of the slices
def test_the_same_rollouts_without_stores_give_the_same_fingerprints_and_the_same_first_loss(
    stored, tmp_path, tiny_flags
):
    """Rank 0, replaying the dumped rollouts, finds and trains the same as the leaders did."""
    replayed = jobs.run(
        tmp_path / "run",
        *tiny_flags,
        *R3,
        *f"--num-rollout 3 --replay-rollouts {stored.run_dir / 'rollouts'}".split(),
    )
    assert replayed.code == 0, replayed.output
    for ours, theirs in zip(verdicts(stored), verdicts(replayed), strict=True):
        for name in ("fingerprints", "rows_replayed", "rows_filled"):
            assert ours["streams"]["routes"][name] == theirs["streams"]["routes"][name]
    same = ("train/loss", "train/grad_norm", "train/log_prob_gap_mean", "r3/rows_replayed")
    for a, b in zip(stored.metrics(), replayed.metrics(), strict=True):
        assert {name: a[name] for name in same} == {name: b[name] for name in same}


def test_without_stores_the_routes_come_to_rank_0s_client(tmp_path, served_flags):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *R3,
        *"--num-rollout 1".split(),
    )
    assert job.code == 0, job.output
    (m,) = job.metrics()
    assert m["perf/route_wire_bytes_rank0"] > 0 and "perf/route_exchange_s" not in m


@pytest.mark.parametrize("bug", ["one_expert", "token_shift", "layer_swap"])
def test_a_planted_bug_fails_with_stores_too(bug, tmp_path, served_flags):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *STORES,
        *"--num-rollout 2".split(),
        "--plant-bug",
        bug,
    )
    assert job.code != 0
    assert "R3 check failed at step 0" in job.output
    (verdict,) = verdicts(job)
    assert verdict["passed"] is False
    assert [place["ranks"] for place in verdict["places"]] == [[0], [1]]


@pytest.mark.parametrize("samples", ["trajectory", "turn"])
def test_conversations_are_put_together_of_their_turns_rows(samples, tmp_path, engine):
    build(tmp_path / "tiny", TinyOptions(task="calculator"), force=True)
    job = jobs.run(
        tmp_path / "run",
        "--hf-checkpoint",
        str(tmp_path / "tiny/model"),
        "--prompt-data",
        str(tmp_path / "tiny/prompts.jsonl"),
        *"--rollout-batch-size 4 --n-samples-per-prompt 4 --no-plot".split(),
        *"--no-tensorboard --num-rollout 2".split(),
        "--rollout-external-engine-addrs",
        engine,
        *STORES,
        *"--environment calculator --environment-max-turns 3".split(),
        *"--environment-max-turn-len 6 --rollout-max-response-len 40".split(),
        "--environment-samples",
        samples,
    )
    assert job.code == 0, job.output
    assert all(m["r3/passed"] is True for m in job.metrics())
    counts = [m["rollout/num_samples"] for m in job.metrics()]
    assert counts == [16, 16] if samples == "trajectory" else all(c > 16 for c in counts)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "topology",
    [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--pipeline-model-parallel-size", "2"],
        ["--context-parallel-size", "2"],
    ],
    ids=["tp2_dp2", "pp2_dp2", "cp2_dp2"],
)
def test_four_ranks_get_their_rows_and_layers_from_two_leaders(topology, tmp_path, served_flags):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *STORES,
        *"--num-rollout 2".split(),
        *topology,
        ranks=4,
        timeout=380,
    )
    assert job.code == 0, job.output
    assert all(m["r3/passed"] and m["perf/route_wire_bytes_rank0"] == 0 for m in job.metrics())
    for m in job.metrics():  # classes stand on rank 0, and go with their rows to all ranks
        rows = {row_class: m[f"rows/{row_class.label}"] for row_class in RowClass}
        tokens = {c: m.get(f"train/loss_tokens_rows_{c.label}", 0) for c in RowClass}
        samples = m["rollout/num_samples"]
        assert tokens[RowClass.DECODED] == rows[RowClass.DECODED] > 0
        assert tokens[RowClass.PREFILLED] == rows[RowClass.FILLED] == samples
        assert rows[RowClass.CACHED] > 0 and tokens[RowClass.CACHED] > samples
