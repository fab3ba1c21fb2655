"""Checkpoints of published models as far as their headers: config.json, and every tensor as a hole.

Configurations are the package's (``families.published``).  Shapes come from transformers' own model on the meta
device, not from the code under test.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from r3train.families.read_facts import read_hf_facts
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.families import FAMILIES
from r3train.families.published import PUBLISHED
from r3train.hf_checkpoint import is_trained, read_transformers_config
from r3train.verify.tiny import as_published

CONFIGS = Path(__file__).parents[2] / "configs"
_BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class Recipe:
    """A recipe in configs/, its published model, and the GPUs that its head names."""

    file: str
    model: str
    num_gpus: int
    gpu_gb: int  # 10**9 bytes, as GPUs are sold

    @property
    def path(self) -> Path:
        return CONFIGS / f"{self.file}.toml"


RECIPES = (
    Recipe("moonlight_16b_a3b", "Moonlight-16B-A3B", 8, 80),
    Recipe("gpt_oss_20b", "gpt-oss-20b", 8, 80),
    Recipe("glm_4_7_flash", "GLM-4.7-Flash", 16, 80),
    Recipe("qwen3_30b_a3b", "Qwen3-30B-A3B", 8, 141),
    Recipe("qwen3_30b_a3b_two_nodes", "Qwen3-30B-A3B", 8, 80),
    Recipe("qwen3_5_35b_a3b_two_nodes", "Qwen3.5-35B-A3B", 8, 80),
    Recipe("glm_4_5_air", "GLM-4.5-Air", 64, 80),
    Recipe("mixtral_8x7b", "Mixtral-8x7B", 16, 80),
    Recipe("qwen2_57b_a14b", "Qwen2-57B-A14B", 32, 80),
    Recipe("minimax_m2", "MiniMax-M2", 96, 80),
    Recipe("deepseek_v3", "DeepSeek-V3", 256, 80),
    Recipe("kimi_k2", "Kimi-K2-Instruct", 256, 80),
    # next to their servers on one machine
    Recipe("olmoe_1b_7b_one_node", "OLMoE-1B-7B", 4, 80),
    Recipe("moonlight_16b_a3b_one_node", "Moonlight-16B-A3B", 4, 80),
    Recipe("gpt_oss_20b_one_node", "gpt-oss-20b", 4, 80),
    Recipe("glm_4_7_flash_one_node", "GLM-4.7-Flash", 4, 80),
    Recipe("qwen3_30b_a3b_one_node", "Qwen3-30B-A3B", 4, 80),
    Recipe("qwen3_5_35b_a3b_one_node", "Qwen3.5-35B-A3B", 4, 80),
    Recipe("deepseek_v2_lite_one_node", "DeepSeek-V2-Lite", 4, 80),
    # in turns with them
    Recipe("qwen3_30b_a3b_colocated", "Qwen3-30B-A3B", 8, 80),
    Recipe("moonlight_16b_a3b_colocated", "Moonlight-16B-A3B", 8, 80),
    Recipe("gpt_oss_20b_colocated", "gpt-oss-20b", 8, 80),
    Recipe("olmoe_1b_7b_one_gpu", "OLMoE-1B-7B", 1, 80),
    Recipe("qwen3_1_7b_one_gpu", "Qwen3-1.7B", 1, 24),
)

MOE_RECIPES = tuple(r for r in RECIPES if read_hf_facts(PUBLISHED / r.model).is_moe)


def model_class(config: Any) -> Any:
    """transformers' class of a language model, or of the whole model of text and images that has it inside."""
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def shapes_of(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every trained tensor that the checkpoint of ``directory``/config.json has, by name.

    As transformers saves them under the hub's names, but for experts that the hub has otherwise.
    """
    declare_torchvision_ops()
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    hf = read_hf_facts(directory)
    family, config = FAMILIES[hf.model_type], read_transformers_config(directory)
    prefix, tiny = family.weights.prefix, next(iter(family.tiny.values()))
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    tensors = model.state_dict()
    if tiny.experts != "together":
        tensors = revert_weight_conversion(model, tensors)
    tensors = as_published(tensors, tiny)
    if not any(name.startswith(prefix) for name in tensors):
        tensors = {name.replace("model", prefix, 1): t for name, t in tensors.items()}
    return {name: tuple(t.shape) for name, t in tensors.items() if is_trained(name, hf)}


def write_config(directory: Path, model: str) -> None:
    """Make the directory with the model's config.json in it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text((PUBLISHED / model / "config.json").read_text())


def write_checkpoint(directory: Path, model: str) -> None:
    """Write config.json, and a safetensors file of the true size whose weights take no room on disk."""
    write_config(directory, model)
    header, end = {}, 0
    for tensor, shape in shapes_of(directory).items():
        start, end = end, end + prod(shape) * _BFLOAT16_BYTES
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
