"""One asynchronous run with everything on, its rollouts trained again without a server, and what both must hold.

The run (``recorded`` in conftest.py): two expert-parallel ranks, R3 and its check, canaries, every answer
rechecked, two rewards, an evaluation set, and the metrics port read while it goes on.
"""

from __future__ import annotations

import json
import math
import re
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from tests.e2e import jobs
from tests.e2e.live_jobs import pointer, running, wait_for
from tests.unit.reward_functions import even_and_small

from r3train.algo.gap_budget import PARTS
from r3train.audit.audit_run import audit_run
from r3train.audit.findings import CLAIMS, SERVED
from r3train.cli import main
from r3train.loop.replay_source import load_rollout
from r3train.observe.prometheus import exported_name
from r3train.trainer.megatron.saved_state import CHECKSUMS

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

STEPS, LAYERS = range(jobs.RECORDED), 4
WEIGHTS = "model-00001-of-00001.safetensors"


def test_every_step_is_proved_live_and_from_its_files(recorded):
    assert recorded.code == 0, recorded.output
    for m in recorded.metrics():
        assert m["r3/passed"] is m["recheck/passed"] is m["served/passed"] is True
        assert m["r3/num_calls"] == m["r3/num_calls_expected"] > 0
        assert m["r3/duplicate_rows"] == m["r3/map_deviation"] == m["r3/rows_native"] == 0
    served = [json.loads(line) for line in (recorded.run_dir / "evidence/served.jsonl").open()]
    judged = {record["step"] for record in served}
    assert judged == {*STEPS, jobs.RECORDED}, "the last weights are evaluated, and judged for it"
    audit = audit_run(recorded.run_dir)
    assert audit.claims == dict.fromkeys((*CLAIMS, SERVED), "passed"), audit.findings


def test_the_rollout_fingerprint_equals_the_trainers_in_every_pass_of_every_step(recorded):
    steps = [json.loads(line) for line in (recorded.run_dir / "evidence/steps.jsonl").open()]
    assert [s["step"] for s in steps] == list(STEPS)
    expected = {s["step"]: s["streams"]["routes"]["fingerprints"] for s in steps}
    summed: dict[tuple, int] = {}
    for e in recorded.evidence():
        key = e["step"], e["replay_pass"], e["stage"], e["layer_number"]
        summed[key] = (summed.get(key, 0) + int(e["fingerprint"], 16)) % (1 << 64)
    # old log-probs and train; re-added here from the records, not taken from the verdict
    assert len(summed) == len(STEPS) * 2 * LAYERS
    for (step, _, _, layer), fingerprint in summed.items():
        assert fingerprint == int(expected[step][str(layer)], 16)


@pytest.mark.parametrize("damage", ["another route", "a call less"])
def test_evidence_that_was_tampered_with_fails_the_audit(damage, recorded, tmp_path):
    run_dir = shutil.copytree(recorded.run_dir, tmp_path / "run")
    file = run_dir / "evidence" / "rank_00001.jsonl"
    first, *lines = file.read_text().splitlines()
    record = json.loads(first)
    record["fingerprint"] = f"{int(record['fingerprint'], 16) ^ 1:#018x}"
    file.write_text("\n".join([json.dumps(record)] * (damage == "another route") + lines) + "\n")
    claims = audit_run(run_dir).claims
    assert claims["applied" if damage == "another route" else "covered"] == "failed"
    result = CliRunner().invoke(main, ["check-evidence", str(run_dir)])
    assert result.exit_code == 1, result.output


def test_both_ranks_write_the_two_line_shapes_without_ci_test(recorded):
    wrapper = (
        r"R3 wrapper: replay_forward branch taken "
        r"\(rank (\d+), n_tokens=\d+, topk=2, replay_idx_sum=\d+\)"
    )
    check = (
        r"R3 check \(rank (\d+), stage replay_forward\): n_tokens=\d+ mismatch=\d+ \(\d+\.\d\d%\)"
    )
    for shape in (wrapper, check):
        assert set(re.findall(shape, recorded.logs())) == {"0", "1"}


def test_old_log_probs_equal_sglangs_at_weight_version_0(recorded):
    first = recorded.metrics()[0]
    assert first["rollout/staleness_max"] == 0
    assert first["train/log_prob_gap_max"] <= 1e-4


def test_after_every_update_the_server_holds_what_the_actor_holds(recorded):
    assert all(m["served/gap_max"] <= 1e-4 for m in recorded.metrics())


def test_the_parts_add_up_to_the_gap_and_older_weights_are_what_dominates(recorded):
    for metrics in recorded.metrics():
        total = metrics["train/log_prob_gap_k3"]
        # R3 takes routing out; every answer is rechecked and canaries are on: all others were read
        parts = {part: metrics.get(f"gap/{part}_k3") for part in PARTS if part != "routing"}
        assert None not in parts.values()
        assert sum(parts.values()) == pytest.approx(total, rel=1e-6)
        assert abs(parts["rest"]) < 0.1 * total
        old = metrics.get("train/loss_tokens_age_1", 0) == metrics["train/num_loss_tokens"]
        if old and total > 1e-9:  # the first update of a warm-up moves nothing
            assert parts["staleness"] > 0.9 * total
        if not old:
            assert parts["staleness"] == 0 and total < 1e-12
        # what the actor's own routers would add on equal weights in float32: rounding
        assert abs(metrics.get("gap/routing_k3", 0.0)) < 1e-9
    assert recorded.metrics()[-1]["train/log_prob_gap_k3"] > 1e-9
    by_its_routers = [m["step"] for m in recorded.metrics() if "gap/routing_k3" in m]
    assert by_its_routers == [0]  # at the start, and every eighth version
    result = CliRunner().invoke(main, ["explain", str(recorded.run_dir)])
    assert result.exit_code == 0 and "staleness dominates" in result.output, result.output


