"""Rules against the checkpoint, limits that follow from both, and warnings."""

from __future__ import annotations

import tomllib

import pytest

from r3train.config.cross_checks import (
    algorithm_warnings,
    check_static,
    rate_warnings,
    replay_warnings,
)
from r3train.families.checks.settings_checks import check_model, replayed_index_topk, prompt_limit
from r3train.config.sources import ConfigError
from tests.unit.config.test_config import config
from tests.unit.config.test_rules import made, PASSES, rows
from tests.unit.hf_model import facts

R3 = {"use_rollout_routing_replay": True}


SFT = {"loss_type": "sft", "n_samples_per_prompt": 1}


def test_sft_needs_no_server_and_no_pass_before_its_steps():
    made = config(**SFT, global_batch_size=2)
    check_static(made, 1)
    assert not made.has_engines and made.learns_conversations
    assert made.replay_passes == ("train",)
    assert algorithm_warnings(made) == []
    dumped = config(**SFT, replay_rollouts=".", **R3)  # on the tokens of recorded rollouts
    check_static(dumped, 1)
    assert not dumped.learns_conversations


def test_checks_change_nothing():
    made = config(expert_model_parallel_size=2, **R3)
    before = made.model_copy(deep=True)
    check_static(made, 2)
    check_model(made, facts(), 2)
    assert made == before


def test_the_check_without_the_master_switch_is_one_warning_and_no_error():
    made = config(enable_r3_correctness_check=True)
    check_static(made, 1)
    assert len(replay_warnings(made)) == 1
    assert "no effect without --use-rollout-routing-replay" in replay_warnings(made)[0]
    assert replay_warnings(config(enable_r3_correctness_check=True, **R3)) == []
    assert replay_warnings(config()) == []


DENSE = 'model_type="qwen3", num_experts=0, num_experts_per_tok=0, moe_layer_numbers=[]'
TWO_STAGES = "pipeline_model_parallel_size=2"
# keys of the checkpoint (4 layers, 8 experts, 512 positions, 64 words) | settings | a part of the complaint
NOT_THE_MODELS = f"""
    | tensor_model_parallel_size=8, sequence_parallel=true | num_attention_heads 4 does not divide by
    vocab_size=63 | tensor_model_parallel_size=2, sequence_parallel=true | vocab_size 63 does not divide by tensor_model_parallel_size 2
    num_attention_heads=6, num_key_value_heads=3 | tensor_model_parallel_size=2, sequence_parallel=true | num_key_value_heads 3 is neither
    | expert_model_parallel_size=3 | 8 experts do not divide by expert_model_parallel_size 3
    {DENSE} | expert_model_parallel_size=2 | qwen3 has no experts: expert_model_parallel_size must be 1, got 2
    {DENSE} | use_rollout_routing_replay=true | model is qwen3 without experts
    {DENSE} | use_routing_replay=true | --use-routing-replay needs a mixture-of-experts model
    {DENSE} | freeze_moe_router=true | qwen3 without experts: no router to freeze
    num_experts_per_tok=9 | | num_experts_per_tok 9 exceeds
    tie_word_embeddings=true | | tie_word_embeddings is true, expected false
    model_type="ernie4_5_moe", tie_word_embeddings=true | transformer_overrides={{"moe_z_loss_coeff"=0.1}} | moe_z_loss_coeff cannot be on for
    | tensor_model_parallel_size=2 | needs --sequence-parallel: Megatron
    | pipeline_model_parallel_size=3 | 4 layers do not divide by 3 pipeline stages
    | {TWO_STAGES}, decoder_first_pipeline_num_layers=5 | leave -1 for 1 stages
    | {TWO_STAGES}, decoder_first_pipeline_num_layers=2, decoder_last_pipeline_num_layers=1 | leave 1 for 0 stages
    num_hidden_layers=6, moe_layer_numbers=[1, 2, 3, 4, 5, 6] | {TWO_STAGES}, virtual_pipeline_model_parallel_size=2 | a stage of 3 layers does not divide by virtual
    num_hidden_layers=5 | {TWO_STAGES}, decoder_first_pipeline_num_layers=2, virtual_pipeline_model_parallel_size=2 | a stage of 3 layers does not divide by virtual
    num_hidden_layers=27 | {TWO_STAGES} | 27 layers do not divide by 2
    | rollout_max_context_len=600 | rollout_max_context_len 600 exceeds
    | rollout_max_response_len=512 | leaves no room for a prompt in max_position
    | sglang={{context_length=8}} | leaves no room for a prompt in sglang context_length 8
    | rollout_max_prompt_len=505 | = 513 exceeds max_position_embeddings 512
    | rollout_stop_token_ids=[64] | 64 is not in 0..63
    moe_layer_numbers=[1, 3, 4] | | layers [2] are dense
    index_topk=64 | use_rollout_routing_replay=true, route_stores=true, rollout_max_context_len=65 | --rollout-max-context-len of at most 64
"""


