"""Kernels that the actor asks Megatron for on CUDA with Transformer Engine, for every recipe's model."""

from __future__ import annotations

import pytest
import torch

from r3train.config import RunConfig
from r3train.families.checks.settings_checks import check_model
from r3train.families.read_facts import read_hf_facts
from r3train.config.model_settings import TE_KERNELS
from r3train.config.sources import ConfigError
from r3train.cpu.device import prepare_device
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from tests.published import RECIPES, Recipe, write_config

prepare_device()
declare_torchvision_ops()

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

from r3train.trainer.megatron import model, transformer_config  # noqa: E402

# Megatron's fused kernel is for rotary positions of heads, without yarn
ROPE = dict.fromkeys(
    (
        "qwen3_30b_a3b",
        "qwen3_30b_a3b_one_node",
        "qwen3_30b_a3b_colocated",
        "qwen3_30b_a3b_two_nodes",
        "qwen3_5_35b_a3b_two_nodes",
        "qwen3_5_35b_a3b_one_node",
        "glm_4_5_air",
        "mixtral_8x7b",
        "qwen2_57b_a14b",
        "minimax_m2",
        "olmoe_1b_7b_one_node",
        "olmoe_1b_7b_one_gpu",
        "qwen3_1_7b_one_gpu",
    ),
    True,
)


@pytest.fixture
def engine_is_there(monkeypatch):
    """Let Megatron find what it looks for of Transformer Engine when it checks a configuration."""
    for name in ("permute", "permute_with_probs", "unpermute"):
        monkeypatch.setattr(moe_utils, f"fused_{name}", print, raising=False)
    for name in ("index", "index_with_probs"):
        monkeypatch.setattr(moe_utils, f"fused_sort_chunks_by_{name}", print, raising=False)
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, print)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.file)
def test_fused_kernels_are_on_where_they_compute_the_same(
    recipe: Recipe, engine_is_there, tmp_path
):
    directory = tmp_path / recipe.model
    write_config(directory, recipe.model)
    config = RunConfig.from_toml(recipe.path, {"hf_checkpoint": str(directory)})
    hf = read_hf_facts(directory)
    for device, use_te, fused in (
        ("cuda", True, True),
        ("cpu", True, False),
        ("cpu", False, False),
    ):
        fields = model.transformer_overrides_of(config, hf, use_te, torch.device(device))
        built = transformer_config.build_transformer_config(
            hf, config.parallel, torch.bfloat16, fields
        )
        assert built.apply_rope_fusion == (fused and ROPE.get(recipe.file, False))
        assert built.moe_permute_fusion == (fused and hf.is_moe)
        # but gpt-oss's, which has biases and a limit
        assert built.bias_activation_fusion == (use_te and hf.model_type != "gpt_oss")
        assert (
            built.gradient_accumulation_fusion == built.disable_parameter_transpose_cache == fused
        )
        assert built.attention_backend.name == "auto"
        for kernels in TE_KERNELS:
            one = config.model.model_copy(update={"attention_backend": kernels})
            other = config.model_copy(update={"model": one})
            fields = model.transformer_overrides_of(other, hf, use_te, torch.device(device))
            assert fields["attention_backend"].name == kernels
    # one rank has nobody to wait for
    overlaps = config.parallel.overlap_grad_reduce, config.parallel.overlap_param_gather
    assert overlaps == (recipe.num_gpus > 1,) * 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.file)
def test_fused_rotary_positions_are_refused_where_they_would_not(recipe: Recipe, tmp_path):
    directory = tmp_path / recipe.model
    write_config(directory, recipe.model)
    config = RunConfig.from_toml(
        recipe.path,
        {"hf_checkpoint": str(directory), "transformer_overrides": {"apply_rope_fusion": True}},
    )
    try:
        check_model(config, read_hf_facts(directory), recipe.num_gpus)
        assert ROPE.get(recipe.file)
    except ConfigError as error:
        assert "apply_rope_fusion cannot be on for" in str(error) and not ROPE.get(recipe.file)
