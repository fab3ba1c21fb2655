"""Model families whose numbers were compared with transformers; every other one is refused by name.

A family is one file here, its line in ``FAMILIES``, and a case in tests/oracle/test_families.py.  The file says
what config.json must have and which weights there are (``weights``, ``rows``); names, shapes, loading and export
follow from that.  Never imports torch: the doctor and a dry run read it.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from r3train.config.hf_facts import HfModelFacts, load_model_config
from r3train.families.deepseek_v2 import DEEPSEEK_V2
from r3train.families.deepseek_v3 import DEEPSEEK_V3
from r3train.families.family import Family, model_weights
from r3train.families.glm4_moe import GLM4_MOE
from r3train.families.glm4_moe_lite import GLM4_MOE_LITE
from r3train.families.gpt_oss import GPT_OSS
from r3train.families.kimi_k2 import KIMI_K2
from r3train.families.minimax_m2 import MINIMAX_M2
from r3train.families.mixtral import MIXTRAL
from r3train.families.olmoe import OLMOE
from r3train.families.qwen2_moe import QWEN2_MOE
from r3train.families.qwen3 import QWEN3
from r3train.families.qwen3_5_moe import QWEN3_5_MOE
from r3train.families.qwen3_moe import QWEN3_MOE
from r3train.families.qwen3_next import QWEN3_NEXT
from r3train.families.weights import ModelWeights, Shape

# config.json's model_type -> the family
FAMILIES: dict[str, Family] = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "gpt_oss": GPT_OSS,
    "kimi_k2": KIMI_K2,
    "minimax_m2": MINIMAX_M2,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
}


def weights_of(hf: HfModelFacts) -> ModelWeights:
    """Return the weights of a checkpoint of a verified family."""
    return model_weights(FAMILIES[hf.model_type], hf)


def tensor_shapes(hf: HfModelFacts) -> dict[str, Shape]:
    """Return the shape of every tensor that the actor loads and exports, by its name on disk."""
    return weights_of(hf).shapes()


def tensor_names(hf: HfModelFacts) -> Set[str]:
    """Return the names of all tensors that the actor loads and exports, for a verified family."""
    return tensor_shapes(hf).keys()


def sent_together(hf: HfModelFacts) -> tuple[tuple[str, ...], ...]:
    """Return the tensors, two and more, that one call of a weight update must bring."""
    return tuple(weights_of(hf).bundles())


def model_type_of(hf_checkpoint: Path) -> str:
    """Return the model_type in a directory's config.json; "" without one."""
    if not (hf_checkpoint / "config.json").is_file():
        return ""
    return load_model_config(hf_checkpoint).get("model_type", "")


def has_fused_experts(hf_checkpoint: Path) -> bool:
    """Return True where all experts of a layer are one tensor on disk, and SGLang loads it so."""
    family = FAMILIES.get(model_type_of(hf_checkpoint))
    return family is not None and family.weights.has_fused_experts
