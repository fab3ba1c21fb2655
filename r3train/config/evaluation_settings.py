"""Evaluation: its sets, its sampling, and the rollouts after which it runs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from r3train.config.section import Section

_NAME = r"^\w[\w.-]*$"


class EvalDataset(Section):
    """One evaluation set; an unset field takes the flag's value, ``EvalSection`` says which."""

    name: str = Field(pattern=_NAME, max_length=100)
    """Name in metrics and files."""
    path: Path = Field(strict=False)
    """File of prompts, .jsonl or .parquet."""
    input_key: str | None = Field(default=None, min_length=1)
    label_key: str | None = Field(default=None, min_length=1)
    metadata_key: str | None = Field(default=None, min_length=1)
    apply_chat_template: bool | None = None
    rm_type: str | None = Field(default=None, min_length=1)
    n_samples_per_eval_prompt: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    max_response_len: int | None = Field(default=None, ge=1)


class EvalSection(Section):
    """Evaluation of the weights that the servers hold, outside training."""

    title: ClassVar[str] = "Evaluation"

    eval_prompt_data: tuple[str, ...] = Field(default=(), strict=False)
    """Evaluation sets: for each a name, and then its file of prompts."""
    datasets: tuple[EvalDataset, ...] = Field(default=(), strict=False)
    """Evaluation sets with settings of their own: [[eval.datasets]] tables with name, path and any of input_key,
    label_key, metadata_key, apply_chat_template, rm_type, n_samples_per_eval_prompt, temperature,
    top_p, top_k, max_response_len."""
    eval_interval: int | None = Field(default=None, ge=1)
    """Rollouts between evaluations; unset: only before training and at the end."""
    skip_eval_before_train: bool = False
    """Do not evaluate the weights that training starts from."""
    n_samples_per_eval_prompt: int = Field(default=1, ge=1)
    """Answers to each prompt of an evaluation set."""
    eval_temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 is greedy.  Unset: rollout_temperature."""
    eval_top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling; 1 is off.  Unset: rollout_top_p."""
    eval_top_k: int | None = Field(default=None, ge=-1)
    """Sample among the k likeliest tokens; 1 is greedy, -1 is off.  Unset: rollout_top_k."""
    eval_max_response_len: int | None = Field(default=None, ge=1)
    """Longest answer in tokens.  Unset: rollout_max_response_len."""
    eval_rm_type: str | None = Field(default=None, min_length=1)
    """Reward: a name, or module:function.  Unset: the reward of the rollout."""
    eval_input_key: str | None = Field(default=None, min_length=1)
    """Key of the prompt.  Unset: input_key."""
    eval_label_key: str | None = Field(default=None, min_length=1)
    """Key of the label.  Unset: label_key."""
    eval_max_concurrency: int | None = Field(default=None, ge=1)
    """Most requests that an evaluation may have in flight while rollouts are generated too; unset: half of
    all that may be."""

    @field_validator("eval_prompt_data")
    @classmethod
    def _pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) % 2:
            raise ValueError("expected a name and a file for each set (gsm8k gsm8k_test.jsonl)")
        for name, path in zip(value[::2], value[1::2]):
            EvalDataset(name=name, path=path)  # refuses a name that no file can have
        return value
