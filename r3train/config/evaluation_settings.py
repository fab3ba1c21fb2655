"""Evaluation: its sets, its sampling, and the rollouts after which it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, field_validator

from r3train.config.requirements import check, only_with, Requirement, requires
from r3train.config.section import LIMIT, Section
from r3train.config.sources import PATTERNS, SET_NAME

if TYPE_CHECKING:
    from r3train.config.run import RunConfig

_ANSWERED = requires("has_engines: no server could answer")


class EvalDataset(Section):
    """One evaluation set; an unset field takes the flag's value, ``EvalSection`` says which."""

    name: str = Field(pattern=SET_NAME, max_length=100)
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
    top_k: Annotated[int | None, *LIMIT] = None
    max_response_len: int | None = Field(default=None, ge=1)


class EvalSection(Section):
    """Evaluation of the weights that the servers hold, outside training."""

    title: ClassVar[str] = "Evaluation"
    every_field: ClassVar[tuple[Requirement, ...]] = (
        only_with("eval_prompt_data or datasets: there is no evaluation set"),
    )

    eval_prompt_data: Annotated[tuple[str, ...], _ANSWERED] = Field(default=(), strict=False)
    """Evaluation sets: for each a name, followed by its file of prompts."""
    datasets: Annotated[tuple[EvalDataset, ...], _ANSWERED] = Field(default=(), strict=False)
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
    eval_top_k: Annotated[int | None, *LIMIT] = None
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
            if not re.fullmatch(SET_NAME, name) or len(name) > 100:
                raise ValueError(
                    f"{name!r} is no name of an evaluation set: expected a name and then its file; a name"
                    f" has {PATTERNS[SET_NAME]}, at most 100"
                )
        return value

    @check
    def _sets(self, run: RunConfig) -> Iterator[str]:
        names = [dataset.name for dataset in run.eval_sets]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"evaluation sets: two have the name {name}"
        context = run.rollout.rollout_max_context_len
        for dataset in run.eval_sets:
            samples, response = dataset.n_samples_per_eval_prompt, dataset.max_response_len
            if (dataset.temperature == 0 or dataset.top_k == 1) and samples > 1:
                yield (
                    f"evaluation set {dataset.name}: n_samples_per_eval_prompt {samples} with greedy"
                    " decoding: all answers to a prompt would be equal"
                )
            if context is not None and response >= context:
                yield (
                    f"evaluation set {dataset.name}: max_response_len {response} leaves no room for a"
                    f" prompt in rollout_max_context_len {context}"
                )
        most, places = run.rollout.max_concurrency, self.eval_max_concurrency
        if places is not None and places > most:
            yield f"eval_max_concurrency {places} exceeds the {most} requests in flight at once"
