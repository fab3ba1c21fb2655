"""Weights of a later pipeline stage: its leader broadcasts them, and rank 0 makes its calls.

Rank 0 and one leader are two threads here; the servers have no rank, so a broadcast ends at once.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from r3train.engine import publish
from r3train.engine.backend import EngineDied, EngineError
from r3train.engine.publish import BroadcastGroup, WeightUpdateError
from r3train.loop import server_weights
from r3train.loop import stage_weight_sync
from r3train.loop.stage_weight_sync import StageLeaderPublisher, PerStagePublisher

LEADER, LATER = 4, 8


class Servers:
    """Servers of no rank; ``calls`` has what they were asked, ``fails`` an error for a bucket of these names."""

    def __init__(self):
        self.calls, self.fails, self.dead = [], {}, None
        self.servers = []

    def check_alive(self):
        if self.dead is not None:
            raise self.dead

    def present(self):
        return self.servers

    def update_group_sizes(self, servers):
        assert servers == self.servers
        return []

    def init_weights_update_group(self, **arguments):
        self.calls.append(("join", arguments["group_name"]))
        return self.done()

    def begin_weight_update(self):
        self.calls.append(("begin",))

    def end_weight_update(self):
        self.calls.append(("end",))

    def destroy_weights_update_group(self, group_name, servers):
        self.calls.append(("leave", group_name))

    def update_weights_from_distributed(
        self,
        names,
        dtypes,
        shapes,
        group_name,
        load_format,
        flush_cache,
        servers,
        weight_version=None,
    ):
        assert servers == self.servers
        self.calls.append(("bucket", group_name, names, weight_version, flush_cache))
        (name,) = names
        return self.done(self.fails.get(name))

    def done(self, error=None):
        answer = Future()
        if isinstance(error, EngineDied):
            self.dead = error  # and answers no more
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(None)
        return answer

    def of_buckets(self):
        return [call[2:] for call in self.calls if call[0] == "bucket"]


@pytest.fixture
def ranks(monkeypatch):
    """Publishers of rank 0 and of a leader, their servers, and messages to ranks that have not taken them."""
    to = defaultdict(Queue)

    def send(values):
        for rank, value in values.items():
            to[rank].put(json.dumps(value))

    monkeypatch.setattr(stage_weight_sync, "send_json", send)
    monkeypatch.setattr(
        stage_weight_sync,
        "recv_json",
        lambda rank=0: json.loads(to[0 if rank else LEADER].get(timeout=20)),
    )
    monkeypatch.setattr(publish, "ALIVE_EVERY_S", 0.01)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    servers = Servers()
    how = dict(bucket_bytes=8, group=BroadcastGroup(timeout_s=20), together=[("half", "other")])
    rank_0, leader = PerStagePublisher(servers, [LEADER], **how), StageLeaderPublisher(**how)
    yield SimpleNamespace(rank_0=rank_0, leader=leader, servers=servers, to=to)
    rank_0.close()
    leader.close()
    dist.destroy_process_group()
    assert to[0].empty() and to[LEADER].empty()


def weights(names, given=None):
    """Tensors of these names, each of which is a bucket; ``given`` gets the names as they are taken."""
    for name in names:
        yield name, torch.ones(2)
        if given is not None:
            given.append(name)


def publish_both(ranks, first, second, version=1):
    """Publish on both ranks, and require that the leader ends with all of its weights given."""
    given = []
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(ranks.leader.send, weights(second, given), version=version)
        try:
            return ranks.rank_0.publish(weights(first), version=version)
        finally:
            if (error := sending.exception(timeout=20)) is not None:
                raise error
            assert given == list(second)


def test_a_leader_sends_its_stage_in_a_group_of_its_own_and_the_version_comes_last(ranks):
    servers = ranks.servers
    for version in (1, 2):
        done = publish_both(ranks, "ab", "xyz", version)
        assert done.sent.keys() == set("abxyz") and done.num_buckets == 5
        assert (done.version, done.num_bytes) == (version, 5 * 8)
        assert {(kind.shape, kind.dtype) for kind in done.sent.values()} == {((2,), "float32")}
        own, others = ranks.rank_0._group_name, ranks.leader._group_name
        assert [call for call in servers.calls if call[0] != "join"] == [
            ("begin",),
            *(("bucket", others, [name], None, False) for name in "xyz"),
            ("bucket", own, ["a"], None, False),
            ("bucket", own, ["b"], version, True),
            ("end",),
        ]
        joined = [call[1] for call in servers.calls if call[0] == "join"]
        assert joined == ([own, others] if version == 1 else [])  # and they are kept
        servers.calls.clear()
    ranks.rank_0.close()
    assert servers.calls == [("leave", own), ("leave", others)]


def test_where_other_servers_are_present_each_stage_has_a_new_group_and_leaves_its_old_one(ranks):
    servers = ranks.servers
    for version, servers.servers in ((1, [0]), (2, [0, 3]), (3, [0, 3])):
        publish_both(ranks, ["own"], ["later"], version)
    groups = [name for what, name in (c for c in servers.calls if len(c) == 2) if what == "join"]
    left = [name for what, name in (c for c in servers.calls if len(c) == 2) if what == "leave"]
    assert len(set(groups)) == 4 and sorted(left) == sorted(groups[:2])


def test_a_leader_has_its_first_bucket_before_its_turn_and_broadcasts_nothing(ranks, monkeypatch):
    publish_both(ranks, "a", "xy")
    flatten, broadcast = publish.flatten, dist.broadcast
    made, begun = threading.Event(), []
    monkeypatch.setattr(publish, "flatten", lambda *how: made.set() or flatten(*how))
    monkeypatch.setattr(dist, "broadcast", lambda *a, **k: begun.append(a) or broadcast(*a, **k))
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(ranks.leader.send, weights("xy"), version=2)
        assert made.wait(20)
        time.sleep(0.1)
        assert not begun and not sending.done()
        ranks.rank_0.publish(weights("a"), version=2)
        sending.result(timeout=20)
    assert len(begun) == 3


@pytest.mark.parametrize("error", [EngineError("refused"), EngineDied("the server died")])
def test_what_ends_a_leaders_broadcast_is_raised_on_rank_0_and_all_go_on_in_new_groups(
    ranks, error
):
    publish_both(ranks, "a", "xyz")
    ranks.servers.fails["y"] = error
    with pytest.raises(type(error)) as raised:
        publish_both(ranks, "ab", "xyz")
    assert raised.value is error
    assert ranks.servers.calls[-1][2] == ["y"], "nothing is asked of the servers after it"
    ranks.rank_0.abandon()
    ranks.servers = ranks.rank_0._engine = Servers()
    ranks.rank_0.reconnect()
    ranks.leader.reconnect()
    publish_both(ranks, "ab", "xyz", 2)
    assert [call[0] for call in ranks.servers.calls].count("join") == 2


def test_a_broken_group_is_dropped_before_servers_are_asked_to_leave_a_leaders(ranks, monkeypatch):
    """Until then a server that waits for its bucket answers no call."""
    ranks.servers.fails["a"] = EngineError("refused")
    with pytest.raises(EngineError, match="refused"):
        publish_both(ranks, "a", "x")
    destroy, calls = dist.destroy_process_group, ranks.servers.calls
    monkeypatch.setattr(
        dist, "destroy_process_group", lambda group: (calls.append(("drop",)), destroy(group))
    )
    ranks.rank_0.reconnect()
    monkeypatch.undo()
    assert [call[0] for call in calls[-2:]] == ["drop", "leave"]


def test_a_fault_of_a_leaders_own_is_raised_on_rank_0(ranks, monkeypatch):
    with pytest.raises(ValueError, match="'half' came without 'other'"):
        publish_both(ranks, "ab", ["x", "half"])
    ranks.rank_0.abandon()
    ranks.rank_0.reconnect()

    def late(_bucket):
        raise WeightUpdateError("a bucket was not loaded in time")

    monkeypatch.setattr(ranks.leader, "_arrive", late)
    with pytest.raises(WeightUpdateError, match="a bucket was not loaded in time"):
        publish_both(ranks, "ab", "xyz")
    ranks.rank_0.abandon()


def test_a_stage_without_tensors_has_its_turn(ranks):
    assert publish_both(ranks, "ab", "").sent.keys() == set("ab")


def test_leaders_that_wait_are_let_go_of_when_an_update_fails_before_their_turn(ranks):
    given = []
    ranks.rank_0.abandon()
    ranks.leader.send(weights("xy", given), version=1)
    assert given == ["x", "y"] and ranks.servers.calls == []
    ranks.rank_0._leaders = [LEADER, LATER]
    ranks.rank_0._waiting = [LEADER, LATER]
    ranks.servers.fails["x"] = EngineError("refused")
    with pytest.raises(EngineError, match="refused"):
        publish_both(ranks, "ab", "xy")
    assert ranks.to[LATER].empty()
    ranks.rank_0.abandon()
    assert "error" in json.loads(ranks.to[LATER].get_nowait())


@pytest.mark.parametrize(
    "rank, asked, expected",
    [
        (0, None, None),  # no leader, but rank 0 itself
        (2, None, None),
        (4, None, (["127.0.0.1", "10.0.0.7"], None)),
        (4, "10.0.0.1", (["127.0.0.1", "10.0.0.7"], "10.0.0.1")),
        (8, None, (["head", "10.0.0.7"], None)),
        (8, "10.0.0.1", (["head", "10.0.0.7"], None)),  # an address of rank 0's node
        (8, "lo", (["head", "10.0.0.7"], "127.0.0.1")),
    ],
)
def test_a_leader_of_another_node_takes_an_address_of_its_own(monkeypatch, rank, asked, expected):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setattr(server_weights, "broadcast_json", lambda _: ["127.0.0.1", "10.0.0.7"])
    monkeypatch.setattr(
        server_weights,
        "broadcast_settings",
        lambda _, hf, hosts, asked: dict(bucket_bytes=1, at=(hosts, asked)),
    )
    monkeypatch.setattr(server_weights, "StageLeaderPublisher", lambda bucket_bytes, at: at)
    config = SimpleNamespace(
        weight_senders=lambda world_size, one_node: range(4, world_size, 4),
        trainer=SimpleNamespace(
            update_weight_master_address=asked, update_weight_transfer_mode="distributed"
        ),
    )
    assert server_weights.build_sender(config, None, None) == expected
