"""Generation: how much, how, and on which servers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from r3train.config.section import Section

ServerScalar = bool | int | float | str


class RolloutSection(Section):
    """How much is generated, how, and on which servers."""

    title: ClassVar[str] = "Rollout"

    num_rollout: int = Field(ge=1)
    """Rollouts of the whole run."""
    rollout_batch_size: int = Field(ge=1)
    """Prompts a rollout."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Samples a prompt: the group that an advantage is computed in."""
    rollout_max_prompt_len: int | None = Field(default=None, ge=1)
    """Longest prompt in tokens; a longer one is an error at start-up."""
    rollout_max_response_len: int = Field(ge=1)
    """Longest response in tokens."""
    rollout_max_context_len: int | None = Field(default=None, ge=2)
    """Longest prompt and response together; unset means the model's own limit."""
    rollout_temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probs of the actor are taken at the same one."""
    rollout_top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    rollout_top_k: int = Field(default=-1, ge=-1)
    """Sample among the k likeliest tokens; -1 is off."""
    rollout_stop_token_ids: list[int] = []
    """Further tokens that end a response."""
    rollout_ignore_eos: bool = False
    """Generate to the longest response, past the end token (and past the stop tokens)."""
    rollout_seed: int = Field(default=42, ge=0)
    """Seed of the prompt order and of sampling."""
    max_weight_staleness: int = Field(default=1, ge=0)
    """Optimizer steps the generating weights may be behind; 0 is synchronous."""
    rollout_segment_len: int | None = Field(default=None, ge=1)
    """Tokens of one request: a longer answer is asked for in segments, and those that came outlive a
    lost server.  Unset: 256 with --max-engine-restarts, else all at once."""
    rollout_max_concurrency: int = Field(default=64, ge=1)
    """Requests in flight at once."""
    rollout_buffer_size: int | None = Field(default=None, ge=1)
    """Groups in flight and waiting for training, at most; unset means what the staleness allows."""
    over_sampling_batch_size: int | None = Field(default=None, ge=1)
    """Groups submitted for a rollout: the first complete ones are trained, the others wait for the
    next if they are fresh enough.  Unset: rollout_batch_size, trained in the order of the prompts."""
    stale_policy: Literal["drop", "regenerate"] = "drop"
    """What happens to a group that would be too stale when trained."""
    rollout_filter: list[Literal["zero_variance", "aborted"]] = []
    """Complete groups to replace by another prompt's: all rewards equal, or a sample aborted."""
    pause_generation_mode: Literal["drain", "in_place", "abort", "retract"] = "drain"
    """What a weight update does to requests in flight: wait for them, freeze them and go on with
    the new weights, abort and resume them from their tokens, or recompute them (not with R3)."""
    flush_cache_on_update: bool = True
    """Whether a prefix cached under old weights is kept from requests sent after an update."""
    rollout_external_engine_addrs: list[str] = []
    """Servers that run elsewhere, as host:port; unset means servers of our own."""
    rollout_num_engines: int = Field(default=1, ge=1)
    """Servers of our own; requests go to the least loaded one, a prompt's samples stay together."""
    environment: str | None = None
    """Environment of several turns: a name (calculator) or module:Class; unset means one turn."""
    environment_max_turns: int = Field(default=4, ge=1)
    """Turns of an episode, at most."""
    environment_max_turn_len: int | None = Field(default=None, ge=1)
    """Longest turn in tokens; unset means what rollout_max_response_len leaves."""
    environment_samples: Literal["trajectory", "turn"] = "trajectory"
    """What is trained: one sample an episode, or one a turn."""
    rollout_request_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds one request may take: a later answer counts as a bad one (--max-bad-answers)."""
    rollout_server_start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds the server may take to become healthy."""
    sglang: dict[str, ServerScalar | list[ServerScalar]] = {}
    """Any flag of the SGLang server."""

    @property
    def samples_per_episode(self) -> int:
        """Sample ids that one episode may need."""
        return self.environment_max_turns if self.environment_samples == "turn" else 1

    @property
    def groups_per_rollout(self) -> int:
        """over_sampling_batch_size with its default resolved."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def buffer_groups(self) -> int:
        """rollout_buffer_size with its default resolved: all that can still be fresh enough."""
        surplus = self.groups_per_rollout - self.rollout_batch_size
        allowed = (self.max_weight_staleness + 1) * self.rollout_batch_size + surplus
        return self.rollout_buffer_size or allowed

    @field_validator("sglang", mode="before")
    @classmethod
    def _one_spelling(cls, value: Any) -> Any:
        """Keys with dashes and with underscores mean the same flag: keep underscores."""
        if not isinstance(value, dict):
            return value
        spelled: dict[str, Any] = {}
        for key, setting in value.items():
            name = str(key).replace("-", "_")
            if name in spelled:
                raise ValueError(f"{name} is given twice, with dashes and with underscores")
            spelled[name] = setting
        return spelled
