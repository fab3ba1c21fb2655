"""Families beside the demo's, in whole jobs: served, replayed, trained, sent back."""

from __future__ import annotations

import shutil

import pytest

from r3train.torchvision_stub import declare_torchvision_ops
from tests.e2e import jobs

pytestmark = pytest.mark.e2e

SIZES = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=None,
    pad_token_id=0,
    eos_token_id=1,
    initializer_range=0.1,
    num_experts_per_tok=2,
)
# transformers' model, its configuration
FAMILIES = {
    "mixtral": ("Mixtral", SIZES | dict(num_local_experts=8)),
    "qwen2_moe": (
        "Qwen2Moe",
        SIZES
        | dict(num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=48)
        | dict(norm_topk_prob=False),
    ),
    "glm4_moe": (
        "Glm4Moe",
        SIZES
        | dict(n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=32, head_dim=16)
        | dict(first_k_dense_replace=1, routed_scaling_factor=1.5, attention_bias=True)
        | dict(use_qk_norm=True, partial_rotary_factor=0.5),
    ),
}


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", pytest.param("glm4_moe", marks=pytest.mark.slow)]
)
def test_a_job_of_the_family_is_proved_and_its_server_follows_the_actor(family, tiny, tmp_path):
    declare_torchvision_ops()
    import torch
    import transformers

    kind, sizes = FAMILIES[family]
    model = tmp_path / "model"
    shutil.copytree(tiny / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    whole = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    for name, buffer in whole.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    whole.save_pretrained(model)
    job = jobs.run(
        tmp_path / "run",
        *("--hf-checkpoint", str(model), "--prompt-data", str(tiny / "prompts.jsonl")),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--no-plot"),
        # the entropy moves the weights: a random model gets no reward
        *("--num-rollout", "3", "--max-weight-staleness", "0", "--lr", "1e-3"),
        *("--entropy-coef", "0.1"),
        *(*jobs.R3_FLAGS, "--no-tensorboard", "--check-weight-update-equal"),
    )
    assert job.code == 0, job.output
    for m in job.metrics():
        assert m["r3/passed"] is True and m["r3/rows_replayed"] > 0
        # every step after the first is on weights that came through an update
        assert m["train/log_prob_gap_max"] <= 1e-4, m
        assert m["train/grad_norm"] > 0