@pytest.mark.parametrize("hf, fields, complaint", rows(NOT_THE_MODELS, parts=3))
def test_a_checkpoint_that_does_not_fit_is_refused(hf, fields, complaint):
    keys = tomllib.loads(f"x = {{{hf}}}")["x"]
    for name in ("moe_layer_numbers", "num_hidden_layers"):
        if name in keys:
            numbers = keys.get("moe_layer_numbers", range(1, keys.get("num_hidden_layers", 4) + 1))
            keys["moe_layer_numbers"] = tuple(numbers)
    with pytest.raises(ConfigError) as refused:
        check_model(made(fields)[0], facts(**keys), 24)
    assert complaint in str(refused.value)


def test_a_warmup_is_counted_in_optimizer_steps_of_which_a_rollout_may_have_several():
    steps = dict(num_rollout=3, global_batch_size=4)  # 4 steps in each rollout
    assert list(rate_warnings(config(**steps, lr_warmup_iters=12))) == []
    assert len(list(rate_warnings(config(**steps, lr_warmup_iters=13)))) == 1
    assert len(list(rate_warnings(config(num_rollout=3, lr_warmup_iters=4)))) == 1


def test_an_indexer_is_replayed_where_samples_may_be_longer_than_its_choice():
    arguments = dict(hf=facts(index_topk=64))
    assert replayed_index_topk(config(**R3), **arguments) == 64
    assert replayed_index_topk(config(**R3, rollout_max_context_len=65), **arguments) == 64
    assert replayed_index_topk(config(**R3, rollout_max_context_len=64), **arguments) is None
    assert replayed_index_topk(config(), **arguments) is None
    assert replayed_index_topk(config(**R3), facts()) is None


def test_what_fits_passes():
    dense = dict(model_type="qwen3", num_experts=0, num_experts_per_tok=0, moe_layer_numbers=())
    tied = {"tie_word_embeddings": True}
    check_model(config(), facts(**dense), 1)
    check_model(config(), facts(**dense, **tied), 1)
    check_model(config(replay_rollouts="."), facts(**tied), 1)
    check_model(config(), facts(model_type="ernie4_5_moe", **tied), 1)
    check_model(config(), facts(index_topk=64), 1)
    check_model(config(**R3), facts(index_topk=64), 1)
    stores = dict(**R3, route_stores=True)
    check_model(config(**stores), facts(index_topk=512), 1)
    check_model(config(**stores, rollout_max_context_len=64), facts(index_topk=64), 1)
    uneven = dict(num_hidden_layers=27, moe_layer_numbers=tuple(range(1, 28)))
    stages = dict(pipeline_model_parallel_size=2, decoder_last_pipeline_num_layers=13)
    check_model(config(**stages), facts(**uneven), 2)
    for text in rows(PASSES):
        config_, ranks = made(*text)
        if "parallel_size" in text[0]:
            check_model(config_, facts(), ranks)


@pytest.mark.parametrize(
    "fields, limit",
    [
        ({}, (504, "max_position_embeddings 512 - rollout_max_response_len 8")),
        (
            {"rollout_max_context_len": 20},
            (12, "rollout_max_context_len 20 - rollout_max_response_len 8"),
        ),
        ({"rollout_max_prompt_len": 5}, (5, "rollout_max_prompt_len 5")),
        (
            {"sglang": {"context_length": 30}},
            (22, "sglang context_length 30 - rollout_max_response_len 8"),
        ),
    ],
)
def test_the_prompt_limit_is_the_tightest_one_and_named(fields, limit):
    assert prompt_limit(config(**fields), facts()) == limit


def test_the_buffer_is_by_default_what_the_staleness_can_use():
    assert config(max_weight_staleness=2).rollout.buffer_groups == 12
    assert config(max_weight_staleness=2, over_sampling_batch_size=7).rollout.buffer_groups == 15


def test_staleness_without_a_correction_and_a_wide_gspo_clip_are_warned_about():
    def warnings(**fields):
        return " ".join(algorithm_warnings(config(**fields)))

    assert "2 weight versions old" in warnings(max_weight_staleness=2)
    assert warnings(max_weight_staleness=1) == ""
    for fields in (
        {"use_tis": True},
        {"rollout_is": "geometric"},
        {"ratio_anchor": "rollout"},
        {"policy_loss": "dppo_kl"},
        {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": ["1.01"]},
    ):
        assert warnings(max_weight_staleness=2, **fields) == ""
    assert "gspo with eps_clip 0.2" in warnings(policy_loss="gspo", max_weight_staleness=0)
    narrow = {"eps_clip": 3e-4, "eps_clip_high": 4e-4, "max_weight_staleness": 0}
    assert warnings(policy_loss="gspo", **narrow) == ""