# tests/oracle/test_algorithm.py holds what gdpo learns from two rewards against float64 (its rule dppo_kl)
def test_the_rewards_at_two_keys_are_kept_and_added_each_with_its_weight(recorded):
    for step, m in enumerate(recorded.metrics()):
        scored = [s for group in load_rollout(recorded.run_dir / "rollouts", step) for s in group]
        parts = np.array([sample.reward_parts for sample, _ in scored])
        tables = [
            even_and_small(s.prompt, s.text, s.token_ids[s.prompt_len :].tolist())
            for s, _ in scored
        ]
        np.testing.assert_allclose(parts, [[t["even"], t["small"]] for t in tables], rtol=1e-6)
        np.testing.assert_allclose([r for _, r in scored], parts @ jobs.REWARD_WEIGHTS, rtol=1e-6)
        means = [m["rollout/reward_mean_even"], m["rollout/reward_mean_small"]]
        np.testing.assert_allclose(means, parts.mean(axis=0), rtol=1e-6)
        assert m["rollout/reward_mean"] == pytest.approx(np.dot(means, jobs.REWARD_WEIGHTS))
        assert m["perf/mfu"] == pytest.approx(m["perf/train_tflops_per_gpu"] / 0.5)


def test_the_evaluation_set_is_answered_by_the_first_weights_and_by_the_last(recorded):
    lines = [json.loads(x) for x in (recorded.run_dir / "eval" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [0, len(STEPS)]
    for version in (0, len(STEPS)):
        file = recorded.run_dir / "eval" / f"{version:07d}-toy.jsonl"
        rows = [json.loads(line) for line in file.open()]
        assert {row["version"] for row in rows} == {version} and len(rows) == 5


def test_the_numbers_of_the_metrics_are_served_while_the_run_goes_on(recorded):
    records = {record["step"]: record for record in recorded.metrics()}
    assert len(recorded.scraped) >= 2, "steps that were seen"
    for step, numbers in recorded.scraped.items():
        for key, value in records[step].items():
            if key == "time" or not isinstance(value, (int, float)):
                continue
            name = exported_name(key) + "_total" * key.startswith("faults/")
            scale = 1e9 if key.endswith("_gb") else 1
            assert math.isclose(numbers[name], value * scale, rel_tol=1e-9), (step, key)
        until = [records[i] for i in range(step + 1)]
        assert numbers["r3train:steps_total"] == step + 1
        tokens = sum(record["rollout/tokens"] for record in until)
        assert numbers["r3train:generation_tokens_total"] == tokens
        assert "r3train:eval_mean toy" in numbers


def test_the_export_reloads_in_transformers_with_the_logits_of_the_server(recorded, engine):
    from tests.e2e.sglang_support import probe_log_probs, Reference

    # published and probed at the end: the server holds what the actor holds
    tokens = np.arange(3, 23, dtype=np.int32)
    served = probe_log_probs(engine, tokens)
    exported = recorded.run_dir.parent / "hf"
    ours, _ = Reference(exported)(tokens)
    np.testing.assert_allclose(ours, served, atol=1e-4)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(exported)("word")["input_ids"]


def test_a_replay_gives_the_same_losses_without_a_server(recorded, replayed):
    assert replayed.code == 0, replayed.output
    assert not (replayed.run_dir / "logs" / "sglang.log").exists()
    jobs.same_numbers(recorded.metrics(), replayed.metrics())
    one, other = (j.run_dir.parent / "hf" / WEIGHTS for j in (recorded, replayed))
    assert one.read_bytes() == other.read_bytes()


def test_asynchronous_saves_leave_the_last_two_whole_and_nothing_else(replayed):
    directory = replayed.run_dir.parent / "ck"
    assert {p.name for p in directory.iterdir()} == {
        "iter_0000003",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
        ".owner",  # of the lock
    }
    assert pointer(directory) == 4


# with the server in test_durability.py
def test_two_steps_a_kill_and_two_steps_are_four_bit_for_bit(tmp_path, replay_flags, replayed):
    flags = [*replay_flags, "--save", str(tmp_path / "ck")]
    killed = tmp_path / "killed"
    with running(killed, *flags, "--save-interval", "2") as job:
        wait_for(lambda: pointer(tmp_path / "ck") == 2, job, killed)
        for process in [job, *job.children(recursive=True)]:
            process.kill()
    resumed = jobs.run(
        tmp_path / "resumed", *flags, "--auto-resume", "--save-hf", str(tmp_path / "hf")
    )
    assert resumed.code == 0, resumed.output
    assert CHECKSUMS not in resumed.output  # nothing to note
    assert [m["step"] for m in resumed.metrics()] == [2, 3]
    jobs.same_numbers(replayed.metrics()[2:], resumed.metrics())
    whole = replayed.run_dir.parent / "hf" / WEIGHTS
    assert (tmp_path / "hf" / WEIGHTS).read_bytes() == whole.read_bytes()
