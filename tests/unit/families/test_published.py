"""Published models of the package stand for checkpoints that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3train.families.read_facts import read_hf_facts
from r3train.families import FAMILIES, weights_of
from r3train.families.checks.family_checks import check_family
from r3train.families.published import PUBLISHED, config_directory, published_names


def test_every_family_has_a_published_model_that_its_checks_take():
    facts = [read_hf_facts(PUBLISHED / name) for name in published_names()]
    for hf in facts:
        check_family(hf)
        assert weights_of(hf).shapes()
    assert {hf.model_type for hf in facts} == FAMILIES.keys()


@pytest.mark.parametrize(
    "name, model",
    [
        ("Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("DeepSeek-V3-bf16", "DeepSeek-V3"),
        ("DeepSeek-V3.2-Exp", "DeepSeek-V3.2"),
        ("DeepSeek-V3.1", None),
        ("model", None),
    ],
)
def test_a_checkpoint_that_is_not_here_is_known_by_the_name_that_its_own_begins_with(name, model):
    if model is None:
        with pytest.raises(ValueError, match="no such file .* no published model .* DeepSeek-V3, "):
            config_directory(Path("models") / name)
        return
    found, note = config_directory(Path("models") / name)
    assert found == PUBLISHED / model and f"models/{name}: not here; {model}'s" in note


def test_a_checkpoints_own_configuration_comes_first(tmp_path):
    own = tmp_path / "Qwen3-30B-A3B"
    own.mkdir()
    assert config_directory(own)[0] == PUBLISHED / "Qwen3-30B-A3B"
    (own / "config.json").write_text("{}")
    assert config_directory(own) == (own, "")
