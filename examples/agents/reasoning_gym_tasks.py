"""Tasks and scores of reasoning-gym: answers in one turn, so no harness is needed.

    python reasoning_gym_tasks.py chain_sum --size 1000 --seed 1 > prompts.jsonl
    PYTHONPATH=examples/agents r3train train --prompt-data prompts.jsonl --custom-rm-path reasoning_gym_tasks:score ...

reasoning-gym is installed next to r3train: it is pure Python.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer, SYSTEM_PROMPTS


def row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """A line of data: the question, and the whole entry, of which the score needs more than the answer."""
    asked = [
        {"role": "system", "content": SYSTEM_PROMPTS["DeepSeekZero"]},
        {"role": "user", "content": entry["question"]},
    ]
    return {
        "prompt": asked,
        "label": entry["answer"],
        "metadata": {"gym": name, "entry": json.dumps(entry)},
    }


def score(prompt: Any, response_text: str, response_ids: list[int]) -> float:
    """The task's own score of the text in <answer>, 0 to 1; 0 without one."""
    answer = extract_answer(response_text)
    scorer = reasoning_gym.get_score_answer_fn(prompt.metadata["gym"])
    return float(scorer(answer, json.loads(prompt.metadata["entry"])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", help="of a data set, such as chain_sum")
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked_for = parser.parse_args()
    tasks = reasoning_gym.create_dataset(asked_for.name, size=asked_for.size, seed=asked_for.seed)
    for task in tasks:
        print(json.dumps(row(asked_for.name, task), default=str))
