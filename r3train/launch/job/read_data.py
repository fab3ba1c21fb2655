"""Prompts, conversations and evaluation sets of a job, from their files."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from r3train.config import RunConfig
from r3train.families.checks.settings_checks import eval_prompt_limit, prompt_limit
from r3train.config.data_settings import DataSection, PromptFile
from r3train.config.evaluation_settings import EvalDataset
from r3train.families.hf_facts import HfModelFacts
from r3train.data.conversations import load_conversations
from r3train.data.file_fingerprint import FileFingerprint
from r3train.data.prompts import load_prompts, Note
from r3train.data.templates import ChatTemplate
from r3train.ids import prompt_id
from r3train.launch.job.checked_job import EvalData, stop_token_ids
from r3train.rewards.scoring import Scorer
from r3train.types import Prompt, RolloutSample

# environment variable with the key of --judge-url
JUDGE_KEY = "R3TRAIN_JUDGE_API_KEY"
_OF_PROMPTS = {"input_key", "label_key", "metadata_key", "apply_chat_template"}


def read_prompts(
    config: RunConfig,
    hf: HfModelFacts,
    tokenizer: Any,
    note: Note,
    tools: Sequence[dict[str, Any]] = (),
) -> list[list[Prompt]]:
    """Read the prompts of each file; each leaves room for the longest response in the context.

    note: told, with a remedy, of prompts that were dropped (--overlong-prompts) and of what has no effect in rows;
    tools: those of rows without any.
    Raises ValueError naming file and line, also for a prompt that is read twice.
    """
    files, limit = config.data.prompt_files, prompt_limit(config, hf)
    stops = stop_token_ids(config, hf, tokenizer)
    options = {"tools": tools, "stop_token_ids": stops, "note": note}
    found = [load_prompts(file, config.data, tokenizer, limit, **options) for file in files]
    if len({file.path.name for file in files}) < len({file.path for file in files}):
        found = [
            [
                dataclasses.replace(prompt, prompt_id=prompt_id(str(file.path), prompt.index))
                for prompt in part
            ]
            for file, part in zip(files, found)
        ]
    counts = Counter(prompt.prompt_id for part in found for prompt in part)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ValueError(
            f"prompt {twice} is read twice (prompt_data): for more of a file give it a weight"
        )
    return found


def read_conversations(
    config: RunConfig,
    hf: HfModelFacts,
    tokenizer: Any,
    note: Note,
) -> list[list[RolloutSample]]:
    """Read the conversations of each file (--loss-type sft); raises ValueError naming file and line.

    note: told, as of prompts, of conversations that were dropped and of what has no effect in rows.
    """
    data, limit = config.data, prompt_limit(config, hf)
    limits = {
        "max_response_len": config.rollout.rollout_max_response_len,
        "stop_token_ids": stop_token_ids(config, hf, tokenizer),
    }
    return [
        load_conversations(file, data, tokenizer, limit, **limits, note=note)
        for file in data.prompt_files
    ]


def read_eval_data(
    config: RunConfig,
    dataset: EvalDataset,
    hf: HfModelFacts,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]] = (),
    note: Note = lambda text, remedy: None,
) -> EvalData:
    """Read an evaluation set and make its reward; raises ValueError naming file, line or flag.

    tools: those of rows without any; note: as for ``read_prompts``.
    """
    limit = eval_prompt_limit(config, hf, dataset)
    data, key = _data_of(config.data, dataset), os.environ.get(JUDGE_KEY)
    try:
        stops = stop_token_ids(config, hf, tokenizer)
        options = {"tools": tools, "stop_token_ids": stops, "note": note}
        prompts = load_prompts(PromptFile(dataset.path), data, tokenizer, limit, **options)
        has_named_reward = dataset.rm_type is not None and ":" not in dataset.rm_type
        weights = None if has_named_reward else config.algorithm.weight_of_key
        reward = Scorer(data, rm_type=dataset.rm_type, judge_key=key, weight_of_key=weights)
    except ValueError as error:
        raise ValueError(f"evaluation set {dataset.name}: {error}") from None
    return EvalData(dataset, prompts, reward, FileFingerprint.of(dataset.path))


def _data_of(data: DataSection, dataset: EvalDataset) -> DataSection:
    """The settings of an evaluation set: of its prompts, none of which may be too long, and of its reward.

    --group-rm is of --custom-rm-path only; --reward-key is of the functions of the user.
    """
    changes = dataset.model_dump(include=_OF_PROMPTS) | {"overlong_prompts": "error"}
    if dataset.rm_type is not None:
        key = data.reward_key if ":" in dataset.rm_type else None
        changes |= {"rm_type": dataset.rm_type, "group_rm": False, "reward_key": key}
    return data.model_copy(update=changes)


def check_rewards(data: EvalData, check: Callable[[Scorer, list[Prompt], str], Any]) -> None:
    """Let ``check`` look at a set's reward and prompts; raises its ValueError with the name of the set."""
    name = f"evaluation set {data.dataset.name}: "
    try:
        check(data.reward, data.prompts, name)
    except ValueError as error:
        raise ValueError(f"{name}{error}") from None


def check_not_all_equal(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError where no row has a reward, and groups of equal rewards are dropped."""
    if not any(prompt.metadata.get("rm_type") for prompt in prompts):
        raise ValueError(
            "--rollout-filter zero_variance drops every group: no reward is named (--rm-type), so all"
            " rewards are 0"
        )


def check_longest_conversation(config: RunConfig, conversations: Sequence[RolloutSample]) -> None:
    """Raise ValueError for a conversation that no microbatch can hold."""
    longest = max(conversations, key=lambda conversation: conversation.num_tokens)
    tokens, cp = config.trainer.max_tokens_per_gpu, config.parallel.context_parallel_size
    if longest.num_tokens > tokens * cp:
        raise ValueError(
            f"{longest.prompt.prompt_id}: the conversation has {longest.num_tokens} tokens, expected at"
            f" most max_tokens_per_gpu {tokens} * context_parallel_size {cp} = {tokens * cp}"
        )


def token_that_does_not_stop(config: RunConfig, hf: HfModelFacts, tokenizer: Any) -> int | None:
    """The token that ends an answer by the chat template, or else by the tokenizer, where none stops at it."""
    stops = stop_token_ids(config, hf, tokenizer)
    uses_template = config.data.apply_chat_template or config.learns_conversations
    token = tokenizer.eos_token_id
    if uses_template and getattr(tokenizer, "chat_template", None) is not None:
        token = ChatTemplate(tokenizer, config.data).closing_token()
    return None if not stops or token in stops else token


def check_tools(config: RunConfig, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError for tools of an environment that its prompts or replies would not show."""
    if not tools:
        return
    name = f"--environment {config.rollout.environment}"
    if not config.data.apply_chat_template:
        raise ValueError(f"{name} has tools, which the model sees with --apply-chat-template only")
    try:
        ChatTemplate(tokenizer, config.data, tools).check_tools()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
