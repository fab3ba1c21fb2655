"""Routes by way of the leaders' stores: the very slices that rank 0 cuts without them.

Real gloo ranks and real stores over HTTP; samples in parts over all stores, with rows that nobody
has, and with rows that rank 0 holds itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.engine.server import free_port

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.ranks


def run(directory: Path, *flags: str) -> list[dict]:
    """The findings of each of four ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-port"]
    torchrun += [str(free_port("127.0.0.1"))]
    worker = ["--nproc-per-node", "4", "-m", "tests.oracle.route_exchange_worker"]
    done = subprocess.run(
        [*torchrun, *worker, str(directory), *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((directory / f"rank_{i}.json").read_text()) for i in range(4)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run(tmp_path_factory.mktemp("exchange"))


def test_every_ranks_slices_are_the_same_bytes_in_every_topology(found):
    for name in found[0]:
        for rank in found:
            assert rank[name]["slices_0"] is rank[name]["slices_1"] is True, (name, rank)
            assert rank[name]["routes_bytes_0"] > 0
    assert len(found[0]) == 7


def test_rank_0_sends_a_data_rank_its_streams_once_and_leaders_send_them_on(found):
    for name in found[0]:
        ranks = [rank[name] for rank in found]
        leaders = sorted({min(rank["group"]) for rank in ranks})
        sent = [{int(to): size for to, size in rank["sent_1"].items()} for rank in ranks]
        directly = {int(to): size for to, size in ranks[0]["sent_directly_1"].items()}
        assert set(directly) == {1, 2, 3}
        for rank, of in enumerate(ranks):
            others = set(of["group"]) - {rank} if rank in leaders else set()
            others |= set(leaders) - {0} if rank == 0 else set()
            assert set(sent[rank]) == others, (name, rank)
            # a slice weighs the same whoever sends it
            for to in set(sent[rank]) - set(leaders):
                assert sent[rank][to] == directly[to], (name, rank, to)


def test_what_the_leaders_recorded_adds_up_to_what_rank_0_would_have(found):
    for name, of in found[0].items():
        assert of["recorded_0"] is of["recorded_1"] is True, name


def test_leaders_fetch_from_one_another_and_free_what_was_trained(found):
    for name in found[0]:
        leaders = [rank[name] for rank in found if "held_0" in rank[name]]
        assert len(leaders) == (4 if name.startswith("dp4") else 1 if "sp_cp2" in name else 2)
        if len(leaders) > 1:
            assert all(of["fetched_1"] > of["fetched_0"] > 0 for of in leaders)
        # 14 samples of at most 4 parts a rollout: both rollouts' would be more
        assert sum(of["held_1"] for of in leaders) <= 14 * 4
        assert 0 < sum(of["held_1"] for of in leaders) < 1.5 * sum(of["held_0"] for of in leaders)


def test_a_single_wrong_bit_in_a_store_is_seen_by_both_comparisons(tmp_path):
    found = run(tmp_path, "--corrupt")
    slices = [rank["dp4"][f"slices_{i}"] for rank in found for i in range(2)]
    assert not all(slices)
    assert not all(found[0]["dp4"][f"recorded_{i}"] for i in range(2))
