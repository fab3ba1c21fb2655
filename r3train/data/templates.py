"""The chat template of a checkpoint: whole prompts, and what stands behind an answer."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from r3train.chat.base import Message
from r3train.chat.messages import plain, text_of
from r3train.config.data_settings import DataSection
from r3train.data.messages import FIELDS, left_out
from r3train.user_code import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Tools = Sequence[dict[str, Any]] | None
# words that no template has, and that nobody can know and write into a message
_STAND_IN = f"r3train-stands-in-for-an-answer-{secrets.token_hex(8)}"
_RESULT = f"r3train-stands-in-for-a-result-{secrets.token_hex(8)}"


class Behind(NamedTuple):
    """Tokens behind an answer, and whether the template writes the answer's last token too.

    Where it does, ``tokens`` follow that token.  Where it does not, they follow what the model said before
    it, or, if no stop token ended the answer, the answer.
    """

    tokens: list[int]
    keeps_last: bool


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat template of a tokenizer and what else is given to it."""

    tokenizer: Tokenizer
    data: DataSection
    tools: Sequence[dict[str, Any]] = ()  # of rows that have none of their own

    def text(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        asks: bool = True,
        where: str = "messages",
    ) -> str:
        """Messages as text, with ``tools`` or the template's own; raises ValueError where the template fails.

        asks: end with the words that ask for an answer; where: begins the error.
        """
        return self._rendered(where, messages, asks, tools or self.tools)

    def reply(self, messages: Sequence[dict[str, Any]], last: int) -> list[int]:
        """Tokens after an answer that ends with token ``last``: its end, messages, the next opening.

        The end is what the template writes after an answer; its first token is left out if it is
        ``last``.  So is the opening of the first message where the template writes no end: the model
        stops with it (GLM-4.5's ``<|user|>`` and ``<|observation|>``).  What comes before is never
        rendered anew: the messages follow a stand-in for the answer, and all after its words counts.
        Messages of role tool that a template writes after a call alone (gpt-oss) follow a stand-in with
        a call of their tool.  Raises ValueError where the template fails.
        """
        return self.behind(messages, last).tokens

    def behind(
        self,
        messages: Sequence[dict[str, Any]],
        last: int,
        calls: Sequence[dict[str, Any]] | None = None,
    ) -> Behind:
        """As ``reply``, and whether the answer's last token is the template's too.

        calls: of the answer, to be written before the messages; None: one of their tool, where they need it.
        """
        if calls:
            return self._behind_calls(messages, last, calls)
        closing, tokens = self._after(messages, strict=calls is not None)
        if tokens[:1] != [last]:
            return Behind(tokens, False)
        keeps = closing[:1] == [last] if closing else self._is_added(last)
        return Behind(tokens[1:] if keeps else tokens, keeps)

    def _behind_calls(
        self, messages: Sequence[dict[str, Any]], last: int, calls: Sequence[dict[str, Any]]
    ) -> Behind:
        """The token that ends a call or what follows ``last`` in the text of the calls, and the messages."""
        text, new = self._written_after_calls(messages, calls)
        end = self.encode(text.rpartition(_STAND_IN)[2])
        tokens = self.encode(new)
        if last in end:
            return Behind(end[len(end) - end[::-1].index(last) :] + tokens, True)
        return Behind(end[-1:] + tokens, False)

    def closing_token(self) -> int | None:
        """The token that ends an answer: of the template's own behind it, or else of the next opening.

        None where neither has one that no text gives, and for a template that fails.
        """
        try:
            texts = self._behind([], asks=False), self._behind([_ASKS], asks=True)
        except ValueError:
            return None
        return next(filter(self._is_added, self.encode(texts[0] or texts[1])), None)

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

    def text_behind(
        self, messages: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The text of messages after an answer with ``calls``; without, with what closes the answer."""
        if calls:
            return self._written_after_calls(messages, calls)[1]
        return self._behind(messages, asks=True)

    def _after(
        self, messages: Sequence[dict[str, Any]], *, strict: bool
    ) -> tuple[list[int], list[int]]:
        """The tokens that close an answer, and those with the messages and the next opening after them.

        strict: write no call before the messages.
        """
        call, text = (
            (None, self._behind(messages, asks=True)) if strict else self._written_after(messages)
        )
        if not strict and (lack := left_out(text, messages)):
            raise ValueError(f"a reply: {lack}")
        if call is None:
            return self.encode(self._behind([], asks=False)), self.encode(text)
        closing = self.encode(call)[-1:]  # the token that ends a call
        return closing, closing + self.encode(text)

    def _written_after(self, messages: Sequence[dict[str, Any]]) -> tuple[str | None, str]:
        """The text with a call that the messages need before them, if they do, and their own text."""
        try:
            return None, self._behind(messages, asks=True)
        except ValueError as error:
            if not self.tools or not messages or messages[0]["role"] != "tool":
                raise
            name = self._called(messages, error)
        # arguments and answer are stand-ins: what is behind the call does not depend on them
        call = {"type": "function", "function": {"name": name, "arguments": {}}}
        return self._written_after_calls(messages, [call])

    def _written_after_calls(
        self, messages: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]]
    ) -> tuple[str, str]:
        """The text of an answer with calls, and that of the messages after it."""
        answer = {"role": "assistant", "content": _STAND_IN, "tool_calls": list(calls)}
        before = [{"role": "user", "content": "."}, answer]
        text = self._rendered("a reply", before, False, self.tools)
        rendered = self._rendered("a reply", [*before, *messages], True, self.tools)
        if not rendered.startswith(text):
            raise ValueError(
                "a reply: the chat template changes a call when messages of role tool follow it"
            )
        return text, rendered[len(text) :]

    def _called(self, messages: Sequence[dict[str, Any]], error: ValueError) -> str:
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

    def _behind(self, messages: Sequence[dict[str, Any]], *, asks: bool) -> str:
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": _STAND_IN}]
        text = self._rendered("a reply", [*before, *messages], asks, self.tools)
        if text.count(_STAND_IN) != 1:
            raise ValueError(
                "a reply: the chat template does not write the content of the answer before it once"
            )
        return text.partition(_STAND_IN)[2]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that the tokenizer would add."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _rendered(
        self, where: str, messages: Sequence[dict[str, Any]], asks: bool, tools: Sequence[Any]
    ) -> str:
        arguments = dict(self.data.apply_chat_template_kwargs)
        if tools:
            arguments["tools"] = list(tools)
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=asks, tokenize=False, **arguments
            )
        except Exception as error:  # a template is a program: it may raise anything
            if "tokenizer.chat_template is not set" in str(error):
                error = ValueError(
                    "the checkpoint has none: take an Instruct checkpoint, or put a chat_template.jinja into its"
                    " directory"
                )
            raise ValueError(f"{where}: the chat template fails: {error}") from error


@dataclass(frozen=True, slots=True)
class RowTemplate:
    """The chat template as the rows of a file use it; ``arguments``: the form in which it takes those of calls."""

    chat: ChatTemplate
    arguments: Literal["text", "table"]
    special: re.Pattern[str]  # finds the tokenizer's special tokens

    @classmethod
    def of(cls, chat: ChatTemplate) -> RowTemplate:
        """Find the form of arguments by renderings of a call."""
        return cls(chat, _arguments_form(chat), _special_tokens(chat.tokenizer))

    def special_tokens_in(self, messages: Sequence[Message]) -> list[str]:
        """The special tokens in texts, of the assistant's only the token that ends them; sorted."""
        found = (
            (m["role"], token) for m in messages for token in self.special.findall(m["content"])
        )
        end = getattr(self.chat.tokenizer, "eos_token", None)
        return sorted({token for role, token in found if role != "assistant" or token == end})

    def reads(self, key: str) -> bool:
        """Tell whether the template reads a key of messages."""
        source = str(getattr(self.chat.tokenizer, "chat_template", None))  # of all that have names
        return re.search(rf"[.'\"]{re.escape(key)}\b", source) is not None

    def text(
        self, messages: Sequence[Message], tools: Tools, *, asks: bool = True, where: str = ""
    ) -> str:
        """Messages of ``read_messages`` as ``ChatTemplate.text`` writes them."""
        extras = ({key: m[key] for key in m.keys() - FIELDS} for m in messages)
        given = [plain(m, self.arguments) | extra for m, extra in zip(messages, extras)]
        return self.chat.text(given, tools, asks=asks, where=where)


def _special_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return what finds the tokenizer's special tokens in a text."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return re.compile(_one_of({token.content for token in added if token.special} - {""}) or "(?!)")


def _one_of(words: set[str]) -> str:
    """A pattern of words, each beginning of several once: a thousand alternatives take 0.1 s for 100,000 characters."""
    heads = sorted({word[0] for word in words if word})
    tails = [re.escape(h) + _one_of({w[1:] for w in words if w[:1] == h}) for h in heads]
    return f"(?:{'|'.join(tails)}){'?' * ('' in words)}" if tails else ""


def _arguments_form(chat: ChatTemplate) -> Literal["text", "table"]:
    """The form of arguments that a template wants: text where it fails with a table, or prints it as Python does."""
    for form in ("table", "text"):
        try:
            text = chat.text([_ASKS, plain(_CALLS, form)], [_TOOL], asks=False)
        except ValueError:
            continue
        if "{'at': 'r3train" not in text:
            return form
    return "table"


_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
_ASKS = {"role": "user", "content": "Look."}
_SAYS = {"role": "assistant", "content": "It is here."}
_CALLS = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "look", "arguments": '{"at": "r3train-stands-in"}'},
        }
    ],
}
_ANSWERS = {"role": "tool", "content": _RESULT, "tool_call_id": "call00001", "name": "look"}


