"""Restarts of lost engines, of which all ranks know."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from r3train.engine.backend import EngineDied, EngineError, EngineUnreachable
from r3train.engine.publish import WeightUpdateError
from r3train.host_group import join_ranks, leave_ranks
from r3train.loop import recovery as module
from r3train.loop.recovery import Recovery


class Engines:
    """The rollout side of rank 0: it restarts, or cannot."""

    def __init__(self, failure=None):
        self.failure, self.calls = failure, []

    def restart(self):
        self.calls.append("restart")
        if self.failure is not None:
            raise self.failure

    def restored(self, version):
        self.calls.append(("restored", version))

    def fault_counts(self):
        return {"engine_restarts": 2}


@pytest.fixture
def one_rank():
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


def test_lost_engines_and_weight_updates_are_caught_and_a_refusal_is_not():
    caught = Recovery(None, enabled=True).caught
    for error in (EngineDied, EngineUnreachable, WeightUpdateError):
        assert issubclass(error, caught)
    assert not issubclass(EngineError, caught) and not issubclass(ValueError, caught)
    assert Recovery(None, enabled=False).caught == ()


def test_without_restarts_there_is_no_collective():
    """No group of ranks has been joined here, so a collective would raise."""
    assert not Recovery(Engines(), enabled=False).needed(EngineDied("it ended"))


def test_rank_0_restarts_where_it_has_a_failure(one_rank):
    engines = Engines()
    recovery = Recovery(engines, enabled=True)
    assert not recovery.needed(None) and recovery.needed(EngineDied("it ended"))
    assert recovery.restart() is None
    recovery.restored(7)
    assert engines.calls == ["restart", ("restored", 7)]
    assert recovery.counts() == {"engine_restarts": 2}


def test_what_prevents_a_restart_is_given_back_and_an_error_of_ours_is_raised(one_rank):
    failure = EngineDied("too many restarts")
    assert Recovery(Engines(failure), enabled=True).restart() is failure
    with pytest.raises(ZeroDivisionError):
        Recovery(Engines(ZeroDivisionError()), enabled=True).restart()


@pytest.mark.parametrize("said", [None, "too many restarts"])
def test_another_rank_hears_what_prevents_the_restart(one_rank, monkeypatch, said):
    monkeypatch.setattr(module, "broadcast_json", lambda value: said)
    recovery = Recovery(None, enabled=True)
    failure = recovery.restart()
    if said is None:
        assert failure is None
    else:
        assert str(failure) == "rank 0 lost its engines: too many restarts"
    recovery.restored(7)
    assert recovery.counts() == {}
