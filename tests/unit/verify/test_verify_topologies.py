"""Topologies of ``r3train verify`` that CI does not run: at least their layers can be placed."""

from types import SimpleNamespace

import pytest

from r3train.config.model import ModelSection
from r3train.verify.model_zoo import VARIANTS
from r3train.verify.topologies import TOPOLOGIES


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=lambda t: t.name)
def test_every_layer_with_experts_has_its_place(topology):
    variant = VARIANTS[topology.variant]
    hf = SimpleNamespace(
        num_hidden_layers=variant.num_layers, moe_layer_numbers=variant.moe_layer_numbers
    )
    model = ModelSection(hf_checkpoint=".", **topology.model)
    assert not model.transformer_overrides, "a setting with a flag of its own is set by it"
    assert set(topology.recomputed_layers(hf)) <= set(variant.moe_layer_numbers)
