"""The arguments of a user's reward function, from the names of its parameters.

r3train calls (prompt, response_text, response_ids), (sample), or with --group-rm (samples).  Functions that
were written for verl, TRL, verifiers and AReaL are called as these call them; others, which say by their names that
they take a label, are refused with the line to write, as slime's and OpenRLHF's are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r3train.config.data_settings import DataSection
from r3train.rewards.answers import written
from r3train.types import Prompt, RolloutSample
from r3train.user_code import require_function

_OURS = ("prompt", "response_text", "response_ids")
# in the name of a third parameter that is no token ids
_NOT_IDS = re.compile(
    r"label|answer|truth|target|solution|gold|gt\b|reference|expected|prompt|response|completion|output"
)
Arguments = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Signature:
    """A way to call a reward function.

    arguments: of some samples (one, unless the function scores a group), by position or by name.
    takes_list: the function scores lists: it is called with a list of one sample.
    """

    arguments: Callable[[Sequence[RolloutSample]], Arguments]
    takes_list: bool = False


def signature_of(
    flag: str, name: str, function: Any, data: DataSection, *, group: bool
) -> Signature:
    """Return the way to call a function; raises ValueError, with the flag, for one that takes something else.

    group: it scores all samples of a prompt in one call.
    """
    parameters = _parameters(function)
    names = tuple(parameters)
    if "completions" in names and ("prompt_ids" not in names or group):
        return Signature(lambda samples: _named(parameters, _trl(samples, data)), not group)
    for sign, arguments in (
        ("prompt_ids", _areal),
        ("completion", _verifiers),
        ("solution_str", _verl),
    ):
        if sign in names and not group:
            return Signature(lambda samples: _named(parameters, arguments(samples[0], data)))
    write, problem = "(samples)" if group else "(prompt, response_text, response_ids)", ""
    if inspect.isclass(function):
        problem = "is a class: make an object of it in its module and name that"
    elif names[:1] == ("args",) and names[1:2] in (("sample",), ("samples",)):
        problem = f"looks like slime's reward: write a function {write if group else '(sample)'}, with sample.text"
        problem += " for sample.response and sample.prompt.label for sample.label"
    elif _NOT_IDS.search("".join(names[2:3])) and not re.search("id|token", names[2]):
        problem = f"its parameters {', '.join(names)} are those of another trainer: write a function {write}, with"
        problem += " prompt.text and prompt.label"
    if problem:
        raise ValueError(f"{flag} {name}: {problem}")
    if group:
        require_function(flag, name, function, "samples", may_be_async=True)
        return Signature(lambda samples: (list(samples),))
    if not _takes(function, 3) and _takes(function, 1):
        return Signature(lambda samples: (samples[0],))
    require_function(flag, name, function, *_OURS, may_be_async=True)
    return Signature(lambda samples: (samples[0].prompt, samples[0].text, _ids(samples[0])))


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or one written in C
        return {}


def _named(parameters: Mapping[str, inspect.Parameter], columns: dict[str, Any]) -> dict[str, Any]:
    """Those of the columns that a function takes."""
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return columns
    return {key: value for key, value in columns.items() if key in parameters}


def _verl(sample: RolloutSample, data: DataSection) -> dict[str, Any]:
    """data_source is the row's column, or the metadata's, or the file's name; extra_info is the metadata."""
    prompt = sample.prompt
    source = {"data_source": prompt.prompt_id.rpartition(":")[0]}
    return {
        "data_source": (source | prompt.metadata | (prompt.columns or {}))["data_source"],
        "solution_str": sample.text,
        "ground_truth": prompt.label,
        "extra_info": prompt.metadata,
    }


def _trl(samples: Sequence[RolloutSample], data: DataSection) -> dict[str, list[Any]]:
    """Lists over samples: columns of the data and of its metadata, the label by its key, prompts, completions.

    Prompts and completions are texts, or with --apply-chat-template messages.
    """
    rows = [_columns(sample.prompt, data) for sample in samples]
    return {
        **{key: [row[key] for row in rows] for key in rows[0]},
        "prompts": [_as_messages(sample.prompt, data) for sample in samples],
        "completions": [_completion(sample, data) for sample in samples],
        "completion_ids": [_ids(sample) for sample in samples],
    }


def _verifiers(sample: RolloutSample, data: DataSection) -> dict[str, Any]:
    """Prompt and completion as for TRL; answer is the label, info the metadata."""
    prompt = sample.prompt
    return _columns(prompt, data) | {
        "prompt": _as_messages(prompt, data),
        "completion": _completion(sample, data),
        "answer": written(prompt.label) or prompt.label,  # text, as there
        "info": prompt.metadata,
    }


def _areal(sample: RolloutSample, data: DataSection) -> dict[str, Any]:
    """Texts and tokens of prompt and completion, and the row's columns; answer is the label."""
    return _columns(sample.prompt, data) | {
        "prompt": sample.prompt.text,
        "completions": sample.text,
        "prompt_ids": sample.token_ids[: sample.prompt_len].tolist(),
        "completion_ids": _ids(sample),
        "answer": sample.prompt.label,
    }


def _columns(prompt: Prompt, data: DataSection) -> dict[str, Any]:
    """The row's columns, those of its metadata, and the label by its key."""
    label = {data.label_key.rpartition(".")[2]: prompt.label}
    return (prompt.columns or {}) | prompt.metadata | label


def _as_messages(prompt: Prompt, data: DataSection) -> Any:
    """The prompt as its trainer has it: text, or with --apply-chat-template messages."""
    if not data.apply_chat_template:
        return prompt.text
    is_text = isinstance(prompt.content, str)
    return [{"role": "user", "content": prompt.content}] if is_text else prompt.content


def _completion(sample: RolloutSample, data: DataSection) -> Any:
    """The response as its trainer has it: text, or with --apply-chat-template a list of one message."""
    message = {"role": "assistant", "content": sample.text}
    return [message] if data.apply_chat_template else sample.text


def _ids(sample: RolloutSample) -> list[int]:
    return sample.token_ids[sample.prompt_len :].tolist()


def _takes(function: Any, count: int) -> bool:
    """True if a function can be called with so many arguments, or does not say."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some functions written in C
        return count == 3
    return True
