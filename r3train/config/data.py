"""Prompts and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from r3train.config.section import Section


class DataSection(Section):
    """Prompts, and the reward of an answer."""

    title: ClassVar[str] = "Prompts and rewards"

    prompt_data: Path = Field(strict=False)
    """File of prompts: one a line (.jsonl) or one a row (.parquet)."""
    input_key: str = Field(default="input", min_length=1)
    """Key of the prompt: text, or chat messages with apply_chat_template."""
    label_key: str = Field(default="label", min_length=1)
    """Key of the label, which the reward compares the answer with."""
    metadata_key: str = Field(default="metadata", min_length=1)
    """Key of an optional table for the reward."""
    apply_chat_template: bool = False
    """Wrap every prompt in the tokenizer's chat template."""
    rollout_shuffle: bool = True
    """Draw prompts in a new order every epoch, from rollout_seed."""
    rm_type: str | None = Field(default=None, min_length=1)
    """Reward by registered name: accepted_words, exact_match, math, gsm8k, dapo, gpqa, f1; boxed_ before a
    name scores the last box alone.  metadata.rm_type of a row wins."""
    custom_rm_path: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """Your own reward as module:function; it replaces rm_type."""
    group_rm: bool = False
    """Call custom_rm_path once for all samples of a prompt; it returns a list of numbers."""
    reward_key: str | None = Field(default=None, min_length=1)
    """Key of the reward, if the reward returns a table."""
    reward_concurrency: int = Field(default=64, ge=1)
    """Rewards computed at once."""
    reward_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds one reward may take."""
