"""A harness as a command: two turns by the unmodified openai client; it fails at some prompts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from openai import OpenAI

FAILS = "tools"  # a word of the prompts at which it fails


def reward_of(task: dict, client: OpenAI) -> float:
    assert "label" not in task, "a harness must not see the answer"
    assert "R3TRAIN_ENGINE_API_KEY" not in os.environ, "nor the servers' key"
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        answer = client.chat.completions.create(model="r3", messages=messages, max_tokens=6)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "please name some"})
    said = (messages[1]["content"] or "").split()
    return len(set(said)) / 6


def work() -> None:
    """Take tasks from stdin, as a worker."""
    for line in sys.stdin:
        task = json.loads(line)
        answer = {"id": task["id"]}
        if FAILS in task["prompt"]:
            answer["error"] = "no tools"
        else:
            with OpenAI(base_url=task["base_url"], api_key=task["key"], max_retries=0) as client:
                answer["reward"] = reward_of(task, client)
        print(json.dumps(answer), flush=True)


def main() -> None:
    if sys.argv[1:] == ["worker"]:
        return work()
    task = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())
    if FAILS in task["prompt"]:
        sys.exit(3)
    reward = reward_of(task, OpenAI(max_retries=0))
    Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(json.dumps(reward))


if __name__ == "__main__":
    main()
