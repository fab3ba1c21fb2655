"""R3 in whole jobs: caught when broken, silent when off.  test_one_run.py has the sound ones."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from safetensors.torch import load_file

from r3train.config.replay_settings import PublishBug, RouteBug
from r3train.audit.audit_run import audit_run
from r3train.verify.tiny import TinyOptions, build
from tests.e2e import jobs

pytestmark = pytest.mark.e2e


# what each check says of its bug in a job; test_slurm plants layer_swap in CI
REPLAY = "R3 check failed at step 0|R3 mismatch tokens"
CAUGHT = {
    "one_expert": REPLAY,
    "token_shift": REPLAY,
    "layer_swap": REPLAY,
    "bypass": REPLAY,
    "answer_with_rows_of_another": REPLAY,
    "answer_without_second_stage": REPLAY,
    "expert_never_sent": "was not sent",
    "tensor_of_last_version": r" 1 of \d+ tensors of engine 0 are not",
    "weights_frozen": r" (\d+) of \1 tensors of engine 0 are not",
    "export_frozen": "parameters of rank 0 are not what",
    "canaries_of_itself": r" (\d+) of \1 tensors of engine 0 are not",
    "expert_bias_not_exported": "e_score_correction_bias was not sent",
    "version_with_first_bucket": "last bucket carried no version",
    "cache_not_flushed": "not served: EARLY",
}
# what canaries alone catch, or stand in the way of
OF_CANARIES = ("cache_not_flushed", "canaries_of_itself")
# the others are caught on real ranks or servers by tests/oracle, test_true_to_sampling.py and
# test_weights_are_proved.py too
IN_GATE = ("token_shift",)


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, marks=pytest.mark.gate if b in IN_GATE else pytest.mark.slow) for b in CAUGHT],
)
def test_a_planted_bug_fails_the_check_and_the_job(bug, tmp_path, tiny_flags, engine):
    served = ["--rollout-external-engine-addrs", engine]
    if bug == "expert_bias_not_exported":  # the model of the other jobs has no such bias
        build(tmp_path / "glm", TinyOptions(family="glm4_moe"))
        served = ["--hf-checkpoint", str(tmp_path / "glm/model")]
    job = jobs.run(
        tmp_path / "run",
        *tiny_flags,
        *jobs.R3_FLAGS,
        *"--num-rollout 2".split(),
        *served,
        "--plant-bug",
        bug,
        # which would name some of the others first
        *(
            ["--check-weight-update-equal"] + [*jobs.NO_CANARIES] * (bug not in OF_CANARIES)
            if bug in get_args(PublishBug)
            else ()
        ),
        # the first bucket is not the last one
        *(["--update-weight-buffer-size", "20000"] if bug == "version_with_first_bucket" else ()),
        *(["--r3-recheck-share", "1"] if bug.startswith("answer_") else ()),
        *(["--r3-evidence", "summed"] if bug == "token_shift" else ()),
    )
    assert job.code != 0
    assert re.search(CAUGHT[bug], job.output), job.output
    if bug in get_args(RouteBug):
        assert job.metrics()[0]["r3/passed"] is False
    if bug == "token_shift":  # a wrong step has every call
        evidence, (step,) = job.evidence(), job.metrics()
        assert len(evidence) == step["r3/num_calls"] and "num_calls" not in evidence[0]
        assert audit_run(job.run_dir).claims["applied"] == "failed"
    if bug.startswith("answer_"):
        assert job.metrics()[0]["recheck/passed"] is False
        lines = (job.run_dir / "evidence/rechecked.jsonl").read_text().splitlines()
        compared = [jobs.json.loads(line) for line in lines]
        # the samples alone are wrong
        assert not any(any(r["noise"]["decoded"]["differ"].values()) for r in compared)
        shares = [max(r["decoded"]["differ"].values()) / r["decoded"]["rows"] for r in compared]
        print(f"{bug}: {len(shares)} samples, {min(shares):.0%} to {max(shares):.0%} of the rows")
        assert max(shares) > 0.8


def test_every_bug_that_can_be_planted_is_planted_here():
    assert set(CAUGHT) == {*get_args(RouteBug), *get_args(PublishBug)}


@pytest.mark.slow
def test_without_the_check_there_is_no_r3_line_and_no_evidence(tmp_path, served_flags):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *"--num-rollout 1 --use-rollout-routing-replay".split(),
    )
    assert job.code == 0, job.output
    assert "R3 wrapper" not in job.logs() and "R3 check" not in job.logs()
    assert not (job.run_dir / "evidence").exists()


# tests/unit/config hold the warning and that no evidence is taken
@pytest.mark.slow
def test_the_check_without_the_master_switch_warns_once_and_does_nothing(tmp_path, served_flags):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *"--num-rollout 1 --enable-r3-correctness-check".split(),
    )
    assert job.code == 0, job.output
    assert job.output.count("--enable-r3-correctness-check") == 1
    assert not (job.run_dir / "evidence").exists()


def test_ci_test_turns_the_check_on_and_holds_its_invariants(tmp_path, tiny, served_flags):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *"--num-rollout 2 --use-rollout-routing-replay --ci-test --kl-loss-coef 0.01".split(),
        *"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split(),
        *"--use-tis --entropy-coef 0.001 --log-route-drift --freeze-moe-router".split(),
        *f"--lr-warmup-iters 0 --save-hf {tmp_path / 'hf'}".split(),
        *"--r3-evidence summed".split(),
    )
    assert job.code == 0, job.output
    m, later = job.metrics()
    assert m["r3/passed"] is True and m["train/kl"] == 0.0 < later["train/kl"]
    # one optimizer step per rollout: its own forward gives the old log-probs
    reference, train = ("ref_log_prob", "replay_forward"), ("train", "replay_forward")
    passes, evidence = (reference, train, ("train", "replay_backward")), job.evidence()
    # a record and a pair of lines a step, rank, pass, stage and layer, with every call in it
    of = [(e["step"], e["rank"], e["layer_number"], e["replay_pass"], e["stage"]) for e in evidence]
    cells = [(s, r, n, *p) for s in (0, 1) for r in (0, 1) for n in (1, 2, 3, 4) for p in passes]
    assert sorted(of) == sorted(cells)
    for step in (m, later):
        of_step = [e["num_calls"] for e in evidence if e["step"] == step["step"]]
        assert sum(of_step) == step["r3/num_calls"] == step["r3/num_calls_expected"]
    lines = re.findall(r"R3 (wrapper|check)\b.*\), calls=(\d+)$", job.logs(), re.MULTILINE)
    for kind in ("wrapper", "check"):
        of_kind = sorted(int(count) for name, count in lines if name == kind)
        assert of_kind == sorted(e["num_calls"] for e in evidence)
    assert audit_run(job.run_dir).verdict == "passed"
    assert m["train/log_prob_gap_max"] <= 1e-4 and m["train/ppo_kl"] == 0.0
    # the controls are counted in the train forward, and agreement beats them there
    assert m["r3/agreement"] > 0.99 > m["r3/agreement_control_token_minus"] > 0
    # the second rollout is of weights before the first update: its rows are another router's choice
    assert later["r3/drift_left"] > m["r3/drift_left"] == 0
    (exported,) = (tmp_path / "hf").glob("**/*.safetensors")
    before, after = load_file(tiny / "model/model.safetensors"), load_file(exported)
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved == {name for name in before if not name.endswith("mlp.gate.weight")}
