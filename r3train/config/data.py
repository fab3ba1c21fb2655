"""Prompts and rewards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from r3train.config.section import Section

JUDGE_TEMPLATE = """Question:
{prompt}

Right answer:
{label}

Answer of a student:
{response}

Is the student's answer right? Give reasons, then end with the line "Score: 1" if it is right and with
"Score: 0" if it is not."""


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
    """Reward by registered name: accepted_words, exact_match, math, gsm8k, dapo, gpqa, f1, remote_rm,
    llm_judge, code; boxed_ before a name scores the last box alone.  metadata.rm_type of a row wins."""
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
    rm_url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """Server that remote_rm asks."""
    judge_url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """OpenAI-compatible endpoint that llm_judge asks, as http://HOST:PORT/v1."""
    judge_model: str | None = Field(default=None, min_length=1)
    """Model that llm_judge asks for."""
    judge_template: str = JUDGE_TEMPLATE
    """Message to the judge; {prompt}, {label} and {response} are filled in."""
    judge_pattern: str = r"(?i)score\s*:\s*([-+]?\d+(?:\.\d+)?)"
    """Regular expression with one group: its last match in the judge's answer is the reward."""
    judge_max_tokens: int = Field(default=1024, ge=1)
    """Most tokens of the judge's answer."""

    @field_validator("judge_template")
    @classmethod
    def _with_response(cls, template: str) -> str:
        if "{response}" not in template:
            raise ValueError("it has no {response}")
        return template

    @field_validator("judge_pattern")
    @classmethod
    def _with_one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"expected one group, found {groups}")
        return pattern
