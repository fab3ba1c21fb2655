"""Asynchronous RL of mixture-of-experts models with rollout routing replay.

    from r3train import RunConfig, train

    code = train(RunConfig.from_toml("tiny_cpu", {"num_rollout": 3}))

What is named here is imported when it is first used: the package itself imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
    from r3train.config import RunConfig as RunConfig
    from r3train.launch.start.start_ranks import train as train
    from r3train.types import (
        Prompt as Prompt,
        RolloutSample as RolloutSample,
        TrainSample as TrainSample,
    )

_NAMES = {
    "RunConfig": "r3train.config",
    "train": "r3train.launch.start.start_ranks",
    "Prompt": "r3train.types",
    "RolloutSample": "r3train.types",
    "TrainSample": "r3train.types",
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_NAMES[name]), name)
