"""Weight versions that servers are sent, and how much of each."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from r3train.engine.backend import EngineDied
from r3train.engine.members import Members
from r3train.engine.publish import Published
from r3train.host_group import join_ranks, leave_ranks
from r3train.loop import async_loop, weight_update
from r3train.loop.async_loop import AsyncLoop
from r3train.loop.canaries import NotServed
from r3train.loop.device_turns import DeviceTurns
from r3train.loop.rank_zero import RankZero
from r3train.loop.intake import Intake, Taken
from r3train.loop.recovery import Recovery
from r3train.loop.rollout_source import RolloutSource
from r3train.loop.train_rollout import Trained
from r3train.loop.weight_update import WeightUpdate
from r3train.observe.console import RunDisplay
from r3train.types import RankTopology
from tests.unit.config.test_config import config
from tests.unit.hf_model import facts
from tests.unit.loop.test_canaries import CHECKED


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    unchecked = SimpleNamespace(require=lambda *sent, **how: None)
    monkeypatch.setattr(weight_update, "WeightIndex", lambda *of: unchecked)
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


class Servers:
    """Rank 0's servers and their weights, which are lost in the update to ``lost_at``."""

    is_deserted = False

    def __init__(self, lost_at: int) -> None:
        self.lost_at, self.publisher = lost_at, self

    def publish(self, weights, *, version):
        if version == self.lost_at:
            self.lost_at = -1
            raise EngineDied("killed")
        return Published(version, {}, 0, 1, 0.0)

    def restart(self, cause):
        pass

    def abandon(self):
        pass

    resume = abandon

    def unchanged(self):
        return nullcontext()

    requests_wait = unchanged


def updates_of(servers, actor, *, canaries=None, **settings) -> WeightUpdate:
    """The updates of a run on one rank whose lost servers are started again once."""
    return WeightUpdate(
        config=config(**{"max_engine_restarts": 1, **settings}),
        hf=facts(),
        actor=actor,
        rank_zero=RankZero(servers, servers, servers, RunDisplay(4, enabled=False), None, None),
        turns=DeviceTurns(),
        recovery=Recovery(servers, enabled=True),
        run_state=None,
        sender=None,
        canaries=canaries,
    )


def test_new_servers_of_a_lora_run_are_sent_all_tensors_and_later_the_targets_alone():
    alone, servers = [], Servers(lost_at=3)

    def hf_weights(*, targets_alone=False, gather_to="rank_0"):
        alone.append(targets_alone)
        return iter(())

    update = updates_of(servers, SimpleNamespace(hf_weights=hf_weights), lora_rank=4)
    for version in (1, 2, 3, 4):
        update.publish(version)
    # the first, one more, one that is lost and sent to the new servers, and one more
    assert alone == [False, True, True, False, True]


def test_canaries_hear_of_restarted_servers_before_they_are_sent_to_them():
    told, servers = [], Servers(lost_at=2)
    canaries = SimpleNamespace(send=told.append, restarted=lambda: told.append("restarted"))
    actor = SimpleNamespace(hf_weights=lambda **how: iter(()))
    update = updates_of(servers, actor, canaries=canaries)
    for version in (1, 2, 3):
        update.publish(version)
    assert told == [1, "restarted", 2, 3]


class Compared(Servers):
    """Servers that are lost at the first call of ``lost_in``, before they have read what it gives them."""

    def __init__(self, lost_in: str) -> None:
        super().__init__(lost_at=1)
        self.lost_in = lost_in

    def publish(self, weights, *, version):
        self.lose("publish", weights)
        return Published(version, {}, 0, 1, 0.0)

    def compare(self, weights, version):
        self.lose("compare", weights)
        return SimpleNamespace(checkpoint=None, require_equal=lambda version: None)

    def lose(self, call, weights):
        if call == self.lost_in and self.lost_at == 1:
            self.lost_at = -1
            raise EngineDied("killed")
        list(weights)


@pytest.mark.parametrize("lost_in", ["publish", "compare"])
def test_every_export_is_drained_also_of_an_update_that_fails(lost_in):
    begun, ended = [], []

    def hf_weights(**how):  # other ranks wait in it for rank 0
        begun.append(how)
        yield from ()
        ended.append(how)

    update = updates_of(
        Compared(lost_in), SimpleNamespace(hf_weights=hf_weights), check_weight_update_equal=True
    )
    update.publish(1)
    assert len(begun) == 4 and ended == begun


