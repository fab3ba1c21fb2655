"""Prompts from a file, tokenised and checked before anything else starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r3train.config.data_settings import DataSection, PromptFile
from r3train.config.files import downloads_nothing, require_regular
from r3train.data.messages import left_out, messages_in, read_messages, read_tools
from r3train.data.row_pool import over_rows
from r3train.data.templates import ChatTemplate, RowTemplate
from r3train.ids import prompt_id
from r3train.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_SHOWN_TOKENS, _SHOWN_TEXT = 64, 2000
_UNKNOWN_SHARE = 0.1
_PICTURES = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, slots=True)
class Record:
    """One line or row: its place (for errors), its 0-based number, and its content.

    ``where`` is FILE:N of a line, as editors take it, and "FILE row N" of a row; both count from 1.
    """

    where: str
    index: int
    content: Mapping[str, Any]


@dataclass(slots=True)
class Remarks:
    """What the rows of a file hold that has no effect, or one that nobody meant: counts, and the first place."""

    note: Callable[[str, str], None]
    found: dict[tuple[str, str], list[Any]] = field(default_factory=dict)

    def add(self, where: str, text: str, remedy: str) -> None:
        """Count a remark."""
        self.found.setdefault((text, remedy), [0, where])[0] += 1

    def tell(self, file: PromptFile) -> None:
        """Tell of every remark once."""
        for (text, remedy), (count, where) in self.found.items():
            self.note(
                f"{file.path}: {text} in {count:,} row{'s' * (count != 1)} (first {where})", remedy
            )


def load_prompts(
    file: PromptFile,
    data: DataSection,
    tokenizer: Tokenizer,
    limit: tuple[int, str],
    *,
    tools: Sequence[dict[str, Any]] = (),
    stop_token_ids: Collection[int] = (),
    note: Callable[[str, str], None] = lambda text, remedy: None,
) -> list[Prompt]:
    """Read the prompts of a .jsonl or .parquet file, in the order of the file.

    data: the keys, the chat template's settings, and the treatment of prompts that are longer than ``limit``: its
    tokens, and words for where it comes from.  ``note`` is told, with a remedy, once of those that were dropped,
    and once of each thing in rows that has no effect.
    tools: of rows without tools of their own.  Blank lines are skipped; labels, metadata and tools may be absent.
    stop_token_ids: those at which a server ends an answer, and no prompt.
    Raises ValueError naming file, line (or row) and key for a missing or empty file, bad JSON, a missing key,
    an empty prompt, one that is no text or text chat, and one of whose messages the template leaves any out.
    """
    prompts, overlong, remarks = [], [], Remarks(note)
    most, limit_name = limit
    reader = _PromptReader.of(data, tokenizer, tools, frozenset(stop_token_ids))
    for record, read in over_rows(read_records(file), reader):
        for remark in read.remarks:
            remarks.add(record.where, *remark)
        count = len(read.token_ids)
        if count > most:
            if data.overlong_prompts == "drop":
                overlong.append(count)
                continue
            raise ValueError(
                f"{record.where}: the prompt has {count} tokens, at most {most} fit ({limit_name})"
            )
        prompts.append(
            Prompt(
                prompt_id=prompt_id(file.path.name, record.index),
                index=record.index,
                text=read.text,
                token_ids=read.token_ids,
                label=find_value(record.content, data.label_key),
                metadata=_metadata(record, data.metadata_key),
                content=read.content,
            )
        )
    if overlong:
        count, limit = len(overlong), f"{most:,} tokens ({limit_name}; longest {max(overlong):,})"
        if not prompts:
            raise ValueError(f"{file.path}: all {count:,} prompts are above {limit}")
        text = f"{file.path}: dropped {count:,} of {count + len(prompts):,} prompts above {limit}"
        note(text, DROPPED)
    if not prompts:
        raise ValueError(_no_prompts(file))
    remarks.tell(file)
    return prompts


DROPPED = "raise the limit, or refuse such data with --overlong-prompts error"


def _no_prompts(file: PromptFile) -> str:
    rows = sum(1 for _ in read_records(PromptFile(file.path)))
    if not rows:
        return f"{file.path}: holds no prompts"
    part = f"@[{file.start}:{'' if file.stop is None else file.stop}]"
    return f"{file.path}{part}: holds no prompts: the file has {rows:,} rows"


@dataclass(frozen=True, slots=True)
class _ReadPrompt:
    """What a row became: its text, int32[tokens], its text or messages, and (remark, remedy) of what was odd."""

    text: str
    token_ids: np.ndarray
    content: Any
    remarks: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _PromptReader:
    """Makes prompts of rows, a batch at a time."""

    data: DataSection
    tokenizer: Tokenizer
    template: RowTemplate | None
    stop_token_ids: frozenset[int]
    prefix: list[int]  # what the tokenizer writes before a text, and behind it
    suffix: list[int]

    @classmethod
    def of(
        cls, data: DataSection, tokenizer: Tokenizer, tools: Sequence[Any], stops: frozenset[int]
    ) -> _PromptReader:
        """Find what a row needs besides itself."""
        if data.apply_chat_template:  # which writes the special tokens itself
            template = RowTemplate.of(ChatTemplate(tokenizer, data, tools))
            return cls(data, tokenizer, template, stops, [], [])
        return cls(data, tokenizer, None, stops, *_added_by(tokenizer))

    def __call__(self, records: Sequence[Record]) -> list[_ReadPrompt]:
        """Read rows; raises ValueError for the first one that is no prompt."""
        read = [self._read(record) for record in records]
        ids = self.tokenizer(
            [text for text, _, _ in read],
            add_special_tokens=self.template is None,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        return [
            _ReadPrompt(text, self._checked(record, tokens), content, remarks)
            for record, (text, content, remarks), tokens in zip(records, read, ids, strict=True)
        ]

    def _checked(self, record: Record, tokens: list[int]) -> np.ndarray:
        """A prompt's tokens without a second beginning; raises ValueError for none, and a stop token at the end."""
        where, length = f"{record.where}: key {self.data.input_key}", len(self.prefix)
        if length and tokens[length : 2 * length] == self.prefix:  # the text has it too
            tokens = tokens[length:]
        if not tokens:
            raise ValueError(f"{where}: the prompt has no tokens")
        if tokens[-1] in self.stop_token_ids:
            token = self.tokenizer.convert_ids_to_tokens(tokens[-1])
            writer = "which the tokenizer adds to every text" if self.suffix else "of its own text"
            raise ValueError(
                f"{where}: the prompt ends in the stop token {token!r} ({tokens[-1]}), {writer}: expected"
                " one that an answer goes on"
            )
        return np.asarray(tokens, dtype=np.int32)

    def _read(self, record: Record) -> tuple[str, Any, list[tuple[str, str]]]:
        """A row's text, its text or messages, and remarks."""
        key = self.data.input_key
        value = required(record, key)
        remarks = [
            (f"key {name} is not read", "the model is served and trained on text alone")
            for name in _PICTURES
            if record.content.get(name) not in (None, "", [], {}) and name != key
        ]
        listed = _or_its_messages(record, key, value)
        if not isinstance(listed, (str, list) if self.template else str):
            expected, hint = "text or a list of messages", ""
            if self.template is None:
                expected, hint = "text", " (chat messages need --apply-chat-template)"
            raise ValueError(
                f"{record.where}: key {key} must be {expected}, got {type(listed).__name__}{hint}"
            )
        if isinstance(value, str) and not value.strip() or value == []:
            raise ValueError(f"{record.where}: key {key}: the prompt is empty")
        if self.template is None:
            return without_surrogates(value, record), value, remarks
        alone = [{"role": "user", "content": value}]
        is_text = isinstance(listed, str)
        messages, odd = require_messages(record, key, alone if is_text else listed, self.template)
        last = messages[-1]
        if last["role"] == "assistant":
            raise ValueError(
                f"{record.where}: key {key}: the last message is the assistant's, expected one that it"
                " answers"
            )
        if last["role"] != "tool" and not last["content"].strip():
            raise ValueError(f"{record.where}: key {key}: the prompt is empty (its last message)")
        text = chat_text(record, messages, self.template, self.data)
        return text, value if is_text else messages, remarks + odd


