"""The doctor on SGLang's tuned blocks for a server's experts: found, not found, in a folder of the user's own, not asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.families.read_facts import read_hf_facts
from r3train.doctor import kernels
from r3train.launch.job.finding import OK, WARNING, Finding
from tests.published import RECIPES, write_config
from tests.unit.doctor_setups import ROOT

H100 = kernels.CARDS["H100"]


def recipe(tmp_path: Path, file: str, **sglang: Any) -> tuple[RunConfig, HfModelFacts]:
    (found,) = [recipe for recipe in RECIPES if recipe.file == file]
    write_config(tmp_path / "model", found.model)
    config = RunConfig.from_toml(found.path, {"hf_checkpoint": str(tmp_path / "model")})
    flags = {**config.rollout.sglang, **sglang}
    rollout = config.rollout.model_copy(update={"sglang": flags})
    return config.model_copy(update={"rollout": rollout}), read_hf_facts(tmp_path / "model")


def said(config: RunConfig, hf: HfModelFacts, card: str | None = H100, **environ: str) -> list:
    return list(kernels.check_tuned_experts(config, hf, card, environ))


def test_a_tuned_file_is_named_with_the_versions_that_have_it(tmp_path):
    (found,) = said(*recipe(tmp_path, "qwen3_30b_a3b_one_node", tp_size=4))
    assert found.level == OK and found.text.startswith("E=128,N=192,device_name=NVIDIA_H100_80GB")
    assert "triton_3_2_0" in found.text


def test_none_is_a_warning_that_names_the_file_the_variable_and_the_page(tmp_path):
    (found,) = said(*recipe(tmp_path, "gpt_oss_20b_one_node", tp_size=1))
    assert found.level == WARNING and "E=32,N=2880,device_name=NVIDIA_H100_80GB" in found.text
    assert "SGLANG_MOE_CONFIG_DIR" in found.remedy and "r3train docs gpus" in found.remedy


def test_a_folder_of_the_users_own_counts_in_place_of_sglangs(tmp_path):
    config, hf = recipe(tmp_path, "gpt_oss_20b_one_node", tp_size=1)
    name = "E=32,N=2880,device_name=NVIDIA_H100_80GB_HBM3.json"
    folder = tmp_path / "tuned/configs/triton_3_8_0"
    folder.mkdir(parents=True)
    own = {"SGLANG_MOE_CONFIG_DIR": str(tmp_path / "tuned")}
    assert said(config, hf, **own)[0].level == WARNING
    (folder / name).write_text(json.dumps({}))
    (found,) = said(config, hf, **own)
    assert found.level == OK and found.text == f"{name}, triton_3_8_0"


@pytest.mark.parametrize(
    "sglang, expected",
    [
        ({"tp_size": 2, "disable_shared_experts_fusion": False}, (65, 768)),
        ({"tp_size": 4, "disable_shared_experts_fusion": False}, (65, 384)),
        ({"tp_size": 2, "disable_shared_experts_fusion": True}, (64, 768)),
        ({"tp_size": 4, "ep_size": 2, "disable_shared_experts_fusion": False}, (32, 768)),
        ({"moe_runner_backend": "deep_gemm"}, None),
        ({"moe_a2a_backend": "deepep"}, None),
    ],
)
def test_experts_of_a_gpu_follow_from_the_servers_flags(sglang, expected, tmp_path):
    config, hf = recipe(tmp_path, "glm_4_7_flash_one_node", **sglang)
    assert kernels.server_experts(config, hf) == expected


def test_nothing_is_said_of_an_unknown_card_or_a_server_of_unknown_size(tmp_path):
    assert not said(*recipe(tmp_path, "gpt_oss_20b_one_node"), card=None)
    config, hf = recipe(tmp_path / "elsewhere", "gpt_oss_20b")
    assert "tp_size" not in config.rollout.sglang and not said(config, hf)


def test_the_doctor_asks_for_a_card_that_it_is_told(tiny):
    args = ["doctor", "--json", "--config", str(ROOT / "configs/tiny_cpu.toml")]
    args += ["--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl")]
    args += ["--use-rollout-routing-replay"]
    for card, level in (("H200", WARNING), (None, None)):
        words = [*args, "--gpu", card] if card else args
        found = json.loads(CliRunner().invoke(main, words).output)
        tuned = [Finding(**each) for each in found if each["subject"] == "tuned experts"]
        assert [each.level for each in tuned] == [level] * bool(card), tuned


def test_of_a_model_that_is_not_here_the_published_configuration_counts():
    words = ["doctor", "--json", "--config", "gpt_oss_20b_one_node", "--gpu", "H100"]
    words += ["--sglang-tp-size", "1"]
    found = json.loads(CliRunner().invoke(main, words).output)
    (tuned,) = [each for each in found if each["subject"] == "tuned experts"]
    assert tuned["level"] == WARNING and "E=32,N=2880" in tuned["text"]
