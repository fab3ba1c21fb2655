"""Conversations for supervised fine-tuning: the assistant's tokens, found by the template's spans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3train.config.data_settings import DataSection, PromptFile
from r3train.data.prompts import (
    DROPPED,
    Remarks,
    chat_text,
    read_records,
    Record,
    require_messages,
    required,
    row_tools,
)
from r3train.data.row_pool import over_rows
from r3train.data.templates import ChatTemplate, RowTemplate
from r3train.ids import prompt_id
from r3train.types import Prompt, RolloutSample


def load_conversations(
    file: PromptFile,
    data: DataSection,
    tokenizer: Any,
    limit: tuple[int, str],
    *,
    max_response_len: int,
    stop_token_ids: Collection[int] = (),
    note: Callable[[str, str], None] = lambda text, remedy: None,
) -> list[RolloutSample]:
    """Read every conversation of a .jsonl or .parquet file as a sample, in the order of the file.

    data, limit, note: as for ``load_prompts``.
    stop_token_ids: those at which a server ends an answer.
    A sample's prompt ends before the first token that is trained; the loss mask is True on the tokens of the
    assistant's messages without weight 0, with those that the template closes an answer with, up to a stop token.  Its ids
    and weight versions are to be set where it is sampled, and no engine gave it log-probs: they are 0.
    Raises ValueError naming file and line, for the faults of ``load_prompts`` and for a conversation
    without an answer, or that the template does not render piece by piece.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"{file.path}: the checkpoint's tokenizer has no chat template for messages"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"{file.path}: the checkpoint's tokenizer does not tell the places of its tokens"
        )
    samples, overlong, remarks = [], [], Remarks(note)
    template = RowTemplate.of(ChatTemplate(tokenizer, data))
    reader = _ConversationReader(data, template, frozenset(stop_token_ids))
    for record, read in over_rows(read_records(file), reader):
        for remark in read.remarks:
            remarks.add(record.where, *remark)
        prompt_len = int(read.mask.argmax())
        response_len = len(read.token_ids) - prompt_len
        faults = [
            f"{record.where}: {what} has {length} tokens, at most {most} fit ({name})"
            for what, length, most, name in (
                ("the prompt", prompt_len, *limit),
                ("from its first answer on the text", response_len, max_response_len, _RESPONSE),
            )
            if length > most
        ]
        if faults and data.overlong_prompts == "error":
            raise ValueError(faults[0])
        if faults:
            overlong.append(faults[0])
            continue
        named = prompt_id(file.path.name, record.index)
        samples.append(_sample(record.index, named, read))
    if overlong:
        count, first = len(overlong), overlong[0]
        if not samples:
            raise ValueError(f"{file.path}: all {count:,} conversations are too long: {first}")
        text = f"{count:,} of {count + len(samples):,} conversations, which are too long"
        note(f"{file.path}: dropped {text}; the first: {first}", DROPPED)
    if not samples:
        raise ValueError(f"{file.path}: holds no conversations")
    remarks.tell(file)
    return samples


@dataclass(frozen=True, slots=True)
class _ReadConversation:
    """What a row became: texts of prompt and response, int32[tokens], bool[tokens] to train, remarks as of prompts."""

    texts: tuple[str, str]
    token_ids: np.ndarray
    mask: np.ndarray
    remarks: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _ConversationReader:
    """Finds the tokens to train in rows."""

    data: DataSection
    template: RowTemplate
    stop_token_ids: frozenset[int]

    def __call__(self, records: Sequence[Record]) -> list[_ReadConversation]:
        """Read rows; raises ValueError for the first one that cannot be trained."""
        return list(map(self._read, records))

    def _read(self, record: Record) -> _ReadConversation:
        key = self.data.input_key
        value = required(record, key)
        messages, remarks = require_messages(record, key, value, self.template, answers=True)
        text, spans = _rendered(record, messages, self.template, self.data)
        tokens = self.template.chat.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True
        )
        token_ids = np.asarray(tokens["input_ids"], dtype=np.int32)
        begin, end = np.asarray(tokens["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(token_ids), dtype=bool)
        for start, stop in spans:
            inside = (begin >= start) & (end <= stop) & (end > begin)
            # a byte-level tokenizer that trims its offsets gives spaces alone the place after them
            spaces = (begin == end) & (start < begin) & (begin <= stop)
            mask |= _up_to_stop(token_ids, inside | spaces, self.stop_token_ids)
        if not mask.any():
            raise ValueError(f"{record.where}: key {key}: no token of an assistant's to train")
        first = spans[0][0]
        return _ReadConversation((text[:first], text[first:]), token_ids, mask, remarks)


def _sample(index: int, prompt_id: str, read: _ReadConversation) -> RolloutSample:
    """Make a sample of a conversation."""
    token_ids, mask, texts = read.token_ids, read.mask, read.texts
    prompt_len = int(mask.argmax())
    return RolloutSample(
        sample_id=index,
        group_id=index,
        prompt=Prompt(
            prompt_id=prompt_id,
            index=index,
            text=texts[0],
            token_ids=token_ids[:prompt_len],
            label=None,
        ),
        token_ids=token_ids,
        prompt_len=prompt_len,
        loss_mask=mask,
        rollout_log_probs=np.zeros(len(token_ids), dtype=np.float32),
        routed_experts=None,
        weight_versions=np.full(len(token_ids), -1, dtype=np.int32),
        finish_reason="stop",
        text=texts[1],
    )


_RESPONSE = "rollout_max_response_len"


def _up_to_stop(
    token_ids: np.ndarray, answer: np.ndarray, stop_token_ids: Collection[int]
) -> np.ndarray:
    """The tokens of an answer, bool[T], without what a template writes after its last stop token.

    A server never samples that: Qwen's newline after the end of a turn, say.
    """
    (stops,) = np.nonzero(answer & np.isin(token_ids, list(stop_token_ids)))
    if not len(stops):
        return answer
    return answer & (np.arange(len(token_ids)) <= stops[-1])


def _rendered(
    record: Record, messages: list[dict[str, Any]], template: RowTemplate, data: DataSection
) -> tuple[str, list[tuple[int, int]]]:
    """The whole text, and the characters of each of the assistant's messages in it that are to be trained.

    A message's span begins where the text of those before it ends, with the words that ask for an
    answer, and ends where its own text does.
    """
    where, spans, tools = record.where, [], row_tools(record, data.tool_key)
    text = template.text(messages, tools, asks=False, where=where)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [i for i in answers if messages[i].get("weight") != 0]
    for i in trained:
        before = template.text(messages[:i], tools, where=where)
        behind = template.text(messages[: i + 1], tools, asks=False, where=where)
        if not behind.startswith(before) or not text.startswith(behind):
            raise ValueError(
                f"{where}: the chat template renders message {i + 1} otherwise within the conversation"
                " than at its end, so its tokens cannot be told: end the conversation with it"
            )
        spans.append((len(before), len(behind)))
    if not answers:
        raise ValueError(f"{where}: no message of role assistant: there is nothing to train")
    if not trained:
        raise ValueError(f"{where}: every answer has weight 0: there is nothing to train")
    return chat_text(record, messages, template, data, trained, asks=False), spans
