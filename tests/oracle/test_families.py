"""Every family that is not refused computes what transformers does, from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from r3train.config.families import FAMILIES, tensor_names
from r3train.config.hf_facts import read_hf_facts
from r3train.hf_checkpoint import read_headers
from r3train.torchvision_stub import declare_torchvision_ops
from tests.oracle.actors import actor_of, configuration, in_ranks

TOKENS = 24
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    eos_token_id=1,
)
MOE = SIZES | dict(moe_intermediate_size=16, num_experts_per_tok=2, norm_topk_prob=True)
GLM = MOE | dict(
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    attention_bias=True,
    partial_rotary_factor=0.5,
)
# name -> (transformers' model, its configuration)
CASES = {
    "qwen3": ("Qwen3", SIZES),
    "qwen3_moe": ("Qwen3Moe", MOE | dict(num_experts=8)),
    "glm4_moe": ("Glm4Moe", GLM | dict(use_qk_norm=True)),
    "glm4_moe without qk norms": ("Glm4Moe", GLM | dict(use_qk_norm=False)),
}
UNVERIFIED = {
    # what the bridge builds in silence, off by nats: no test of ours may pass for these
    "qwen3_moe without normalised gates": (
        "Qwen3Moe",
        MOE | dict(num_experts=8, norm_topk_prob=False),
    ),
}


def text() -> np.ndarray:
    return np.random.default_rng(0).integers(2, SIZES["vocab_size"], TOKENS).astype(np.int32)


def make(directory: Path, kind: str, sizes: dict) -> np.ndarray:
    """Write a checkpoint with every weight random; returns transformers' log-probs, float32[T]."""
    declare_torchvision_ops()
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:  # norms too: one in the place of another must show
                tensor.add_(0.2 * torch.randn_like(tensor))
        ids = torch.from_numpy(text()).long()
        every = model(ids[None]).logits[0].log_softmax(-1)
    model.save_pretrained(directory)
    return np.concatenate([[0.0], every[:-1].gather(1, ids[1:, None])[:, 0].numpy()])


def actors_log_probs(directories: list[str]) -> dict[str, torch.Tensor]:
    """The actor's log-probs of the text and the names that it exports, by directory; in a rank."""
    from r3train.loop import weight_probe

    found = {}
    for directory in directories:
        with actor_of(configuration(Path(directory))) as actor:
            log_probs = weight_probe.actor_log_probs(actor, [actor.topology], text())
            found[directory] = (
                torch.from_numpy(log_probs),
                sorted(n for n, _ in actor.hf_weights()),
            )
    return found


@pytest.mark.ranks
def test_an_actor_of_every_verified_family_gives_the_log_probs_of_transformers(tmp_path):
    cases = CASES | UNVERIFIED
    expected = {name: make(tmp_path / name, *case) for name, case in cases.items()}
    (got,) = in_ranks(
        1, tmp_path / "ranks", actors_log_probs, [str(tmp_path / name) for name in cases]
    )
    assert {name.split()[0] for name in CASES} == FAMILIES.keys()
    for name in cases:
        log_probs, exported = got[str(tmp_path / name)]
        error = np.abs(log_probs.numpy() - expected[name]).max()
        assert (error < 1e-4) == (name in CASES), (name, error)
        hf = read_hf_facts(tmp_path / name)
        assert set(exported) == tensor_names(hf) == read_headers(tmp_path / name).keys(), name