@pytest.mark.parametrize("serving, told", [("merged", [1, 1]), ("adapter", [1])])
def test_requests_may_take_weights_before_their_update_has_ended_and_no_adapter_before_it_is_loaded(
    serving, told
):
    nothing, servers, versions = lambda **how: iter(()), Servers(lost_at=1), []
    source = RolloutSource()
    source.set_version = versions.append
    actor = SimpleNamespace(hf_weights=nothing, adapter_weights=nothing)
    update = updates_of(servers, actor, lora_rank=4, lora_serving=serving)
    update.set_source(source)
    assert update.publish(1)["rollout/weight_version"] == 1 and versions == told


class Deserted(Servers):
    """Servers that come and go, of which none is left after the update to ``lost_at``."""

    @property
    def is_deserted(self):
        return self.lost_at == -1


def test_weights_that_nobody_is_there_to_get_are_made_up_for_when_a_server_has_joined():
    versions, servers = [], Deserted(lost_at=1)
    source = RolloutSource()
    source.set_version = versions.append
    actor = SimpleNamespace(hf_weights=lambda **how: iter(()))
    update = updates_of(servers, actor, max_engine_restarts=0, rollout_engines_file="f")
    update.set_source(source)
    assert update.publish(1) == {} and versions == [1], "requests ask for it, and wait"
    servers.lost_at = 0
    assert update.revive(1, EngineDied("none holds them"))["rollout/weight_version"] == 1


def test_generation_goes_on_where_the_next_update_comes_before_anybody_asks_for_a_server():
    """A batch may be complete already, and a server has joined while it was trained."""
    resumed, servers = [], Deserted(lost_at=1)
    servers.resume = lambda: resumed.append(servers.lost_at)
    source = RolloutSource()
    source.set_version = lambda version: None
    actor = SimpleNamespace(hf_weights=lambda **how: iter(()))
    update = updates_of(servers, actor, max_engine_restarts=0, rollout_engines_file="f")
    update.set_source(source)
    assert update.publish(1) == {} and not resumed
    servers.lost_at = 0  # one has joined
    for version in (2, 3):
        assert update.publish(version)["rollout/weight_version"] == version
    assert resumed == [0], "once"


def test_no_request_goes_to_servers_whose_new_weights_are_not_judged_yet():
    members, servers, asked = Members(["h:1"], [0], changes=True), Servers(lost_at=2), []
    publish = servers.publish

    def recorded(weights, *, version):
        published = publish(weights, version=version)
        members.record(version)
        return published

    def judge(version, **how):
        asked.append((members.holders(version), members.askable(version)))

    servers.publish, servers.requests_wait = recorded, members.requests_wait
    servers.restart = lambda cause: asked.append((members.holders(0), members.askable(0)))
    actor = SimpleNamespace(hf_weights=lambda **how: iter(()))
    update = updates_of(servers, actor)
    update.checksums = SimpleNamespace(over=iter, judge=judge)
    for version in (1, 2):
        update.publish(version)
        assert members.askable(version) == [0]
    # an update, one that is lost, the restart, and the update of the new servers
    assert asked == [([0], []), ([], []), ([0], []), ([0], [])]


