"""The device of a rank, prepared before Megatron is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from r3train.cpu import device


def test_an_import_of_megatron_before_it_is_refused(monkeypatch):
    monkeypatch.setattr(device, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    with pytest.raises(AssertionError, match="megatron.core was imported before prepare_device"):
        device.prepare_device()
    assert not device._installed


ON_CUDA = """
import sys, torch
torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
torch.cuda.set_device = lambda device: None
from r3train.cpu.device import prepare_device
assert prepare_device(uses_deep_ep={uses_deep_ep}) == torch.device("cuda", 0)
import megatron.core.transformer.moe.fused_a2a
print("imported")
"""


@pytest.mark.parametrize("uses_deep_ep", [False, True])
def test_kernels_of_servers_that_assert_at_their_import_end_no_rank(uses_deep_ep, tmp_path):
    """As sgl-deep-ep does on a host with two NCCLs: with the flex dispatcher, which needs it, the rank ends."""
    for name in ("deep_ep", "flashinfer", "flash_mla"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('another NCCL')")
    rank = subprocess.run(
        [sys.executable, "-c", ON_CUDA.format(uses_deep_ep=uses_deep_ep)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (rank.stdout == "imported\n") == (not uses_deep_ep), rank.stderr
    assert ("another NCCL" in rank.stderr) == uses_deep_ep
