"""Model families: how mbridge builds each, and what it gets wrong.

Its facts and its weights are in ``r3train/families/``.  Import this after ``declare_torchvision_ops``.
"""

from __future__ import annotations

import sys
from types import ModuleType

# mbridge imports every family that it knows, and these four import transformers' models, generation and
# image processing: 1.1 s of each rank's start, for families that are not among ours
for _name in ("gemma3", "glm4_vl", "internvl3", "qwen2_5_vl"):
    _unused = ModuleType(f"mbridge.models.{_name}")
    _unused.__getattr__ = lambda name: None
    sys.modules.setdefault(_unused.__name__, _unused)

from mbridge.models.glm4moe import GLM4MoEBridge  # noqa: E402
from mbridge.models.qwen3 import Qwen3Bridge  # noqa: E402

from r3train.trainer.megatron.families.deepseek import DEEPSEEK_V3  # noqa: E402
from r3train.trainer.megatron.families.deepseek_v2 import DEEPSEEK_V2  # noqa: E402
from r3train.trainer.megatron.families.family import MegatronFamily  # noqa: E402
from r3train.trainer.megatron.families.gpt_oss import GPT_OSS  # noqa: E402
from r3train.trainer.megatron.families.minimax_m2 import MINIMAX_M2  # noqa: E402
from r3train.trainer.megatron.families.mixtral import MIXTRAL  # noqa: E402
from r3train.trainer.megatron.families.olmoe import OLMOE  # noqa: E402
from r3train.trainer.megatron.families.qwen3_5_moe import QWEN3_5_MOE  # noqa: E402
from r3train.trainer.megatron.families.qwen3_next import QWEN3_NEXT  # noqa: E402
from r3train.trainer.megatron.families.qwen_moe import QWEN2_MOE, QWEN3_MOE  # noqa: E402

# config.json's model_type -> the family
FAMILIES: dict[str, MegatronFamily] = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,  # Moonlight too, and Kimi-K2 is read as one
    "glm4_moe": MegatronFamily(GLM4MoEBridge),
    "glm4_moe_lite": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "minimax_m2": MINIMAX_M2,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": MegatronFamily(Qwen3Bridge),
    "qwen3_moe": QWEN3_MOE,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
}
