"""PEFT directories that a run may start from, and those that it refuses by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3train.families.read_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.hf_checkpoint import WeightIndex, check_tensors, kind_of, read_headers
from r3train.peft_files import (
    CONFIG,
    TENSORS,
    AdapterFile,
    check_adapter,
    not_in_peft,
    packed_name,
    saved_forms,
    write_adapter,
)
from r3train.verify.tiny import build
from r3train.families.tiny_options import TinyOptions
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.drawn_adapters import drawn

LORA = dict(lora_rank=4, lora_alpha=8.0, target_modules=["gate_proj", "up_proj", "down_proj"])
EXPERT = "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return read_hf_facts(write_checkpoint(VARIANTS["glm"], tmp_path_factory.mktemp("glm")))


@pytest.fixture
def settings(base, tmp_path) -> LoraSection:
    """Settings of a run that starts from an adapter which fits it."""
    settings, kinds = LoraSection(**LORA), read_headers(base.path)
    factors = {}
    for name in settings.targets(kinds):
        (rows, columns), path = kinds[name].shape, name.removesuffix(".weight")
        factors[f"{path}.lora_A"] = torch.randn(4, columns)
        factors[f"{path}.lora_B"] = torch.randn(rows, 4)
    write_adapter(factors.items(), tmp_path / "adapter", settings, base)
    return LoraSection(**LORA, lora_adapter_path=tmp_path / "adapter")


def test_what_was_written_is_accepted_and_read_back(base, settings):
    check_adapter(settings, base)
    saved = load_file(settings.lora_adapter_path / TENSORS)
    name = EXPERT.removeprefix("base_model.model.").removesuffix(".weight")
    read = AdapterFile(settings.lora_adapter_path).whole(name, (32, 4))
    assert torch.equal(read, saved[EXPERT])
    config = json.loads((settings.lora_adapter_path / CONFIG).read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"]
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8.0, 0.0)


def test_the_packed_form_stacks_a_layers_experts_in_their_order(base, settings, tmp_path):
    whole = load_file(settings.lora_adapter_path / TENSORS)
    factors = [
        (n.removeprefix("base_model.model.").removesuffix(".weight"), t) for n, t in whole.items()
    ]
    # experts come in the order of expert-parallel ranks
    write_adapter(factors[::-1], tmp_path / "packed", settings, base, packed=True)
    packed = load_file(tmp_path / "packed" / TENSORS)
    for e in range(8):
        stack = packed[EXPERT.replace(".experts.3.", ".experts.")]
        assert torch.equal(stack[e], whole[EXPERT.replace(".experts.3.", f".experts.{e}.")])
    assert sum(t.numel() for t in packed.values()) == sum(t.numel() for t in whole.values())
    apart = {name for name in whole if ".experts." not in name}
    assert apart and all(torch.equal(packed[name], whole[name]) for name in apart)
    assert packed_name("a.block_sparse_moe.experts.11.w3.lora_A") == (
        "a.block_sparse_moe.experts.up_proj.lora_A"
    )


def test_the_packed_form_has_the_experts_of_a_tensor_that_holds_them_all(tmp_path):
    build(tmp_path, TinyOptions(family="qwen3_vl_moe", num_layers=1))
    model, settings = tmp_path / "model", LoraSection(lora_rank=4)
    factors = drawn(model, settings)
    write_adapter(factors.items(), tmp_path / "packed", settings, read_hf_facts(model), packed=True)
    packed = load_file(tmp_path / "packed" / TENSORS)
    path = "model.language_model.layers.0.mlp.experts"
    for linear in ("gate_up_proj.lora_A", "gate_up_proj.lora_B", "down_proj.lora_A"):
        whole = packed[f"base_model.model.{path}.{linear}.weight"]
        for e, expert in enumerate(whole):
            assert torch.equal(expert, factors[f"{path}.{e}.{linear}"])
    assert (
        "gate_up_proj" in json.loads((tmp_path / "packed" / CONFIG).read_text())["target_modules"]
    )


def test_layers_of_multi_token_prediction_have_no_adapter(base, settings, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(base.path, model)
    tensors = load_file(model / "model.safetensors")
    layer = f"model.layers.{base.num_hidden_layers}.mlp.up_proj.weight"
    extra = {layer: torch.ones(8, 8), "mtp.layers.0.mlp.up_proj.weight": torch.ones(8, 8)}
    save_file(tensors | extra, model / "model.safetensors", metadata={"format": "pt"})
    published = read_hf_facts(model)
    check_tensors(published)
    check_adapter(settings, published)


@pytest.mark.parametrize(
    "key, value, complaint",
    [
        ("r", 8, "r is 8, and --lora-rank is 4"),
        ("lora_alpha", 16, "lora_alpha is 16, and --lora-alpha is 8.0"),
        ("use_rslora", True, "use_rslora is True: the trainer computes plain LoRA"),
        ("use_dora", True, "use_dora is True"),
        ("rank_pattern", {"q_proj": 8}, "rank_pattern is"),
        ("modules_to_save", ["lm_head"], "modules_to_save is"),
        ("peft_type", "IA3", "peft_type is 'IA3'"),
        ("bias", "all", "bias is 'all'"),
        ("init_lora_weights", "pissa", "init_lora_weights is 'pissa'"),
        ("alora_invocation_tokens", [5], "alora_invocation_tokens is"),
    ],
)
def test_another_kind_of_adapter_is_refused(key, value, complaint, base, settings):
    file = settings.lora_adapter_path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=f"{CONFIG}: {complaint}"):
        check_adapter(settings, base)


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda t: t.pop(EXPERT), f"{EXPERT} is missing, and --target-modules wants it"),
        (lambda t: t.update(extra=torch.ones(1)), "extra is not among --target-modules"),
        (lambda t: t.update({EXPERT: torch.ones(4, 32)}), r"up_proj.lora_B.weight is \[4, 32\], expected \[32, 4\]"),
        (
            lambda t: t.update({"base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight": torch.ones(1)}),
            "holds experts fused as transformers has them",
        ),
    ],
)  # fmt: skip
def test_tensors_other_than_the_targets_are_refused(change, complaint, base, settings):
    file = settings.lora_adapter_path / TENSORS
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=complaint):
        check_adapter(settings, base)


def test_a_directory_without_an_adapter_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match=f"{CONFIG}: cannot read"):
        check_adapter(LoraSection(**LORA, lora_adapter_path=tmp_path), base)


def test_an_update_of_the_targets_alone_is_held_against_their_names(base):
    lora = LoraSection(**LORA, exclude_modules=["experts"])
    tensors = load_file(base.path / "model.safetensors")
    index = WeightIndex(base, "float32", lora)

    def require(names, targets_alone=True):
        sent = {n: kind_of(tensors[n]) for n in names}
        num_bytes = sum(tensors[n].nbytes for n in names)
        index.require(sent, num_bytes, version=7, targets_alone=targets_alone)

    targets = lora.targets(tensors)
    require(targets)
    require(tensors, targets_alone=False)
    some = min(targets)
    with pytest.raises(ValueError, match=f"weight update 7 .*{some} was not sent"):
        require(targets - {some})
    with pytest.raises(ValueError, match="model.norm.weight has no adapter and was sent"):
        require(targets | {"model.norm.weight"})
    with pytest.raises(ValueError, match="was not sent"):
        require(targets, targets_alone=False)


def test_an_export_of_other_factors_than_the_targets_is_never_written(base, settings, tmp_path):
    """As of experts of several ranks under one rank's ids: names twice, and others missing."""
    saved = load_file(settings.lora_adapter_path / TENSORS)
    factors = {n[17:].removesuffix(".weight"): t for n, t in saved.items()}
    name = EXPERT[17:].removesuffix(".weight")
    twice = [*factors.items(), (name, factors[name])]
    missing = [(n, t) for n, t in factors.items() if n != name]
    for wrong, complaint in ((twice, "twice, or wrong"), (missing, f"{EXPERT} is missing")):
        with pytest.raises(AssertionError, match=complaint):
            write_adapter(wrong, tmp_path / "wrong", settings, base)
    assert not list(tmp_path.glob("*wrong*"))


