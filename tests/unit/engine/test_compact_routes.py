"""A server of ours sends short routes, whichever way its scheduler's process starts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pybase64
import pytest
import torch

from r3train.routing.indexer_topk import decode

# as a server's process does it, without its key and flags; a process of its own, because patches stay
_INSTALLED = """
from r3train.cpu.torchvision_stub import declare_torchvision_ops
declare_torchvision_ops()
from r3train.engine import compact_routes
compact_routes.install()
from sglang.srt.entrypoints import engine, http_server
import inspect, pickle
starts = [
    engine.Engine.run_scheduler_process_func,
    inspect.signature(http_server.launch_server).parameters["run_scheduler_process_func"].default,
]
assert all(start is compact_routes.run_scheduler for start in starts), starts
print(pickle.dumps(starts[0]).hex())
"""


def test_every_scheduler_that_sglang_starts_is_ours_and_a_spawned_process_finds_it():
    done = subprocess.run(
        [sys.executable, "-c", _INSTALLED], capture_output=True, text=True, check=True
    )
    start = pickle.loads(bytes.fromhex(done.stdout.split()[-1]))
    assert start.__module__ == "r3train.engine.compact_routes"


class Capturer:
    """SGLang's, of one request's tokens; it notes what it was asked for."""

    num_layers, topk_size = 2, 3

    def __init__(self, ids):
        self.ids, self.asked = torch.from_numpy(ids), []

    def get_topk(self, req_pool_idx, seqlen, req_to_token_pool, start_len=0):
        assert (req_pool_idx, req_to_token_pool) == (5, "table")
        start_len = min(start_len, seqlen - 1)
        self.asked.append((start_len, seqlen - 1))
        return self.ids[start_len : seqlen - 1]


@pytest.mark.parametrize(
    "start, asked", [(None, [(3, 7), (7, 9)]), (0, [(3, 7), (7, 9)]), (6, [(6, 9)]), (9, [])]
)
def test_a_scheduler_sends_bits_of_the_rows_that_were_asked_for(start, asked, monkeypatch):
    from r3train.engine import compact_routes

    monkeypatch.setattr(compact_routes, "BLOCK_BYTES", 4 * 24)  # four rows
    random = np.random.default_rng(0)
    ids = np.full((9, 2, 3), -1, dtype=np.int32)
    for row, layer in np.ndindex(9, 2):
        own = random.permutation(row + 1)[:3]
        ids[row, layer, : len(own)] = own
    capturer = Capturer(ids)
    processor = SimpleNamespace(req_to_token_pool="table")

    def collect(**changes):
        request_facts = dict(
            kv=SimpleNamespace(req_pool_idx=5),
            origin_input_ids=[1] * 4,
            output_ids_through_stop=[2] * 6,
            routed_experts_start_len=start,
            return_indexer_topk=True,
            indexer_topk=None,
        )
        request = SimpleNamespace(**request_facts | changes)
        compact_routes.collect_chosen(processor, request)
        return request.indexer_topk

    assert collect() is None, "this server records nothing"
    # SGLang's own asks in its own module
    for name in (compact_routes.__name__, compact_routes.collect_all_chosen.__module__):
        monkeypatch.setattr(f"{name}.get_global_indexer_capturer", lambda: capturer)
    assert collect(return_indexer_topk=False) is None and capturer.asked == []
    sent = collect()
    assert capturer.asked == asked
    sample_facts = dict(num_tokens=10, num_layers=2, topk=3, start=start or 0, sample="7")
    whole = pybase64.b64encode(ids.tobytes()).decode()
    np.testing.assert_array_equal(decode(sent, **sample_facts), decode(whole, **sample_facts))
    if asked:  # a row that cannot be: the client is to refuse it
        capturer.ids[8, 1] = 0
        assert collect().tolist() == ids.tolist()


@pytest.mark.parametrize(
    "ids, sent", [([[[3, 1]], [[0, 2]]], "u1:AwEAAg=="), ([[[3, -1]]], None), (None, None)]
)
def test_what_a_scheduler_collected_is_sent_short_where_it_can_be(monkeypatch, ids, sent):
    from r3train.engine import compact_routes

    tensor = None if ids is None else torch.tensor(ids, dtype=torch.int32)
    monkeypatch.setattr(
        compact_routes, "collect_routes", lambda self, req: setattr(req, "routed_experts", tensor)
    )
    request = SimpleNamespace(routed_experts=None)
    compact_routes.collect_short(None, request)
    if sent is None:
        assert request.routed_experts is tensor
    else:
        assert request.routed_experts == sent