_BEGINS = {"role": "system", "content": "Be brief."}
_SHAPES = (
    [_ASKS],
    [_BEGINS, _ASKS],
    [_ASKS, {**_SAYS, "reasoning_content": "Hm."}, _ASKS],
    [_ASKS, plain(_CALLS, "table"), _ANSWERS],
    [_ASKS, plain(_CALLS, "text"), _ANSWERS],
)


def check_variables(tokenizer: Tokenizer, data: DataSection) -> None:
    """Raise ValueError for --apply-chat-template-kwargs that write no conversation of any shape otherwise."""
    values = data.apply_chat_template_kwargs
    whole = _shapes(tokenizer, data) if values else []
    for name, value in values.items():
        less = {"apply_chat_template_kwargs": {k: v for k, v in values.items() if k != name}}
        if _shapes(tokenizer, data.model_copy(update=less)) == whole:
            raise ValueError(
                f"--apply-chat-template-kwargs: {name} = {value!r} has no effect on this template, which"
                " writes the same without: leave it out, or give the name and the type that it tests"
            )


def _shapes(tokenizer: Tokenizer, data: DataSection) -> list[str | None]:
    """Renderings of conversations of several shapes, None where the template fails."""
    chat, texts = ChatTemplate(tokenizer, data), []
    for messages, tools, asks in product(_SHAPES, ([], [_TOOL]), (True, False)):
        try:
            texts.append(chat.text(messages, tools, asks=asks))
        except ValueError:
            texts.append(None)
    return texts


