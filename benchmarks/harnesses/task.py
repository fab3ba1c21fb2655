"""The task of all programs here: one sum by a tool, and its reward."""

import json
import os
from pathlib import Path

base_url, key, model = (os.environ[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
prompt = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())["prompt"]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: the other number
    """
    return a + b


def judge(answer: object) -> None:
    """Write the reward: 1 for an answer with the sum."""
    print(answer)
    Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(str(int("3" in str(answer))))
