"""Prompts from a file, tokenised and checked before anything else starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from r3train.types import Prompt


_SHOWN_TOKENS, _SHOWN_TEXT = 64, 2000
_UNKNOWN_SHARE = 0.1


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class _Record:
    """One line or row: its place (for errors), its 0-based number, and its content."""

    where: str
    index: int
    content: Mapping[str, Any]


def load_prompts(
    path: Path | str,
    *,
    tokenizer: Tokenizer,
    input_key: str = "input",
    label_key: str = "label",
    metadata_key: str = "metadata",
    apply_chat_template: bool = False,
    max_prompt_len: int | None = None,
    limit_name: str = "rollout_max_prompt_len",
) -> list[Prompt]:
    """Read every prompt of a .jsonl or .parquet file, in the order of the file.

    ``limit_name`` says in errors where ``max_prompt_len`` (tokens) comes from.  Blank lines are
    skipped; ``metadata_key`` may be absent.  Raises ValueError naming file, line (or row) and key
    for a missing or empty file, bad JSON, a missing key, an empty prompt or one that is too long.
    """
    path = Path(path)
    prompts = []
    for record in _records(path):
        text = _prompt_text(record, input_key, tokenizer if apply_chat_template else None)
        # a chat template writes the special tokens itself
        tokens = tokenizer.encode(text, add_special_tokens=not apply_chat_template)
        if not tokens:
            raise ValueError(f"{record.where}: key {input_key}: the prompt has no tokens")
        if max_prompt_len is not None and len(tokens) > max_prompt_len:
            raise ValueError(
                f"{record.where}: the prompt has {len(tokens)} tokens,"
                f" at most {max_prompt_len} fit ({limit_name})"
            )
        prompts.append(
            Prompt(
                prompt_id=f"{path.name}:{record.index}",
                index=record.index,
                text=text,
                token_ids=np.asarray(tokens, dtype=np.int32),
                label=_required(record, label_key),
                metadata=_metadata(record, metadata_key),
            )
        )
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


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

    Raises ValueError if there is nothing else in any prompt.
    """
    if unknown is None:
        return None
    shares = [float(np.mean(prompt.token_ids == unknown)) for prompt in prompts]
    if min(shares) == 1.0:
        raise ValueError(
            f"every token of all {len(prompts)} prompts is the tokenizer's unknown token ({unknown}):"
            " it is no tokenizer for this text"
        )
    bad = [prompt.prompt_id for prompt, share in zip(prompts, shares) if share > _UNKNOWN_SHARE]
    if not bad:
        return None
    return (
        f"{len(bad)} of {len(prompts)} prompts have more than {_UNKNOWN_SHARE:.0%} unknown tokens"
        f" (first {bad[0]}: {shares[[p.prompt_id for p in prompts].index(bad[0])]:.0%})"
    )


def _records(path: Path) -> Iterator[_Record]:
    if not path.is_file():
        raise ValueError(f"{path}: no such prompt file (prompt_data)")
    if path.suffix == ".parquet":
        return _parquet_records(path)
    if path.suffix in (".jsonl", ".json"):
        return _jsonl_records(path)
    raise ValueError(f"{path}: prompts are read from .jsonl or .parquet, got {path.suffix!r}")


def _jsonl_records(path: Path) -> Iterator[_Record]:
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
                    f"{path} line {number}: not UTF-8 at byte {error.start + 1} of the line"
                ) from None
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path} line {number} column {error.colno}: not JSON: {error.msg}"
                ) from None
            if not isinstance(content, dict):
                raise ValueError(
                    f"{path} line {number}: expected a JSON object, got {type(content).__name__}"
                )
            yield _Record(f"{path} line {number}", index, content)


def _parquet_records(path: Path) -> Iterator[_Record]:
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
                    yield _Record(f"{path} row {index + 1}", index, content)
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot read as parquet: {error}") from None


def _required(record: _Record, key: str) -> Any:
    value = record.content.get(key)
    if value is None:
        state = "is null" if key in record.content else "is missing"
        raise ValueError(
            f"{record.where}: key {key} {state}; keys there: {', '.join(record.content) or 'none'}"
        )
    return value


def _prompt_text(record: _Record, key: str, template: Tokenizer | None) -> str:
    """The prompt as text; with ``template``, messages (or one user message) in its chat form."""
    value = _required(record, key)
    if not isinstance(value, str) and template is None:
        raise ValueError(
            f"{record.where}: key {key} must be text, got {type(value).__name__}"
            " (chat messages need --apply-chat-template)"
        )
    if isinstance(value, str) and not value.strip() or value == []:
        raise ValueError(f"{record.where}: key {key}: the prompt is empty")
    if template is None:
        return value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "role" in message and "content" in message
        for message in messages
    ):
        raise ValueError(
            f"{record.where}: key {key} must be text or a list of messages with role and content"
        )
    try:
        return template.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the checkpoint: it may raise anything
        raise ValueError(f"{record.where}: the chat template fails: {error}") from error


def _metadata(record: _Record, key: str) -> dict[str, Any]:
    value = record.content.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{record.where}: key {key} must be an object, got {type(value).__name__}")
    return value