def test_what_peft_would_drop_is_saved_merged(base):
    def forms(**fields):
        return saved_forms(LoraSection(lora_rank=4, **fields), base)

    assert saved_forms(LoraSection(), base) == (True, False)
    assert forms(lora_save_hf="adapter") == (True, False)  # dense layers and shared experts
    attention = dict(exclude_modules=["mlp"])
    assert forms(**attention) == (True, True)
    assert forms(**attention, lora_save_hf="adapter") == (False, True)
    assert forms(**attention, lora_save_hf="merged") == (True, False)


def test_adapters_of_experts_of_one_tensor_a_layer_are_in_no_file_of_peft(tmp_path):
    build(tmp_path, TinyOptions(family="gpt_oss"))
    hf = read_hf_facts(tmp_path / "model")
    begun = LoraSection(lora_rank=4, lora_adapter_path=tmp_path / "adapter")
    assert saved_forms(begun, hf) == (True, False)
    name = r"no name for one expert's part of model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ValueError, match=f"--lora-adapter-path: .* {name}; .*--exclude-modules ex"):
        check_adapter(begun, hf)
    with pytest.raises(AssertionError):
        write_adapter([], tmp_path / "adapter", begun, hf)
    assert saved_forms(LoraSection(lora_rank=4, exclude_modules=["experts"]), hf) == (True, True)


@pytest.mark.parametrize(
    "family, without_experts",
    [
        ("moonlight", False),
        ("glm4_moe_lite", False),
        ("deepseek_v2", False),
        ("qwen2_moe", True),
        ("kimi_k25", True),
    ],
)
def test_peft_drops_shared_experts_of_some_families_also_without_routed_ones(
    family, without_experts, tmp_path
):
    build(tmp_path, TinyOptions(family=family))
    hf = read_hf_facts(tmp_path / "model")
    assert saved_forms(LoraSection(lora_rank=4), hf) == (True, False)
    alone = LoraSection(lora_rank=4, exclude_modules=["experts"])
    assert saved_forms(alone, hf) == (True, without_experts)


@pytest.mark.parametrize(
    "family, excluded, unread",
    [
        ("nemotron_h", [], "backbone.layers.0.mixer.out_proj: PEFT refuses that of a Mamba mixer"),
        ("nemotron_h", ["experts", "out_proj"], None),
        (
            "qwen3_5_moe",
            ["mlp"],
            "layers.0.linear_attn.in_proj_a: transformers' language model has",
        ),
    ],
)
def test_linears_whose_adapters_peft_does_not_read_are_named(family, excluded, unread, tmp_path):
    build(tmp_path, TinyOptions(family=family))
    hf = read_hf_facts(tmp_path / "model")
    settings = LoraSection(lora_rank=4, exclude_modules=excluded)
    reason = not_in_peft(settings, hf)
    assert unread in reason if unread else reason is None
    assert saved_forms(settings, hf) == (True, unread is None)
