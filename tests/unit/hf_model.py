"""The facts of a tiny mixture-of-experts checkpoint, without the checkpoint."""

from __future__ import annotations

from pathlib import Path

from r3train.families.hf_facts import HfModelFacts


def facts(**changes) -> HfModelFacts:
    base = dict(
        path=Path("model"),
        model_type="qwen3_moe",
        num_hidden_layers=4,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=64,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        moe_layer_numbers=(1, 2, 3, 4),
        eos_token_ids=(1,),
        tie_word_embeddings=False,
    )
    return HfModelFacts(**{**base, **changes})
