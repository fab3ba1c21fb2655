"""Servers that may start with other weights than the actor are sent its own before rollout 0."""

from __future__ import annotations

import pytest

from tests.unit.config.test_config import config

ADAPTERS = {"lora_rank": 4, "lora_serving": "merged"}


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, False),
        (ADAPTERS, False),
        (ADAPTERS | {"lora_adapter_path": "adapter"}, True),
        (ADAPTERS | {"lora_serving": "adapter"}, True),
        ({"load": "checkpoints"}, True),
        ({"rollout_external_engine_addrs": ["h:1"]}, True),
    ],
)
def test_servers_that_start_behind_the_actor_are_sent_its_weights_first(settings, expected):
    assert config(**settings).servers_may_hold_other_weights is expected
