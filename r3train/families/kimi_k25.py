"""Kimi-K2.5's language model: Kimi-K2's layers, inside a model of text and images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from r3train.families.deepseek_v3 import DEEPSEEK_V3, SIGMOID
from r3train.families.family import Config
from r3train.families.kimi_k2 import tiny_kimi_k2
from r3train.families.tiny_options import TinyModel, TinyOptions


_ARCHITECTURES = ["DeepseekV3ForCausalLM"]


def _conflicts(config: Config) -> Iterator[str]:
    yield from DEEPSEEK_V3.conflicts(config)
    if config.get("architectures") != _ARCHITECTURES:  # transformers does not save it
        yield f"text_config needs architectures {_ARCHITECTURES}, without which no server starts"


def _vision(o: TinyOptions) -> dict[str, Any]:
    width = 32
    tower = {"hidden_size": width, "intermediate_size": width}
    tower |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"pos_emb_height": 4, "pos_emb_width": 4}
    # SGLang reads some sizes under the names of releases, transformers under others
    tower |= {"init_pos_emb_height": 4, "init_pos_emb_width": 4}
    tower |= {"vt_hidden_size": width, "text_hidden_size": o.hidden_size}
    return {
        "vision_config": tower,
        "projection_hidden_size": width,
        "tie_word_embeddings": False,
        "architectures": ["KimiK25ForConditionalGeneration"],
    }


KIMI_K25 = replace(
    DEEPSEEK_V3,
    weights=replace(
        DEEPSEEK_V3.weights, prefix="language_model.model", output="language_model.lm_head.weight"
    ),
    needs=DEEPSEEK_V3.needs | {"tie_word_embeddings": (False, False)},
    conflicts=_conflicts,
    peft_fuses_experts=False,
    fp8_served=False,
    tiny={
        "kimi_k25": TinyModel(
            "Kimi_K25",
            tiny_kimi_k2,
            SIGMOID | {"model_type": "kimi_k2", "architectures": _ARCHITECTURES},
            vision=_vision,
            names={
                "language_model.model.blocks.": "language_model.model.layers.",
                "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
                "model.mm_projector.": "mm_projector.",
            },
        )
    },
)
