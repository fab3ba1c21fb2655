"""Model families: how mbridge builds each, and what it gets wrong.

A family is one file here and one line below, its facts in ``config/families.py``, and a case in
tests/oracle/test_families.py.  Import this after ``declare_torchvision_ops``.
"""

from __future__ import annotations

from mbridge.models.glm4moe import GLM4MoEBridge
from mbridge.models.qwen3 import Qwen3Bridge

from r3train.trainer.megatron.families.family import MegatronFamily
from r3train.trainer.megatron.families.mixtral import MIXTRAL
from r3train.trainer.megatron.families.qwen_moe import QWEN2_MOE, QWEN3_MOE

# config.json's model_type -> the family
FAMILIES: dict[str, MegatronFamily] = {
    "glm4_moe": MegatronFamily(GLM4MoEBridge),
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": MegatronFamily(Qwen3Bridge),
    "qwen3_moe": QWEN3_MOE,
}