@pytest.mark.parametrize("part", ["checksums", "canaries"])
@pytest.mark.parametrize("losses", [1, 2, 3])
def test_a_start_whose_only_server_is_lost_while_it_is_asked_goes_on_with_another_twice(
    part, losses, monkeypatch
):
    calls, lost = [], [EngineDied("killed")] * losses

    def asked(name):
        def ask(version):
            calls.append(name)
            if name == part and lost:
                raise lost.pop()

        return ask

    canaries = SimpleNamespace(
        ask_first=asked("canaries"),
        begin=asked("begin"),
        send=None,
        keep=None,
        score_joiner=None,
        wait=lambda: None,
        judge=lambda version: {},
    )
    monkeypatch.setattr(async_loop, "Canaries", lambda **parts: canaries)
    checksums = SimpleNamespace(begin=asked("checksums"))
    monkeypatch.setattr(async_loop, "ServerChecksums", lambda *parts: checksums)
    monkeypatch.setattr(
        WeightUpdate, "revive", lambda _, version, cause: calls.append(f"revive: {cause}")
    )
    monkeypatch.setattr(WeightUpdate, "publish", lambda _, version: calls.append("publish"))
    monkeypatch.setattr(async_loop, "TrainSpeed", lambda *parts: None)
    source = RolloutSource()
    rollouts = SimpleNamespace(start_producer=lambda: calls.append("generate") or source)
    evaluations = SimpleNamespace(begin=None, end=lambda source: None)
    loop = AsyncLoop(
        config(num_rollout=1, max_engine_restarts=1, **CHECKED),
        facts(),
        SimpleNamespace(topology=RankTopology()),
        rank_zero=RankZero(
            Servers(0), None, rollouts, RunDisplay(4, enabled=False), None, evaluations
        ),
        evidence=None,
        run_state=SimpleNamespace(watch=lambda source: source),
        routes=SimpleNamespace(),
    )
    if losses == 3:
        with pytest.raises(EngineDied):
            loop.run(1)
        return
    assert loop.run(1) == 1
    again = [part, "revive: killed"] * losses
    expected = ["checksums", "publish", "canaries", "generate", "begin"]
    expected[(place := expected.index(part)) : place] = again
    assert calls == expected


@pytest.mark.parametrize("mode, kept", [("drain", True), ("in_place", False), ("retract", False)])
def test_what_was_frozen_while_weights_were_refused_is_generated_again(mode, kept, monkeypatch):
    saved = []

    def refuse(_, version):
        raise NotServed("SAME", version, {})

    monkeypatch.setattr(WeightUpdate, "publish", refuse)
    monkeypatch.setattr(Intake, "take", lambda *of: Taken([], None, {}))
    trained = Trained({}, first_step_done=True)
    monkeypatch.setattr(async_loop, "train_rollout", lambda *of: trained)
    monkeypatch.setattr(async_loop, "settle", lambda *of: None)
    monkeypatch.setattr(async_loop, "memory_metrics", lambda *of: {})
    loop = AsyncLoop(
        config(num_rollout=3, r3_canaries=0, pause_generation_mode=mode, max_weight_staleness=1),
        facts(),
        SimpleNamespace(topology=RankTopology(), device=None, check_replay=lambda on: None),
        rank_zero=None,
        evidence=None,
        run_state=SimpleNamespace(
            agree_on_stop=lambda: False,
            save_failed=lambda *of, keeps_samples: saved.append(keeps_samples),
        ),
        routes=SimpleNamespace(metrics=lambda: {}),
    )
    with pytest.raises(NotServed):
        loop.run(0)
    assert saved == [kept]


@pytest.mark.parametrize(
    "compared, stops, sent", [(False, False, [1, 2]), (True, False, [1, 2, 3]), (True, True, [])]
)
def test_the_last_weights_are_sent_only_to_be_compared(compared, stops, sent, monkeypatch):
    versions, no_metrics = [], lambda *of: {}
    monkeypatch.setattr(WeightUpdate, "publish", lambda _, version: versions.append(version) or {})
    monkeypatch.setattr(Intake, "take", lambda *of: Taken([], None, {}))
    trained = Trained({}, first_step_done=True)
    monkeypatch.setattr(async_loop, "train_rollout", lambda *of: trained)
    monkeypatch.setattr(async_loop, "settle", lambda *of: None)
    monkeypatch.setattr(async_loop, "memory_metrics", no_metrics)
    saves = ("save_due", "save_last", "save_stopped")
    loop = AsyncLoop(
        config(num_rollout=3, check_weight_update_equal=compared, r3_canaries=0),
        facts(),
        SimpleNamespace(topology=RankTopology(), device=None, check_replay=lambda on: None),
        rank_zero=None,
        evidence=None,
        run_state=SimpleNamespace(
            agree_on_stop=lambda: stops, **dict.fromkeys(saves, lambda *of, **how: None)
        ),
        routes=SimpleNamespace(metrics=no_metrics),
    )
    assert loop.run(0) == (1 if stops else 3)
    assert versions == sent
