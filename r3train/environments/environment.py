"""The interface of an environment, which answers each turn of a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from r3train.types import Prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model.

    ``token_ids`` are the generated tokens, and the conversation continues from them.  ``text`` is
    for reading only.
    """

    index: int  # 0-based
    token_ids: list[int]
    text: str
    is_last: bool  # no further turn fits: the observation would not be seen


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer.

    An observation of text is tokenised by itself and appended; one of token ids is appended as it
    is.  One of messages (tables with role and content) is written by the tokenizer's chat template,
    with the end of the model's message before it and the opening of the next one after it.  A message of
    role tool may have the tool's ``name``, which some templates need where there are several.  The
    rewards of all turns add up to the episode's; if no turn gives one, --rm-type scores the text.
    """

    observation: str | list[int] | list[dict[str, Any]] = ""
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """One episode: created with its prompt; ``step`` gets every turn in order.

    tools: schemas of functions that the model may call; the chat template shows them in every prompt.
    They may be left out.
    """

    tools: ClassVar[list[dict[str, Any]]]

    def __init__(self, prompt: Prompt) -> None: ...

    async def step(self, turn: Turn) -> StepResult:
        """Answer one turn; may await (a tool, a service).  An exception ends the run."""
        ...
