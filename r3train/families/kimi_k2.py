"""Kimi-K2: DeepSeek-V3 of other sizes, under a model_type that transformers does not know."""

from __future__ import annotations

from dataclasses import replace

from r3train.families.deepseek_v3 import DEEPSEEK_V3

KIMI_K2 = replace(DEEPSEEK_V3, read_as="deepseek_v3")
