"""A whole job whose default group serves the device only, as NCCL's does, on two real ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from r3train.families.read_facts import read_hf_facts
from r3train.data.tokenizer import load_tokenizer
from r3train.loop.replay_source import dump_rollout
from r3train.verify.tiny import TinyOptions, build
from r3train.types import RolloutSample
from tests.all_prompts import all_prompts
from tests.e2e import jobs

pytestmark = pytest.mark.ranks
GROUPS, SAMPLES, RESPONSE = 4, 2, 6
REHEARSED = ("-m", "tests.rehearsal.device_alone")


SPLITS = {
    "tensors": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "layers": ("--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "1"),
    "data": ("--expert-model-parallel-size", "1", "--use-distributed-optimizer"),
}


@pytest.fixture(
    scope="module", params=["tensors", "data", pytest.param("layers", marks=pytest.mark.slow)]
)
def rehearsed(request, tmp_path_factory) -> tuple[jobs.Job, list[dict]]:
    """One rollout from a file through two ranks, a checkpoint, an export; what each rank sent."""
    directory = tmp_path_factory.mktemp("device_alone")
    build(directory, TinyOptions(), force=True)
    dump_rollout(directory / "rollouts", 0, rollout(directory))
    job = jobs.run(
        directory / "run",
        "--hf-checkpoint",
        str(directory / "model"),
        *"--no-plot --no-tensorboard".split(),
        "--prompt-data",
        str(directory / "prompts.jsonl"),
        "--replay-rollouts",
        str(directory / "rollouts"),
        *"--num-rollout 1".split(),
        "--rollout-batch-size",
        str(GROUPS),
        "--n-samples-per-prompt",
        str(SAMPLES),
        *"--distributed-backend nccl".split(),
        *SPLITS[request.param],
        *"--kl-loss-coef 0.01".split(),
        "--save",
        str(directory / "saved"),
        "--save-hf",
        str(directory / "exported"),
        "--r3-mismatch-threshold",
        "1",  # no router chose these routes
        *jobs.R3_FLAGS,
        program=(*REHEARSED, str(directory / "report")),
        torchrun=True,  # it changes torch before anything is imported
    )
    reports = sorted(directory.glob("report.*.json"))
    return job, [json.loads(r.read_text()) for r in reports]


def rollout(directory) -> list:
    """Groups of the first prompts, with random responses and routes."""
    facts = read_hf_facts(directory / "model")
    prompts = all_prompts(directory / "prompts.jsonl", load_tokenizer(directory / "model"))
    rng = np.random.default_rng(0)
    return [
        [sample(rng, facts, prompts[g], g * SAMPLES + i, g) for i in range(SAMPLES)]
        for g in range(GROUPS)
    ]


def sample(rng, facts, prompt, sample_id: int, group_id: int):
    first = len(prompt.token_ids)
    n = first + RESPONSE
    mask = np.arange(n) >= first
    response = rng.integers(1, facts.vocab_size, RESPONSE).astype(np.int32)
    scores = rng.random((n - 1, facts.num_hidden_layers, facts.num_experts))
    return (
        RolloutSample(
            sample_id=sample_id,
            group_id=group_id,
            prompt=prompt,
            token_ids=np.concatenate([prompt.token_ids, response]),
            prompt_len=first,
            loss_mask=mask,
            rollout_log_probs=np.where(mask, -3, 0).astype(np.float32),
            routed_experts=scores.argsort(-1)[..., : facts.num_experts_per_tok].astype(np.uint8),
            weight_versions=np.where(mask, 0, -1).astype(np.int32),
            finish_reason="length",
        ),
        float(sample_id % 2),
    )


def test_a_job_starts_trains_proves_its_step_and_saves(rehearsed):
    job, reports = rehearsed
    assert job.code == 0, job.output[-6000:]
    (metrics,) = job.metrics()
    assert metrics["r3/passed"] is True and metrics["train/grad_norm"] > 0
    assert (job.run_dir.parent / "saved/iter_0000001/trainer_state.json").is_file()
    assert (job.run_dir.parent / "exported/model.safetensors.index.json").is_file()
    assert [r["sent"]["device"] > 50 and r["sent"]["host"] > 10 for r in reports] == [True, True]


def test_one_gloo_group_is_all_that_a_rank_makes(rehearsed):
    assert [report["host_groups"] for report in rehearsed[1]] == [1, 1]
