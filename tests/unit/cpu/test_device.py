"""The device of a rank, prepared before Megatron is imported."""

from __future__ import annotations

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
