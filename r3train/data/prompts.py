"""Prompts from a file, tokenised and checked before anything else starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r3train.config.data_settings import DataSection, PromptFile
from r3train.config.files import downloads_nothing, require_regular
from r3train.ids import prompt_id
from r3train.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_SHOWN_TOKENS, _SHOWN_TEXT = 64, 2000
_UNKNOWN_SHARE = 0.1
_BATCH = 256  # texts that are tokenised at once
# words of an answer that no template has
_STAND_IN = "r3train-stands-in-for-an-answer"
_RESULT = "r3train-stands-in-for-a-result"


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
    texts = ((r, _prompt_text(r, data.input_key, template)) for r in read_records(file))
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
                label=find_value(record.content, data.label_key),
                metadata=_metadata(record, data.metadata_key),
            )
        )
    if overlong:
        text = (
            f"{len(overlong):,} of {len(overlong) + len(prompts):,} prompts above {most:,}"
            f" tokens ({limit_name}; longest {max(overlong):,})"
        )
        if not prompts:
            raise ValueError(f"{file.path}: nothing is left without {text}")
        note(f"{file.path}: dropped {text}")
    if not prompts:
        raise ValueError(f"{file.path}: holds no prompts")
    return prompts


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
                raise ValueError(f"{path}:{number}:{error.colno}: not JSON: {error.msg}") from None
            if not isinstance(content, dict):
                raise ValueError(
                    f"{path}:{number}: expected a JSON object, got {type(content).__name__}"
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


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat template of a tokenizer and what else is given to it."""

    tokenizer: Tokenizer
    data: DataSection
    tools: Sequence[dict[str, Any]] = ()  # of rows that have none of their own

    def render(self, record: Record, messages: list[dict[str, Any]], *, asks: bool = True) -> str:
        """Messages as text; raises ValueError naming the row where the template fails.

        asks: end with the words that ask for an answer.
        """
        own = None if self.data.tool_key is None else _tools(record, self.data.tool_key)
        return _whole(self._rendered(record.where, messages, asks, own or self.tools), record)

    def reply(self, messages: list[dict[str, Any]], last: int) -> list[int]:
        """Tokens after an answer that ends with token ``last``: its end, messages, the next opening.

        The end is what the template writes after an answer; its first token is left out if it is
        ``last``.  So is the opening of the first message where the template writes no end: the model
        stops with it (GLM-4.5's ``<|user|>`` and ``<|observation|>``).  What comes before is never
        rendered anew: the messages follow a stand-in for the answer, and all after its words counts.
        Messages of role tool that a template writes after a call alone (gpt-oss) follow a stand-in with
        a call of their tool.  Raises ValueError where the template fails.
        """
        closing, tokens = self._after(messages)
        if tokens[:1] != [last]:
            return tokens
        is_end = closing[:1] == [last] if closing else self._is_added(last)
        return tokens[1:] if is_end else tokens

    def check_tools(self) -> None:
        """Raise ValueError if the template does not show the tools, or what one answers."""
        message, where = [{"role": "user", "content": _STAND_IN}], "tools"
        shown = self._rendered(where, message, True, self.tools)
        if shown == self._rendered(where, message, True, ()):
            raise ValueError(
                "the environment has tools, and the tokenizer's chat template does not show them"
            )
        result = {"role": "tool", "content": _RESULT}
        if len(self.tools) > 1:
            result["name"] = self._tool_names[0]
        if _RESULT not in self._written_after([result])[1]:
            raise ValueError(
                "the environment has tools, and the tokenizer's chat template does not write messages"
                " of role tool"
            )

    def _after(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """The tokens that close an answer, and those with the messages and the next opening after them."""
        call, text = self._written_after(messages)
        if call is None:
            return self._encode(self._behind([], asks=False)), self._encode(text)
        closing = self._encode(call)[-1:]  # the token that ends a call
        return closing, closing + self._encode(text)

    def _written_after(self, messages: list[dict[str, Any]]) -> tuple[str | None, str]:
        """The text with a call that the messages need before them, if they do, and their own text."""
        try:
            return None, self._behind(messages, asks=True)
        except ValueError as error:
            if not self.tools or not messages or messages[0]["role"] != "tool":
                raise
            name = self._called(messages, error)
        # arguments and answer are stand-ins: what is behind the call does not depend on them
        call = {"type": "function", "function": {"name": name, "arguments": {}}}
        answer = {"role": "assistant", "content": _STAND_IN, "tool_calls": [call]}
        before = [{"role": "user", "content": "."}, answer]
        text = self._rendered("a reply", before, False, self.tools)
        whole = self._rendered("a reply", [*before, *messages], True, self.tools)
        if not whole.startswith(text):
            raise ValueError(
                "a reply: the chat template changes a call when messages of role tool follow it"
            )
        return text, whole[len(text) :]

    def _called(self, messages: list[dict[str, Any]], error: ValueError) -> str:
        """The name of the one tool whose answers begin the messages; raises ValueError if it is unknown.

        error: what the template said to the answers without a call.
        """
        answers = takewhile(lambda message: message["role"] == "tool", messages)
        names = {message.get("name") for message in answers}
        if names == {None} and len(self._tool_names) == 1:
            return self._tool_names[0]
        if len(names) == 1 and names <= set(self._tool_names):
            return names.pop()
        raise ValueError(
            f"{error}; if it writes messages of role tool after a call only, give each of a turn the"
            f" name of the same tool ({', '.join(self._tool_names)}), got"
            f" {', '.join(sorted(map(str, names)))}"
        )

    @property
    def _tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def _is_added(self, token: int) -> bool:
        """True for a token that no text but its own gives, as special ones are."""
        return token in self.tokenizer.get_added_vocab().values()

    def _behind(self, messages: list[dict[str, Any]], *, asks: bool) -> str:
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": _STAND_IN}]
        text = self._rendered("a reply", [*before, *messages], asks, self.tools)
        if text.count(_STAND_IN) != 1:
            raise ValueError(
                "a reply: the chat template does not write the content of the answer before it once"
            )
        return text.partition(_STAND_IN)[2]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _rendered(
        self, where: str, messages: list[dict[str, Any]], asks: bool, tools: Sequence[Any]
    ) -> str:
        given = dict(self.data.apply_chat_template_kwargs)
        if tools:
            given["tools"] = list(tools)
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=asks, tokenize=False, **given
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(f"{where}: the chat template fails: {error}") from error


def _prompt_text(record: Record, key: str, template: ChatTemplate | None) -> str:
    """The prompt as text; with ``template``, messages (or one user message) in its chat form."""
    value = required(record, key)
    if not isinstance(value, str) and template is None:
        raise ValueError(
            f"{record.where}: key {key} must be text, got {type(value).__name__}"
            " (chat messages need --apply-chat-template)"
        )
    if isinstance(value, str) and not value.strip() or value == []:
        raise ValueError(f"{record.where}: key {key}: the prompt is empty")
    if template is None:
        return _whole(value, record)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return template.render(record, require_messages(record, key, messages, "text or "))


def _whole(text: str, record: Record) -> str:
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


def _metadata(record: Record, key: str) -> dict[str, Any]:
    value = find_value(record.content, key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{record.where}: key {key} must be an object, got {type(value).__name__}")
    return value
