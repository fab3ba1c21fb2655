"""Families that nobody verified, and checkpoints that hold more or less than the actor trains."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from r3train.families.checks.settings_checks import check_model
from r3train.families.read_facts import read_hf_facts
from r3train.families import (
    DENSE_NAMES,
    FAMILIES,
    TINY_MODELS,
    TINY_NAMES,
    sent_together,
    tensor_shapes,
)
from r3train.families.checks.family_checks import check_family, untrained_parts
from r3train.families.published import published_names
from r3train.hf_checkpoint import copy_all_but_weights, is_trained, read_headers
from r3train.verify.tiny import build
from r3train.families.tiny_options import TinyOptions
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from tests.published import shapes_of, write_checkpoint, write_config
from tests.unit.config.test_config import config
from tests.unit.launch.test_preflight import start

PAGE = Path(__file__).parents[3] / "docs/guide/models.md"


@pytest.fixture
def model_dir(tiny, tmp_path) -> Path:
    """A copy of the demo's model and prompts, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))


def refused(directory: Path) -> str:
    """Return the words of the dry run, which must refuse the checkpoint."""
    result = start(directory, "--dry-run")
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def change(directory: Path, **keys) -> None:
    file = directory / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize("family", ["phimoe", "gemma3"])
def test_a_family_that_nobody_verified_is_refused_by_name_with_those_that_work(family, model_dir):
    change(model_dir, model_type=family)
    output = refused(model_dir)
    assert f"model_type '{family}' was not verified" in output
    assert f"verified: {', '.join(sorted(FAMILIES))}" in output


@pytest.mark.parametrize(
    "family, keys, is_taken",
    [
        ("qwen3_moe", {"norm_topk_prob": False}, True),
        ("olmoe", {}, True),
        ("deepseek_v2", {}, True),
        ("qwen3_moe", {"norm_topk_prob": True}, False),
        ("mixtral", {}, False),
        ("gpt_oss", {}, False),
        ("glm4_moe", {}, False),
        ("minimax_m2", {}, False),
        ("hy_v3", {}, False),
    ],
)
def test_a_token_has_one_expert_only_where_its_gate_is_a_share_of_all_experts(
    family, keys, is_taken, model_of_family
):
    """Elsewhere transformers' gate is 1, and Megatron's is not, or it refuses to start."""
    hf = read_hf_facts(model_of_family(family, num_experts_per_tok=1, **keys) / "model")
    said = nullcontext() if is_taken else pytest.raises(ValueError, match="num_experts_per_tok")
    with said:
        check_family(hf)


def test_a_model_of_text_and_images_is_refused_by_name_and_not_by_a_missing_key(model_dir):
    file = model_dir / "model" / "config.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": "glm4v_moe", "text_config": text}))
    assert "model_type 'glm4v_moe' is a model of text and images" in refused(model_dir)
    change(model_dir, model_type="qwen3_5_moe", text_config=[])
    assert "key text_config must hold a JSON object, got []" in refused(model_dir)


def test_of_text_and_images_one_is_trained_by_text_alone_and_the_dry_run_says_so(model_of_family):
    model = model_of_family("qwen3_5_moe")
    hf = read_hf_facts(model / "model")
    assert (hf.model_type, hf.num_hidden_layers, hf.num_experts) == ("qwen3_5_moe", 2, 8)
    result = start(model, "--dry-run")
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "qwen3_5_moe: text alone is trained and served, its vision tower does not move" in output


def test_the_published_configuration_of_its_language_model_is_taken(tmp_path):
    model = tmp_path / "published"
    write_checkpoint(model, "Qwen3.5-35B-A3B")
    hf = read_hf_facts(model)
    check_family(hf)
    found = {name: kind.shape for name, kind in read_headers(model).items()}
    assert tensor_shapes(hf) == found
    assert found["model.language_model.layers.0.mlp.experts.gate_up_proj"] == (256, 1024, 2048)
    assert untrained_parts(hf).startswith("1 layer(s) of multi-token prediction are neither")


