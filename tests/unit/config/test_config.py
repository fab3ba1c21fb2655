"""RunConfig: merging, unknown names, round trip."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from r3train.config import ConfigError, peers, RunConfig
from r3train.config.sources import places

REQUIRED = {
    "hf_checkpoint": "model",
    "prompt_data": "prompts.jsonl",
    "num_rollout": 3,
    "rollout_batch_size": 4,
    "rollout_max_response_len": 8,
    "n_samples_per_prompt": 4,
}


def config(**fields) -> RunConfig:
    return RunConfig.from_sources(flags={**REQUIRED, **fields})


def toml(tmp_path, text: str):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "fields, senders",
    [
        ({}, []),
        (dict(pipeline_model_parallel_size=2), [4]),
        (dict(pipeline_model_parallel_size=4), [2, 4, 6]),
        (dict(pipeline_model_parallel_size=4, lora_rank=8), []),
        (dict(pipeline_model_parallel_size=4, update_weight_transfer_mode="disk"), []),
        (dict(pipeline_model_parallel_size=4, replay_rollouts="rollouts"), []),
        (dict(update_weight_transfer_mode="shared_memory"), [1, 2, 3, 4, 5, 6, 7]),
        (dict(update_weight_transfer_mode="shared_memory", lora_rank=8), [1, 2, 3, 4, 5, 6, 7]),
        (dict(update_weight_transfer_mode="shared_memory", replay_rollouts="rollouts"), []),
    ],
)
def test_the_first_rank_of_each_later_stage_sends_weights_and_by_memory_every_rank(fields, senders):
    assert list(config(**fields).weight_senders(8, one_node=True)) == senders


def test_ranks_on_other_nodes_than_the_servers_send_no_weights_by_memory():
    made = config(update_weight_transfer_mode="shared_memory")
    assert not made.weight_senders(8, one_node=False)


def test_field_names_are_unique_over_all_sections():
    names = [
        name
        for section in RunConfig.model_fields.values()
        for name in section.annotation.model_fields
    ]
    assert len(names) == len(set(names)) == len(places(RunConfig))


def test_every_field_has_a_description():
    for place in places(RunConfig).values():
        assert place.info.description and place.info.description.endswith("."), place.name


def test_every_field_that_may_be_unset_is_unset_by_default():
    """TOML has no null: a resolved file could not say none where the default is a value."""
    for place in places(RunConfig).values():
        if "None" in str(place.info.annotation):
            assert place.info.default is None, place.name


def test_the_config_package_imports_neither_torch_nor_transformers():
    code = (
        "import sys, r3train.config.options, r3train.config.cross_checks;"
        "bad = {'torch', 'transformers', 'megatron', 'sglang'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flags_win_over_the_file_and_the_file_over_the_default(tmp_path):
    path = toml(tmp_path, "[trainer]\nlr = 0.5\nseed = 7\n")
    made = RunConfig.from_toml(path, {**REQUIRED, "lr": 0.25})
    assert (made.trainer.lr, made.trainer.seed, made.trainer.clip_grad) == (0.25, 7, 1.0)


@pytest.mark.parametrize("flag", ["rollout_engines_file", "rollout_external_engine_addrs"])
def test_a_flag_that_names_servers_takes_the_place_of_the_files_way(flag, tmp_path):
    ways = {"rollout_engines_file": "servers", "rollout_external_engine_addrs": ["a:1"]}
    [key] = ways.keys() - {flag}
    text = f"[rollout]\n{key} = {ways[key]!r}\n"
    path = toml(tmp_path, f'{text}[trainer]\nupdate_weight_transfer_mode = "disk"\n')
    by_flag = RunConfig.from_toml(path, {**REQUIRED, flag: ways[flag]}).rollout
    alone = config(**{flag: ways[flag]}, update_weight_transfer_mode="disk").rollout
    assert by_flag == alone
    both = RunConfig.from_toml(path, {**REQUIRED, **ways}).rollout
    assert both.rollout_engines_file and both.rollout_external_engine_addrs, "refused by their rule"


def test_flags_add_to_the_tables_of_the_file(tmp_path):
    path = toml(
        tmp_path,
        "[rollout.sglang]\nmem-fraction-static = 0.3\ntp-size = 1\n"
        "[model.transformer_overrides]\nmoe_z_loss_coeff = 0.1\n",
    )
    flags = {
        **REQUIRED,
        "sglang": {"tp_size": 2},
        "transformer_overrides": {"moe_router_dtype": "fp32"},
    }
    made = RunConfig.from_toml(path, flags)
    assert made.rollout.sglang == {"mem_fraction_static": 0.3, "tp_size": 2}
    assert made.model.transformer_overrides == {
        "moe_z_loss_coeff": 0.1,
        "moe_router_dtype": "fp32",
    }


def test_a_former_name_of_a_setting_works_as_a_key_and_is_written_by_its_new_one(tmp_path):
    made = RunConfig.from_toml(toml(tmp_path, "[replay]\nr3_audit_share = 0.5"), REQUIRED)
    assert made.replay.r3_recheck_share == 0.5
    assert "r3_recheck_share = 0.5" in made.to_toml() and "r3_audit_share" not in made.to_toml()


@pytest.mark.parametrize("name, default", sorted(peers.REMOVED_DEFAULTS.items()))
def test_a_removed_setting_is_passed_over_at_its_default_and_refused_at_another_value(
    tmp_path, name, default
):
    RunConfig.from_toml(toml(tmp_path, f"[replay]\n{name} = {default}"), REQUIRED)
    with pytest.raises(ConfigError, match=f"{name}.*removed"):
        RunConfig.from_toml(toml(tmp_path, f"[replay]\n{name} = 0.5"), REQUIRED)


def test_the_resolved_config_reads_back_equal(tmp_path):
    made = config(
        recompute_modules=["moe", "core_attn"],
        transformer_overrides={"moe_z_loss_coeff": 1e-3, "moe_layer_freq": [0, 1]},
        sglang={"mem_fraction_static": 0.3, "sleep_on_idle": True},
        save="ck",
        r3_mismatch_threshold=0.5,
        rollout_stop_token_ids=[3, 4],
    )
    assert RunConfig.from_toml(toml(tmp_path, made.to_toml())) == made


@pytest.mark.parametrize(
    "text, message",
    [
        ("[trainer]\nlearning_rate = 1.0", r"\[trainer\] unknown key learning_rate"),
        ("[rollout]\nnum_rollouts = 1", r"unknown key num_rollouts\. Did you mean num_rollout\?"),
        ("[rollout]\nlr = 1.0", r"\[rollout\] lr belongs in the table \[trainer\]"),
        ("lr = 1.0", r"lr belongs in the table \[trainer\]"),
        ("[trainr]\nlr = 1.0", r"unknown table or key trainr\. Did you mean trainer\?"),
        ("trainer = 3", r"\[trainer\] must be a table, got 3"),
        ("[trainer\nlr = 1", r"recipe\.toml: not valid TOML: .*line 1"),
        ("[trainer]\nlr = -1.0", r"recipe\.toml: \[trainer\] lr: .*-1\.0$"),
        ("[rollout.sglang]\ntp-size = 1\ntp_size = 2", "tp_size is given twice"),
        (
            "[replay]\nr3_audit_share = 0.1\nr3_recheck_share = 0.2",
            "r3_audit_share is r3_recheck_share, which is given too",
        ),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_the_nearest_right_name(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        RunConfig.from_toml(toml(tmp_path, text), REQUIRED)
    assert "recipe.toml" in str(caught.value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_rollout", 0),
        ("num_rollout", True),
        ("num_rollout", "3"),
        ("num_rollout", 2.5),
        ("lr", float("nan")),
        ("lr", -1.0),
        ("bf16", 1),
        ("optimizer", "adan"),
        ("rollout_top_p", 0.0),
        ("custom_rm_path", "no_colon"),
        ("run_name", "a/b"),
        ("recompute_modules", "moe"),
    ],
)
def test_a_bad_value_names_its_flag(name, value):
    with pytest.raises(ConfigError, match="^--" + name.replace("_", "-") + ": .*got "):
        config(**{name: value})


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("num_rolout", 3, r"unknown setting num_rolout\. Did you mean num_rollout"),
        ("transformer_overrides", {"moe_x": None}, r"--transformer-override.*\.moe_x"),
    ],
)
def test_a_wrong_setting_is_named(name, value, message):
    with pytest.raises(ConfigError, match=message):
        config(**{name: value})


def test_the_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        config().trainer.lr = 1.0


def test_rows_may_leave_all_experts_more_often_where_servers_round_to_fp8():
    fp8 = dict(REQUIRED, bf16=True, rollout_weights="fp8")
    assert RunConfig.from_sources(flags=fp8).mismatch_threshold == 0.03
    given = RunConfig.from_sources(flags=fp8 | {"r3_mismatch_threshold": 0.0})
    assert given.mismatch_threshold == 0.0


@pytest.mark.parametrize(
    "environ, threshold",
    [
        ({}, 1e-2),
        ({"MILES_TEST_R3_THRESHOLD": "0.3"}, 0.3),
        ({"R3_MISMATCH_THRESHOLD": "0.2", "MILES_TEST_R3_THRESHOLD": "0.3"}, 0.2),
    ],
)
def test_the_threshold_comes_from_the_environment_below_file_and_flag(tmp_path, environ, threshold):
    made = RunConfig.from_sources(flags=REQUIRED, environ=environ)
    assert made.mismatch_threshold == threshold
    path = toml(tmp_path, "[replay]\nr3_mismatch_threshold = 0.4\n")
    made = RunConfig.from_sources(file=path, flags=REQUIRED, environ=environ)
    assert made.mismatch_threshold == 0.4
    flags = {**REQUIRED, "r3_mismatch_threshold": 0.5}
    made = RunConfig.from_sources(file=path, flags=flags, environ=environ)
    assert made.mismatch_threshold == 0.5


@pytest.mark.parametrize("text", ["a lot", "2", "nan"])
def test_a_bad_threshold_names_its_environment_variable(text):
    with pytest.raises(ConfigError, match="environment variable R3_MISMATCH_THRESHOLD"):
        RunConfig.from_sources(flags=REQUIRED, environ={"R3_MISMATCH_THRESHOLD": text})


@pytest.mark.parametrize(
    "replay, check, ci_test, enabled",
    [
        (True, True, False, True),
        (True, False, True, True),
        (True, False, False, False),
        (False, True, True, False),
    ],
)
def test_evidence_is_taken_where_replay_is_on_and_check_or_ci_test_asks(
    replay, check, ci_test, enabled
):
    made = config(
        use_rollout_routing_replay=replay, enable_r3_correctness_check=check, ci_test=ci_test
    )
    assert made.r3_check_enabled is enabled


def test_defaults_that_depend_on_other_fields_are_resolved_without_being_written_back():
    made = config()
    assert (made.samples_per_rollout, made.samples_per_step, made.steps_per_rollout) == (16, 16, 1)
    assert made.algorithm.clip_high == made.algorithm.eps_clip
    assert made.ref_checkpoint == made.model.hf_checkpoint
    assert made.trainer.global_batch_size is None and made.algorithm.eps_clip_high is None
