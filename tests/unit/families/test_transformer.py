"""Megatron's configuration from config.json: keys that it may leave out, and keys that it may not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3train.families.hf_facts import HfModelFacts
from r3train.families.read_facts import read_hf_facts
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.families import FAMILIES, tensor_shapes
from r3train.families.checks.family_checks import family_conflicts
from r3train.families.family import model_arguments, transformer_fields
from r3train.families.published import PUBLISHED, published_names
from r3train.families.transformer import DEFAULTS


def published(directory: Path, model: str, **changes: Any) -> HfModelFacts:
    """Write a published config.json with keys that are changed, or left out where they are ``...``."""
    config = json.loads((PUBLISHED / model / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return read_hf_facts(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_default_of_a_family_is_that_of_transformers(family):
    declare_torchvision_ops()
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[FAMILIES[family].read_as or family]().get_text_config()
    rope = getattr(config, "rope_parameters", {})
    # Nemotron-H has no positions, and another key for its norms
    defaults = {} if family == "nemotron_h" else DEFAULTS
    for key, value in (defaults | FAMILIES[family].defaults).items():
        # a key that transformers' class lacks has one value: what it computes
        fixed = FAMILIES[family].needs.get(key, (None, ...))[1]
        theirs = rope[key] if key in rope else getattr(config, key, fixed)
        # for null they take one group
        assert (1 if theirs is None else theirs) == value, key


def built(hf: HfModelFacts) -> dict[str, Any]:
    """Return what Megatron is given of a config.json, but for the width of dense layers: that their tensors show."""
    family = FAMILIES[hf.model_type]
    made = transformer_fields(family, hf) | model_arguments(family, hf)
    return {name: value for name, value in made.items() if name != "ffn_hidden_size"}


@pytest.mark.parametrize("model", published_names())
def test_a_key_that_transformers_fills_in_is_filled_in_alike_or_shows(model, tmp_path):
    """Also a default that no table has, such as gpt-oss's pattern of windows; other tensors show, and a refusal."""
    declare_torchvision_ops()
    from transformers import CONFIG_MAPPING

    hf = published(tmp_path, model)
    config, made = json.loads((tmp_path / "config.json").read_text()), built(hf)
    for key in config.keys() - {"model_type"}:
        try:
            lacking = published(tmp_path, model, **{key: ...})
            if built(lacking) == made or any(family_conflicts(lacking)):
                continue
        except ValueError:
            continue
        if tensor_shapes(lacking) == tensor_shapes(hf):
            left = {name: value for name, value in config.items() if name != key}
            name = FAMILIES[hf.model_type].read_as or hf.model_type
            assert getattr(CONFIG_MAPPING[name].from_dict(left), key, None) != config[key], key


@pytest.mark.parametrize(
    "model, key, named",
    [
        ("Qwen3-30B-A3B", "moe_intermediate_size", "moe_intermediate_size"),
        ("DeepSeek-V3", "v_head_dim", "v_head_dim"),
        ("DeepSeek-V3", "n_group", "n_group"),
        ("Qwen3-Next-80B-A3B", "linear_num_key_heads", "linear_num_key_heads"),
    ],
)
def test_a_size_that_is_missing_is_refused_by_name(model, key, named, tmp_path):
    hf = published(tmp_path, model, **{key: ...})
    assert f"{tmp_path}/config.json: key {named} is missing" in list(family_conflicts(hf))


def test_heads_share_the_hidden_size_where_config_json_has_no_width_of_theirs(tmp_path):
    hf = published(tmp_path, "Mixtral-8x7B", head_dim=None)
    assert transformer_fields(FAMILIES["mixtral"], hf)["kv_channels"] == 128


def test_positions_are_read_where_releases_and_transformers_5_have_them(tmp_path):
    family = FAMILIES["qwen3_moe"]
    released = published(tmp_path, "Qwen3-30B-A3B", rope_theta=5.0)
    assert model_arguments(family, released)["rotary_base"] == 5.0
    rope = {"rope_type": "default", "rope_theta": 7.0}
    saved = published(tmp_path, "Qwen3-30B-A3B", rope_theta=..., rope_parameters=rope)
    assert model_arguments(family, saved)["rotary_base"] == 7.0


def test_null_groups_are_one_group(tmp_path):
    hf = published(tmp_path, "DeepSeek-V3", n_group=None, topk_group=None)
    fields = transformer_fields(FAMILIES["deepseek_v3"], hf)
    assert "moe_router_num_groups" not in fields
    family = replace(FAMILIES["deepseek_v3"], defaults={"n_group": 2, "topk_group": 1})
    hf = published(tmp_path, "DeepSeek-V3", n_group=..., topk_group=...)
    assert transformer_fields(family, hf)["moe_router_num_groups"] == 2


@pytest.mark.parametrize(
    "model, changes, said",
    [
        ("DeepSeek-V3", {"rope_scaling": {"type": "yarn"}}, "rope_scaling: key factor is missing"),
        ("DeepSeek-V3", {"rope_scaling": 4}, "key rope_scaling must hold a JSON object, got 4"),
        ("DeepSeek-V3", {"n_group": "8"}, "key n_group must be an integer of at least 1, got '8'"),
        ("gpt-oss-20b", {"sliding_window": 0}, "key sliding_window must be an integer of at"),
        ("MiniMax-M2", {"head_dim": 0.5}, "key head_dim must be an integer of at least 1"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(model, changes, said, tmp_path):
    hf = published(tmp_path, model, **changes)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/config.json: {said}")):
        transformer_fields(FAMILIES[hf.model_type], hf)
