"""The device side of replay on CUDA.  Where there is no GPU these read *not run*, never passed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3train.ids import token_uids
from r3train.routing.fingerprint import rollout_fingerprint, route_hashes, to_unsigned
from r3train.routing.padding import fill_missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: no CUDA device"),
]


def test_the_device_fingerprint_equals_the_hosts_on_cuda():
    rng = np.random.default_rng(0)
    routes = np.argsort(rng.random((4095, 3, 64)), axis=-1)[..., :8].astype(np.uint8)
    expected = rollout_fingerprint(token_uids(7, 4095), routes, np.array([1, 2, 3]))
    uids = torch.from_numpy(token_uids(7, 4095)).cuda()
    for layer in (1, 2, 3):
        experts = torch.from_numpy(routes[:, layer - 1].astype(np.int64)).cuda()
        total = int(route_hashes(uids, experts, layer).sum())
        assert to_unsigned(total) == int(expected[layer - 1])


def test_filled_rows_are_distinct_on_cuda():
    scores = torch.randn(4096, 128, device="cuda")
    experts = scores.topk(8).indices
    missing = torch.rand(4096, 8, device="cuda") < 0.3
    filled = fill_missing(scores, experts.masked_fill(missing, 0), missing)
    assert (filled.sort(1).values.diff(dim=1) > 0).all()


def test_filling_does_not_wait_for_the_device():
    scores = torch.randn(4096, 128, device="cuda")
    experts = scores.topk(8).indices
    missing = torch.rand(4096, 8, device="cuda") < 0.3
    torch.cuda.set_sync_debug_mode("error")
    try:
        fill_missing(scores, experts, missing)
    finally:
        torch.cuda.set_sync_debug_mode("default")
