"""LoRA in whole jobs: servers serve what the actor trains, merged or as adapters, and R3 is proved."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3train.config.checkpoint_settings import rollout_path
from r3train.config.lora_settings import LoraSection
from r3train.hf_checkpoint import MARKER, read_headers
from r3train.observe.metrics import eval_rows_path
from r3train.peft_files import CONFIG, packed_name, TENSORS
from r3train.verify.tiny import build
from r3train.families.tiny_options import TinyOptions
from tests.e2e import jobs
from tests.e2e.accounts import all_trained_once, dumped_samples
from tests.e2e.live_jobs import output, running, scheduler, wait_for

pytestmark = pytest.mark.e2e

LORA = LoraSection(lora_rank=4, lora_alpha=8.0, exclude_modules=("o_proj",))
ADAPTERS = ("--lora-rank", "4", "--lora-alpha", "8", "--exclude-modules", "o_proj")


@pytest.fixture(scope="module")
def merged_job(tmp_path_factory, tiny_flags) -> jobs.Job:
    """Two ranks that share the experts; every update is compared with the actor, bit for bit."""
    run_dir = tmp_path_factory.mktemp("merged") / "run"
    return jobs.run(
        run_dir,
        *tiny_flags,
        *ADAPTERS,
        "--save-hf",
        str(run_dir.with_name("hf")),
        *"--num-rollout 4 --max-weight-staleness 0 --lr 5e-3".split(),
        *"--kl-loss-coef 0.01 --entropy-coef 0.05 --dump-rollouts".split(),
        "--save",
        str(run_dir.with_name("checkpoints")),
        *jobs.R3_FLAGS,
        *"--ci-test --check-weight-update-equal".split(),
    )


def exported(job: jobs.Job) -> Path:
    return job.run_dir.with_name("hf")


@pytest.mark.gate
def test_servers_get_adapters_merged_and_after_the_first_update_the_adapted_tensors_alone(
    tiny, merged_job
):
    assert merged_job.code == 0, merged_job.output
    saved, metrics = exported(merged_job), merged_job.metrics()
    for m in metrics:
        assert m["r3/passed"] is True and m["r3/rows_replayed"] > 0
        assert m["recheck/passed"] is True
        # the server's merged weights and the actor's adapters are the same policy
        assert m["train/log_prob_gap_max"] <= 1e-4 and m["served/gap_max"] <= 1e-4, m
        assert m["train/grad_norm"] > 0
    assert metrics[0]["train/kl"] == 0 and metrics[-1]["train/kl"] > 0
    kinds = read_headers(tiny / "model")
    targets = LORA.targets(kinds)
    sent = [(m["perf/published_tensors"], m["perf/published_bytes"]) for m in metrics]
    whole, adapted = (
        (len(names), sum(kinds[n].num_bytes for n in names)) for names in (kinds, targets)
    )
    assert sent == [whole, adapted, adapted, adapted] and len(targets) < len(kinds)
    # what was saved: the adapter, and the base with it merged
    base = load_file(tiny / "model" / "model.safetensors")
    [merged] = map(load_file, saved.glob("*.safetensors"))
    factors = load_file(saved / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys() and len(factors) == 2 * len(targets)
    for name, weight in merged.items():
        if name in targets:
            path = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (factors[f"{path}.lora_{x}.weight"].double() for x in "AB")
            delta = weight.double() - base[name].double()
            assert delta.abs().max() > 0
            assert (delta - LORA.scale * b @ a).abs().max() < 1e-6, name
        else:
            assert (weight == base[name]).all(), name


def test_a_job_begins_with_the_adapter_that_another_saved_and_writes_the_merged_form_alone(
    merged_job, tiny_flags, tmp_path
):
    """One rank where the other had two, one step that moves nothing: it writes what it began with.

    A merged server starts from the base: the adapter is sent before rollout 0.
    """
    saved = tmp_path / "hf"
    job = jobs.run(
        tmp_path / "run",
        *tiny_flags,
        *ADAPTERS,
        *jobs.R3_FLAGS,
        *"--expert-model-parallel-size 1 --num-rollout 1 --max-weight-staleness 0".split(),
        *"--lr 0 --min-lr 0 --lora-adapter-path".split(),
        str(exported(merged_job) / "adapter"),
        *f"--save-hf {saved} --lora-save-hf merged".split(),
        ranks=1,
    )
    assert job.code == 0, job.output
    [metrics] = job.metrics()
    assert metrics["train/log_prob_gap_max"] <= 1e-4, metrics
    same_tensors(saved, exported(merged_job))
    assert not (saved / "adapter").exists()


def same_tensors(one: Path, other: Path) -> None:
    ours, theirs = (
        load_file(file) for place in (one, other) for file in place.glob("*.safetensors")
    )
    assert ours.keys() == theirs.keys()
    assert all((tensor == theirs[name]).all() for name, tensor in ours.items())


def test_a_checkpoint_of_adapters_is_converted_to_what_the_job_exported(merged_job, tmp_path):
    places = [str(exported(merged_job).with_name("checkpoints")), str(tmp_path / "converted")]
    command = [sys.executable, "-m", "r3train.cli", "convert", *places]
    done = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for form in (".", "adapter"):
        same_tensors(tmp_path / "converted" / form, exported(merged_job) / form)


@pytest.mark.slow
def test_experts_of_one_tensor_a_layer_learn_and_are_served_and_saved_merged(tmp_path):
    """gpt-oss: SGLang gets their tensors without the biases next to them."""
    build(tmp_path / "tiny", TinyOptions(family="gpt_oss"))
    model, saved = tmp_path / "tiny" / "model", tmp_path / "hf"
    job = jobs.run(
        tmp_path / "run",
        "--hf-checkpoint",
        str(model),
        "--save-hf",
        str(saved),
        *f"--prompt-data {tmp_path / 'tiny' / 'prompts.jsonl'} --no-plot".split(),
        *"--rollout-batch-size 4 --n-samples-per-prompt 4 --num-rollout 3".split(),
        *"--max-weight-staleness 0 --lora-rank 4 --lr 5e-3".split(),
        *jobs.R3_FLAGS,
        "--check-weight-update-equal",
    )
    assert job.code == 0, job.output
    assert "no name for one expert's part of model.layers.0.mlp.experts" in job.output
    metrics = job.metrics()
    proved(metrics, gap=1e-3)  # of the sinks, see docs/guide/models.md
    kinds = read_headers(model)
    targets = LoraSection(lora_rank=4).targets(kinds)
    assert [m["perf/published_tensors"] for m in metrics] == [len(kinds)] + [len(targets)] * 2
    base = load_file(model / "model.safetensors")
    [merged] = map(load_file, saved.glob("*.safetensors"))
    assert {n for n, t in merged.items() if not torch.equal(t, base[n])} == targets
    assert len(targets) == 4 * (4 + 2) and not (saved / "adapter").exists()


# answers of 40 tokens: an update comes while most of them are half done
LONG = (
    *ADAPTERS,
    *"--lr 2e-3 --rollout-max-response-len 40 --rollout-ignore-eos".split(),
    *"--r3-mismatch-threshold 0.5".split(),
    *jobs.R3_FLAGS,
    *"--check-weight-update-equal --dump-rollouts".split(),
)
SERVED = (*LONG, "--lora-serving", "adapter")


def versions_of(run_dir, steps) -> list[np.ndarray]:
    """Each trained sample's weight versions, of the tokens that were generated."""
    samples = dumped_samples(run_dir, range(steps)).values()
    return [np.unique(s.weight_versions[s.loss_mask]) for s in samples]


