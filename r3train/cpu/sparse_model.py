"""Models with sparse attention on a CPU; to be imported before SGLang's scheduler."""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt.configs import model_config

from r3train.patches import patch


def leave_sparse_attention_to_the_model() -> None:
    """Let the model alone know that its attention is sparse.

    Everything else that asks takes CUDA's page size, cache of keys, backend and flags for it.
    """
    original = model_config.is_deepseek_dsa

    def is_deepseek_dsa(config: Any) -> bool:
        asking = sys._getframe(1).f_globals["__name__"]
        of_model = "sglang.srt.models.deepseek_v2", model_config.__name__
        return asking in of_model and original(config)

    why = "its cache, backend and flags are for CUDA"
    patch(model_config, "is_deepseek_dsa", is_deepseek_dsa, expects="(config)", why=why)
