"""--colocate: the order in which servers and actor hold memory when a server is lost between two turns."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from r3train.families.read_facts import read_hf_facts
from r3train.engine.backend import EngineBusy, EngineDied, SamplingParams
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.host_group import join_ranks, leave_ranks
from r3train.loop.async_loop import AsyncLoop
from r3train.loop.device_turns import ColocatedTurns
from r3train.loop.rank_zero import RankZero
from r3train.loop.recovery import Recovery
from r3train.loop.weight_update import WeightUpdate
from r3train.observe.console import RunDisplay
from r3train.types import RankTopology
from tests.unit.config.test_config import config
from tests.fakes.server import SimulatedEngine, prompt_for


class Side:
    """Rank 0's servers, whose first release fails; the actor writes into the same list."""

    def __init__(self):
        self.calls = []

    def keep_onloaded(self, *kinds):
        self.calls.append(("servers", *kinds))
        if len(self.calls) == 1:
            raise EngineDied("killed")

    def restart(self, cause):
        self.calls.append(("restart",))

    def resume(self):
        self.calls.append(("resume",))
        self.producer.resume()


def test_a_server_lost_when_it_should_release_is_restarted_and_the_batch_waits_for_that(tiny):
    settings = config(
        hf_checkpoint=tiny / "model",
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        num_rollout=4,
        colocate=True,
        max_weight_staleness=0,
        max_engine_restarts=1,
    )
    engine, side, taken = SimulatedEngine(), Side(), []
    memory = SimpleNamespace(hold=lambda *parts: side.calls.append(("actor", *parts)))
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    try:
        loop = AsyncLoop(
            settings,
            read_hf_facts(tiny / "model"),
            SimpleNamespace(topology=RankTopology(), memory=memory),
            rank_zero=RankZero(side, side, side, RunDisplay(4, enabled=False), None, None),
            evidence=None,
            run_state=None,
            routes=SimpleNamespace(slices=lambda prepared, count: []),
        )
        loop._update._update = lambda *_: (side.calls.append(("sent",)) or {}, None)
        loop._intake._prepare = lambda _, groups: (
            taken.extend(groups) or SimpleNamespace(counts=[0]),
            {},
        )
        with Producer(
            settings.rollout, lambda: engine, prompt_for, RequestSettings(SamplingParams(20))
        ) as producer:
            side.producer = producer
            loop._intake.set_source(producer)
            taken_now = loop._intake.take(0)
            stats = producer.stats()
    finally:
        leave_ranks()
    assert taken_now.steps == [[]] and [group[0][0].group_id for group in taken] == [0, 1]
    assert side.calls == [
        ("servers",),
        ("actor",),  # a new server takes all of its memory
        ("restart",),
        ("servers",),
        ("actor", "weights"),
        ("sent",),
        ("actor",),
        ("servers", "weights", "kv_cache"),
        ("resume",),
        ("actor",),
        ("servers",),
    ]
    assert stats["in_flight"] == 0
    assert len(engine.asked) == 4, "answers that were complete were asked for again"


class Refuses:
    """Servers that never hold their memory again."""

    def __init__(self):
        self.calls = []

    def keep_onloaded(self, *kinds):
        self.calls.append(kinds)
        raise EngineBusy("answered 503")

    def stop(self):
        self.calls.append("stop")


def test_servers_that_refuse_their_turn_for_good_end_the_run_after_a_checkpoint(tiny):
    settings = config(
        hf_checkpoint=tiny / "model", colocate=True, max_weight_staleness=0, max_engine_restarts=1
    )
    servers, held, saved = Refuses(), [], []
    memory = SimpleNamespace(hold=lambda *parts: held.append(parts), is_whole=False)
    actor, recovery = SimpleNamespace(memory=memory), Recovery(servers, enabled=True)
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    try:
        update = WeightUpdate(
            config=settings,
            hf=read_hf_facts(tiny / "model"),
            actor=actor,
            rank_zero=RankZero(servers, None, None, RunDisplay(4, enabled=False), None, None),
            turns=ColocatedTurns(settings, actor, servers, recovery),
            recovery=recovery,
            run_state=SimpleNamespace(save_failed=lambda *of: saved.append((of[0], held[-1]))),
            sender=None,
        )
        with pytest.raises(EngineBusy, match="503"):
            update.publish(0)
        assert not saved, "nothing is new before the first rollout"
        update.set_source(SimpleNamespace(failure=None))
        with pytest.raises(EngineBusy, match="503"):
            update.publish(3)
    finally:
        leave_ranks()
    # once the servers have left, and all that a checkpoint needs has come back
    assert saved == [(3, ("weights", "gradients", "optimizer"))] and servers.calls[-1] == "stop"