def proved(metrics: list[dict], gap: float = 1e-4, unaudited: int = 0) -> None:
    """unaudited: rollouts that may have no sample that was rechecked, as a kill can leave them."""
    audited = [m["recheck/passed"] is True and m["recheck/parts"] > 0 for m in metrics]
    assert audited.count(True) >= len(metrics) - unaudited
    for m in metrics:
        assert m["r3/passed"] is True and m["r3/rows_replayed"] > 0
        assert m["recheck/passed"] is not False
        # from the second update on B is not zero: a server without the adapter would not agree
        assert m["served/gap_max"] <= gap, m


def test_versions_are_adapters_side_by_side_and_every_answer_ends_on_its_own(
    tmp_path, tiny, tiny_flags, merged_job
):
    """No update pauses a server, and no base weight goes out; evaluations name their version too."""
    saved = tmp_path / "hf"
    job = jobs.run(
        tmp_path / "run",
        *tiny_flags,
        *SERVED,
        *"--num-rollout 4 --ci-test".split(),
        *f"--lora-adapter-path {exported(merged_job) / 'adapter'} --kl-loss-coef 0.01".split(),
        *f"--eval-prompt-data words {tiny / 'prompts.jsonl'} --eval-interval 2".split(),
        *f"--save-hf {saved} --lora-save-hf adapter".split(),
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    proved(metrics)
    assert metrics[0]["train/log_prob_gap_max"] <= 1e-4
    assert metrics[0]["train/kl"] > 0  # it began with the other job's adapter
    # no row of a version that an answer lacks, or of an adapter that a server does not hold
    evaluated = [json.loads(line) for line in (job.run_dir / "eval/metrics.jsonl").open()]
    assert [row["step"] for row in evaluated] == [0, 2, 4]
    for version in (0, 2, 4):
        rows = eval_rows_path(job.run_dir, version, "words").read_text().splitlines()
        assert {json.loads(row)["version"] for row in rows} == {version}
    assert max(m["rollout/staleness_max"] for m in metrics) == 1
    versions = versions_of(job.run_dir, 4)
    assert len(versions) == 64 and all(len(of_sample) == 1 for of_sample in versions)
    assert {int(v[0]) for v in versions} >= {0, 1, 2}
    kinds = read_headers(tiny / "model")
    targets = LORA.targets(kinds)
    expected = sum(4 * 4 * sum(kinds[name].shape) for name in targets)
    assert {m["perf/published_bytes"] for m in metrics} == {expected}
    # too old for the last update, unloaded and gone
    left = sorted(path.name for path in (job.run_dir / "weights").iterdir())
    assert left[-1] == "v000004" and left[0] >= "v000002"
    # what was saved is the last version, one pair of factors an expert
    assert {p.name for p in saved.iterdir()} == {CONFIG, TENSORS, MARKER}
    last = load_file(job.run_dir / "weights" / left[-1] / TENSORS)
    factors = load_file(saved / TENSORS)
    assert len(factors) == 2 * len(targets)
    for name, factor in factors.items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        served = last[packed_name(name)]
        assert (factor == (served[int(expert[1])] if expert else served)).all(), name


@pytest.mark.slow
def test_the_adapter_of_another_version_is_found_by_the_canaries(tmp_path, tiny_flags):
    """The label is the new one's: nothing but what the server computes tells the two apart."""
    job = jobs.run(
        tmp_path / "run",
        *tiny_flags,
        *SERVED,
        *"--num-rollout 3".split(),
        program=("-m", "tests.e2e.train_with_bug", "adapter_of_last_version"),
    )
    assert job.code != 0, job.output
    assert re.search("not served: (MOVED|BOUND): server 0, weight version", job.output), job.output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("serving", ["merged", "adapter"])
def test_of_two_servers_one_dies_and_answers_go_on_under_their_own_versions(
    serving, tmp_path, tiny, tiny_flags
):
    """Segments of 8 tokens: what a lost server had finished is gone on with, and the run resumes."""
    run_dir, saved = tmp_path / "run", ("--save", str(tmp_path / "ck"), "--auto-resume")
    flags = [*tiny_flags, *LONG, *saved, "--rollout-num-engines", "2"]
    flags += ["--lora-serving", serving]
    flags += ["--max-engine-restarts", "1", "--rollout-segment-len", "8"]
    with running(run_dir, *flags, "--num-rollout", "6") as job:
        # the rollout is trained, and the loss found by the update that follows
        wait_for(rollout_path(run_dir / "rollouts", 3).exists, job, run_dir)
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=500) == 0, output(run_dir)
    assert "restart 1 of 1" in output(run_dir)
    resumed = jobs.run(tmp_path / "resumed", *flags, "--num-rollout", "8")
    assert resumed.code == 0, resumed.output
    proved(jobs.Job(0, "", run_dir).metrics() + resumed.metrics(), unaudited=2)
    all_trained_once([run_dir, resumed.run_dir], 8)
    if serving == "adapter":
        for of_sample in versions_of(run_dir, 6) + versions_of(resumed.run_dir, 8):
            assert len(of_sample) == 1
    else:  # all tensors to new servers, then those of the targets alone
        kinds = read_headers(tiny / "model")
        whole, adapted = len(kinds), len(LORA.targets(kinds))
        sent = [m["perf/published_tensors"] for m in jobs.Job(0, "", run_dir).metrics()]
        assert sent == [whole, adapted, adapted, whole, adapted, adapted]