def _added_by(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer writes before every text, and behind it."""
    whole, bare = (tokenizer(["a"], add_special_tokens=on)["input_ids"][0] for on in (True, False))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return list(whole[:start]), list(whole[start + len(bare) :])
    return [], []


def shown(prompt: Prompt, tokenizer: Tokenizer, which: str = "first") -> list[str]:
    """Return lines that show a prompt as the model gets it: its rendered text and its tokens."""
    ids = prompt.token_ids.tolist()
    begin, left, end = _ends(ids, _SHOWN_TOKENS)
    tokens = [
        " ".join(f"{n} {token!r}" for n, token in zip(part, tokenizer.convert_ids_to_tokens(part)))
        for part in (begin, end)
    ]
    text, more, ending = _ends(prompt.text, _SHOWN_TEXT)
    return [
        f"{which} prompt ({prompt.prompt_id}, {len(ids)} tokens): {text!r}"
        + (f" and {more} more characters, then {ending!r}" if more else ""),
        f"its tokens: {tokens[0]}" + (f" and {left} more, then {tokens[1]}" if left else ""),
    ]


def _ends(whole: Any, most: int) -> tuple[Any, int, Any]:
    """The beginning, the number of what is left out, and the end, of text or tokens above ``most``."""
    if len(whole) <= most:
        return whole, 0, whole[:0]
    part = most // 4
    return whole[: most - part], len(whole) - most, whole[-part:]


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
            except RecursionError:
                raise ValueError(f"{path}:{number}: the JSON is nested too deep") from None
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


def row_tools(record: Record, key: str | None) -> list[dict[str, Any]] | None:
    """The tools of a row; None without any.  Raises ValueError naming the key for what are no tools."""
    if key is None:
        return None
    try:
        return read_tools(find_value(record.content, key))
    except ValueError as error:
        raise ValueError(f"{record.where}: key {key}: {error}") from None


def chat_text(
    record: Record,
    messages: list[dict[str, Any]],
    template: RowTemplate,
    data: DataSection,
    trained: Collection[int] | None = (),
    *,
    asks: bool = True,
) -> str:
    """A row's messages as text, with its own tools if it has any.

    asks: end with the words that ask for an answer.  trained: numbers of the answers whose thoughts must be there.
    Raises ValueError where the template fails, and where it leaves out a part of the messages or the tools.
    """
    tools = row_tools(record, data.tool_key)
    text = template.text(messages, tools, asks=asks, where=record.where)
    if lack := left_out(text, messages, tools or (), trained):
        raise ValueError(f"{record.where}: {lack}")
    return without_surrogates(text, record)


def without_surrogates(text: str, record: Record) -> str:
    """Return a text that tokenizers take; raises ValueError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{record.where}: character {error.start + 1} of the prompt is {text[error.start]!r}, half of"
            " a surrogate pair: it is no text"
        ) from None
    return text


