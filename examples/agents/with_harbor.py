"""terminus-2 of Harbor as a harness: the task's shell is a tmux session of this machine.

Run by ``r3train train`` as --agent-command; base_url and key are in OpenAI's variables.  A row's metadata has ``check``: a
command of the shell that is to succeed in the end.  The shell is the machine's own here: Harbor's environments (Docker,
Modal, E2B and others) hold a model that knows a shell, and its verifier judges from outside.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched

from harbor.agents.terminus_2 import Terminus2  # noqa: E402
from harbor.environments.base import ExecResult  # noqa: E402
from harbor.models.agent.context import AgentContext  # noqa: E402
from harbor.models.trial.paths import EnvironmentPaths  # noqa: E402

task = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())
logs = Path("logs").absolute()
logs.mkdir()
os.environ["TMUX_TMPDIR"] = str(logs)  # a server of tmux for this session alone
EnvironmentPaths.agent_dir = PurePosixPath(logs)


class LocalEnvironment:
    """The part of Harbor's environments that terminus-2 uses, in the session's directory."""

    default_user = None
    session_id = "local"

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: Any = None,
        timeout_sec: Any = None,
        **_: Any,
    ) -> ExecResult:
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            shell=True,
            cwd=cwd,
            env=os.environ | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout_sec,
            check=False,
        )
        return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)


async def main() -> None:
    """Let terminus-2 work on the task, and write the reward."""
    agent = Terminus2(
        logs_dir=logs,
        model_name="openai/r3train",
        api_base=os.environ["OPENAI_BASE_URL"],
        record_terminal_session=False,
    )
    environment = LocalEnvironment()
    try:
        await agent.setup(environment)
        await agent.run(task["prompt"], environment, AgentContext())
    finally:
        await environment.exec("tmux kill-server")
    checked = await environment.exec(task["metadata"]["check"])
    reward = float(checked.return_code == 0)
    Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(json.dumps(reward))


asyncio.run(main())
