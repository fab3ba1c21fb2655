"""Canaries of servers that store less than the actor: gpt-oss's attention sinks, which SGLang keeps in bfloat16.

In a file of its own, because a process has one process group at a time and each rig of ``test_canaries`` joins one.
"""

from __future__ import annotations

import pytest
from tests.e2e.test_canaries import opened

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    with opened("gpt_oss", "float32", tmp_path_factory.mktemp("gpt_oss")) as rig:
        yield rig


def test_BOUND_names_sinks_that_were_kept(gpt_oss):
    assert gpt_oss.caught_by(1e-3, servers=1, fault=gpt_oss.kept("sinks")) == "BOUND"


def test_sound_updates_of_servers_that_store_less_pass(gpt_oss):
    for lr in (1e-3, 1e-4, 1e-5):
        assert gpt_oss.update(lr)["served/passed"]
