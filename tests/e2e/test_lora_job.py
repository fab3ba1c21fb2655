"""LoRA in a whole job: a server without adapters serves what the actor trains, and R3 is proved."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from r3train.config.lora import LoraSection
from r3train.hf_checkpoint import read_headers
from tests.e2e import jobs

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