@dataclass(frozen=True, slots=True)
class SessionTemplate:
    """The chat template as the sessions of agents use it: tools and messages come with each request.

    arguments: the form in which the template takes those of calls.  with_calls: the answers of tools are
    written after the calls only.  no_tools: why requests with tools are refused; None where they are not.  special:
    finds the tokenizer's special tokens.
    """

    chat: ChatTemplate
    arguments: Literal["text", "table"] = "table"
    with_calls: bool = False
    no_tools: str | None = None
    special: re.Pattern[str] = re.compile("(?!)")

    @classmethod
    def of(cls, chat: ChatTemplate) -> SessionTemplate:
        """Find how a template is used, by renderings of a conversation; raises ValueError where no way is right.

        A way is right if what it writes behind an answer ends the rendering of the whole conversation.
        """
        if getattr(chat.tokenizer, "chat_template", None) is None:
            raise ValueError("the checkpoint's tokenizer has no chat template for messages")
        plain_way = cls(chat, special=_special_tokens(chat.tokenizer))
        if problem := plain_way._problem(_SAYS, [_ASKS], ()):
            raise ValueError(f"no turn can follow an answer: {problem}")
        form = _arguments_form(chat)
        ways = [
            replace(plain_way, arguments=form, with_calls=with_calls)
            for with_calls in (False, True)
        ]
        problems = [way._problem(_CALLS, [_ANSWERS], [_TOOL]) for way in ways]
        for way, problem in zip(ways, problems):
            if problem is None:
                if way.whole_text([_ASKS], [_TOOL]) != way.whole_text([_ASKS], []):
                    return way
                return replace(way, no_tools="the chat template does not show the tools")
        return replace(
            plain_way, no_tools=f"no answer of a tool can follow its call: {problems[0]}"
        )

    def whole_text(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> str:
        """A request as text, with the words that ask for an answer; raises ValueError where the template fails."""
        self._check(messages, tools)
        return self.chat.text([plain(m, self.arguments) for m in messages], tools)

    def whole(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """The tokens of a whole request; raises ValueError where the template fails."""
        return self.chat.encode(self.whole_text(messages, tools))

    def special_in(self, messages: Sequence[Message]) -> int:
        """Count the special tokens in the texts of users and tools: the model reads them as its template's own."""
        texts = (text_of(m.get("content")) for m in messages if m["role"] in ("user", "tool"))
        return sum(len(self.special.findall(text)) for text in texts)

    def check_values(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        values: Mapping[str, Any],
    ) -> None:
        """Raise ValueError for variables of the template with which it writes a request otherwise than the run does."""
        chat = self.chat
        asked = {"apply_chat_template_kwargs": chat.data.apply_chat_template_kwargs | values}
        other = replace(self, chat=replace(chat, data=chat.data.model_copy(update=asked)))
        if other.whole_text(messages, tools) != self.whole_text(messages, tools):
            raise ValueError(
                f"chat_template_kwargs {quoted(values)}: the chat template writes the request otherwise with it;"
                " --apply-chat-template-kwargs sets it for the whole run"
            )

    def behind(
        self,
        answer: dict[str, Any],
        new: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        last: int,
    ) -> Behind:
        """Tokens behind an answer that ends with token ``last``: its end, the new messages, the opening.

        Nothing of the answer is rendered, apart from its calls where the template needs them.  Raises
        ValueError where the template fails.
        """
        self._check(new, tools)
        messages, calls = self._plain(answer, new)
        return replace(self.chat, tools=tools).behind(messages, last, calls)

    def _plain(
        self, answer: dict[str, Any], new: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]]]:
        """New messages, and the answer's calls if they are to be written before these."""
        messages = [plain(message, self.arguments) for message in new]
        if self.with_calls and new[0]["role"] == "tool":
            return messages, plain(answer, self.arguments).get("tool_calls", ())
        return messages, ()

    def _check(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> None:
        if self.no_tools and (tools or any(message["role"] == "tool" for message in messages)):
            raise ValueError(self.no_tools)

    def _problem(
        self, answer: dict[str, Any], new: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> str | None:
        """Tell why this way is wrong for an answer and the messages after it; None where it is right."""
        try:
            rendered = self.whole_text([_ASKS, _SAYS, _ASKS, answer, *new], tools)
            if any(message["content"] not in rendered for message in new):
                return "the chat template does not write messages of role tool"
            written = replace(self.chat, tools=tools).text_behind(*self._plain(answer, new))
        except ValueError as error:
            return str(error)
        if not rendered.endswith(written):
            return "the chat template writes messages after an answer otherwise than after a stand-in for it"
        return None
