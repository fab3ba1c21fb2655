"""Environments of verifiers 0.1 as a harness: its data set, its tools, its rubric.

    python with_verifiers_0_1.py rows ENVIRONMENT > prompts.jsonl     a line of data for each row
    r3train train --prompt-data prompts.jsonl --agent-command "/PATH/python /PATH/with_verifiers_0_1.py play"

ENVIRONMENT is one that vf-install has installed, or any module with ``load_environment``.  base_url and key are in OpenAI's
variables.  A JudgeRubric's judge has another model's name, so it needs --agent-other-base-url.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers as vf


def rows(environment: str) -> None:
    """Print the data set as lines of data; answers stay in the environment, where no tool of the model reaches."""
    for index, row in enumerate(vf.load_environment(environment).get_dataset()):
        metadata = {"environment": environment, "index": index}
        print(json.dumps({"prompt": row["prompt"], "metadata": metadata}))


async def play() -> None:
    """Play the row of R3TRAIN_TASK_FILE, and write the rubric's reward."""
    metadata = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())["metadata"]
    env = vf.load_environment(metadata["environment"])
    url = os.environ["OPENAI_BASE_URL"]
    client = vf.ClientConfig(api_base_url=url, api_key_var="OPENAI_API_KEY")
    row = env.get_dataset()[metadata["index"]]
    state = await env.run_rollout(row, client, "r3train", {})
    if state.get("error"):  # it scores what was refused or failed with 0
        sys.exit(f"the rollout failed: {state['error']}")
    Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(json.dumps(state["reward"]))


if sys.argv[1] == "rows":
    rows(sys.argv[2])
else:
    asyncio.run(play())
