"""Rules and derived values at their edges: the last setting that passes next to the first that does not."""

from __future__ import annotations

import pytest

from r3train.config.cross_checks import check_static
from tests.unit.config.test_config import config

TOP_P = {"rollout_top_p": 0.9}
REPLAY = {"use_rollout_routing_replay": True}
CHECKED = REPLAY | {"enable_r3_correctness_check": True}
IN_PLACE = {"pause_generation_mode": "in_place", "max_weight_staleness": 1}
LORA = {"lora_rank": 4}
PLAYED = {"environment": "some.module:Class", "max_weight_staleness": 0}


def complaints(**fields) -> str:
    try:
        check_static(config(**fields), 1)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "passes, refused, message",
    [
        (
            {"rollout_top_k": 2, **TOP_P},
            {"rollout_top_k": 1, **TOP_P},
            "rollout_top_p 0.9 is without",
        ),
        (
            {"rollout_top_k": 1},
            {"rollout_top_k": 1, **TOP_P},
            "rollout_top_p 0.9 is without effect",
        ),
        ({"rollout_top_k": 4096}, {"rollout_top_k": 4097}, "rollout_top_k 4097 is above"),
        (
            {"rollout_top_k": 1, "rollout_temperature": 1.0},
            {"rollout_top_k": 1, "rollout_temperature": 0.5},
            "rollout_top_k 1 is greedy decoding: SGLang ignores rollout_temperature 0.5",
        ),
        (
            {"rollout_top_k": 2, "rollout_temperature": 0.5},
            {"rollout_temperature": 1e-9},
            "is greedy decoding for SGLang, whose log-probs are",
        ),
        (
            {"rollout_filter": ["zero_variance"], "n_samples_per_prompt": 2},
            {"rollout_filter": ["zero_variance"], "n_samples_per_prompt": 1},
            "zero_variance needs n_samples_per_prompt above 1",
        ),
        (
            {"max_weight_staleness": 0},
            {"pause_generation_mode": "in_place", "max_weight_staleness": 0},
            "--pause-generation-mode in_place needs max_weight_staleness above 0",
        ),
        (
            IN_PLACE | {"sglang": {"disable_overlap_schedule": True}},
            IN_PLACE | {"sglang": {"disable_overlap_schedule": False}},
            "sglang.disable_overlap_schedule is off, and --pause-generation-mode in_place needs it",
        ),
        (
            {"sglang": {"disable_overlap_schedule": False}},  # drain needs it not
            IN_PLACE | {"sglang": {"disable_overlap_schedule": False}},
            "sglang.disable_overlap_schedule is off",
        ),
        (
            {"apply_chat_template": True, "tool_key": "tools"},
            {"tool_key": "tools"},
            "tool_key is for the chat template",
        ),
        (PLAYED, PLAYED | {"group_rm": True}, "--group-rm scores answers of one turn"),
        (
            PLAYED | {"environment_samples": "turn"},
            PLAYED | {"environment_samples": "turn", "global_batch_size": 4},
            "which do not divide into optimizer steps",
        ),
        (
            PLAYED | {"global_batch_size": 4},
            PLAYED | {"environment_samples": "turn", "global_batch_size": 4},
            "which do not divide into optimizer steps",
        ),
    ],
)
def test_a_rule_of_rollouts_refuses_from_its_edge_on(passes, refused, message):
    size = {"rollout_batch_size": 4, "n_samples_per_prompt": 2}
    assert message in complaints(**size | refused)
    assert message not in complaints(**size | passes)


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
    assert config(r3_audit_share=0.25, **fields).audit_share == share


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


def test_the_first_rank_of_each_later_stage_broadcasts_weights():
    two = {"pipeline_model_parallel_size": 2}
    assert list(config(pipeline_model_parallel_size=4).weight_leaders(8)) == [2, 4, 6]
    assert list(config(**two).weight_leaders(4)) == [2] and not config().weight_leaders(4)
    for more in (
        LORA,
        {"update_weight_transfer_mode": "disk"},
        {"replay_rollouts": "dir"},
    ):
        assert not config(**two, **more).weight_leaders(4)


def test_targets_alone_are_sent_of_adapters_that_are_broadcast():
    assert config(**LORA).may_send_targets_alone
    assert not config().may_send_targets_alone
    assert not config(**LORA, update_weight_transfer_mode="disk").may_send_targets_alone


@pytest.mark.parametrize(
    "fields, due",
    [
        ({}, [0, 2, 4, 5]),
        ({"skip_eval_before_train": True}, [2, 4, 5]),
        ({"eval_interval": 3}, [0, 3, 5]),
        ({"eval_interval": None}, [0, 5]),
    ],
)
def test_versions_are_evaluated_at_the_interval_and_at_both_ends(fields, due):
    sets = {"eval_prompt_data": ["a", "a.jsonl"], "num_rollout": 5, "eval_interval": 2}
    run = config(**sets | fields)
    assert [version for version in range(6) if run.eval_due(version)] == due
    assert not config(num_rollout=5).eval_due(5)


def test_an_evaluations_own_settings_come_before_the_runs():
    names = {"eval_prompt_data": ["a", "a.jsonl", "b", "b.jsonl"]}
    own = config(
        **names,
        rollout_temperature=0.5,
        eval_temperature=0.0,
        eval_top_p=0.25,
        eval_top_k=3,
        eval_max_response_len=7,
        eval_input_key="q",
        eval_label_key="a",
    )
    assert [dataset.name for dataset in own.eval_sets] == ["a", "b"]
    for dataset in own.eval_sets:
        sampled = (dataset.temperature, dataset.top_p, dataset.top_k, dataset.max_response_len)
        assert sampled == (0.0, 0.25, 3, 7)
        assert (dataset.input_key, dataset.label_key) == ("q", "a")
    runs = config(**names, rollout_temperature=0.5, rollout_max_response_len=9).eval_sets[0]
    assert (runs.temperature, runs.top_p, runs.top_k, runs.max_response_len) == (0.5, 1.0, -1, 9)


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
    given = {
        k: v for k, v in (base | fields).items() if "use_opd" in fields or not k.startswith("opd")
    }
    assert config(**given).reward_is_optional is optional


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
    assert half > 1 and run.eval_places == half
    assert config(eval_max_concurrency=7).eval_places == 7


@pytest.mark.parametrize(
    "value, refused",
    [
        (-1.0, False),
        (0, True),  # of no token at all
        (1.25, True),
        (False, False),
        (True, True),
        ("none", False),
        ("1.0", True),
    ],
)
def test_a_capacity_that_drops_replayed_choices_is_refused(value, refused):
    said = complaints(**REPLAY, transformer_overrides={"moe_expert_capacity_factor": value})
    assert ("capacity dropping discards replayed choices" in said) is refused


def test_a_ratio_of_replayed_experts_needs_replay():
    message = "--r3-keep-score-ratio needs --use-rollout-routing-replay"
    assert message in complaints(r3_keep_score_ratio=0.5)
    assert message not in complaints(r3_keep_score_ratio=0.5, **REPLAY)
    assert message not in complaints(r3_keep_score_ratio=0.0)
