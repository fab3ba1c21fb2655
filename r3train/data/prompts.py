"""Prompts from a file, tokenised and checked before anything else starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r3train.config.data_settings import DataSection, PromptFile
from r3train.config.files import downloads_nothing, require_regular
from r3train.data.json_values import json_value, label_value
from r3train.data.templates import ChatTemplate
from r3train.ids import prompt_id
from r3train.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_SHOWN_TOKENS, _SHOWN_TEXT = 64, 2000
_UNKNOWN_SHARE = 0.1
_BATCH = 256  # texts that are tokenised at once


@dataclass(frozen=True, slots=True)
class Record:
    """One line or row: its place (for errors), its 0-based number, and its content.

    ``where`` is FILE:N of a line, as editors take it, and "FILE row N" of a row; both count from 1.
    """

    where: str
    index: int
    content: Mapping[str, Any]


def load_prompts(
    file: PromptFile,
    data: DataSection,
    tokenizer: Tokenizer,
    limit: tuple[int, str],
    *,
    tools: Sequence[dict[str, Any]] = (),
    note: Callable[[str], None] = lambda text: None,
) -> list[Prompt]:
    """Read the prompts of a .jsonl or .parquet file, in the order of the file.

    data: the keys, the chat template's settings, and the treatment of prompts that are longer than ``limit``: its
    tokens, and words for where it comes from.  ``note`` is told, once, of those that were dropped.
    tools: of rows without tools of their own.  Blank lines are skipped; labels, metadata and tools may be absent.
    Raises ValueError naming file, line (or row) and key for a missing or empty file, bad JSON, a missing key
    and an empty prompt.
    """
    prompts, overlong = [], []
    most, limit_name = limit
    template = ChatTemplate(tokenizer, data, tools) if data.apply_chat_template else None
    texts = ((r, _prompt_text(r, data, template)) for r in read_records(file))
    # a chat template writes the special tokens itself
    for record, text, tokens in _tokenized(texts, tokenizer, special=template is None):
        if not tokens:
            raise ValueError(f"{record.where}: key {data.input_key}: the prompt has no tokens")
        if len(tokens) > most:
            if data.overlong_prompts == "drop":
                overlong.append(len(tokens))
                continue
            raise ValueError(
                f"{record.where}: the prompt has {len(tokens)} tokens,"
                f" at most {most} fit ({limit_name})"
            )
        prompts.append(
            Prompt(
                prompt_id=prompt_id(file.path.name, record.index),
                index=record.index,
                text=text,
                token_ids=np.asarray(tokens, dtype=np.int32),
                label=_label(record, data.label_key),
                metadata=_metadata(record, data.metadata_key),
                content=find_value(record.content, data.input_key),
                columns=_columns(record, data),
            )
        )
    if overlong:
        count, limit = len(overlong), f"{most:,} tokens ({limit_name}; longest {max(overlong):,})"
        if not prompts:
            raise ValueError(f"{file.path}: all {count:,} prompts are above {limit}")
        note(f"{file.path}: dropped {count:,} of {count + len(prompts):,} prompts above {limit}")
    if not prompts:
        raise ValueError(_no_prompts(file))
    return prompts


def _no_prompts(file: PromptFile) -> str:
    rows = sum(1 for _ in read_records(PromptFile(file.path)))
    if not rows:
        return f"{file.path}: holds no prompts"
    part = f"@[{file.start}:{'' if file.stop is None else file.stop}]"
    return f"{file.path}{part}: holds no prompts: the file has {rows:,} rows"


def _tokenized(
    texts: Iterator[tuple[Record, str]], tokenizer: Tokenizer, *, special: bool
) -> Iterator[tuple[Record, str, list[int]]]:
    """Yield each text with its tokens, which come a batch at a time: in half the time of one by one."""
    while batch := list(islice(texts, _BATCH)):
        ids = tokenizer(
            [text for _, text in batch],
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        for (record, text), tokens in zip(batch, ids, strict=True):
            yield record, text, tokens


def shown(prompt: Prompt, tokenizer: Tokenizer) -> list[str]:
    """Return lines that show a prompt as the model gets it: its rendered text and its tokens."""
    ids = prompt.token_ids[:_SHOWN_TOKENS].tolist()
    tokens = " ".join(
        f"{number} {token!r}" for number, token in zip(ids, tokenizer.convert_ids_to_tokens(ids))
    )
    left = len(prompt.token_ids) - len(ids)
    text = prompt.text[:_SHOWN_TEXT]
    more = f" and {len(prompt.text) - len(text)} more characters" if text != prompt.text else ""
    return [
        f"first prompt ({prompt.prompt_id}, {len(prompt.token_ids)} tokens): {text!r}{more}",
        f"its tokens: {tokens}" + (f" and {left} more" if left else ""),
    ]


def unknown_tokens(prompts: Sequence[Prompt], unknown: int | None) -> str | None:
    """Return a warning where prompts have many unknown tokens (id ``unknown``); None if they do not.

    Prompts without tokens (of conversations that the assistant opens) do not count.  Raises ValueError
    if there is nothing else in any prompt.
    """
    prompts = [prompt for prompt in prompts if len(prompt.token_ids)]
    if unknown is None or not prompts:
        return None
    starts = np.cumsum([0, *(len(prompt.token_ids) for prompt in prompts)])
    ids = np.concatenate([prompt.token_ids for prompt in prompts])
    shares = np.add.reduceat(ids == unknown, starts[:-1], dtype=np.int64) / np.diff(starts)
    if shares.min() == 1.0:
        raise ValueError(
            f"every token of all {len(prompts)} prompts is the tokenizer's unknown token ({unknown}):"
            " it is no tokenizer for this text"
        )
    (bad,) = np.nonzero(shares > _UNKNOWN_SHARE)
    if not bad.size:
        return None
    return (
        f"{len(bad)} of {len(prompts)} prompts have more than {_UNKNOWN_SHARE:.0%} unknown tokens"
        f" (first {prompts[bad[0]].prompt_id}: {shares[bad[0]]:.0%})"
    )


def read_records(file: PromptFile) -> Iterator[Record]:
    """Read the lines or rows of a file that count; raises ValueError naming file and line."""
    path = file.path
    if not path.exists():
        hint = downloads_nothing(path, dataset=True)
        raise ValueError(f"{path}: no such prompt file (prompt_data){hint}")
    try:
        require_regular(path, follow=True)
    except IsADirectoryError:
        raise ValueError(
            f"{path}: is a directory, expected a file of prompts (prompt_data)"
        ) from None
    except OSError as error:  # /dev/zero has no end
        raise ValueError(f"{path}: {error.strerror} of prompts (prompt_data)") from None
    readers = {".parquet": _parquet_records, ".jsonl": _jsonl_records, ".json": _jsonl_records}
    if path.suffix not in readers:
        raise ValueError(f"{path}: prompts are read from .jsonl or .parquet, got {path.suffix!r}")
    for record in readers[path.suffix](path):
        if file.stop is not None and record.index >= file.stop:
            return
        if record.index >= file.start:
            yield record


def _jsonl_records(path: Path) -> Iterator[Record]:
    with path.open("rb") as stream:
        for index, raw in enumerate(stream):
            number = index + 1
            try:
                line = raw.decode("utf-8")
                if not line.strip():
                    continue
                content = json.loads(line)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}:{number}: not UTF-8 at byte {error.start + 1} of the line"
                ) from None
            except json.JSONDecodeError as error:
                if line.strip() in ("[", "{", "[{"):
                    raise ValueError(
                        f"{path}:{number}: JSON over several lines; expected one object per line"
                    ) from None
                raise ValueError(f"{path}:{number}:{error.colno}: not JSON: {error.msg}") from None
            if not isinstance(content, dict):
                raise ValueError(
                    f"{path}:{number}: expected a JSON object per line, got {type(content).__name__}"
                )
            yield Record(f"{path}:{number}", index, content)


def _parquet_records(path: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            index = 0
            for batch in file.iter_batches():
                for content in batch.to_pylist():
                    yield Record(f"{path} row {index + 1}", index, content)
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot read as parquet: {error}") from None


def find_value(content: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or of a.b key b of table a; None if it is missing or null."""
    if key in content:
        return content[key]
    found: Any = content
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def required(record: Record, key: str) -> Any:
    """The value of a key; raises ValueError if it is missing or null."""
    value = find_value(record.content, key)
    if value is None:
        state = "is null" if key in record.content else "is missing"
        raise ValueError(
            f"{record.where}: key {key} {state}; keys there: {', '.join(record.content) or 'none'}"
        )
    return value


