"""What the asynchronous rollout refuses at start-up: deadlocks, labels that lie, runs without end."""

from __future__ import annotations

import pytest
from tests.unit.config.test_config_cross_checks import R3, config, static_refuses

from r3train.config.cross_checks import check_static


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rollout_buffer_size": 3}, "rollout_buffer_size 3 is below rollout_batch_size 4"),
        (
            {"rollout_buffer_size": 5, "over_sampling_batch_size": 6},
            "rollout_buffer_size 5 is below over_sampling_batch_size 6",
        ),
        ({"over_sampling_batch_size": 3}, "over_sampling_batch_size 3 is below"),
        ({"stale_policy": "regenerate"}, "--stale-policy regenerate needs --over-sampling"),
        (
            {"rollout_filter": ["zero_variance"], "rollout_top_k": 1},
            "zero_variance cannot go with rollout_top_k 1",
        ),
        (
            {"rollout_filter": ["zero_variance"], "n_samples_per_prompt": 1},
            "zero_variance needs n_samples_per_prompt above 1",
        ),
        (
            {"pause_generation_mode": "retract", **R3},
            "retract cannot go with --use-rollout-routing-replay: SGLang recomputes the rows",
        ),
        (
            {"pause_generation_mode": "in_place", "max_weight_staleness": 0},
            "in_place needs max_weight_staleness above 0",
        ),
        (
            {"pause_generation_mode": "abort", "sglang": {"disable_overlap_schedule": False}},
            "the version of the token at an update is off by one",
        ),
        (
            {"rollout_num_engines": 2, "rollout_external_engine_addrs": ["h:1"]},
            "give one of the two",
        ),
        ({"rollout_external_engine_addrs": ["h:1", "h:1"]}, "names a server twice"),
        ({"environment_samples": "turn"}, "--environment-samples turn needs --environment"),
        (
            {"environment": "calculator", "environment_samples": "turn", "global_batch_size": 8},
            "leave global_batch_size unset",
        ),
    ],
)
def test_settings_that_cannot_go_together_are_refused_with_the_reason(fields, message):
    static_refuses(message, **fields)


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
    ],
)
def test_settings_that_can_pass(fields):
    check_static(config(**fields), 1)


def test_the_buffer_is_by_default_what_the_staleness_can_use():
    assert config(max_weight_staleness=2).rollout.buffer_groups == 12
    assert config(max_weight_staleness=2, over_sampling_batch_size=7).rollout.buffer_groups == 15
