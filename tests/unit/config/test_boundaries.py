"""Values that follow from several settings, at their edges."""

from __future__ import annotations

import pytest

from tests.unit.config.test_config import config

REPLAY = {"use_rollout_routing_replay": True}
CHECKED = REPLAY | {"enable_r3_correctness_check": True}
LORA = {"lora_rank": 4}


@pytest.mark.parametrize(
    "fields, share",
    [
        (CHECKED, 0.25),
        (REPLAY, 0.0),
        (REPLAY | {"ci_test": True}, 0.25),
        ({"enable_r3_correctness_check": True}, 0.0),
        (CHECKED | {"flush_cache_on_update": False}, 0.0),
        (CHECKED | {"replay_rollouts": "dir"}, 0.0),
        (CHECKED | {"debug_rollout_only": True}, 0.0),
        (CHECKED | {"ci_inject_rollout_data_path": "file"}, 0.0),
    ],
)
def test_samples_are_computed_again_where_that_is_exact_and_checked(fields, share):
    assert config(r3_recheck_share=0.25, **fields).recheck_share == share


@pytest.mark.parametrize(
    "fields, tokens, holds",
    [
        (CHECKED, 1024, True),
        (CHECKED | {"r3_canaries": 0}, 0, True),
        (REPLAY, 0, False),
        (REPLAY | {"ci_test": True}, 1024, True),
        ({"enable_r3_correctness_check": True}, 0, False),
        (CHECKED | {"flush_cache_on_update": False}, 1024, True),
        (CHECKED | {"replay_rollouts": "dir"}, 0, False),
        (CHECKED | {"debug_rollout_only": True}, 0, False),
        (CHECKED | {"colocate": True, "max_weight_staleness": 0}, 1024, True),
        (CHECKED | {"bf16": False, "sglang": {"dtype": "bfloat16"}}, 0, True),
        (CHECKED | {"bf16": False, "sglang": {"dtype": "float32"}}, 1024, True),
        (CHECKED | {"sglang": {"quantization": "fp8"}}, 0, False),
        (CHECKED | {"sglang": {"dp_size": 1}}, 1024, True),
        (CHECKED | {"sglang": {"dp_size": 2}}, 0, False),
        (CHECKED | {"lora_rank": 8, "lora_serving": "merged"}, 1024, True),
        (CHECKED | {"lora_rank": 8, "lora_serving": "adapter"}, 1024, False),
        ({"check_weight_update_equal": True}, 1024, True),
        ({"check_weight_update_equal": True, "r3_canaries": 0}, 0, True),
        ({"check_weight_update_equal": True, "sglang": {"dp_size": 2}}, 0, False),
    ],
)
def test_servers_are_compared_where_they_can_compute_and_hold_what_the_actor_does(
    fields, tokens, holds
):
    made = config(**fields)
    assert (made.canary_tokens, made.judges_checksums) == (tokens, holds)


@pytest.mark.parametrize(
    "bf16, own, dtype",
    [
        (True, {}, "bfloat16"),
        (False, {}, "float32"),
        (True, {"dtype": "auto"}, "bfloat16"),
        (False, {"dtype": "bfloat16"}, "bfloat16"),
        (True, {"dtype": "half"}, "float16"),
        (True, {"dtype": "float"}, "float32"),
    ],
)
def test_rechecks_allow_the_rounding_of_the_servers_dtype(bf16, own, dtype):
    assert config(bf16=bf16, sglang=own, **CHECKED).server_dtype == dtype


@pytest.mark.parametrize(
    "fields, sums",
    [
        (CHECKED | {"r3_evidence": "summed"}, True),
        (CHECKED | {"r3_evidence": "calls"}, False),
        (REPLAY | {"r3_evidence": "summed"}, False),
    ],
)
def test_evidence_is_summed_where_it_is_written_and_asked_for(fields, sums):
    assert config(**fields).sums_evidence is sums


@pytest.mark.parametrize(
    "fields, other",
    [
        ({}, False),
        ({"rollout_external_engine_addrs": ["h:1"]}, True),
        ({"load": "dir"}, True),
        (LORA | {"lora_serving": "merged"}, False),
        (LORA | {"lora_serving": "merged", "lora_adapter_path": "dir"}, True),
        (LORA | {"lora_serving": "adapter"}, True),
    ],
)
def test_servers_may_hold_other_weights_where_the_actor_does_not_begin_with_the_checkpoint(
    fields, other
):
    assert config(**fields).servers_may_hold_other_weights is other


