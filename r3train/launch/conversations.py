"""Episodes with an environment, built from a checked job."""

from __future__ import annotations

from collections.abc import Callable

from r3train.environments.registry import get_environment
from r3train.launch.job import Job
from r3train.generation.conversation import Conversation
from r3train.types import Prompt


def conversations(job: Job) -> Callable[[Prompt], Conversation] | None:
    """A maker of each rollout's episode; None without --environment."""
    rollout = job.config.rollout
    if rollout.environment is None:
        return None
    environment = get_environment(rollout.environment)
    return lambda prompt: Conversation(
        environment(prompt),
        rollout,
        encode=lambda text: job.tokenizer.encode(text, add_special_tokens=False),
        decode=lambda ids: job.tokenizer.decode(ids, skip_special_tokens=True),
    )
