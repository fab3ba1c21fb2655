"""mini-swe-agent as a harness: the model's tool is a shell, and it submits what the shell writes.

Run by ``r3train train`` as --agent-command; base_url and key are in OpenAI's variables.  The shell is the
machine's own here: run a model that knows a shell in a container (docs/run/security.md).
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ |= {
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": tempfile.mkdtemp(dir="."),
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched
}

from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402

task = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())
agent = DefaultAgent(
    LitellmModel(
        model_name="openai/r3train",
        observation_template="the {{ output.output }}",
        format_error_template="please",
        model_kwargs={"max_tokens": 4},
    ),
    LocalEnvironment(),
    system_template="please",
    instance_template="{{ task }}",
    step_limit=3,
)
submitted = agent.run(task["prompt"]).get("submission", "").strip()
good = submitted in task["metadata"]["accepted"]
Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(json.dumps(float(good)))
