"""Rules between sections and against the checkpoint: each is broken once."""

from __future__ import annotations

import pytest

from r3train.config.algorithm_settings import AlgorithmSection
from r3train.config.cross_checks import (
    algorithm_warnings,
    check_model,
    check_static,
    prompt_limit,
    replay_warnings,
)
from tests.unit.config.test_config import config
from tests.unit.hf_model import facts

R3 = {"use_rollout_routing_replay": True}
DENSE = dict(model_type="qwen3", num_experts=0, num_experts_per_tok=0, moe_layer_numbers=())


COLOCATED = {"colocate": True, "max_weight_staleness": 0}
SFT = {"loss_type": "sft", "n_samples_per_prompt": 1}
TAUGHT = {"use_opd": True, "opd_type": "sglang", "opd_teacher_url": "h:1"}


def static_refuses(message: str, world_size: int = 1, **fields) -> None:
    with pytest.raises(ValueError, match=message):
        check_static(config(**fields), world_size)


def model_refuses(message: str, hf: dict, world_size: int = 1, **fields) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(config(**fields), facts(**hf), world_size)


@pytest.mark.parametrize(
    "world_size, fields",
    [
        (1, {}),
        (1, R3),
        (2, {"expert_model_parallel_size": 2, **R3}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (4, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        (4, {"context_parallel_size": 2, "expert_model_parallel_size": 4}),
        (
            8,
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "pipeline_model_parallel_size": 2,
                "expert_model_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
            },
        ),
        (3, {"pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": 2}),
    ],
)
def test_topologies_that_fit_pass(world_size, fields):
    check_static(config(**fields), world_size)
    check_model(config(**fields), facts(), world_size)


@pytest.mark.parametrize(
    "message, world_size, fields",
    [
        ("world size 3 does not divide by tensor_model", 3, {"tensor_model_parallel_size": 2}),
        ("world size 1 does not divide by tensor_model", 1, {"context_parallel_size": 2}),
        ("= 4$", 6, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
        ("expert_model_parallel_size 4", 2, {"expert_model_parallel_size": 4}),
        ("global_batch_size 2 is below the 4", 4, {"global_batch_size": 2}),
    ],
)
def test_a_topology_that_does_not_fit_the_ranks_is_refused(message, world_size, fields):
    static_refuses(message, world_size, **fields)


@pytest.mark.parametrize(
    "message, fields",
    [
        ("expert_tensor_parallel_size 2", {"expert_tensor_parallel_size": 2}),
        ("--sequence-parallel needs", {"sequence_parallel": True}),
        ("--virtual-pipeline", {"virtual_pipeline_model_parallel_size": 2}),
        ("--decoder-first-pipeline", {"decoder_first_pipeline_num_layers": 2}),
        (
            "needs --use-distributed",
            {"overlap_param_gather": True, "use_distributed_optimizer": False},
        ),
        ("needs --overlap-grad", {"overlap_param_gather": True}),
        (
            "for all of them: give one of the two",
            {"sglang_server_concurrency": 8, "rollout_max_concurrency": 8},
        ),
        ("16 does not divide by global_batch_size 5", {"global_batch_size": 5}),
        ("16 does not divide by global_batch_size 32", {"global_batch_size": 32}),
        (
            "--reuse-log-probs on needs one optimizer step per rollout .* of 2 steps",
            {"reuse_log_probs": "on", "global_batch_size": 8},
        ),
        ("--save-interval needs --save", {"save_interval": 2}),
        ("--save-keep-last needs --save", {"save_keep_last": 2}),
        ("--async-save needs --save", {"async_save": True}),
        ("--auto-resume needs --save", {"auto_resume": True}),
        ("--load-model-only needs --load", {"load_model_only": True}),
        ("nowhere: no such directory of rollouts", {"replay_rollouts": "nowhere"}),
        ("--dump-rollouts would copy", {"replay_rollouts": ".", "dump_rollouts": True}),
        ("has none", {"replay_rollouts": ".", "check_weight_update_equal": True}),
        ("has none", {"replay_rollouts": ".", "max_engine_restarts": 1}),
        (
            "belong to somebody else",
            {"max_engine_restarts": 1, "rollout_external_engine_addrs": ["h:1"]},
        ),
        (
            "leaves no room for a prompt in rollout_max_context_len 8",
            {"rollout_max_context_len": 8},
        ),
        (
            "rollout_max_prompt_len 3 .* = 11 exceeds rollout_max_context_len 10",
            {"rollout_max_context_len": 10, "rollout_max_prompt_len": 3},
        ),
        ("tis_clip_low 3.0 exceeds tis_clip 2.0", {"tis_clip_low": 3.0}),
        ("overlong_buffer_len 99 exceeds rollout_max_resp", {"overlong_buffer_len": 99}),
        (
            "--reuse-log-probs on cannot go with --kl-coef",
            {"reuse_log_probs": "on", "kl_coef": 0.1},
        ),
        ("--kl-coef 0.1 cannot .* 0.2: .* count twice", {"kl_coef": 0.1, "kl_loss_coef": 0.2}),
        ("--plant-fault nan_once has no effect", {"plant_fault": "nan_once", "kl_coef": 0.1}),
        ("gdpo needs --reward-keys", {"advantage_estimator": "gdpo"}),
        ("--reward-key a cannot go with --reward-keys", {"reward_key": "a", "reward_keys": ["b"]}),
        ("--rm-type math returns a number", {"rm_type": "math", "reward_keys": ["a"]}),
        ("reward_keys a a names a key twice", {"reward_keys": ["a", "a"]}),
        (
            "reward_weights has 1 entries for 2",
            {"reward_keys": ["a", "b"], "reward_weights": [1.0]},
        ),
        (
            "--kl-coef has no effect with --advantage-estimator gdpo",
            {"advantage_estimator": "gdpo", "reward_keys": ["a"], "kl_coef": 0.1},
        ),
        ("--use-tis is --rollout-is token", {"use_tis": True, "rollout_is": "sequence"}),
        ("be corrected twice", {"use_tis": True, "ratio_anchor": "rollout"}),
        ("dppo_tv cannot go with", {"rollout_is": "token", "policy_loss": "dppo_tv"}),
        ("has 0 entries for 1", {"rollout_rs": ["token_k1"]}),
        (
            "names an estimate twice",
            {"rollout_rs": ["token_k1", "token_k1"], "rollout_rs_threshold": ["2"]},
        ),
        ("--ref-load needs --kl-loss-coef", {"ref_load": "ref"}),
        ("^--use-opd needs --opd-type: sglang or megatron$", {"use_opd": True}),
        ("megatron needs --opd-teacher-load", {"use_opd": True, "opd_type": "megatron"}),
        ("sglang needs --opd-teacher-url", {"use_opd": True, "opd_type": "sglang"}),
        ("^opd_teacher_load other has no effect", {**TAUGHT, "opd_teacher_load": "other"}),
        ("^opd_teacher_url h:1 has no effect", {"opd_teacher_url": "h:1"}),
        (
            "rollout_temperature 0.7: .* those at temperature 1",
            {**TAUGHT, "rollout_temperature": 0.7},
        ),
        ("rollout_top_k 20: .* those of the whole vocabulary", {**TAUGHT, "rollout_top_k": 20}),
        ("^use_opd True has no effect with --loss-type sft", {**TAUGHT, **SFT}),
        ("min_lr 1.0 exceeds lr", {"min_lr": 1.0}),
        ("full needs --recompute-method", {"recompute_granularity": "full"}),
        ("need --recompute-granularity full", {"recompute_method": "uniform"}),
        ("needs --recompute-granularity selective", {"recompute_modules": ["moe"]}),
        ("nowhere: no such checkpoint directory", {"load": "nowhere"}),
        (
            "rollout_temperature 1e-07 is greedy decoding for SGLang",
            {"rollout_temperature": 1e-7},
        ),
        (
            "rollout_top_k 1 is greedy decoding: SGLang ignores rollout_temperature 0.8",
            {"rollout_top_k": 1, "rollout_temperature": 0.8},
        ),
        ("rollout_top_k 0 is not a number of tokens", {"rollout_top_k": 0}),
        ("^rollout_top_p 0.9 needs --rollout-top-k: SGLang says which", {"rollout_top_p": 0.9}),
        ("^rollout_top_p 0.9 is without effect", {"rollout_top_p": 0.9, "rollout_top_k": 1}),
        ("^rollout_top_k 4097 is above 4096, the most tokens", {"rollout_top_k": 4097}),
        (
            "^rollout_top_k 20 is above 10, the most",
            {"rollout_top_k": 20, "sglang": {"sampling_mask_max_tokens": 10}},
        ),
        (
            "rollout_top_k 20 is without effect: --loss-type sft",
            {"rollout_top_k": 20, "loss_type": "sft"},
        ),
        ("rollout_buffer_size 3 is below rollout_batch_size 4", {"rollout_buffer_size": 3}),
        (
            "rollout_buffer_size 5 is below over_sampling_batch_size 6",
            {"rollout_buffer_size": 5, "over_sampling_batch_size": 6},
        ),
        ("over_sampling_batch_size 3 is below", {"over_sampling_batch_size": 3}),
        ("--stale-policy regenerate needs --over-sampling", {"stale_policy": "regenerate"}),
        (
            "zero_variance cannot go with rollout_top_k 1",
            {"rollout_filter": ["zero_variance"], "rollout_top_k": 1},
        ),
        (
            "zero_variance needs n_samples_per_prompt above 1",
            {"rollout_filter": ["zero_variance"], "n_samples_per_prompt": 1},
        ),
        (
            "retract cannot go with --use-rollout-routing-replay: SGLang recomputes the rows",
            {"pause_generation_mode": "retract", **R3},
        ),
        (
            "in_place needs max_weight_staleness above 0",
            {"pause_generation_mode": "in_place", "max_weight_staleness": 0},
        ),
        (
            "the version of the token at an update is off by one",
            {"pause_generation_mode": "abort", "sglang": {"disable_overlap_schedule": False}},
        ),
        ("--colocate: .* max_weight_staleness must be 0, not 1", {"colocate": True}),
        (
            "--colocate is for servers that the run starts",
            {**COLOCATED, "rollout_external_engine_addrs": ["h:1"]},
        ),
        (
            "--colocate cannot go with --lora-serving adapter",
            {**COLOCATED, "lora_rank": 4, "lora_serving": "adapter"},
        ),
        ("--colocate: .* no turns to take", {**COLOCATED, "replay_rollouts": "dumps"}),
        ("--colocate: .* no turns to take", {**COLOCATED, "debug_rollout_only": True}),
        (
            "give one of the two",
            {"rollout_num_engines": 2, "rollout_external_engine_addrs": ["h:1"]},
        ),
        (
            "--rollout-server-env is of our local servers",
            {"rollout_server_env": ["HF_TOKEN"], "rollout_external_engine_addrs": ["h:1"]},
        ),
        ("names a server twice", {"rollout_external_engine_addrs": ["h:1", "h:1"]}),
        (
            "profile_step_end 3 is not after profile_step_start 3",
            {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 3},
        ),
        (
            "so nothing would be profiled",
            {"use_pytorch_profiler": True, "profile_step_start": 998, "profile_step_end": 999},
        ),
        ("profile_ranks has no effect without", {"profile_ranks": [1]}),
        (
            "profile_ranks 9 is none of the",
            {
                "use_pytorch_profiler": True,
                "profile_step_start": 0,
                "profile_step_end": 1,
                "profile_ranks": [0, 9],
            },
        ),
        (
            "rollout_0000000.safetensors: no such file",
            {"ci_inject_rollout_data_path": "/nowhere"},
        ),
        (
            "ci_inject_rollout_data_min_match_ratio has no effect without",
            {"ci_inject_rollout_data_min_match_ratio": 0.5},
        ),
        ("has no servers", {"ci_inject_rollout_data_path": ".", "replay_rollouts": "."}),
        ("--debug-rollout-only generates", {"debug_rollout_only": True, "replay_rollouts": "."}),
        (
            "--save has no effect with --debug-rollout-only",
            {"debug_rollout_only": True, "save": "x"},
        ),
        (
            "--ci-test has no effect with --debug-rollout-only",
            {"debug_rollout_only": True, "ci_test": True},
        ),
        (
            "--plant-fault has no effect with --debug-rollout-only",
            {"debug_rollout_only": True, "plant_fault": "nan_once"},
        ),
        (
            "--debug-rollout-only starts servers of its own",
            {"debug_rollout_only": True, "rollout_external_engine_addrs": ["h:1"]},
        ),
        ("--environment-samples turn needs --environment", {"environment_samples": "turn"}),
        (
            "leave global_batch_size unset",
            {"environment": "calculator", "environment_samples": "turn", "global_batch_size": 8},
        ),
        (
            "sinkhorn and quantile",
            {
                "transformer_overrides": {
                    "moe_router_load_balancing_type": ["aux_loss", "quantile"]
                },
                **R3,
            },
        ),
        ("no replay to spoil", {"plant_bug": "one_expert"}),
        ("nothing would notice", {"plant_bug": "one_expert", **R3}),
        (
            "needs --r3-audit-share above 0",
            {
                "plant_bug": "answer_with_rows_of_another",
                "enable_r3_correctness_check": True,
                "r3_audit_share": 0.0,
                **R3,
            },
        ),
        ("needs --check-weight-update-equal: nothing", {"plant_bug": "weights_frozen", **R3}),
    ],
)
def test_settings_that_contradict_each_other_are_refused(message, fields):
    static_refuses(message, **fields)


# setting of the learning rule -> (a value off its default, settings that leave it without effect, why)
WITHOUT_EFFECT = {
    "opd_type": ("sglang", {}, "--use-opd"),
    "opd_kl_coef": (0.5, {}, "--use-opd"),
    "grpo_std_normalization": (False, {"advantage_estimator": "rloo"}, "estimator grpo"),
    "gamma": (0.5, {}, "estimator reinforce_plus_plus"),
    "normalize_advantages": (
        True,
        {"advantage_estimator": "reinforce_plus_plus_baseline"},
        "already",
    ),
    "overlong_penalty_factor": (0.5, {}, "needs --overlong-buffer-len"),
    "eps_clip": (0.1, {"policy_loss": "dppo_tv"}, "--dppo-delta"),
    "eps_clip_high": (0.28, {"policy_loss": "dppo_kl"}, "--dppo-delta"),
    "eps_clip_c": (3.0, {"policy_loss": "cispo"}, "no dual clip"),
    "dppo_delta": (0.1, {}, "dppo_tv or dppo_kl"),
    "ratio_anchor": ("rollout", {"policy_loss": "dppo_tv"}, "against the engine as it is"),
    "kl_loss_type": ("k1", {}, "needs --kl-loss-coef"),
    "use_unbiased_kl": (True, {"global_batch_size": 8, "kl_coef": 0.1}, "needs --kl-loss-coef"),
    "reward_weights": ([1.0], {}, "needs --reward-keys"),
    "ref_routing": ("native", {"kl_loss_coef": 0.1}, "needs a reference .*replay"),
    "rollout_is_mode": ("mask", {}, "needs --rollout-is"),
    "tis_clip": (3.0, {}, "needs --rollout-is"),
    "tis_clip_low": (0.5, {}, "needs --rollout-is"),
    "rollout_rs_threshold": (["2"], {}, "needs --rollout-rs"),
    "opsm_delta": (0.1, {}, "one optimizer step per rollout"),
}
# these choose a rule, or act on their own
ALWAYS_IN_EFFECT = {
    *(
        "advantage_estimator",
        "policy_loss",
        "loss_aggregation",
        "rollout_is",
        "use_tis",
        "rollout_rs",
    ),
    *(
        "overlong_buffer_len",
        "length_penalty_coef",
        "mask_truncated",
        "kl_loss_coef",
        "kl_coef",
        "reward_keys",
        "entropy_coef",
    ),
    *("min_ess", "loss_type", "use_opd"),
}


def test_every_setting_of_the_learning_rule_has_an_effect_or_a_refusal():
    assert WITHOUT_EFFECT.keys() | ALWAYS_IN_EFFECT == AlgorithmSection.model_fields.keys()
    assert not WITHOUT_EFFECT.keys() & ALWAYS_IN_EFFECT


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused_in_one_line_with_the_reason(name):
    value, others, reason = WITHOUT_EFFECT[name]
    with pytest.raises(ValueError, match=rf"^{name} .* has no effect: .*{reason}[^\n]*$"):
        check_static(config(**{name: value}, **others), 1)
    check_static(config(**others), 1)  # at its default nobody minds


@pytest.mark.parametrize(
    "fields",
    [
        {"grpo_std_normalization": False},
        {"gamma": 0.5, "advantage_estimator": "reinforce_plus_plus"},
        {"overlong_penalty_factor": 0.5, "overlong_buffer_len": 4},
        {"eps_clip": 0.1, "eps_clip_high": 0.28, "eps_clip_c": 3.0, "policy_loss": "gspo"},
        {"eps_clip_high": 0.2, "policy_loss": "dppo_tv"},  # as if it were unset
        {"dppo_delta": 0.1, "policy_loss": "dppo_kl"},
        {"kl_loss_type": "k1", "kl_loss_coef": 0.1},
        {"kl_coef": 0.1, "ref_routing": "native", **R3},
        {"advantage_estimator": "gdpo", "reward_keys": ["a", "b"], "reward_weights": [1, 0.5]},
        {
            **{"use_unbiased_kl": True, "kl_loss_coef": 0.1, "opsm_delta": 0.1},
            "global_batch_size": 8,
        },
        {"rollout_is_mode": "mask", "tis_clip": 3.0, "tis_clip_low": 0.5, "rollout_is": "token"},
        TAUGHT | {"opd_kl_coef": 0.5},
        {"reward_keys": ["a"], "rm_type": "boxed_remote_rm"},
        {"reward_keys": ["a"], "rm_type": "own:plug"},
        {"reward_keys": ["a"], "rm_type": "math", "custom_rm_path": "own:plug"},
        # the ranks compute a teacher's log-probs as the actor's
        {
            **{"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "teacher"},
            **{"rollout_temperature": 0.7, "rollout_top_k": 20},
        },
        # code of a user's own may read what it likes
        {"gamma": 0.5, "grpo_std_normalization": False, "advantage_estimator": "own:plug"},
        {"eps_clip_c": 3.0, "dppo_delta": 0.1, "tis_clip": 3.0, "policy_loss": "own:plug"},
        {"eps_clip": 0.1, "ratio_anchor": "rollout", "policy_loss": "dppo_mine:plug"},
        {"normalize_advantages": True, "advantage_estimator": "reinforce_plus_plus_mine:plug"},
    ],
)
def test_the_same_settings_pass_where_they_have_an_effect(fields):
    check_static(config(**fields), 1)


@pytest.mark.parametrize("name", [*WITHOUT_EFFECT, "use_tis", "length_penalty_coef", "min_ess"])
def test_a_setting_of_reinforcement_is_refused_with_sft(name):
    of_reference = {"kl_loss_type"}
    value = {"use_tis": True, "length_penalty_coef": 0.5, "min_ess": 0.5}.get(name)
    value = WITHOUT_EFFECT[name][0] if value is None else value
    if name in of_reference:
        check_static(config(**SFT, kl_loss_coef=0.1, **{name: value}), 1)
    else:
        static_refuses(
            rf"^{name} [^\n]* has no effect with --loss-type sft", **SFT, **{name: value}
        )


@pytest.mark.parametrize(
    "message, fields",
    [
        ("n_samples_per_prompt 4: .* it must be 1", {"n_samples_per_prompt": 4}),
        ("conversations have no routes", R3),
        ("--environment has no effect", {"environment": "calculator"}),
        ("needs a server: --loss-type sft has none", {"check_weight_update_equal": True}),
        ("needs a server: --loss-type sft has none", {"max_engine_restarts": 1}),
    ],
)
def test_what_sft_cannot_do_is_refused(message, fields):
    static_refuses(message, **SFT | fields)


def test_sft_needs_no_server_and_no_pass_before_its_steps():
    made = config(**SFT, global_batch_size=2)
    check_static(made, 1)
    assert not made.has_engines and made.learns_conversations
    assert made.replay_passes == ("train",)
    assert algorithm_warnings(made) == []
    dumped = config(**SFT, replay_rollouts=".", **R3)  # on the tokens of recorded rollouts
    check_static(dumped, 1)
    assert not dumped.learns_conversations


def test_every_broken_rule_is_named_at_once():
    with pytest.raises(ValueError) as caught:
        check_static(config(global_batch_size=5, save_interval=2, sequence_parallel=True), 1)
    assert len(str(caught.value).splitlines()) == 3


def test_checks_change_nothing():
    made = config(expert_model_parallel_size=2, **R3)
    before = made.model_copy(deep=True)
    check_static(made, 2)
    check_model(made, facts(), 2)
    assert made == before


CONFLICTS = {
    "moe_router_fusion": (True, "fused router"),
    "moe_router_load_balancing_type": ("sinkhorn", "sinkhorn and quantile"),
    "moe_expert_capacity_factor": (1.5, "capacity dropping"),
    "moe_pad_expert_input_to_capacity": (True, "capacity"),
    "moe_router_force_load_balancing": (True, "random"),
    "enable_cuda_graph": (True, "CUDA graph"),
    "external_cuda_graph": (True, "CUDA graph"),
    "cuda_graph_impl": ("local", "CUDA graph"),
    "cuda_graph_scope": ("moe_router", "CUDA graph"),
    "overlap_moe_expert_parallel_comm": (True, "interleaves two microbatches"),
}


@pytest.mark.parametrize("place", ["transformer_overrides", "sglang"])
@pytest.mark.parametrize("name", CONFLICTS)
def test_r3_refuses_what_it_cannot_live_with_wherever_it_is_set(place, name):
    value, reason = CONFLICTS[name]
    static_refuses(rf"{place}\.{name} = .*{reason}", **{place: {name: value}}, **R3)
    check_static(config(**{place: {name: value}}), 1)  # without R3 it is nobody's business here


@pytest.mark.parametrize(
    "name, value",
    [
        ("moe_router_fusion", False),
        ("moe_router_load_balancing_type", "aux_loss"),
        ("moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss"]),
        ("moe_expert_capacity_factor", -1.0),
        ("cuda_graph_impl", "none"),
        ("moe_router_dtype", "fp32"),
    ],
)
def test_r3_accepts_the_harmless_value_of_the_same_setting(name, value):
    check_static(config(transformer_overrides={name: value}, **R3), 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_buffer_size": 4},
        {"over_sampling_batch_size": 6, "stale_policy": "regenerate"},
        {"pause_generation_mode": "in_place", **R3},
        {"pause_generation_mode": "abort", **R3},
        {"pause_generation_mode": "retract"},
        {"rollout_filter": ["zero_variance", "aborted"]},
        {"rollout_num_engines": 3},
        {"plant_bug": "bypass", "enable_r3_correctness_check": True, **R3},
        {"plant_bug": "weights_frozen", "check_weight_update_equal": True},
    ],
)
def test_settings_that_can_go_together_pass(fields):
    check_static(config(**fields), 1)


@pytest.mark.parametrize(
    "fields, passes",
    [
        ({}, ("train",)),
        ({"reuse_log_probs": "on", "kl_loss_coef": 0.1}, ("ref_log_prob", "train")),
        # the reward needs them before
        ({"kl_coef": 0.1}, ("old_log_prob", "ref_log_prob", "train")),
        # what the reference's own routers chose is not replayed
        ({"kl_loss_coef": 0.1, "ref_routing": "native", **R3}, ("train",)),
        ({"global_batch_size": 16}, ("train",)),
        ({"global_batch_size": 8}, ("old_log_prob", "train")),
        ({"reuse_log_probs": "off"}, ("old_log_prob", "train")),
        # what --ci-test compares with the train forward
        ({"ci_test": True}, ("old_log_prob", "train")),
        ({"ci_test": True, "kl_loss_coef": 0.1}, ("ref_log_prob", "train")),
        ({"ci_test": True, "reuse_log_probs": "on"}, ("train",)),
    ],
)
def test_the_old_pass_is_skipped_with_one_optimizer_step_a_rollout(fields, passes):
    made = config(**fields)
    check_static(made, 1)
    assert made.replay_passes == passes


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("name", ["use_rollout_routing_replay", "moe_enable_routing_replay"])
def test_a_replay_flag_of_the_server_is_refused(name, replay):
    fields = {"use_rollout_routing_replay": replay, "sglang": {name: True}}
    static_refuses(rf"sglang.{name}: set --use-rollout-routing-replay", **fields)


def test_the_check_without_the_master_switch_is_one_warning_and_no_error():
    made = config(enable_r3_correctness_check=True)
    check_static(made, 1)
    assert len(replay_warnings(made)) == 1
    assert "no effect without --use-rollout-routing-replay" in replay_warnings(made)[0]
    assert replay_warnings(config(enable_r3_correctness_check=True, **R3)) == []
    assert replay_warnings(config()) == []


@pytest.mark.parametrize(
    "message, hf, fields",
    [
        ("num_attention_heads 4 does not", {}, {"tensor_model_parallel_size": 8}),
        (
            "vocab_size 63 does not divide by tensor_model_parallel_size 2",
            {"vocab_size": 63},
            {"tensor_model_parallel_size": 2},
        ),
        (
            "num_key_value_heads 3 is neither",
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            {"tensor_model_parallel_size": 2},
        ),
        (
            "8 experts do not divide by expert_model_parallel_size 3",
            {},
            {"expert_model_parallel_size": 3},
        ),
        ("qwen3 has no experts", DENSE, {"expert_model_parallel_size": 2}),
        ("num_experts_per_tok 9 exceeds", {"num_experts_per_tok": 9}, {}),
        ("tie_word_embeddings is true, expected false", {"tie_word_embeddings": True}, {}),
        ("needs --sequence-parallel: Megatron", {}, {"tensor_model_parallel_size": 2}),
        ("4 layers do not divide by 3 pipeline stages", {}, {"pipeline_model_parallel_size": 3}),
        (
            "leave -1 for 1 stages",
            {},
            {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 5},
        ),
        (
            "leave 1 for 0 stages",
            {},
            {
                "pipeline_model_parallel_size": 2,
                "decoder_first_pipeline_num_layers": 2,
                "decoder_last_pipeline_num_layers": 1,
            },
        ),
        (
            "a stage of 3 layers does not divide by virtual",
            {"num_hidden_layers": 6, "moe_layer_numbers": tuple(range(1, 7))},
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        ),
        ("rollout_max_context_len 600 exceeds", {}, {"rollout_max_context_len": 600}),
        ("leaves no room for a prompt in max_position", {}, {"rollout_max_response_len": 512}),
        ("leaves no room .* sglang context_length 8", {}, {"sglang": {"context_length": 8}}),
        ("= 513 exceeds max_position_embeddings 512", {}, {"rollout_max_prompt_len": 505}),
        (r"64 is not in 0\.\.63", {}, {"rollout_stop_token_ids": [64]}),
        ("model is qwen3 without experts", DENSE, R3),
        (r"layers \[2\] are dense", {"moe_layer_numbers": (1, 3, 4)}, {}),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(message, hf, fields):
    model_refuses(message, hf, 24, **fields)


def test_a_dense_model_without_r3_and_tied_embeddings_without_an_engine_are_fine(tmp_path):
    tied = {"tie_word_embeddings": True}
    check_model(config(), facts(**DENSE), 1)
    check_model(config(), facts(**DENSE, **tied), 1)
    check_model(config(replay_rollouts=tmp_path), facts(**tied), 1)


def test_27_layers_go_over_two_uneven_stages():
    hf = dict(num_hidden_layers=27, moe_layer_numbers=tuple(range(1, 28)))
    fields = {"pipeline_model_parallel_size": 2}
    model_refuses("27 layers do not divide by 2", hf, 2, **fields)
    check_model(config(decoder_last_pipeline_num_layers=13, **fields), facts(**hf), 2)


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

    assert "1 weight versions old" in warnings(max_weight_staleness=1)
    assert warnings(max_weight_staleness=0) == ""
    for fields in (
        {"use_tis": True},
        {"rollout_is": "geometric"},
        {"ratio_anchor": "rollout"},
        {"policy_loss": "dppo_kl"},
        {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": ["1.01"]},
    ):
        assert warnings(max_weight_staleness=1, **fields) == ""
    assert "gspo with eps_clip 0.2" in warnings(policy_loss="gspo", max_weight_staleness=0)
    narrow = {"eps_clip": 3e-4, "eps_clip_high": 4e-4, "max_weight_staleness": 0}
    assert warnings(policy_loss="gspo", **narrow) == ""