def _or_its_messages(record: Record, key: str, value: Any) -> Any:
    """A row's value, or the messages that its text holds as JSON; raises ValueError for other tables in it."""
    if not isinstance(value, str):
        return value
    try:
        return messages_in(value) or value
    except ValueError as error:
        raise ValueError(f"{record.where}: key {key} holds {error}") from None


def require_messages(
    record: Record, key: str, value: Any, template: RowTemplate, *, answers: bool = False
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return the messages of a row, and (remark, remedy) of keys without effect and special tokens in their texts.

    answers: those of the assistant are to be trained, and what is said of them must have an effect.
    Raises ValueError naming row and message for what is no text chat.
    """
    try:
        messages, unknown = read_messages(_or_its_messages(record, key, value), template.reads)
    except ValueError as error:
        raise ValueError(f"{record.where}: key {key}: {error}") from None
    for index, name in unknown:
        if answers and messages[index]["role"] == "assistant":
            raise ValueError(
                f"{record.where}: key {key}: message {index + 1}: the key {name} beside an answer has no"
                " effect here: leave it out, or give weight 0 to an answer that is not to be trained"
            )
    odd = [
        (f"the key {name} beside a message has no effect", "the chat template does not read it")
        for name in dict.fromkeys(name for _, name in unknown)
    ]
    remedy = "there they become control tokens; is the text rendered already?"
    for token in template.special_tokens_in(messages):
        odd.append((f"the special token {token!r} within a message", remedy))
    return messages, odd


def _metadata(record: Record, key: str) -> dict[str, Any]:
    value = find_value(record.content, key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{record.where}: key {key} must be an object, got {type(value).__name__}")
    return value
