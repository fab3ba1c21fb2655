"""Prompts from a file, tokenised and checked before anything else starts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track

from r3train.chat.base import ChatRefused
from r3train.config.data_settings import DataSection, PromptFile
from r3train.config.files import path_hint, require_regular
from r3train.data.json_values import json_value, label_value
from r3train.data.messages import NOTHING, left_out, messages_in, read_messages, read_tools
from r3train.data.templates import ChatTemplate, RowTemplate, Tools
from r3train.ids import prompt_id
from r3train.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_SHOWN_TOKENS, _SHOWN_TEXT = 64, 2000
_UNKNOWN_SHARE = 0.1
_BATCH = 256  # texts that are tokenised at once
_SIZE_WITH_BAR = 4 << 20
_PICTURES = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, slots=True)
class Record:
    """One line or row: its place (for errors), its 0-based number, and its content.

    ``where`` is FILE:N of a line, as editors take it, and "FILE row N" of a row; both count from 1.
    """

    where: str
    index: int
    content: Mapping[str, Any]


# (where, what is odd, its remedy)
Remark = tuple[str, str, str]
Note = Callable[[str, str], None]


def load_prompts(
    file: PromptFile,
    data: DataSection,
    tokenizer: Tokenizer,
    limit: tuple[int, str],
    *,
    tools: Sequence[dict[str, Any]] = (),
    stop_token_ids: Collection[int] = (),
    note: Note = lambda text, remedy: None,
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
    template, prefix, suffix = None, [], []
    if data.apply_chat_template:  # which writes the special tokens itself
        template = RowTemplate.of(ChatTemplate(tokenizer, data, tools))
    else:
        prefix, suffix = _added_by(tokenizer)
    most, limit_name = limit
    writer = "which the tokenizer adds to every text" if suffix else "of its own text"

    def read(records: Sequence[Record]) -> Iterator[tuple[Prompt, str | None, list[Remark]]]:
        rows = [_read_prompt(record, data, template) for record in records]
        all_tokens = tokenizer(
            [text for text, _, _ in rows],
            add_special_tokens=template is None,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        for record, (text, content, odd), ids in zip(records, rows, all_tokens, strict=True):
            where, fault = f"{record.where}: key {data.input_key}", None
            if prefix and ids[len(prefix) : 2 * len(prefix)] == prefix:  # the text has it too
                ids = ids[len(prefix) :]
            if not ids:
                raise ValueError(f"{where}: the prompt has no tokens")
            if ids[-1] in stop_token_ids:
                token = f"{tokenizer.convert_ids_to_tokens(ids[-1])!r} ({ids[-1]}), {writer}"
                raise ValueError(f"{where}: the prompt ends in the stop token {token}")
            if len(ids) > most:
                size = f"{len(ids)} tokens, at most {most} fit ({limit_name})"
                fault = f"{record.where}: the prompt has {size}"
            prompt = Prompt(
                prompt_id=prompt_id(file.path.name, record.index),
                index=record.index,
                text=text,
                token_ids=np.asarray(ids, dtype=np.int32),
                label=_label(record, data.label_key),
                metadata=_metadata(record, data.metadata_key),
                content=content,
                columns=_columns(record, data),
            )
            yield prompt, fault, odd

    return read_rows(file, read, data, note, "prompts")


def read_rows(
    file: PromptFile, read: Callable[..., Any], data: DataSection, note: Note, kind: str
) -> list[Any]:
    """Read a file's rows: ``read`` makes of a batch (the row, why it is too long or None, remarks) each.

    Rows that are too long are dropped, or refused, as ``data`` says.  Raises ValueError where none is left.
    """
    rows, overlong, remarks = [], [], []
    has_tools, key = data.tool_key is None, data.tool_key
    for batch in _batches(file):
        has_tools = has_tools or any(find_value(r.content, key) is not None for r in batch)
        for row, fault, odd in read(batch):
            remarks += odd
            if fault is None:
                rows.append(row)
            elif data.overlong_prompts == "error":
                raise ValueError(fault)
            else:
                overlong.append(fault)
    if overlong:
        num_rows, remedy = len(overlong) + len(rows), "raise the limit, or --overlong-prompts error"
        text = f"of {num_rows:,} {kind}, which are too long; the first: {overlong[0]}"
        if not rows:
            raise ValueError(f"{file.path}: drops all {text}")
        note(f"{file.path}: dropped {len(overlong):,} {text}", remedy)
    if not rows:
        num_rows = sum(1 for _ in read_records(PromptFile(file.path)))
        part = f"@[{file.start}:{'' if file.stop is None else file.stop}]: holds no {kind}: the file has"
        raise ValueError(
            f"{file.path}{part} {num_rows:,} rows" if num_rows else f"{file.path}: holds no {kind}"
        )
    if not has_tools:
        remedy = "name their key with --tool-key, or leave the flag out"
        note(f"{file.path}: no row has tools (key {key})", remedy)
    first = {remark[1:]: remark[0] for remark in reversed(remarks)}
    for remark, count in Counter(remark[1:] for remark in remarks).items():
        text, remedy = remark
        note(f"{file.path}: {text}, in {count:,} of the rows (first {first[remark]})", remedy)
    return rows


def _batches(file: PromptFile) -> Iterable[list[Record]]:
    """The records of a file, ``_BATCH`` at a time; behind a bar if it is large and a terminal looks on."""
    records = read_records(file)
    batches = iter(lambda: list(islice(records, _BATCH)), [])
    console = Console(stderr=True)
    if not console.is_terminal or not file.path.is_file():
        return batches
    if file.path.stat().st_size < _SIZE_WITH_BAR:
        return batches
    total = None  # what a parquet file has is compressed
    if file.path.suffix != ".parquet":
        with file.path.open("rb") as lines:
            total = sum(1 for _ in islice(lines, file.start, file.stop)) / _BATCH
    name = f"reading {file.path.name}"
    return track(batches, name, total, console=console, transient=True)


def _read_prompt(
    record: Record, data: DataSection, template: RowTemplate | None
) -> tuple[str, Any, list[Remark]]:
    """A row's text, its text or messages, and remarks."""
    key = data.input_key
    value, where = required(record, key), f"{record.where}: key {key}"
    pictures = (n for n in _PICTURES if n != key and record.content.get(n) not in NOTHING)
    odd = [(record.where, f"key {name} is not read", "text alone is trained") for name in pictures]
    listed = _or_its_messages(record, key, value)
    if not isinstance(listed, (str, list) if template else str):
        expected = "text (chat messages need --apply-chat-template)"
        expected = "text or a list of messages" if template else expected
        raise ValueError(f"{where}: got {type(listed).__name__}, expected {expected}")
    if isinstance(value, str) and not value.strip() or value == []:
        raise ValueError(f"{where}: the prompt is empty")
    if template is None:
        return without_surrogates(value, record), value, odd
    is_text = isinstance(listed, str)
    listed = [{"role": "user", "content": value}] if is_text else listed
    messages, more = require_messages(record, key, listed, template)
    last = messages[-1]
    if last["role"] == "assistant":
        raise ValueError(f"{where}: the last message is the assistant's, expected another's")
    if last["role"] != "tool" and not last["content"].strip():
        raise ValueError(f"{where}: the prompt is empty (its last message)")
    tools = row_tools(record, data.tool_key)
    text = template.text(messages, tools, where=record.where)
    content = value if is_text else messages
    return require_whole(record, text, messages, tools), content, odd + more


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
            " it is no tokenizer for this text (of a tiny model: r3train make-tiny-model --tokenizer-from FILE)"
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
        hint = path_hint(path, dataset=True)
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
            except ValueError as error:  # an integer of thousands of digits
                raise ValueError(f"{path}:{number}: {error}") from None
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
                # 0.1 of 32 bits is 0.1, not 0.10000000149011612
                for n, field in enumerate(batch.schema):
                    if pyarrow.types.is_float32(field.type):
                        column = batch[n].cast(pyarrow.string()).cast(pyarrow.float64())
                        batch = batch.set_column(n, field.name, column)
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


