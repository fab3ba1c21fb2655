"""SGLang's parsers of reasoning and of calls of tools, used as a library on a whole answer's text.

Importing them takes seconds and 0.2 GB: nothing here does before a parser is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from r3train.chat.base import Parse, Parsed
from r3train.user_code import find_user_code, quoted, running_user_code

_CALLS_FLAG = "--agent-tool-call-parser"
_REASONING_FLAG = "--agent-reasoning-parser"
# ids that are no random ones: SGLang's serving_chat.py, _process_tool_call_id
_IDS = {"kimi_k2": "functions.{name}:{index}", "kimi_k3": "{name}:{index}"}


def make_parse(
    calls: str, reasoning: str, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> Parse:
    """Return what reads an answer's text: its reasoning first, then the calls in the rest.

    calls, reasoning: none; auto, which judges by the chat template; a name of SGLang's; calls may be
    module:function too, a ``Parse`` of the user.  Raises ValueError for an unknown name, with the known
    ones, and where auto finds no parser of calls.  SGLang's never raise for a text: what they cannot
    read is content.
    """
    detected = _detected(tokenizer) if "auto" in (calls, reasoning) else (None, None)
    if calls == "auto":
        if detected[0] is None:
            raise ValueError(
                f"{_CALLS_FLAG} auto: the chat template shows no form of calls that SGLang has a parser for;"
                f" expected none, module:function or one of {', '.join(known_calls())}; hermes reads"
                ' <tool_call>{"name": ..., "arguments": ...}</tool_call>'
            )
        calls = detected[0]
    if reasoning == "auto":
        reasoning = detected[1] or "none"
    split = partial(_split, _reasoning(reasoning, tokenizer, template_kwargs))
    read = _calls(calls, tokenizer)

    def parse(text: str, tools: Sequence[dict[str, Any]]) -> Parsed:
        thought, rest = split(text)
        parsed = read(rest, tools)
        return parsed if thought is None else replace(parsed, reasoning=thought)

    return parse


def _detected(tokenizer: Any) -> tuple[str | None, str | None]:
    """The parsers of calls and of reasoning that SGLang's rules find for a chat template."""
    from sglang.srt.parser import template_detection as rules

    template = getattr(tokenizer, "chat_template", None)
    always, toggle = rules.detect_reasoning_pattern(template)
    given = (template, tokenizer, toggle, always)
    return rules.detect_tool_call_parser(*given), rules.detect_reasoning_parser(*given)


def known_calls() -> list[str]:
    """SGLang's parsers of calls by name."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return sorted(FunctionCallParser.ToolCallParserEnum)


def _reasoning(name: str, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Any:
    """Make SGLang's parser of reasoning for one text, again and again; None for none."""
    if name == "none":
        return None
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    known = sorted(ReasoningParser.DetectorMap)
    find_user_code(_REASONING_FLAG, name, {"none": None, "auto": None} | dict.fromkeys(known, name))
    if ":" in name:
        raise ValueError(
            f"{_REASONING_FLAG} {name}: expected none, auto or one of {', '.join(known)}"
        )
    make = partial(ReasoningParser, name, stream_reasoning=False, tokenizer=tokenizer)
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": "."}],
        add_generation_prompt=True,
        tokenize=False,
        **template_kwargs,
    )
    begins, ends = make().detector.think_start_token, make().detector.think_end_token
    # where the prompt's end opens a thought, the answer begins within it
    is_open = opening.rfind(begins) > opening.rfind(ends)
    return partial(make, force_reasoning=True) if is_open else make


def _split(make: Any, text: str) -> tuple[str | None, str]:
    """The reasoning in a text, None without, and the rest."""
    if make is None:
        return None, text
    try:
        thought, rest = make().parse_non_stream(text)
    except Exception:  # noqa: BLE001 - whatever the model wrote is an answer
        return None, text
    return thought or None, rest or ""


def _calls(name: str, tokenizer: Any) -> Parse:
    if name == "none":
        return lambda text, tools: Parsed(text)
    if ":" in name:
        return users_parse(name)
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    find_user_code(_CALLS_FLAG, name, dict.fromkeys(["none", "auto", *known_calls()], name))
    # a model that learns writes calls that are none at every step
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)

    def read(text: str, tools: Sequence[dict[str, Any]]) -> Parsed:
        try:
            schemas = [Tool.model_validate(tool) for tool in tools]
            rest, found = FunctionCallParser(schemas, name, tokenizer=tokenizer).parse_non_stream(
                text
            )
            calls = tuple({"name": call.name, "arguments": call.parameters} for call in found)
            is_whole = bool(calls) and all(map(_is_call, calls))
        except Exception:  # noqa: BLE001 - whatever the model wrote is an answer
            return Parsed(text)
        if not found:  # a call that was cut is left out, as SGLang's endpoint does
            return Parsed(rest or "")
        return Parsed(rest or "", None, calls, _IDS.get(name)) if is_whole else Parsed(text)

    return read


def _is_call(call: dict[str, Any]) -> bool:
    """True for a name with a JSON object of arguments, as every client reads it: no NaN, no half of a pair."""
    call["name"].encode()
    return bool(call["name"]) and isinstance(orjson.loads(call["arguments"]), dict)


def users_parse(name: str) -> Parse:
    """Return the user's parser of calls, a module:function; raises ValueError where there is none."""
    return partial(_users, name, find_user_code(_CALLS_FLAG, name, {}))


def _users(name: str, function: Any, text: str, tools: Sequence[dict[str, Any]]) -> Parsed:
    with running_user_code(f"{_CALLS_FLAG} {name}, reading {quoted(text)}"):
        parsed = function(text, tools)
        if not isinstance(parsed, Parsed):
            raise ValueError(f"returned {quoted(parsed)}, expected a Parsed")
        (parsed.ids or "").format(name="", index=0)  # it raises what is wrong with the form
        for call in parsed.calls:
            if not _is_call(call):
                raise ValueError(
                    f"returned the call {quoted(call)}, expected a name with arguments as a JSON object's text"
                )
    return parsed
