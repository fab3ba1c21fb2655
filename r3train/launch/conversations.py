"""Episodes with an environment, built from a checked job."""

from __future__ import annotations

from collections.abc import Callable

from r3train.config.rollout import RolloutSection
from r3train.environments.registry import get_environment
from r3train.launch.job import Job
from r3train.generation.conversation import Conversation, ConversationRules
from r3train.types import Prompt


def conversations(job: Job) -> Callable[[Prompt], Conversation] | None:
    """What makes each rollout's episode; None without --environment."""
    rollout = job.config.rollout
    if rollout.environment is None:
        return None
    environment = get_environment(rollout.environment)
    rules = ConversationRules(
        max_turns=rollout.environment_max_turns,
        max_turn_len=rollout.environment_max_turn_len,
        sample_a_turn=rollout.environment_samples == "turn",
        encode=lambda text: job.tokenizer.encode(text, add_special_tokens=False),
        decode=lambda ids: job.tokenizer.decode(ids, skip_special_tokens=True),
    )
    return lambda prompt: Conversation(environment(prompt), rules)


def samples_per_episode(rollout: RolloutSection) -> int:
    """How many sample ids an episode may need."""
    return rollout.environment_max_turns if rollout.environment_samples == "turn" else 1