def row_tools(record: Record, key: str | None) -> Tools:
    """The tools of a row; None without any.  Raises ValueError naming the key for what are no tools."""
    if key is None:
        return None
    try:
        return read_tools(find_value(record.content, key))
    except (ChatRefused, ValueError) as error:
        raise ValueError(f"{record.where}: key {key}: {error}") from None


def require_whole(
    record: Record, text: str, messages: Sequence[Any], tools: Tools, trained: Collection[int] = ()
) -> str:
    """Return a row's rendered text; raises ValueError where it lacks a part of the messages or the tools.

    trained: numbers of the answers whose thoughts must be there.
    """
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
) -> tuple[list[dict[str, Any]], list[Remark]]:
    """Return the messages of a row, and remarks on keys without effect and special tokens in their texts.

    answers: those of the assistant are to be trained, and what is said of them must have an effect.
    Raises ValueError naming row and message for what is no text chat.
    """
    value = _or_its_messages(record, key, value)
    try:
        messages, unknown = read_messages(value, template.reads)
    except ValueError as error:
        raise ValueError(f"{record.where}: key {key}: {error}") from None
    odd = {}
    for index, name in unknown:
        if answers and messages[index]["role"] == "assistant":
            raise ValueError(
                f"{record.where}: key {key}: message {index + 1}: the key {name} next to an answer has no"
                " effect here: leave it out, or give weight 0 to an answer that is not to be trained"
            )
        odd[f"the key {name} next to a message has no effect"] = (
            "the chat template does not read it"
        )
    for token in template.special_tokens_in(messages):
        remedy = "there they become control tokens; is the text rendered already?"
        odd[f"the special token {token!r} stands in a message"] = remedy
    return messages, [(record.where, *remark) for remark in odd.items()]


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
