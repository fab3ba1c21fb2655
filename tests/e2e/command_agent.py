"""A harness as a command: two turns by the unmodified openai client; it ends with exit code 3 at some prompts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from openai import OpenAI

FAILS = "tools"  # a word of the prompts at which it fails


def main() -> None:
    task = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())
    assert "label" not in task, "a harness must not see the answer"
    assert "R3TRAIN_ENGINE_API_KEY" not in os.environ, "nor the servers' key"
    if FAILS in task["prompt"]:
        sys.exit(3)
    client = OpenAI(max_retries=0)
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        answer = client.chat.completions.create(model="r3", messages=messages, max_tokens=6)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "please name some"})
    said = (messages[1]["content"] or "").split()
    reward = len(set(said)) / 6
    Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(json.dumps(reward))


if __name__ == "__main__":
    main()
