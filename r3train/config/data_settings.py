"""Prompts and rewards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from r3train.config.requirements import check, excludes, requires
from r3train.config.section import Section
from r3train.config.sources import IMPORT_PATH, URL

if TYPE_CHECKING:
    from r3train.config.run import RunConfig

# the defaults: their absence is no mistake
LABEL_KEY, METADATA_KEY = "label", "metadata"
JUDGE_TEMPLATE = """Question:
{prompt}

Right answer:
{label}

Answer of a student:
{response}

Is the student's answer right? Give reasons, then end with the line "Score: 1" if it is right and with
"Score: 0" if it is not."""

_FILE = re.compile(r"(?P<path>.+?)(@\[(?P<start>\d*):(?P<stop>\d*)\])?(\*(?P<weight>[\d.]+))?")


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file of prompts, the rows that count, and its weight among several."""

    path: Path
    start: int = 0
    stop: int | None = None
    weight: float | None = None

    @classmethod
    def of(cls, text: str) -> PromptFile:
        """Read PATH, PATH@[START:STOP] or either with *WEIGHT; raises ValueError."""
        found = _FILE.fullmatch(text)
        try:
            if "@[" in found["path"]:
                raise ValueError
            start, stop = int(found["start"] or 0), int(found["stop"] or -1)
            weight = None if found["weight"] is None else float(found["weight"])
        except (TypeError, ValueError):
            raise ValueError(f"{text}: expected PATH@[START:STOP]*WEIGHT") from None
        if weight == 0 or 0 <= stop <= start:
            raise ValueError(f"{text}: no row, or no weight, is left")
        return cls(Path(found["path"]), start, None if stop < 0 else stop, weight)


class DataSection(Section):
    """Prompts, and the reward of an answer."""

    title: ClassVar[str] = "Prompts and rewards"

    prompt_data: tuple[str, ...] = Field(min_length=1, strict=False)
    """Files of prompts: one per line (.jsonl) or one per row (.parquet).  PATH@[0:1000] takes a part of a
    file; PATH*0.3 gives it a weight, its share of the prompts sampled; then every file needs one."""
    input_key: str = Field(default="input", min_length=1)
    """Key of the prompt: text, or chat messages with apply_chat_template.  a.b is key b of table a."""
    label_key: str = Field(default=LABEL_KEY, min_length=1)
    """Key of the label, which the reward compares the answer with; it may be absent where the reward
    needs none."""
    metadata_key: str = Field(default=METADATA_KEY, min_length=1)
    """Key of an optional table for the reward."""
    apply_chat_template: bool = False
    """Wrap every prompt in the tokenizer's chat template."""
    apply_chat_template_kwargs: Annotated[
        dict[str, Any], requires("apply_chat_template: it is for the chat template")
    ] = {}
    """Variables of the chat template, as JSON: {"enable_thinking": false}."""
    tool_key: Annotated[
        str | None, requires("apply_chat_template: it is for the chat template")
    ] = Field(default=None, min_length=1)
    """Key of a row's tools, a list of their schemas, for the chat template."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """Treatment of prompts that leave no room for the longest response: drop and count them, or refuse
    the data.  With --loss-type sft: of conversations that are too long."""
    rollout_shuffle: bool = True
    """Take prompts in a new order every epoch, which follows from rollout_seed."""
    prompt_sampling: Annotated[
        Literal["uniform", "difficulty"],
        requires("has_engines: nothing else tells how hard a prompt is", when="difficulty"),
    ] = "uniform"
    """The prompts of an epoch: all, or those whose mean reward, each held to 0..1, was below 0.95 when they were
    trained last, those above 0 twice, and a fourth of the others.  RUN/pass_rates.jsonl keeps it."""
    rm_type: str | None = Field(default=None, min_length=1)
    """Reward by registered name: accepted_words, exact_match, math, gsm8k, dapo, gpqa, f1, remote_rm,
    llm_judge, code; boxed_ before a name scores the last box only.  metadata.rm_type of a row wins."""
    custom_rm_path: str | None = Field(default=None, pattern=IMPORT_PATH)
    """Your own reward as module:function; it replaces rm_type."""
    group_rm: Annotated[
        bool, excludes("environment: it gives rewards of its own, turn by turn")
    ] = False
    """Call custom_rm_path once for all samples of a prompt; it returns a list of numbers."""
    reward_key: Annotated[str | None, excludes("reward_keys: the reward is one")] = Field(
        default=None, min_length=1
    )
    """Key of the reward, if the reward returns a table."""
    reward_concurrency: int = Field(default=64, ge=1)
    """Rewards computed at once."""
    reward_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds one reward may take."""
    rm_url: str | None = Field(default=None, pattern=URL)
    """Server that remote_rm asks."""
    judge_url: str | None = Field(default=None, pattern=URL)
    """OpenAI-compatible endpoint that llm_judge asks, as http://HOST:PORT/v1."""
    judge_model: str | None = Field(default=None, min_length=1)
    """Model that llm_judge asks for."""
    judge_template: str = JUDGE_TEMPLATE
    """Message to the judge; {prompt}, {label} and {response} are filled in."""
    judge_pattern: str = (
        r"(?i)score[\s*_`\"']*(?:is|[:\uff1a=])[\s*_`\"']*([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+|/[1-9]\d*)?%?)"
    )
    """Regular expression with one group: its last match in the judge's answer, a number, a/b or a%, is the reward."""
    judge_max_tokens: int = Field(default=1024, ge=1)
    """Longest answer of the judge in tokens."""

    @property
    def prompt_files(self) -> tuple[PromptFile, ...]:
        """The files of prompt_data, read."""
        return tuple(map(PromptFile.of, self.prompt_data))

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return (str(value),) if isinstance(value, (str, Path)) else value

    @field_validator("prompt_data")
    @classmethod
    def _weights_for_all_or_none(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        weights = [PromptFile.of(text).weight for text in value]
        if None in weights and set(weights) != {None}:
            raise ValueError("give every file a weight (PATH*0.3), or none")
        return value

    @check
    def _difficulty_or_weights(self, run: RunConfig) -> Iterator[str]:
        if self.prompt_sampling == "difficulty" and self.prompt_files[0].weight is not None:
            yield "--prompt-sampling difficulty draws from all files alike: PATH without *WEIGHT"

    @field_validator("apply_chat_template_kwargs", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None

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
