"""Environments of verifiers 0.4 (v1) as a harness: its tasks, its own harnesses and tools, its rewards.

    python with_verifiers.py rows TASKSET > prompts.jsonl     a line of data for each task
    r3train train --prompt-data prompts.jsonl --agent-command "/PATH/python /PATH/with_verifiers.py play"

TASKSET is a package that verifiers finds, one of the hub or your own.  base_url and key are in OpenAI's variables.  Its
judges have other models' names, so they need --agent-other-base-url.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf

HARNESS = {"id": "null"}  # calls the model with the taskset's tools; "bash" gives it a shell
AGENT = {"harness": HARNESS, "runtime": {"type": "subprocess"}}


def environment(taskset: str) -> vf.Env:
    """The environment of a taskset, with one agent."""
    config = vf.resolve_env_config({"taskset": {"id": taskset}, "agent": AGENT})
    return vf.load_environment(config)


def rows(taskset: str) -> None:
    """Print the tasks as lines of data; a task is found again by its place."""
    for task in environment(taskset).taskset:
        metadata = {"taskset": taskset, "idx": task.data.idx}
        print(json.dumps({"prompt": str(task.data.prompt), "metadata": metadata}))


async def play() -> None:
    """Play the task of R3TRAIN_TASK_FILE, and write its reward."""
    metadata = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())["metadata"]
    env = environment(metadata["taskset"])
    [task] = env.taskset.include(idx=[metadata["idx"]])
    url = os.environ["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    async with env.serving():
        [slot] = env.slots(task)
        episode = await env.run_slot(slot, vf.ModelContext("r3train", client))
    if not episode.ok:
        sys.exit(f"the episode failed: {[trace.errors for trace in episode.traces]}")
    [trace] = episode.traces
    Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(json.dumps(trace.reward))


if sys.argv[1] == "rows":
    rows(sys.argv[2])
else:
    asyncio.run(play())
