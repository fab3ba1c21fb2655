"""One tiny checkpoint and one SGLang server for all jobs that do not test the server's own life."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from r3train.engine.server import SGLangServer
from r3train.verify.tiny import TinyOptions, build
from tests.e2e import jobs
from tests.e2e.sglang_support import make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint and task."""
    directory = tmp_path_factory.mktemp("tiny")
    build(directory, TinyOptions(), force=True)
    return directory


@pytest.fixture(scope="session")
def tiny_flags(tiny: Path) -> list[str]:
    """Flags that give a job the tiny model and its prompts, and keep it short."""
    return [
        *("--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl")),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--no-plot"),
        *jobs.FEW_ROWS,
        "--no-tensorboard",
    ]


@pytest.fixture(scope="session")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with routed experts; jobs bring it to their own weights first."""
    log = tmp_path_factory.mktemp("engine") / "sglang.log"
    with SGLangServer(tiny / "model", log, return_routed_experts=True) as server:
        server.wait_ready()
        yield server.addr


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints, a and b, of one shape and other weights."""
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / name, seed) for seed, name in enumerate("ab")]