STEPS = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 4}
ONE = STEPS | {"global_batch_size": 8}


@pytest.mark.parametrize(
    "fields, reuses",
    [
        (ONE, True),
        (STEPS, False),
        (STEPS | {"reuse_log_probs": "off"}, False),
        (ONE | {"reuse_log_probs": "off"}, False),
        (ONE | {"kl_coef": 0.1}, False),
        (ONE | {"use_routing_replay": True}, False),
        (ONE | {"ci_test": True}, False),
        (ONE | {"ci_test": True, "reuse_log_probs": "on"}, True),
        (ONE | {"ci_test": True, "kl_loss_coef": 0.1}, True),
        (STEPS | {"ci_test": True, "reuse_log_probs": "on"}, False),
        (STEPS | {"loss_type": "sft"}, True),
        (ONE | {"loss_type": "sft", "ci_test": True}, True),
        (ONE | {"loss_type": "sft", "reuse_log_probs": "off"}, False),
    ],
)
def test_the_old_pass_is_left_out_where_the_train_forward_is_the_same(fields, reuses):
    run = config(**fields)
    assert run.reuses_log_probs is reuses
    assert ("old_log_prob" in run.replay_passes) is not reuses
    assert run.replay_passes[-1] == "train"


def test_the_reference_replays_where_there_is_one_and_it_is_asked_to():
    reference = {"kl_loss_coef": 0.1}
    assert "ref_log_prob" in config(**reference).replay_passes
    assert "ref_log_prob" not in config(**reference, ref_routing="native").replay_passes
    assert "ref_log_prob" not in config().replay_passes
    both = config(**reference, **STEPS).replay_passes
    assert both == ("old_log_prob", "ref_log_prob", "train")


def test_the_number_of_ranks_is_torchruns_or_that_of_a_dry_run():
    dry = config(world_size=4, dry_run=True).run
    assert dry.ranks({}) == 4 and dry.ranks({"WORLD_SIZE": "4"}) == 4
    with pytest.raises(ValueError, match="--world-size 4: torchrun has started 2 ranks"):
        dry.ranks({"WORLD_SIZE": "2"})
    assert config(world_size=4).run.ranks({"WORLD_SIZE": "4"}) == 4
    assert config().run.ranks({}) == 1 and config().run.ranks({"WORLD_SIZE": "3"}) == 3


@pytest.mark.parametrize(
    "fields, optional",
    [
        ({"use_opd": True}, True),
        ({}, False),
        ({"use_opd": True, "rm_type": "math"}, False),
        ({"use_opd": True, "custom_rm_path": "a.b:c"}, False),
        ({"use_opd": True, "environment": "a.b:c"}, False),
    ],
)
def test_a_reward_may_be_left_out_under_a_teacher_alone(fields, optional):
    base = {"rm_type": None, "opd_type": "megatron", "opd_teacher_load": "dir"}
    settings = {
        k: v for k, v in (base | fields).items() if "use_opd" in fields or not k.startswith("opd")
    }
    assert config(**settings).reward_is_optional is optional


def test_the_optimizer_is_sharded_where_it_has_a_state():
    assert config(use_distributed_optimizer=True).shards_optimizer
    assert not config(use_distributed_optimizer=False).shards_optimizer
    assert not config(use_distributed_optimizer=True, optimizer="sgd").shards_optimizer


def test_the_reference_is_the_base_where_adapters_are_trained_beside_it():
    assert config(**LORA).reference_is_base and not config().reference_is_base
    assert not config(**LORA, ref_load="other").reference_is_base


def test_adapters_are_served_by_servers_that_are_asked_to():
    served = LORA | {"lora_serving": "adapter"}
    assert config(**served).serves_adapters
    assert not config(**LORA, lora_serving="merged").serves_adapters
    assert not config(lora_serving="adapter").serves_adapters
    assert not config(**served, replay_rollouts="dir").serves_adapters


def test_evaluations_have_half_of_the_places_of_rollouts():
    run = config()
    half = run.rollout.max_concurrency // 2
    assert half > 1 and run.eval_slots == half
    assert config(eval_max_concurrency=7).eval_slots == 7
