"""Conversations for supervised fine-tuning: the assistant's tokens, found by the template's spans."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from r3train.config.data_settings import DataSection, PromptFile
from r3train.data.prompts import (
    Note,
    read_rows,
    Record,
    Remark,
    require_messages,
    require_whole,
    required,
    row_tools,
)
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
    note: Note = lambda text, remedy: None,
) -> list[RolloutSample]:
    """Read every conversation of a .jsonl or .parquet file as a sample, in the order of the file.

    data, limit, note: as for ``load_prompts``.
    stop_token_ids: those at which a server ends an answer.
    A sample's prompt ends before the first token that is trained; the loss mask is True on the tokens of the
    assistant's messages without weight 0, with those that the template closes an answer with, up to a stop
    token.  Its ids and weight versions are to be set where it is sampled, and no engine gave it log-probs: they are 0.
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
    template, stops = RowTemplate.of(ChatTemplate(tokenizer, data)), list(stop_token_ids)
    limits = (*limit, "the prompt"), (max_response_len, "rollout_max_response_len", _RESPONSE)

    def read(records: Sequence[Record]) -> Iterator[tuple[RolloutSample, str | None, list[Remark]]]:
        rows = [_rendered(record, template, data) for record in records]
        all_tokens = tokenizer(
            [text for text, _, _ in rows], add_special_tokens=False, return_offsets_mapping=True
        )
        ids, places = all_tokens["input_ids"], all_tokens["offset_mapping"]
        for record, (text, spans, odd), *tokens in zip(records, rows, ids, places, strict=True):
            token_ids, mask = _masked(*tokens, spans, stops)
            if not mask.any():
                where = f"{record.where}: key {data.input_key}"
                raise ValueError(f"{where}: no token of an assistant's to train")
            named, first = prompt_id(file.path.name, record.index), spans[0][0]
            sample = _sample(record.index, named, (text[:first], text[first:]), token_ids, mask)
            lengths = sample.prompt_len, sample.response_len
            faults = (
                f"{record.where}: {what} has {length} tokens, at most {most} fit ({name})"
                for length, (most, name, what) in zip(lengths, limits)
                if length > most
            )
            yield sample, next(faults, None), odd

    return read_rows(file, read, data, note, "conversations")


def _masked(
    ids: list[int], places: list[Any], spans: Sequence[tuple[int, int]], stops: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, int32[T], and which of them stand in the spans of characters, bool[T]."""
    token_ids = np.asarray(ids, dtype=np.int32)
    begin, end = np.asarray(places, dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(token_ids), dtype=bool)
    for start, stop in spans:
        inside = (begin >= start) & (end <= stop) & (end > begin)
        # a byte-level tokenizer that trims its offsets gives spaces alone the place after them
        spaces = (begin == end) & (start < begin) & (begin <= stop)
        mask |= _up_to_stop(token_ids, inside | spaces, stops)
    return token_ids, mask


def _sample(
    index: int, prompt_id: str, texts: tuple[str, str], token_ids: np.ndarray, mask: np.ndarray
) -> RolloutSample:
    """Make a sample of a conversation; texts: of prompt and response, mask: bool[T], tokens to train."""
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


_RESPONSE = "from its first answer on the text"


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
    record: Record, template: RowTemplate, data: DataSection
) -> tuple[str, list[tuple[int, int]], list[Remark]]:
    """The whole text, the characters of each of the assistant's messages in it to be trained, and remarks.

    A message's span begins where the text of those before it ends, with the words that ask for an
    answer, and ends where its own text does.
    """
    where, key, spans = record.where, data.input_key, []
    value, tools = required(record, key), row_tools(record, data.tool_key)
    messages, odd = require_messages(record, key, value, template, answers=True)
    text = template.text(messages, tools, asks=False, where=where)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [i for i in answers if messages[i].get("weight") != 0]
    for i in trained:
        if not any(
            messages[i].get(part) for part in ("content", "reasoning_content", "tool_calls")
        ):
            raise ValueError(
                f"{where}: message {i + 1}: an answer of nothing would teach to end at once: weight 0 leaves it out"
            )
        before = template.text(messages[:i], tools, where=where)
        behind = template.text(messages[: i + 1], tools, asks=False, where=where)
        if not behind.startswith(before) or not text.startswith(behind):
            raise ValueError(
                f"{where}: the chat template renders message {i + 1} otherwise within the conversation"
                " than at its end, so its tokens cannot be told: end the conversation with it"
            )
        spans.append((len(before), len(behind)))
    if not trained:
        lack = "every answer has weight 0" if answers else "no message of role assistant"
        raise ValueError(f"{where}: {lack}: there is nothing to train")
    return require_whole(record, text, messages, tools, trained), spans, odd
