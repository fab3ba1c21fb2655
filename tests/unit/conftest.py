"""Models that many tests read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3train.verify.tiny import TinyOptions, build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """Directory of the demo's model (``model``) and its prompts (``prompts.jsonl``)."""
    directory = tmp_path_factory.mktemp("tiny")
    build(directory, TinyOptions(), force=True)
    return directory


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Path:
    """The same without experts."""
    directory = tmp_path_factory.mktemp("dense")
    build(directory, TinyOptions(num_experts=0), force=True)
    return directory
