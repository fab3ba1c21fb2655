"""GLM-4.7-Flash: DeepSeek-V3's layers."""

from __future__ import annotations

from dataclasses import replace

from r3train.families.deepseek_v3 import DEEPSEEK_V3

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    defaults={"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1},
)
