"""Kimi-K2: DeepSeek-V3 of other sizes, under a model_type that transformers does not know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3train.families.deepseek_v3 import DEEPSEEK_V3, ONE_GROUP, SIGMOID, tiny_deepseek_v3
from r3train.families.tiny_options import TinyModel, TinyOptions


def tiny_kimi_k2(o: TinyOptions) -> dict[str, Any]:
    """Return the keys of DeepSeek-V3 without groups of experts."""
    return tiny_deepseek_v3(o) | ONE_GROUP | {"routed_scaling_factor": 2.827}


KIMI_K2 = replace(
    DEEPSEEK_V3,
    read_as="deepseek_v3",
    tiny={"kimi_k2": TinyModel("DeepseekV3", tiny_kimi_k2, SIGMOID | {"model_type": "kimi_k2"})},
)