# in 10^9; those of the other models are in tests/contract/test_recipes.py
PARAMETERS = {
    "DeepSeek-V2-Lite": 15.7,
    "Kimi-K2-Instruct": 1026.4,
    "Kimi-K2.5": 1026.4,
    "MiniMax-M2": 228.7,
    "Mixtral-8x7B": 46.7,
    "OLMoE-1B-7B": 6.9,
    "Qwen2-57B-A14B": 57.4,
    "Nemotron-3-Nano-30B-A3B": 31.6,
    "Qwen3-Next-80B-A3B": 79.7,
    "Qwen3-VL-30B-A3B": 30.5,
}


@pytest.mark.parametrize("model", published_names())
def test_a_published_configuration_is_taken_and_has_the_shapes_of_transformers(model, tmp_path):
    write_config(tmp_path / model, model)
    hf = read_hf_facts(tmp_path / model)
    check_family(hf)
    found, expected = shapes_of(hf.path), tensor_shapes(hf)
    assert found == expected
    count = sum(map(prod, found.values())) / 1e9
    assert count == pytest.approx(PARAMETERS.get(model, count), abs=0.06)
    parts = untrained_parts(hf)
    assert (parts is not None and parts.startswith("3 layer(s)")) == (model == "MiniMax-M2")


def run_the_pages_way_out() -> None:
    """Write ANOTHER from DIRECTORY, both in the working directory, by the page's code."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(code, {})


def test_the_pages_way_out_of_mxfp4_makes_a_checkpoint_that_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "tiny", TinyOptions(family="gpt_oss", num_layers=2))
    source, target = tmp_path / "DIRECTORY", tmp_path / "ANOTHER"
    source.mkdir()
    copy_all_but_weights(tmp_path / "tiny" / "model", source)
    config = json.loads((source / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    kept, scales = {}, {}
    for name, w in load_torch(tmp_path / "tiny" / "model" / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            kept[name] = w.bfloat16()
            continue
        experts, inputs, outputs = w.shape
        groups = experts, outputs, inputs // 32
        kept[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
        scales[f"{name}_scales"] = torch.randint(118, 127, groups, dtype=torch.uint8)
    save_torch(kept, source / "model-1.safetensors")
    save_torch(scales, source / "model-2.safetensors")
    files = dict.fromkeys(kept, "model-1.safetensors") | dict.fromkeys(
        scales, "model-2.safetensors"
    )
    index = json.dumps({"metadata": {}, "weight_map": files})
    (source / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"quantization_config is set \(mxfp4\)"):
        check_family(read_hf_facts(source))
    run_the_pages_way_out()
    check_family(read_hf_facts(target))
    assert {n: kind.shape for n, kind in read_headers(target).items()} == tensor_shapes(
        read_hf_facts(target)
    )
    declare_torchvision_ops()
    from transformers import AutoModelForCausalLM, Mxfp4Config

    plain = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=plain)
    written = load_torch(target / "model-1.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], w) for name, w in model.state_dict().items())


def test_the_pages_way_out_of_fp8_makes_a_checkpoint_that_is_taken(tmp_path, monkeypatch):
    build(tmp_path / "tiny", TinyOptions(family="deepseek_v3", num_layers=2))
    source, target = tmp_path / "DIRECTORY", tmp_path / "ANOTHER"
    source.mkdir()
    copy_all_but_weights(tmp_path / "tiny" / "model", source)
    config = json.loads((source / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": [24, 16]}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    tensors, scales, expected = {}, {}, {}
    for name, w in load_torch(tmp_path / "tiny" / "model" / "model.safetensors").items():
        tensors[name] = expected[name] = w.bfloat16()
        if w.dim() == 2 and "_proj" in name:  # no block is whole at the edges
            rows, columns = (torch.arange(n) for n in w.shape)
            scale = torch.rand(-(-len(rows) // 24), -(-len(columns) // 16)) + 0.5
            tensors[name] = w.to(torch.float8_e4m3fn)
            scales[f"{name}_scale_inv"] = scale
            each = scale[rows[:, None] // 24, columns // 16]
            expected[name] = (tensors[name].float() * each).bfloat16()
    save_torch(tensors, source / "model-1.safetensors")
    save_torch(scales, source / "model-2.safetensors")
    with pytest.raises(ValueError, match=r"quantization_config is set \(fp8\)"):
        check_family(read_hf_facts(source))
    monkeypatch.chdir(tmp_path)
    run_the_pages_way_out()
    hf = read_hf_facts(target)
    check_family(hf)
    assert read_headers(target).keys() == expected.keys()
    written = load_torch(target / "model-1.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert (target / "tokenizer.json").is_file()


@pytest.fixture(scope="module")
def model_of_family(tmp_path_factory):
    """Copies of a tiny model of a family: of(family, **keys of its config.json)."""
    root, made = tmp_path_factory.mktemp("families"), []

    def copy(family: str, **keys) -> Path:
        build(root / family, TinyOptions(family=family, num_layers=2))
        made.append(root / f"copy{len(made)}")
        shutil.copytree(root / family, made[-1])
        change(made[-1], **keys)
        return made[-1]

    return copy


YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}


@pytest.mark.parametrize(
    "family, keys, message",
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        (
            "qwen3_moe",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling has rope_type 'yarn'",
        ),
        (
            "qwen3_moe",
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope_parameters has rope_type 'llama3'",
        ),
        (
            "qwen3_moe",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is set (fp8)",
        ),
        (
            "qwen3_moe",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config is set (mxfp4)",
        ),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave is True"),
        ("deepseek_v32", {"index_topk": None}, "key index_topk"),
        ("glm_moe_dsa", {"indexer_rope_interleave": None}, "indexer_rope_interleave is None"),
        ("deepseek_v32", {"index_topk_freq": 4}, "index_topk_freq is 4"),
        ("glm_moe_dsa", {"indexer_types": ["full", "none"]}, "2 of full, shared, one per layer"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "2 of full, shared, one per layer"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, "without (S) are SF; Megatron has"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FX"}, "must hold 2 of F, S"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 0}, "index_topk_freq must be"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads is 2, expected 4"),
        ("moonlight", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("moonlight", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("moonlight", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v3", {"rope_parameters": YARN}, "mscale 1.0 and mscale_all_dim 0.5"),
        (
            "kimi_k2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "mscale None and mscale_all_dim None",
        ),
        (
            "gpt_oss",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_type is 'default', expected 'yarn'",
        ),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is None, expected a number"),
        (
            "kimi_k2",  # as releases write it
            {"rope_parameters": None, "rope_scaling": {**YARN, "type": "yarn"}},
            "mscale 1.0 and mscale_all_dim 0.5",
        ),
        ("deepseek_v3", {"topk_group": 2}, "topk_group 2, expected twice as many experts"),
        ("minimax_m2", {"use_qk_norm": None}, "use_qk_norm is None"),
        ("minimax_m2", {"rotary_dim": 4}, "rotary_dim is 4, expected 8"),
        ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha is 2.0"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is None"),
        ("qwen3_next", {"partial_rotary_factor": 0.25}, "SGLang rotates 0.25 of a head"),
        ("qwen3_next", {"full_attention_interval": 2}, "what SGLang takes from full_attention"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "must hold 2 entries, one per layer"),
        ("nemotron_h", {"hybrid_override_pattern": "ME*"}, "must hold 2 letters of M, *, E and -"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "one per layer, got 'MX'"),
        ("nemotron_h", {"hybrid_override_pattern": 5, "n_routed_experts": 0}, "per layer, got 5"),
        ("nemotron_h", {"hybrid_override_pattern": None}, "hybrid_override_pattern is missing"),
        ("nemotron_h", {"hybrid_override_pattern": "E-"}, "has a '-'"),
        ("nemotron_h", {"layers_block_type": ["mamba"]}, "layers_block_type is ['mamba']"),
        ("nemotron_h", {"mamba_n_groups": 4}, "n_groups is 2, and SGLang takes 4"),
        ("nemotron_h", {"mamba_d_conv": 3}, "conv_kernel is 4, and SGLang takes 3"),
        ("nemotron_h", {"moe_latent_size": 16}, "moe_latent_size is 16"),
        ("ernie4_5_moe", {"moe_num_experts": None}, "key moe_num_experts is missing"),
        ("ernie4_5_moe", {"moe_k": "2"}, "key moe_k must be an integer of at least 1, got '2'"),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0}, "key moe_num_shared_experts must be"),
        ("ernie4_5_moe", {"moe_layer_end_index": 0}, "moe_layer_end_index is 0, expected 1"),
        ("ernie4_5_moe", {"moe_layer_start_index": None}, "moe_layer_start_index is missing"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval is 2"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3"}},
            "low_freq_factor of scaled positions",
        ),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        # of the language model within
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_5_moe", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("qwen3_5_moe", {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ("qwen3_5_moe", {"partial_rotary_factor": 0.25}, "SGLang rotates 0.25 of a head"),
        ("qwen3_5_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_vl_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("kimi_k25", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("kimi_k25", {"architectures": None}, "text_config needs architectures ['DeepseekV3"),
    ],
)
def test_a_setting_of_a_family_that_was_not_verified_is_refused(
    family, keys, message, model_of_family
):
    model = model_of_family(family) / "model"
    text = json.loads((model / "config.json").read_text()).get("text_config")
    change(model.parent, **(keys if text is None else {"text_config": text | keys}))
    with pytest.raises(ValueError, match=re.escape(message)):
        check_family(read_hf_facts(model))


@pytest.mark.parametrize("family", [name for name in TINY_NAMES if name != "qwen3_moe"])
def test_a_tiny_model_of_every_family_passes_the_dry_run(family, model_of_family):
    result = start(model_of_family(family), "--dry-run")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("family", DENSE_NAMES)
def test_a_dense_model_is_taken_without_the_flags_of_r3_and_refused_with_them(
    family, model_of_family
):
    model, dense = model_of_family(family), "--expert-model-parallel-size 1".split()
    message = start(model, *dense, "--dry-run").output
    assert f"{family} without experts, so there is no routing to replay" in message
    without = start(model, *dense, "--no-use-rollout-routing-replay", "--dry-run")
    assert without.exit_code == 0, without.output


@pytest.mark.parametrize(
    "family, field",
    [
        ("gpt_oss", "expert_tensor_parallel_size"),
        ("nemotron_h", "context_parallel_size"),
    ],
)
def test_a_topology_in_which_a_family_was_not_verified_is_refused(family, field, model_of_family):
    flag = f"--{field.replace('_', '-')} 2: {family} needs 1"
    with pytest.raises(ValueError, match=flag):
        check_model(config(**{field: 2}), read_hf_facts(model_of_family(family) / "model"), 2)


@pytest.mark.parametrize(
    "kinds, stages, first",
    [("FFSF", 2, 3), ("FFFS", 4, 4), ("FSFS", 2, None), ("FFFF", 4, None)],
)
def test_a_stage_that_begins_with_a_layer_without_an_indexer_is_refused(
    kinds, stages, first, tmp_path
):
    build(tmp_path / "tiny", TinyOptions(family="glm_moe_dsa"))
    change(tmp_path / "tiny", indexer_types=[{"F": "full", "S": "shared"}[kind] for kind in kinds])
    hf, asked = read_hf_facts(tmp_path / "tiny/model"), config(pipeline_model_parallel_size=stages)
    if first is None:
        return check_model(asked, hf, stages)
    with pytest.raises(ValueError, match=f"stage begins with layer {first} of .* has no indexer"):
        check_model(asked, hf, stages)


def test_context_parallel_ranks_share_the_heads_of_linear_attention(model_of_family):
    hf = read_hf_facts(model_of_family("qwen3_next", linear_num_key_heads=4) / "model")
    both = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    check_model(config(**both, context_parallel_size=2), hf, 4)
    with pytest.raises(ValueError) as refused:
        check_model(config(**both, context_parallel_size=4), hf, 8)
    assert str(refused.value).startswith(
        "--tensor-model-parallel-size 2 times --context-parallel-size 4 does not divide"
        " linear_num_key_heads 4 of qwen3_next: "
    )


@pytest.mark.parametrize(
    "family, key, heads",
    [
        ("minimax_m2", "num_key_value_heads", 2),
        ("qwen3_next", "num_key_value_heads", 2),
        ("qwen3_next", "linear_num_key_heads", 2),
        ("nemotron_h", "n_groups", 2),
    ],
)
def test_more_tensor_ranks_than_a_familys_own_layers_can_be_cut_for_are_refused(
    family, key, heads, model_of_family
):
    keys = {name: 4 for name in ("num_key_value_heads", "linear_num_key_heads") if name != key}
    asked = config(tensor_model_parallel_size=4, sequence_parallel=True)
    with pytest.raises(ValueError) as refused:
        check_model(asked, read_hf_facts(model_of_family(family, **keys) / "model"), 4)
    assert str(refused.value).startswith(
        f"--tensor-model-parallel-size 4 does not divide {key} {heads} of {family}: "
    )
    # Megatron's own attention shares a key head between ranks
    check_model(asked, read_hf_facts(model_of_family("glm4_moe") / "model"), 4)


def test_layers_of_token_prediction_are_named_as_neither_trained_nor_exported(model_of_family):
    result = start(model_of_family("moonlight", num_nextn_predict_layers=1), "--dry-run")
    output = " ".join(result.output.split())
    assert "1 layer(s) of multi-token prediction are neither served nor trained" in output


def test_tensors_that_the_server_loads_as_one_are_sent_together(model_of_family):
    pairs = sent_together(read_hf_facts(model_of_family("deepseek_v3") / "model"))
    assert [tuple(name.split(".", 4)[4] for name in pair) for pair in pairs] == [
        ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    ] * 2
    assert not sent_together(
        read_hf_facts(model_of_family("moonlight") / "model")
    )  # queries as they are


def test_a_tensor_that_would_be_neither_loaded_nor_exported_is_refused(model_dir):
    file = model_dir / "model" / "model.safetensors"
    weights = load_file(file)
    gate = "model.layers.1.mlp.shared_expert_gate.weight"
    save_file(weights | {gate: weights["model.norm.weight"]}, file)
    assert f"{gate}: would be neither loaded nor exported" in refused(model_dir)


def test_a_tensor_that_is_missing_is_refused(model_dir):
    file = model_dir / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.3.mlp.experts.7.up_proj.weight"]
    save_file(weights, file)
    assert "model.layers.3.mlp.experts.7.up_proj.weight: missing" in refused(model_dir)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_the_shapes_by_config_json_are_those_that_transformers_writes(family, model_of_family):
    hf = read_hf_facts(model_of_family(family) / "model")
    kinds = read_headers(hf.path).items()
    found = {name: kind.shape for name, kind in kinds if is_trained(name, hf)}
    assert tensor_shapes(hf) == found  # every size of the tiny models is known


def test_a_size_that_config_json_does_not_say_is_refused(model_dir):
    change(model_dir, moe_intermediate_size=None)
    assert "config.json: key moe_intermediate_size is missing" in refused(model_dir)


def test_experts_under_an_unknown_key_are_refused(model_dir):
    change(model_dir, num_local_experts=None, num_experts=None, experts=8)
    assert "config.json: key num_experts is missing" in refused(model_dir)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def shrink(name: str, change):
    def damage(file: Path) -> None:
        weights = load_file(file)
        save_file(weights | {name: change(weights[name])}, file)

    return damage


@pytest.mark.parametrize(
    "damage, message",
    [
        (cut, "model.safetensors: not a whole safetensors file, cut?"),
        (lambda file: file.write_bytes(b""), "model.safetensors: not a whole safetensors file"),
        (Path.unlink, "no *.safetensors file"),
        (lambda file: file.write_bytes(b"\xff" * 64), "model.safetensors: not a whole safetensors"),
        (
            shrink("model.layers.2.mlp.experts.5.down_proj.weight", lambda w: w[:, :-1].copy()),
            "model.layers.2.mlp.experts.5.down_proj.weight has the shape [64, 31],"
            " expected [64, 32] by config.json",
        ),
        (
            shrink("model.embed_tokens.weight", lambda w: w[:60].copy()),
            "model.embed_tokens.weight has the shape [60, 64], expected [64, 64]",
        ),
        (
            shrink("model.norm.weight", lambda w: w.astype("int32")),
            "model.norm.weight is int32, expected one of float64, float32",
        ),
    ],
)
def test_weights_that_no_server_could_load_are_refused_in_one_line(damage, message, model_dir):
    damage(model_dir / "model" / "model.safetensors")
    output = refused(model_dir)
    assert message in output and "Traceback" not in output


def test_a_size_of_another_model_in_config_json_names_how_many_tensors_differ(model_dir):
    change(model_dir, moe_intermediate_size=48)
    assert "expected [64, 48] by config.json (96 such tensors)" in refused(model_dir)


def test_layers_of_token_prediction_and_rotary_frequencies_may_be_there(model_dir):
    file = model_dir / "model" / "model.safetensors"
    weights = load_file(file)
    extra = ("model.layers.4.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    save_file(weights | {name: weights["model.norm.weight"] for name in extra}, file)
    result = start(model_dir, "--dry-run")
    assert result.exit_code == 0, result.output
