"""Reading a checkpoint's shape from its JSON."""

from __future__ import annotations

import json

import pytest

from r3train.families.read_facts import read_hf_facts

QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def checkpoint(tmp_path, without=(), generation=None, **changes):
    content = {key: value for key, value in {**QWEN, **changes}.items() if key not in without}
    (tmp_path / "config.json").write_text(json.dumps(content))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_qwen3_moe_is_read(tmp_path):
    facts = read_hf_facts(checkpoint(tmp_path))
    assert facts.is_moe and facts.model_type == "qwen3_moe"
    assert (facts.num_experts, facts.num_experts_per_tok) == (8, 2)
    assert facts.moe_layer_numbers == (1, 2, 3, 4)
    assert facts.eos_token_ids == (1,) and facts.tie_word_embeddings is False


def test_a_dense_model_has_no_experts(tmp_path):
    without = ("num_experts", "num_experts_per_tok", "decoder_sparse_step", "mlp_only_layers")
    facts = read_hf_facts(checkpoint(tmp_path, without, model_type="qwen3"))
    assert not facts.is_moe
    assert (facts.num_experts, facts.num_experts_per_tok, facts.moe_layer_numbers) == (0, 0, ())


@pytest.mark.parametrize(
    "without, changes, numbers",
    [
        ((), {"decoder_sparse_step": 2}, (2, 4)),
        ((), {"mlp_only_layers": [0, 2]}, (2, 4)),
        ((), {"mlp_only_layers": None}, (1, 2, 3, 4)),
        (("num_experts",), {"n_routed_experts": 8, "first_k_dense_replace": 1}, (2, 3, 4)),
        (("num_experts",), {"n_routed_experts": 8, "moe_layer_freq": 2}, (1, 3)),
        (("num_experts",), {"n_routed_experts": 8, "moe_layer_freq": [0, 1, 1, 0]}, (2, 3)),
        (("num_experts",), {"num_local_experts": 8}, (1, 2, 3, 4)),
    ],
)
def test_the_moe_layers_of_each_family_are_numbered_from_one(tmp_path, without, changes, numbers):
    facts = read_hf_facts(checkpoint(tmp_path, without, **changes))
    assert facts.moe_layer_numbers == numbers and facts.num_experts == 8
    dense = facts.route_shape.dense_layer_ids
    assert sorted([*dense, *(n - 1 for n in numbers)]) == list(range(facts.num_hidden_layers))


def test_key_value_heads_default_to_heads(tmp_path):
    assert read_hf_facts(checkpoint(tmp_path, ("num_key_value_heads",))).num_key_value_heads == 4


def test_end_tokens_of_both_files_count(tmp_path):
    facts = read_hf_facts(
        checkpoint(tmp_path, eos_token_id=[1, 2], generation={"eos_token_id": [2, 5]})
    )
    assert facts.eos_token_ids == (1, 2, 5)


def test_no_end_token_is_none(tmp_path):
    assert read_hf_facts(checkpoint(tmp_path, eos_token_id=None)).eos_token_ids == ()


def test_a_missing_directory_or_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such checkpoint directory"):
        read_hf_facts(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json: cannot read: No such file"):
        read_hf_facts(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("\xff", "not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_config_that_is_no_object_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        read_hf_facts(tmp_path)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts"])
def test_a_number_that_no_model_has_is_refused_before_it_takes_memory(tmp_path, key):
    with pytest.raises(ValueError, match=f"key {key} is 1000000000, expected at most"):
        read_hf_facts(checkpoint(tmp_path, **{key: 10**9}))


@pytest.mark.parametrize(
    "key",
    ["num_hidden_layers", "num_experts_per_tok", "vocab_size", "max_position_embeddings"],
)
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(ValueError, match=rf"config\.json: key {key} is missing"):
        read_hf_facts(checkpoint(tmp_path, (key,)))


@pytest.mark.parametrize(
    "key, value",
    [
        ("num_hidden_layers", "4"),
        ("num_hidden_layers", 0),
        ("vocab_size", True),
        ("model_type", None),
        ("eos_token_id", "x"),
        ("mlp_only_layers", ["x"]),
        ("moe_layer_freq", [1, 0]),
        ("num_experts", "many"),
    ],
)
def test_a_key_of_the_wrong_kind_is_named(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"config\.json: key {key} must"):
        read_hf_facts(checkpoint(tmp_path, **{key: value}))
