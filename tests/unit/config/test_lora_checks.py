"""Rules of LoRA: each is broken once; and the tensors that get an adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from r3train.families.checks.settings_checks import check_model
from r3train.families.read_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.families import FAMILIES, tensor_names
from r3train.verify.tiny import build
from r3train.families.tiny_options import TinyOptions
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.unit.config.test_config import config

LORA = dict(lora_rank=4)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """Layer 0 is dense; the others have a shared and eight routed experts."""
    return read_hf_facts(write_checkpoint(VARIANTS["glm"], tmp_path_factory.mktemp("glm")))


ADAPTER = LORA | dict(lora_serving="adapter")


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "hy_v3", "ernie4_5_moe", "nemotron_h", "qwen3_next", "qwen3_5_moe"]
)
def test_adapters_that_sglang_does_not_serve_right_are_refused(family, tmp_path):
    build(tmp_path, TinyOptions(family=family))
    hf = read_hf_facts(tmp_path / "model")
    settings = dict(hf_checkpoint=hf.path)
    check_model(config(**settings, **LORA), hf, 1)
    with pytest.raises(ValueError, match=f"was not seen to serve adapters of {family} right"):
        check_model(config(**settings, **ADAPTER), hf, 1)


def test_latent_attention_whose_queries_are_not_compressed_is_not_served_as_adapters(tmp_path):
    for family in ("moonlight", "deepseek_v3"):
        build(tmp_path / family, TinyOptions(family=family))
    whole, compressed = (
        read_hf_facts(tmp_path / family / "model") for family in ("moonlight", "deepseek_v3")
    )
    check_model(config(**ADAPTER), compressed, 1)
    with pytest.raises(ValueError, match="adapters of q_proj and kv_a_proj_with_mqa in joined"):
        check_model(config(**ADAPTER), whole, 1)
    with pytest.raises(ValueError, match="q_a_proj and kv_a_proj_with_mqa as one tensor"):
        check_model(config(**ADAPTER, exclude_modules=["q_a_proj"]), compressed, 1)


@pytest.mark.parametrize(
    "message, fields",
    [
        ("has no w1; it has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj", dict(target_modules=["q_proj", "k_proj", "v_proj", "w1"])),
        ("exclude_modules: .* has no module expert$", dict(exclude_modules=["expert"])),
        ("leave no linear with an adapter", dict(exclude_modules=["layers"])),
        ("self_attn has q_proj and not k_proj: Megatron holds them in one", dict(target_modules=["q_proj", "v_proj", "o_proj"])),
        ("has gate_proj and not up_proj", dict(exclude_modules=["up_proj"])),
        ("7 of the 8 experts of .*layers.1.*: all experts of a layer or none", dict(exclude_modules=["layers.1.mlp.experts.3"])),
        (
            "num_key_value_heads 2 does not divide by tensor_model_parallel_size 4",
            dict(tensor_model_parallel_size=4, sequence_parallel=True),
        ),
    ],
)  # fmt: skip
def test_targets_that_the_model_cannot_have_are_refused(message, fields, glm):
    with pytest.raises(ValueError, match=f"(?m){message}"):
        check_model(config(**LORA, **fields), glm, fields.get("tensor_model_parallel_size", 1))


def test_all_linear_is_attention_dense_shared_and_every_routed_expert(glm):
    from r3train.hf_checkpoint import read_headers

    names = read_headers(glm.path)
    targets = LoraSection(**LORA).targets(names)
    left = {n for n in names if n not in targets}
    assert len(targets) == 4 * 4 + 3 + 3 * (3 + 3 * 8)
    assert all(
        any(part in n for part in ("norm", "bias", "embed", "lm_head", "mlp.gate.weight"))
        for n in left
    )
    without = LoraSection(**LORA, exclude_modules=["experts", "layers.2"]).targets(names)
    assert without == {n for n in targets if ".experts." not in n and ".layers.2." not in n}
    check_model(config(**LORA), glm, 1)


def test_adapters_of_a_family_in_which_nobody_verified_them_are_refused(glm, monkeypatch):
    check_model(config(**LORA), glm, 1)
    monkeypatch.setitem(FAMILIES, "glm4_moe", replace(FAMILIES["glm4_moe"], lora=False))
    with pytest.raises(ValueError, match="no adapters of glm4_moe; there are those of deepseek_v2"):
        check_model(config(**LORA), glm, 1)


@pytest.mark.parametrize(
    "family, attention",
    [
        ("moonlight", {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
        ("glm4_moe_lite", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    ],
)
def test_latent_attention_has_an_adapter_on_every_projection(family, attention, tmp_path):
    build(tmp_path / "tiny", TinyOptions(family=family))
    hf = read_hf_facts(tmp_path / "tiny" / "model")
    targets = LoraSection(**LORA).targets(tensor_names(hf))
    assert {n.split(".")[-2] for n in targets if ".self_attn." in n} == attention
    check_model(config(**LORA), hf, 1)
    check_model(config(**LORA, tensor_model_parallel_size=2, sequence_parallel=True), hf, 2)
    if "q_a_proj" in attention:
        for excluded in (dict(exclude_modules=["q_a_proj"]), dict(target_modules=["q_a_proj"])):
            with pytest.raises(ValueError, match="q_a_proj and kv_a_proj_with_mqa as one tensor"):
                check_model(config(**LORA, **excluded), hf, 1)


def test_experts_of_one_tensor_a_layer_are_targets_by_that_tensors_name(tmp_path):
    build(tmp_path / "tiny", TinyOptions(family="gpt_oss", num_layers=1))
    hf = read_hf_facts(tmp_path / "tiny" / "model")
    names, experts = tensor_names(hf), "model.layers.0.mlp.experts"
    check_model(config(**LORA), hf, 1)
    targets = LoraSection(**LORA).targets(names)
    assert {n for n in targets if ".mlp." in n} == {
        f"{experts}.{n}_proj" for n in ("gate_up", "down")
    }
    alone = LoraSection(**LORA, target_modules=["gate_up_proj"]).targets(names)
    assert alone == {f"{experts}.gate_up_proj"}
    for module in ("experts", "mlp.experts", "mlp"):
        left = LoraSection(**LORA, exclude_modules=[module]).targets(names)
        assert len(left) == 4 and all(".self_attn." in n for n in left)
    with pytest.raises(ValueError, match="has no gate_proj; it has .*gate_up_proj"):
        check_model(config(**LORA, target_modules=["gate_proj"]), hf, 1)


def test_projections_of_a_delta_net_are_targets_together(tmp_path):
    build(tmp_path / "tiny", TinyOptions(family="qwen3_5_moe"))
    hf = read_hf_facts(tmp_path / "tiny" / "model")
    check_model(config(**LORA), hf, 1)
    net = "model.language_model.layers.0.linear_attn"
    said = (
        f"target_modules: {net} has in_proj_qkv and not in_proj_z, in_proj_b: Megatron holds them"
    )
    with pytest.raises(ValueError, match=said):
        check_model(config(**LORA, exclude_modules=["in_proj_z", "in_proj_b"]), hf, 1)


@pytest.mark.parametrize(
    "mode, alone", [("distributed", True), ("disk", False), ("shared_memory", False)]
)
def test_adapted_tensors_go_out_alone_only_where_a_server_reads_no_files(mode, alone):
    assert config(lora_rank=4, update_weight_transfer_mode=mode).may_send_targets_alone is alone
    assert not config(update_weight_transfer_mode=mode).may_send_targets_alone
