"""Weights in shared memory of which each rank writes its own; the ranks are threads here."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from r3train.engine.backend import EngineError
from r3train.engine.publish_memory import SharedMemoryPublisher


class Servers:
    """Servers that read a checkpoint; ``error`` is what the next load raises."""

    def __init__(self):
        self.loaded, self.error = [], None

    def update_weights_from_disk(self, path, *, weight_version, flush_cache):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        read = [load_file(file) for file in Path(path).glob("*.safetensors")]
        held = {name: tensor.tolist() for file in read for name, tensor in file.items()}
        self.loaded.append((weight_version, held))


class Ranks:
    """Three ranks' publishers, and what they tell one another."""

    def __init__(self, directory: Path):
        self.servers, self._told = Servers(), [None] * 3
        self._together = threading.Barrier(3, timeout=20)
        (directory / "hf").mkdir()
        (directory / "hf/config.json").write_text("{}")
        self.of = [
            SharedMemoryPublisher(
                None if rank else self.servers,
                directory=directory / "m",
                hf_checkpoint=directory / "hf",
                bucket_bytes=8,
                gather=lambda part, rank=rank: self._gather(part, rank),
            )
            for rank in range(3)
        ]

    def _gather(self, part, rank):
        self._told[rank] = json.dumps(part)
        self._together.wait()
        parts = [json.loads(told) for told in self._told]
        self._together.wait()
        return parts

    def all(self, *calls):
        """Let every rank make its call; returns what each returned, and raises what one raised."""
        with ThreadPoolExecutor(3) as threads:
            return [future.result(timeout=20) for future in [threads.submit(c) for c in calls]]

    def publish(self, version, *names):
        def call(rank):
            given = weights(names[rank], version)
            how = self.of[rank].send if rank else self.of[rank].publish
            return lambda: how(given, version=version)

        return self.all(*map(call, range(3)))[0]


def weights(names, value=1):
    """A tensor of 8 bytes for each name."""
    for name in names:
        yield name, torch.full((2,), float(value))


@pytest.fixture
def ranks(tmp_path):
    made = Ranks(tmp_path)
    yield made
    for each in made.of:
        each.close()
    assert not list((tmp_path / "m").glob("*.safetensors"))


def test_servers_load_what_all_ranks_have_written_at_once(ranks):
    for version in (1, 2, 3):
        done = ranks.publish(version, "ab", "xyz", "")
        assert (done.version, done.num_bytes, done.num_buckets) == (version, 40, 5)
        assert {(kind.shape, kind.dtype) for kind in done.sent.values()} == {((2,), "float32")}
        assert done.sent.keys() == set("abxyz")
        held = dict.fromkeys("abxyz", [version, version])
        assert ranks.servers.loaded.pop() == (version, held)


def test_a_tensor_that_two_ranks_have_written_is_refused_by_name_before_a_server_loads_it(ranks):
    with pytest.raises(ValueError, match="weight update 1: two ranks have written x"):
        ranks.publish(1, "ab", "xy", "xz")
    assert not ranks.servers.loaded


def test_no_tensor_of_any_rank_is_refused(ranks):
    with pytest.raises(ValueError, match="no weight to publish"):
        ranks.publish(1, "", "", "")


def test_a_load_that_fails_leaves_all_ranks_ready_for_the_next_update(ranks):
    ranks.servers.error = EngineError("refused")
    with pytest.raises(EngineError, match="refused"):
        ranks.publish(1, "a", "x", "y")
    ranks.of[0].abandon()  # no other rank waits
    assert ranks.publish(2, "a", "x", "y").sent.keys() == set("axy")


def test_ranks_that_have_written_go_on_when_the_update_never_begins_on_rank_0(ranks):
    first, *others = ranks.of
    sends = [lambda r=r: r.send(weights("old"), version=1) for r in others]
    ranks.all(first.abandon, *sends)
    assert ranks.publish(2, "a", "x", "y").sent.keys() == set("axy")
