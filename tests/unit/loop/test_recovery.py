"""Restarts of lost servers, of which all ranks know."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from r3train.engine.backend import EngineBusy, EngineDied, EngineError, EngineUnreachable
from r3train.engine.publish import WeightUpdateError
from r3train.host_group import join_ranks, leave_ranks
from r3train.loop import recovery as module
from r3train.loop.recovery import Recovery


class Servers:
    """Rank 0's servers, which restart, or cannot."""

    def __init__(self, failure=None):
        self.failure, self.calls = failure, []

    def restart(self, cause):
        self.calls.append(cause)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def one_rank():
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


def test_lost_servers_and_weight_updates_are_caught_and_a_refusal_is_not():
    caught = Recovery(None, enabled=True).caught
    for error in (EngineDied, EngineUnreachable, WeightUpdateError):
        assert issubclass(error, caught)
    assert not issubclass(EngineError, caught) and not issubclass(ValueError, caught)
    assert Recovery(None, enabled=False).caught == ()


@pytest.mark.parametrize(
    "enabled, cause",
    [(False, EngineDied("it ended")), (True, EngineError("401")), (True, EngineBusy("503"))],
)
def test_a_cause_that_no_restart_fixes_is_given_back_and_nothing_restarts(one_rank, enabled, cause):
    recovery = Recovery(servers := Servers(), enabled=enabled)
    assert recovery.rank_zero_failed(cause) and recovery.restart(cause) is cause
    assert servers.calls == []


def test_rank_0_restarts_where_it_has_a_failure(one_rank):
    servers = Servers()
    recovery = Recovery(servers, enabled=True)
    assert not recovery.rank_zero_failed(None) and recovery.rank_zero_failed(EngineDied("it ended"))
    assert recovery.restart(EngineDied("it ended")) is None
    assert servers.calls == ["it ended"]


def test_what_prevents_a_restart_is_given_back_and_an_error_of_ours_is_raised(one_rank):
    failure = EngineDied("too many restarts")
    lost = EngineDied("it ended")
    assert Recovery(Servers(failure), enabled=True).restart(lost) is failure
    with pytest.raises(ZeroDivisionError):
        Recovery(Servers(ZeroDivisionError()), enabled=True).restart(lost)


@pytest.mark.parametrize("said", [None, "too many restarts"])
def test_another_rank_hears_what_prevents_the_restart(one_rank, monkeypatch, said):
    monkeypatch.setattr(module, "broadcast_json", lambda value: said)
    recovery = Recovery(None, enabled=True)
    failure = recovery.restart(None)
    if said is None:
        assert failure is None
    else:
        assert "too many restarts" in str(failure)
