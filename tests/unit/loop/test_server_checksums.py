"""Servers' checksums on the running job: which servers have a start to be held against, and who hears of a fault."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from r3train.engine.backend import AnswerLate, EngineDied, EngineError, EngineUnreachable
from r3train.host_group import join_ranks, leave_ranks
from r3train.loop.canaries import NotServed
from r3train.loop.server_checksums import ServerChecksums
from tests.unit.config.test_config import config

ADDRESS = ["127.0.0.1:30000"]


@pytest.fixture(autouse=True)
def one_rank():
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


class Fleet:
    """Servers whose one tensor has the checksum of a number each."""

    def __init__(self, *held: int):
        self.held, self.error, self.dropped = list(held), None, []
        self.present = self.present_then = lambda: list(range(len(self.held)))

    def checksums(self, version):
        if self.error is not None:
            self.present = self.present_then
            raise self.error
        return {i: {"rank 0 w": f"{h:08x}"} for i, h in enumerate(self.held)}, ["tp 1"] * 9

    def drop(self, server, why):
        self.dropped.append((server, why))


def weights(fleet: Fleet, **settings) -> ServerChecksums:
    settings = config(enable_r3_correctness_check=True, **settings)
    return ServerChecksums(settings, SimpleNamespace(servers=fleet, weights=fleet), None)


def update(held: ServerChecksums, version: int, **how) -> dict:
    for _ in held.over(iter([("w", torch.full((4,), float(version)))])):
        pass
    return held.judge(version, **how)


def test_a_server_of_the_run_that_comes_back_with_its_first_weights_is_named():
    held = weights(fleet := Fleet(0, 0))
    held.begin(0)
    for version in (1, 2):
        fleet.held = [version, version]
        assert update(held, version)["perf/checksums_s"] >= 0
        assert held.count(version) == 2
    fleet.held = [3, 0]
    with pytest.raises(
        NotServed, match="^not served: RESTART: server 1, weight version 3"
    ) as error:
        update(held, 3)
    assert error.value.metrics == {"served/passed": False}


def test_an_external_server_may_have_held_what_this_run_sends_later():
    """As one that a killed run had brought further, which goes on now from an earlier checkpoint."""
    held = weights(fleet := Fleet(3), rollout_external_engine_addrs=ADDRESS)
    held.begin(2)
    for version in (2, 3, 4):
        fleet.held = [version]
        update(held, version)
    fleet.held = [3]
    with pytest.raises(NotServed, match="SAME: server 0, weight version 5: .* of weight version 3"):
        update(held, 5)


def test_of_servers_that_come_and_go_one_that_holds_other_tensors_leaves_before_it_is_asked_for_any():
    held = weights(fleet := Fleet(0, 0, 0), rollout_engines_file="f")
    held.begin(0)
    fleet.held = [1, 9, 1]
    update(held, 1)
    assert [server for server, _ in fleet.dropped] == [1] and "rank 0 w" in fleet.dropped[0][1]
    assert held.count(1) == 2, "of those that stay"


def test_servers_of_a_run_that_start_with_other_tensors_end_it_before_the_first_rollout():
    with pytest.raises(NotServed, match="UNLIKE: server 1, weight version 0: rank 0 w"):
        weights(Fleet(0, 1)).begin(0)


def test_servers_that_say_no_checksums_end_no_run():
    held = weights(fleet := Fleet(0))
    fleet.error = EngineError("404")
    held.begin(0)
    assert update(held, 1) == {} and held.count(1) is None


@pytest.mark.parametrize(
    "error, present, lost",
    [
        (EngineDied("9"), [0], True),
        (EngineUnreachable("no server"), [], True),
        (EngineUnreachable("another one has joined"), [1], True),
        (AnswerLate("300 s"), [], False),
        (AnswerLate("300 s"), [0], False),
        (EngineUnreachable("one whose answer broke, and stays"), [0], False),
    ],
    ids=str,
)
def test_lost_servers_are_not_taken_for_ones_that_say_no_checksums(error, present, lost):
    held = weights(fleet := Fleet(0))
    fleet.error, fleet.present_then = error, lambda: present
    with pytest.raises(EngineUnreachable) if lost else contextlib.nullcontext():
        held.begin(0)


def test_after_a_failed_update_the_other_ranks_go_on_and_nothing_is_read():
    held = weights(fleet := Fleet(0))
    held.begin(0)
    fleet.error = AssertionError("read")
    update(held, 1, sent=False)
    assert held.count(1) == 0
