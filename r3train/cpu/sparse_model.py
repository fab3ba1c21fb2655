"""Models with sparse attention on a CPU; to be imported before SGLang's scheduler."""

from __future__ import annotations

import sys
from typing import Any

from sglang.srt.configs import model_config
from sglang.srt.runtime_context import get_exec
from sglang.srt.state_capturer import indexer_topk

from r3train.patches import patch


def leave_sparse_attention_to_the_model() -> None:
    """Let the model alone know that its attention is sparse.

    Everything else that asks takes CUDA's page size, cache of keys, backend and flags for it.
    """
    original = model_config.is_deepseek_dsa

    def is_deepseek_dsa(config: Any) -> bool:
        caller = sys._getframe(1).f_globals["__name__"]
        model_modules = "sglang.srt.models.deepseek_v2", model_config.__name__
        return caller in model_modules and original(config)

    why = "its cache, backend and flags are for CUDA"
    patch(model_config, "is_deepseek_dsa", is_deepseek_dsa, expects="(config)", why=why)


def record_choices() -> None:
    """Let a server keep what its indexers choose: see ``sglang_sparse_attention``, whose twin of them tells it."""

    def create_indexer_capturer(
        *, model_config: Any, num_tokens: int, max_running_requests: int, device: str
    ) -> Any:
        config = model_config.hf_text_config
        return indexer_topk._create_indexer_capturer_raw(
            enable=get_exec().features.enable_return_indexer_topk,
            num_indexer_layers=indexer_topk.get_num_indexer_layers(config),
            index_topk=getattr(config, "index_topk", 0),
            num_tokens=num_tokens,
            max_running_requests=max_running_requests,
            device=device,
        )

    expects = "(*, model_config, num_tokens, max_running_requests, device)"
    why = "it records on CUDA and NPUs only"
    patch(
        indexer_topk, "create_indexer_capturer", create_indexer_capturer, expects=expects, why=why
    )