def _tools(record: Record, key: str) -> list[Any] | None:
    """The tools of a row, as a list or as JSON text; None without any."""
    value = find_value(record.content, key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{record.where}: key {key}: not JSON: {error}") from None
    if value is not None and not isinstance(value, list):
        raise ValueError(
            f"{record.where}: key {key} must be a list of tools, got {type(value).__name__}"
        )
    return value or None


def chat_text(
    record: Record,
    messages: list[dict[str, Any]],
    template: ChatTemplate,
    data: DataSection,
    *,
    asks: bool = True,
) -> str:
    """A row's messages as text, with its own tools if it has any; raises ValueError where the template fails.

    asks: end with the words that ask for an answer.
    """
    tools = None if data.tool_key is None else _tools(record, data.tool_key)
    return _without_surrogates(
        template.text(messages, tools, asks=asks, where=record.where), record
    )


def _prompt_text(record: Record, data: DataSection, template: ChatTemplate | None) -> str:
    """The prompt as text; with ``template``, messages (or one user message) in its chat form."""
    key = data.input_key
    value = required(record, key)
    if not isinstance(value, str) and template is None:
        raise ValueError(
            f"{record.where}: key {key} must be text, got {type(value).__name__}"
            " (chat messages need --apply-chat-template)"
        )
    if isinstance(value, str) and not value.strip() or value == []:
        raise ValueError(f"{record.where}: key {key}: the prompt is empty")
    if template is None:
        return _without_surrogates(value, record)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    messages = require_messages(record, key, messages, "text or ")
    return chat_text(record, messages, template, data)


def _without_surrogates(text: str, record: Record) -> str:
    """Return a text that tokenizers take; raises ValueError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{record.where}: character {error.start + 1} of the prompt is {text[error.start]!r}, half of"
            " a surrogate pair: it is no text"
        ) from None
    return text


def require_messages(
    record: Record, key: str, messages: Any, or_else: str = ""
) -> list[dict[str, Any]]:
    """Return chat messages; raises ValueError for anything else.  or_else: what would do too."""
    if not are_messages(messages):
        raise ValueError(
            f"{record.where}: key {key} must be {or_else}a list of messages with role and content"
        )
    # parquet gives every message the fields of all
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in messages
    ]


def are_messages(value: Any) -> bool:
    """True for a list of tables that have role and content."""
    return isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message and "content" in message
        for message in value
    )


def _label(record: Record, key: str) -> Any:
    return label_value(record.where, key, find_value(record.content, key))


def _columns(record: Record, data: DataSection) -> dict[str, Any] | None:
    """The row's columns but prompt and tools that are JSON; None where no function of the user could ask for them."""
    if data.custom_rm_path is None and ":" not in (data.rm_type or ""):
        return None
    found = {}
    for key in record.content.keys() - {data.input_key, data.tool_key}:
        with suppress(ValueError):  # what a reward does not ask for need not be JSON
            found[key] = json_value(record.where, key, record.content[key])
    return found


def _metadata(record: Record, key: str) -> dict[str, Any]:
    value = json_value(record.where, key, find_value(record.content, key))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{record.where}: key {key} must be an object, got {type(value).__name__}")
    return value
