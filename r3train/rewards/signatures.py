"""The arguments of a user's reward function, from the names of its parameters.

r3train calls (prompt, response_text, response_ids), (sample), or with --group-rm (samples).  Functions that
were written for verl and TRL are called as these call them; those of slime are refused with the line to write.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r3train.config.data_settings import DataSection
from r3train.types import RolloutSample
from r3train.user_code import require_function

_OURS = ("prompt", "response_text", "response_ids")
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
    if "completions" in names:
        return Signature(lambda samples: _named(parameters, _trl(samples, data)), not group)
    if "solution_str" in names and not group:
        return Signature(lambda samples: _named(parameters, _verl(samples[0])))
    if names[:1] == ("args",) and names[1:2] in (("sample",), ("samples",)):
        write = "(samples)" if group else "(sample)"
        raise ValueError(
            f"{flag} {name}: looks like slime's reward: write a function {write}, with sample.text for"
            " sample.response and sample.prompt.label for sample.label"
        )
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


def _verl(sample: RolloutSample) -> dict[str, Any]:
    """data_source is the metadata's, or the file's name; extra_info is the metadata."""
    prompt = sample.prompt
    file = prompt.prompt_id.rpartition(":")[0]
    return {
        "data_source": prompt.metadata.get("data_source", file),
        "solution_str": sample.text,
        "ground_truth": prompt.label,
        "extra_info": prompt.metadata,
    }


def _trl(samples: Sequence[RolloutSample], data: DataSection) -> dict[str, list[Any]]:
    """Lists over samples: columns of the data (metadata, and the label by its key), prompts, completions.

    A completion is text, or with --apply-chat-template a list of one message.
    """
    keys = samples[0].prompt.metadata
    texts: list[Any] = [sample.text for sample in samples]
    if data.apply_chat_template:
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    return {
        **{key: [sample.prompt.metadata[key] for sample in samples] for key in keys},
        data.label_key.rpartition(".")[2]: [sample.prompt.label for sample in samples],
        "prompts": [sample.prompt.text for sample in samples],
        "completions": texts,
        "completion_ids": [_ids(sample) for sample in samples],
    }


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
