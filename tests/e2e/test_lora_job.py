"""LoRA in whole jobs: servers serve what the actor trains, merged or as adapters, and R3 is proved."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from safetensors.torch import load_file

from r3train.config.lora import LoraSection
from r3train.hf_checkpoint import read_headers
from tests.e2e import jobs
from tests.e2e.accounts import all_trained_once, dumped_samples
from tests.e2e.live_jobs import output, running, scheduler, steps_done, wait_for

pytestmark = pytest.mark.e2e

LORA = LoraSection(lora_rank=4, lora_alpha=8.0, exclude_modules=("self_attn",))


def test_servers_get_adapters_merged_and_after_the_first_update_the_adapted_tensors_alone(
    tiny, tmp_path
):
    """Two ranks that share the experts; every update is held against the actor, bit for bit."""
    saved = tmp_path / "hf"
    job = jobs.run(
        tmp_path / "run",
        *("--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl")),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--no-plot"),
        *("--num-rollout", "4", "--max-weight-staleness", "0", "--lr", "5e-3"),
        *("--lora-rank", "4", "--lora-alpha", "8", "--exclude-modules", "self_attn"),
        *("--kl-loss-coef", "0.01", "--entropy-coef", "0.05", "--save-hf", str(saved)),
        *(*jobs.R3_FLAGS, "--ci-test", "--no-tensorboard", "--check-weight-update-equal"),
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    for m in metrics:
        assert m["r3/passed"] is True and m["r3/rows_replayed"] > 0
        assert m["r3_audit/passed"] is True
        # the server's merged weights and the actor's adapters are the same policy
        assert m["train/log_prob_gap_max"] <= 1e-4 and m["train/weight_probe_gap"] <= 1e-4, m
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


# answers of 40 tokens: an update comes while most of them are half done
LONG = (
    *("--lora-rank", "4", "--lora-alpha", "8", "--lr", "2e-3"),
    *("--rollout-max-response-len", "40", "--rollout-ignore-eos", "--r3-mismatch-threshold", "0.5"),
    *(*jobs.R3_FLAGS, "--check-weight-update-equal", "--dump-rollouts"),
)
SERVED = (*LONG, "--lora-serving", "adapter")


def versions_of(run_dir, steps) -> list[np.ndarray]:
    """Each trained sample's weight versions, of the tokens that were generated."""
    samples = dumped_samples(run_dir, range(steps)).values()
    return [np.unique(s.weight_versions[s.loss_mask]) for s in samples]


def proved(metrics: list[dict]) -> None:
    for m in metrics:
        assert m["r3/passed"] is True and m["r3/rows_replayed"] > 0
        assert m["r3_audit/passed"] is True and m["r3_audit/parts"] > 0
        # from the second update on B is not zero: a server without the adapter would not agree
        assert m["train/weight_probe_gap"] <= 1e-4, m


def test_versions_are_adapters_side_by_side_and_every_answer_ends_on_its_own(
    tmp_path, tiny, tiny_flags
):
    """No update pauses a server, and no base weight goes out."""
    job = jobs.run(tmp_path / "run", *tiny_flags, *SERVED, "--num-rollout", "4", "--ci-test")
    assert job.code == 0, job.output
    metrics = job.metrics()
    proved(metrics)
    assert metrics[0]["train/log_prob_gap_max"] <= 1e-4
    assert max(m["rollout/staleness_max"] for m in metrics) == 1
    versions = versions_of(job.run_dir, 4)
    assert len(versions) == 64 and all(len(of_sample) == 1 for of_sample in versions)
    assert {int(v[0]) for v in versions} >= {0, 1, 2}
    kinds = read_headers(tiny / "model")
    targets = LoraSection(lora_rank=4).targets(kinds)
    expected = sum(4 * 4 * sum(kinds[name].shape) for name in targets)
    assert {m["perf/published_bytes"] for m in metrics} == {expected}
    # too old for the last update, unloaded and gone
    left = sorted(path.name for path in (job.run_dir / "weights").iterdir())
    assert left[-1] == "v000004" and left[0] >= "v000002"


@pytest.mark.slow
def test_the_adapter_of_another_version_is_found_by_its_log_probs(tmp_path, tiny_flags):
    """The label is the new one's: nothing but what the server computes tells the two apart."""
    job = jobs.run(
        *(tmp_path / "run", *tiny_flags, *SERVED, "--num-rollout", "2"),
        program=("-m", "tests.e2e.train_with_bug", "adapter_of_last_version"),
    )
    assert job.code != 0, job.output
    assert "weight update 2: the server's log-prob of probe token" in job.output


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
        wait_for(lambda: steps_done(run_dir) >= 3, job, run_dir)
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=500) == 0, output(run_dir)
    assert "restart 1 of 1" in output(run_dir)
    resumed = jobs.run(tmp_path / "resumed", *flags, "--num-rollout", "8")
    assert resumed.code == 0, resumed.output
    proved(jobs.Job(0, "", run_dir).metrics() + resumed.metrics())
    all_trained_once([run_dir, resumed.run_dir], 8)
    if serving == "adapter":
        for of_sample in versions_of(run_dir, 6) + versions_of(resumed.run_dir, 8):
            assert len(of_sample) == 1
    else:  # all tensors to new servers, then those of the targets alone
        kinds = read_headers(tiny / "model")
        whole, adapted = len(kinds), len(LoraSection(lora_rank=4).targets(kinds))
        sent = [m["perf/published_tensors"] for m in jobs.Job(0, "", run_dir).metrics()]
        assert sent[0] == whole and set(sent[1:]) <= {whole, adapted} and adapted in sent
