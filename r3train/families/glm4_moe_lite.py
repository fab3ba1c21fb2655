"""GLM-4.7-Flash: DeepSeek-V3's layers."""

from __future__ import annotations

from r3train.families.deepseek_v3 import DEEPSEEK_V3

GLM4_MOE_LITE = DEEPSEEK_V3
