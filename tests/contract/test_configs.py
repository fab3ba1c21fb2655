"""Every recipe in configs/ is valid, and stays so."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3train.config import RunConfig
from r3train.families.checks.settings_checks import check_model, prompt_limit
from r3train.config.cross_checks import check_static
from tests.unit.hf_model import facts

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("**/*.toml"))


QWEN3_30B_A3B = facts(
    path=Path("Qwen3-30B-A3B"),
    num_hidden_layers=48,
    num_experts=128,
    num_experts_per_tok=8,
    vocab_size=151936,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=40960,
    moe_layer_numbers=tuple(range(1, 49)),
    eos_token_ids=(151645, 151643),
)


def test_there_are_recipes():
    assert {path.name for path in RECIPES} >= {"tiny_cpu.toml", "qwen3_30b_a3b.toml"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_resolved_form_reads_back_the_same(path, tmp_path):
    config = RunConfig.from_toml(path)
    saved = tmp_path / "config.toml"
    saved.write_text(config.to_toml())
    assert RunConfig.from_toml(saved) == config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_head_has_its_commands_and_what_a_step_of_it_takes(path):
    schema, *head = path.read_text().split("[model]")[0].splitlines()
    assert schema == "#:schema ../r3train.schema.json"
    for said in (
        f"r3train train --config {path.stem}",
        f"CONFIG={path.stem} ",
        "sbatch",
        "# A step",
    ):
        assert said in "\n".join(head), said


def test_the_demo_fits_two_ranks_with_r3_and_with_the_check():
    config = RunConfig.from_toml(
        CONFIGS / "tiny_cpu.toml",
        {"use_rollout_routing_replay": True, "enable_r3_correctness_check": True},
    )
    check_static(config, 2)
    check_model(config, facts(), 2)
    assert config.r3_check_enabled
    assert config.parallel.expert_model_parallel_size == 2


def test_the_demo_does_not_fit_three_ranks():
    with pytest.raises(ValueError, match="world size 3 is not a multiple"):
        check_static(RunConfig.from_toml(CONFIGS / "tiny_cpu.toml"), 3)


def test_the_30b_recipe_fits_eight_gpus():
    config = RunConfig.from_toml(CONFIGS / "qwen3_30b_a3b.toml")
    check_static(config, 8)
    check_model(config, QWEN3_30B_A3B, 8)
    assert prompt_limit(config, QWEN3_30B_A3B) == (2048, "rollout_max_prompt_len 2048")
    assert config.steps_per_rollout == 1


def test_the_demo_is_judged_by_the_default_threshold():
    config = RunConfig.from_toml(CONFIGS / "tiny_cpu.toml")
    assert config.mismatch_threshold == 1e-2
    assert config.rollout.max_weight_staleness == 1  # its rows are a step old
