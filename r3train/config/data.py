"""Prompts and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from r3train.config.section import Section


class DataSection(Section):
    """What is asked, and how an answer is judged."""

    title: ClassVar[str] = "Prompts and rewards"

    prompt_data: Path = Field(strict=False)
    """Prompts, one a line (.jsonl) or a row (.parquet)."""
    input_key: str = Field(default="input", min_length=1)
    """Key of the prompt: text, or chat messages with apply_chat_template."""
    label_key: str = Field(default="label", min_length=1)
    """Key of what the reward compares the answer with."""
    metadata_key: str = Field(default="metadata", min_length=1)
    """Key of an optional table that is handed to the reward."""
    apply_chat_template: bool = False
    """Wrap every prompt in the tokenizer's chat template."""
    rollout_shuffle: bool = True
    """Draw prompts in a new order every epoch, from rollout_seed."""
    rm_type: str = Field(default="accepted_words", min_length=1)
    """Reward by registered name: accepted_words, exact_match, math."""
    custom_rm_path: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """Your own reward as module:function; it takes the place of rm_type."""
    reward_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds one reward may take."""
