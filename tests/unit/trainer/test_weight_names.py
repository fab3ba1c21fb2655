"""Parameters of both of Megatron's layer specs, under the names that mbridge speaks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from r3train.trainer.megatron.hf_bridge import as_te_names

LAYER = "decoder.layers.0."
# of latent attention: Transformer Engine fuses the norms of queries and keys, and not the layer's first
LATENT = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight": "self_attention.linear_q_up_proj.weight",
}
HEADS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.q_layernorm.weight",
}
EXPERTS = {
    "mlp.experts.local_experts.3.linear_fc1.weight": "mlp.experts.linear_fc1.weight3",
    "mlp.experts.local_experts.3.linear_fc2.bias": "mlp.experts.linear_fc2_bias.weight3",
    "pre_mlp_layernorm.weight": "pre_mlp_layernorm.weight",
}


class Chunk(torch.nn.Module):
    """A model that is its parameters."""

    def __init__(self, names: list[str], latent: bool):
        super().__init__()
        self.decoder = None
        self.config = SimpleNamespace(multi_latent_attention=latent)
        self.named = {LAYER + name: torch.nn.Parameter(torch.empty(())) for name in names}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.named)

    def named_parameters(self):
        return iter(self.named.items())


@pytest.mark.parametrize("latent, names", [(True, LATENT | EXPERTS), (False, HEADS | EXPERTS)])
def test_the_local_spec_and_transformer_engines_come_out_under_the_same_names(latent, names):
    local, fused = list(names), list(names.values())
    engines = [
        name.replace("_bias.weight3", ".bias3") for name in fused
    ]  # as Megatron has them there
    for given in (local, fused, engines):
        chunk = Chunk(given, latent)
        adapted = as_te_names(chunk)
        assert list(adapted.state_dict()) == [LAYER + name for name in fused]
        for (_, got), parameter in zip(adapted.named_parameters(), chunk.named.values()):
            assert got is parameter


def test_an_adapter_is_no_weight_of_the_checkpoint():
    chunk = Chunk(["input_layernorm.weight", "self_attention.linear_qkv.lora.a"], False)
    assert list(as_te_names(chunk).state_dict()) == [LAYER + HEADS["input_layernorm.weight"]]
