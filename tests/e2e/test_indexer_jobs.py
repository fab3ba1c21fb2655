"""Sparse attention in whole jobs: the tokens that SGLang's indexers chose are replayed, and that is proved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.loop.replay_source import load_rollout
from tests.e2e import jobs

pytestmark = pytest.mark.e2e

TOPK, LAYERS = 16, 4


@pytest.fixture(scope="module", params=["deepseek_v32"])
def flags(request, tmp_path_factory) -> tuple[str, ...]:
    """Flags of jobs with a model whose answers are longer than the choice of its indexers."""
    tiny = tmp_path_factory.mktemp("tiny")
    made = CliRunner().invoke(
        main, ["make-tiny-model", "--family", request.param, "--output", str(tiny)]
    )
    assert made.exit_code == 0, made.output
    file = tiny / "model" / "config.json"
    content = json.loads(file.read_text())
    assert content["num_hidden_layers"] == LAYERS
    file.write_text(json.dumps(content | {"index_topk": TOPK}))
    return (
        *f"--hf-checkpoint {tiny / 'model'} --prompt-data {tiny / 'prompts.jsonl'}".split(),
        *"--rollout-batch-size 2 --n-samples-per-prompt 4 --num-rollout 2".split(),
        *jobs.FEW_ROWS,
        *"--no-plot --no-tensorboard --lr-warmup-iters 0 --rollout-max-response-len 70".split(),
        "--rollout-ignore-eos",
        *jobs.R3_FLAGS,
        "--ci-test",
    )


@pytest.fixture(scope="module")
def job(flags, tmp_path_factory) -> jobs.Job:
    """Context-parallel ranks that recompute; answers come in segments, and an update comes in mid-generation."""
    return jobs.run(
        tmp_path_factory.mktemp("job") / "run",
        *flags,
        *"--expert-model-parallel-size 1 --context-parallel-size 2".split(),
        *"--recompute-granularity full --recompute-method uniform".split(),
        *"--recompute-num-layers 1 --reuse-log-probs off --dump-rollouts".split(),
        *"--rollout-segment-len 30 --r3-recheck-share 0.3".split(),
    )


def audit_of(run_dir: Path) -> dict:
    checked = CliRunner().invoke(main, ["check-evidence", str(run_dir), "--json"])
    (audit,) = json.loads(checked.stdout)["audits"]
    return audit


def test_every_row_attends_to_the_tokens_that_the_server_chose(job):
    assert job.code == 0, job.output
    samples = [
        s for n in range(2) for group in load_rollout(job.run_dir / "rollouts", n) for s, _ in group
    ]
    rows = sum(len(s.indexer_topk) for s in samples)
    assert rows == sum(s.num_tokens - 1 - TOPK for s in samples) > 500
    for m in job.metrics():
        assert m["r3/passed"] is True
    # of the same weights; others would choose other tokens
    assert job.metrics()[0]["r3/agreement_indexer_equal"] > 0.9
    # the tokens are the server's: else hundreds of rows of another choice would move log-probs by tenths
    assert job.metrics()[0]["train/log_prob_gap_max"] <= 1e-4
    audit = audit_of(job.run_dir)
    assert audit["verdict"] == "passed", audit["findings"]
    assert set(audit["claims"].values()) == {"passed"} and len(audit["claims"]) == 5
    # old log-probs, the train forward and its recomputation
    assert audit["numbers"]["rows_of_indexer"] == 3 * LAYERS * rows


def test_a_dumped_rollout_is_trained_again_with_its_choices(job, flags, tmp_path):
    again = jobs.run(
        tmp_path / "run",
        *flags,
        *"--tensor-model-parallel-size 2 --sequence-parallel".split(),
        *"--expert-model-parallel-size 1 --reuse-log-probs off".split(),
        "--replay-rollouts",
        str(job.run_dir / "rollouts"),
    )
    assert again.code == 0, again.output
    first, recorded = again.metrics()[0], job.metrics()[0]
    assert first["train/log_prob_gap_max"] <= 1e-4
    assert first["train/grad_norm"] == pytest.approx(recorded["train/grad_norm"], rel=1e-4)
    audit = audit_of(again.run_dir)
    assert audit["claims"]["applied"] == audit["claims"]["covered"] == "passed"


def test_a_trainer_that_chooses_by_itself_is_found(job, flags, tmp_path):
    spoiled = jobs.run(
        tmp_path / "run",
        *flags,
        *f"--replay-rollouts {job.run_dir / 'rollouts'} --r3-mismatch-threshold 1".split(),
        program=("-m", "tests.e2e.train_with_bug", "choices_not_applied"),
    )
    assert spoiled.code != 0 and "indexer/replay_forward layer" in spoiled.output
    assert audit_of(spoiled.run_dir)["claims"]["applied"] == "failed"
