"""A model that may search the documents of its row before it answers; --rm-type scores the answer.

    PYTHONPATH=examples/tools r3train train ... \
        --environment search_tool:SearchTool --apply-chat-template --rm-type boxed_f1

The reward reads the box alone: the text of an episode holds the calls and the documents too.  laptop.toml does this
on a CPU, with the rows of questions.jsonl.

A row holds its documents, as questions over several documents do:

    {"input": "Who ...?", "label": "...", "metadata": {"documents": ["Ada Lovelace was ...", "..."]}}
"""

from __future__ import annotations

import math
import re
from collections import Counter

from r3train.environments import StepResult, Turn
from r3train.environments.tool_calls import ToolCall, tool_calls
from r3train.types import Prompt

MOST_FOUND = 2
MOST_CHARACTERS = 1000


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


class SearchTool:
    """Answers each search of a turn; a turn without a call is the answer."""

    tools = [
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Find the documents that share the most, and rarest, words.",
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string", "description": "Words to find."}},
                    "required": ["query"],
                },
            },
        }
    ]

    def __init__(self, prompt: Prompt) -> None:
        documents = prompt.metadata.get("documents")
        if not isinstance(documents, list) or not all(isinstance(d, str) for d in documents):
            raise ValueError(f"prompt {prompt.prompt_id}: expected texts in metadata.documents")
        self.documents = [(words(document), document) for document in documents]
        self.counts = Counter(word for found, _ in self.documents for word in found)

    async def step(self, turn: Turn) -> StepResult:
        calls = tool_calls(turn.text)
        results = [{"role": "tool", "content": self._result(call)} for call in calls]
        return StepResult(results, done=not calls)

    def _result(self, call: ToolCall) -> str:
        query = call.arguments.get("query")
        if call.error or call.name != "search" or not isinstance(query, str):
            return call.error or "there is one tool, search, and its argument is query, a text"
        scored = [(self._score(words(query) & found), text) for found, text in self.documents]
        best = sorted((s for s in scored if s[0] > 0), key=lambda s: -s[0])[:MOST_FOUND]
        return "\n\n".join(text[:MOST_CHARACTERS] for _, text in best) or "nothing was found"

    def _score(self, shared: set[str]) -> float:
        return sum(math.log(1 + len(self.documents) / self.counts[word]) for word in shared)
