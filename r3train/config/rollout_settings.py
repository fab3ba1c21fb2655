"""Generation: its amount, its sampling, its servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from r3train.config.requirements import at_least, check, excludes, only_with, requires
from r3train.config.section import each_once, LIMIT, Section

if TYPE_CHECKING:
    from r3train.config.run import RunConfig

# a thousand times what a large job has
_MOST_SAMPLES = 10_000_000
# SGLang 0.5.23 (sampling_params.py) takes a lower temperature for greedy decoding
_LOWEST_TEMPERATURE = 1e-6
# SGLang 0.5.23 (scheduler.py): it says which tokens it kept of at most so many
_KEPT_TOKENS_FLAG, _MOST_KEPT_TOKENS = "sampling_mask_max_tokens", 4096
_NEVER_FIT = "training would wait for groups that never fit"
_LOCAL_SERVERS_ONLY = excludes(
    "rollout_external_engine_addrs or rollout_engines_file: it configures servers that r3train starts; give one of the two"
)
_KEPT = (
    "rollout_top_k > 1: SGLang says which tokens it kept only if their number is limited, and without them"
    " every ratio would be wrong and no metric show it; 1 is greedy decoding"
)
_RETRACTED = (
    "use_rollout_routing_replay: SGLang recomputes the rows of a retracted request with the new weights, and"
    " they no longer describe the log-probs that were kept; use in_place or abort"
)
ServerScalar = bool | int | float | str


class RolloutSection(Section):
    """Generation: its amount, its sampling, its servers."""

    title: ClassVar[str] = "Rollout"

    num_rollout: int = Field(ge=1, le=9_999_999)
    """Rollouts in the whole run."""
    rollout_batch_size: int = Field(ge=1)
    """Prompts in a rollout."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """Samples of each prompt; they form the group in which advantages are computed."""
    rollout_max_prompt_len: int | None = Field(default=None, ge=1)
    """Longest prompt in tokens; longer ones are dropped (--overlong-prompts)."""
    rollout_max_response_len: int = Field(ge=1)
    """Longest response in tokens."""
    rollout_max_context_len: int | None = Field(default=None, ge=2)
    """Longest prompt and response together; unset means the model's own limit."""
    rollout_temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the actor computes log-probs at the same temperature.  It must
    be 1.0 with rollout_top_k 1."""
    rollout_top_p: Annotated[
        float,
        requires(_KEPT),
    ] = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    rollout_top_k: Annotated[
        int,
        *LIMIT,
        requires(
            "rollout_temperature = 1: it is greedy decoding, whose log-probs are those at 1",
            when="1",
        ),
        excludes("loss_type = sft: it samples no token"),
    ] = -1
    """Sample among the k likeliest tokens; 1 is greedy, -1 is off.  Above 1 the servers also return the
    tokens that top_k and top_p kept, and all log-probs are over these."""
    rollout_stop_token_ids: tuple[int, ...] = Field(default=(), strict=False)
    """Tokens that end a response, next to the model's end tokens."""
    rollout_stop: tuple[str, ...] = Field(default=(), strict=False)
    """Texts that end a response, each an added token of the checkpoint's tokenizer (such as
    <|im_end|>); the response keeps it."""
    rollout_ignore_eos: bool = False
    """Do not stop at end and stop tokens: every response gets rollout_max_response_len tokens."""
    rollout_seed: int = Field(default=42, ge=0)
    """Seed of the prompt order and of sampling."""
    max_weight_staleness: int = Field(default=1, ge=0)
    """Rollouts that the generating weights may be behind training; 0 is synchronous.  A rollout makes
    one weight version, however many optimizer steps it has."""
    rollout_segment_len: int | None = Field(default=None, ge=1)
    """Most tokens of one request.  A longer answer is requested in segments, so a crashed server
    loses one segment at most.  Unset: with --max-engine-restarts 256, and 2048 where the run's servers have
    GPUs; else no limit."""
    sglang_server_concurrency: Annotated[
        int | None,
        excludes(
            "rollout_max_concurrency: one limits all servers together, the other each; give one of the two"
        ),
    ] = Field(default=None, ge=1)
    """Requests in flight at once for each server; unset: 64."""
    rollout_max_concurrency: int | None = Field(default=None, ge=1)
    """Requests in flight at once over all servers; unset: sglang_server_concurrency for each."""
    rollout_buffer_size: Annotated[
        int | None,
        at_least(f"rollout_batch_size: {_NEVER_FIT}"),
        at_least(f"over_sampling_batch_size: {_NEVER_FIT}"),
    ] = Field(default=None, ge=1)
    """Most groups in flight or waiting for training; unset: as many as the staleness allows."""
    over_sampling_batch_size: Annotated[
        int | None, at_least("rollout_batch_size: a rollout would never be complete")
    ] = Field(default=None, ge=1)
    """Groups generated for a rollout.  The first to complete are trained; the others wait for the
    next rollout if they are fresh enough.  Unset: rollout_batch_size, in prompt order."""
    stale_policy: Annotated[
        Literal["drop", "regenerate"],
        requires(
            "over_sampling_batch_size > rollout_batch_size: in the order of the prompts no group gets stale"
        ),
    ] = "drop"
    """Treatment of a group that would be too stale when trained: drop it, or generate it again."""
    rollout_filter: Annotated[
        tuple[Literal["zero_variance", "aborted"], ...],
        requires(
            "n_samples_per_prompt > 1: every group of one would be dropped, and no rollout ever complete",
            when="*zero_variance*",
        ),
        excludes(
            "rollout_top_k = 1: greedy samples of a prompt are equal, so every group would be dropped",
            when="*zero_variance*",
        ),
    ] = Field(default=(), strict=False)
    """Groups to replace by another prompt's.  zero_variance: those whose rewards are all equal.
    aborted: those with an aborted sample."""
    pause_generation_mode: Annotated[
        Literal["drain", "in_place", "abort", "retract"],
        excludes(_RETRACTED, when="retract"),
        requires(
            "max_weight_staleness > 0: a rollout that spans an update is at least one version old"
        ),
        excludes(
            "sglang.disable_overlap_schedule = False|0: versions at an update would be off by one"
        ),
        excludes(
            "lora_serving = adapter: nothing is paused for an update, and every answer ends on its version"
        ),
    ] = "drain"
    """Treatment of requests in flight during a weight update.  drain: wait for them.  in_place:
    freeze them and continue with the new weights.  abort: abort them and resume from their tokens.
    retract: compute their cache again (not with R3)."""
    retraction_policy: Literal["regenerate", "accept"] = "regenerate"
    """With R3: treatment of an answer that a server retracted for lack of KV cache.  Its routes were
    computed again, in other forward passes than its log-probs.  regenerate: throw the answer away and ask
    again.  accept: train it as it is."""
    flush_cache_on_update: Annotated[
        bool, excludes("lora_serving = adapter: servers keep the prefixes of each version apart")
    ] = True
    """Do not let requests after an update use prefixes that were cached with older weights."""
    rollout_external_engine_addrs: Annotated[tuple[str, ...], AfterValidator(each_once)] = Field(
        default=(), strict=False
    )
    """External servers, as host:port; empty means that the run starts its own."""
    rollout_engines_file: Annotated[
        Path | None,
        requires("has_engines"),
        excludes("rollout_external_engine_addrs: name them in the file, too"),
        requires(
            "pause_generation_mode = drain|abort or update_weight_transfer_mode = disk|shared_memory: a server that is"
            " lost breaks a broadcast, and requests in flight would go on with a mixture of weights"
        ),
    ] = Field(default=None, strict=False)
    """External servers that come and go: a file with a host:port in each line, or a directory of address files as
    r3train serve --address-file writes them.  It is read every second: a server that is named joins, one that is named no
    more or dies leaves, and its requests go on elsewhere."""
    rollout_wait_for_servers_s: Annotated[float, only_with("rollout_engines_file")] = Field(
        default=1800.0, gt=0
    )
    """Seconds without a server after which the run saves a checkpoint and ends."""
    opd_teacher_url: Annotated[str | None, only_with("opd_type = sglang")] = Field(
        default=None, min_length=1
    )
    """SGLang server of the teacher, as http://HOST:PORT (--opd-type sglang)."""
    rollout_num_engines: Annotated[
        int,
        _LOCAL_SERVERS_ONLY,
    ] = Field(default=1, ge=1)
    """Servers to start.  A prompt goes with all its samples to the least loaded one."""
    rollout_weights: Annotated[
        Literal["same", "fp8"],
        requires("bf16: SGLang multiplies fp8 by bfloat16 activations alone", when="fp8"),
        requires("has_engines", when="fp8"),
        excludes(
            "rollout_external_engine_addrs or rollout_engines_file: they would have to start from a checkpoint that the run writes",
            when="fp8",
        ),
        excludes("lora_serving = adapter: adapters were not seen on servers of fp8", when="fp8"),
    ] = "same"
    """Form of the weights on the servers.  same: the actor's.  fp8: linears of attention, MLPs and experts in
    blocks of 128 x 128 numbers with a scale each, half of the memory; the rest stays bfloat16."""
    environment: Annotated[str | None, excludes("learns_conversations: nothing is generated")] = (
        None
    )
    """Environment of several turns: a name (calculator) or module:Class; unset: one turn."""
    environment_max_turns: int = Field(default=4, ge=1)
    """Most turns of an episode."""
    environment_max_turn_len: int | None = Field(default=None, ge=1)
    """Longest turn in tokens; unset means as much as rollout_max_response_len leaves."""
    environment_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that making the environment, and each of its steps, may take; a longer one ends the run."""
    environment_samples: Annotated[
        Literal["trajectory", "turn"],
        requires("environment"),
        requires(
            "steps_per_rollout = 1: turns do not divide into optimizer steps: leave global_batch_size unset"
        ),
    ] = "trajectory"
    """Samples to train from an episode: one of the whole trajectory, or one of each turn."""
    rollout_request_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a request may take; a later answer is a bad one (--max-bad-answers)."""
    rollout_server_start_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that a server may take to start.  A server that ends is noticed at once; large
    checkpoints take many minutes to load."""
    colocate: Annotated[
        bool,
        requires("max_weight_staleness = 0: nothing is generated while the ranks train"),
        excludes(
            "rollout_external_engine_addrs or rollout_engines_file: it is for servers that the run starts on its own GPUs"
        ),
        excludes("lora_serving = adapter: the base is lost with the servers' memory; take merged"),
        requires("has_engines: there are no turns to take"),
        excludes("debug_rollout_only: there are no turns to take"),
    ] = False
    """Trainer and servers use the same GPUs one after the other, with max_weight_staleness 0: servers
    release weights and KV cache while the ranks train, and the ranks' memory is on the host while servers
    generate."""
    rollout_server_env: Annotated[
        tuple[str, ...],
        _LOCAL_SERVERS_ONLY,
    ] = Field(default=(), strict=False)
    """Names of environment variables that servers inherit besides the usual ones (docs/run/security.md)."""
    sglang: dict[str, ServerScalar | list[ServerScalar]] = {}
    """Any flag of the SGLang server."""

    @check
    def _sampling(self, run: RunConfig) -> Iterator[str]:
        if run.samples_per_rollout > _MOST_SAMPLES:
            yield (
                f"{run.samples_in_words} samples in a rollout, expected at most {_MOST_SAMPLES}: rank 0"
                " holds them all"
            )
        context, top_k = self.rollout_max_context_len, self.rollout_top_k
        if context is not None:
            yield from self.no_room(context, f"rollout_max_context_len {context}")
        most = self.sglang.get(_KEPT_TOKENS_FLAG, _MOST_KEPT_TOKENS)
        if isinstance(most, int) and top_k > most:
            yield (
                f"rollout_top_k {top_k} is above {most}, the most tokens of which SGLang says that it"
                f" kept them: set less, or more in sglang.{_KEPT_TOKENS_FLAG}"
            )
        temperature = self.rollout_temperature
        if temperature < _LOWEST_TEMPERATURE:
            yield (
                f"rollout_temperature {temperature} is greedy decoding for SGLang, whose log-probs are"
                " then those at temperature 1, while the actor would compute them at"
                f" {temperature}: set rollout_top_k 1 and rollout_temperature 1.0"
            )

    def no_room(self, context: int, name: str) -> Iterator[str]:
        """Yield lengths of prompts and responses that ``context`` tokens do not hold; name: in words."""
        prompt, response = self.rollout_max_prompt_len, self.rollout_max_response_len
        if response >= context:
            yield f"rollout_max_response_len {response} leaves no room for a prompt in {name}"
        if prompt is not None and prompt + response > context:
            yield (
                f"rollout_max_prompt_len {prompt} + rollout_max_response_len {response} ="
                f" {prompt + response} exceeds {name}"
            )

    @property
    def replays_sampling_mask(self) -> bool:
        """True when tokens are sampled among those that top-k and top-p keep, and log-probs are of these."""
        return self.rollout_top_k > 1

    @property
    def exact_boundaries(self) -> bool:
        """True when a weight update comes in mid-generation, whose tokens must have the right version.

        Servers then run without SGLang's overlap of scheduling and computing.
        """
        return self.pause_generation_mode != "drain"

    @property
    def fresh_prefixes(self) -> bool:
        """True when no request uses a prefix that was cached before the last weight update.

        in_place flushes nothing: a request that waited for its turn over the update finds the prefix of
        the weights that it was sent under.
        """
        return self.flush_cache_on_update and self.pause_generation_mode != "in_place"

    @property
    def groups_per_rollout(self) -> int:
        """over_sampling_batch_size with its default resolved."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def kept_top_k(self) -> int | None:
        """rollout_top_k where the tokens that it kept are replayed, else None."""
        return self.rollout_top_k if self.replays_sampling_mask else None

    @property
    def buffer_groups(self) -> int:
        """rollout_buffer_size with its default resolved: all groups that can be fresh enough."""
        surplus = self.groups_per_rollout - self.rollout_batch_size
        allowed = (self.max_weight_staleness + 1) * self.rollout_batch_size + surplus
        return self.rollout_buffer_size or allowed

    @property
    def num_servers(self) -> int:
        """Servers that generate: others' or the run's own; 1 where they come and go."""
        return len(self.rollout_external_engine_addrs) or self.rollout_num_engines

    @property
    def has_external_servers(self) -> bool:
        """True where others start the servers."""
        return bool(self.rollout_external_engine_addrs or self.rollout_engines_file)

    def concurrency(self, servers: int) -> int:
        """Requests that may be in flight at once over so many servers."""
        each = self.sglang_server_concurrency or 64
        return (
            servers * each if self.rollout_max_concurrency is None else self.rollout_max_concurrency
        )

    @property
    def max_concurrency(self) -> int:
        """Requests that may be in flight at once over all servers, or over one where they come and go."""
        return self.concurrency(self.num_servers)

    @property
    def most_samples_in_flight(self) -> int:
        """Samples that the buffer has room for."""
        return self.buffer_groups * self.n_samples_per_prompt

    @property
    def most_in_flight(self) -> int:
        """Most requests that can be in flight at once."""
        return min(self.max_concurrency, self.most_samples_in_flight)

    def pool_needed(self, longest_prompt: int) -> int:
        """KV tokens that are needed if all requests in flight reach their full length and share no prefix."""
        return self.most_in_flight * self.longest_sample(longest_prompt)

    def pool_facts(self, pool_tokens: int | None, longest_prompt: int) -> str:
        """Size of the servers' KV pools, None if unknown, and what requests need, in words."""
        size = "are of unknown size" if pool_tokens is None else f"hold {pool_tokens:,} tokens"
        return (
            f"the servers' KV pools {size}, and {self.most_in_flight:,} requests in flight of up to"
            f" {self.longest_sample(longest_prompt):,} tokens need {self.pool_needed(longest_prompt):,}"
        )

    def pool_shortage(self, pool_tokens: int | None, longest_prompt: int) -> str | None:
        """The warning about KV pools that are too small; None if they are not, or unknown."""
        if pool_tokens is None or pool_tokens >= self.pool_needed(longest_prompt):
            return None
        facts = self.pool_facts(pool_tokens, longest_prompt)
        return f"{facts}: SGLang will retract requests (--retraction-policy)"

    def longest_sample(self, longest_prompt: int) -> int:
        """Tokens of the longest sample that a prompt of so many can become."""
        length = longest_prompt + self.rollout_max_response_len
        return min(length, self.rollout_max_context_len or length)

    @field_validator("sglang", mode="before")
    @classmethod
    def _one_spelling(cls, value: Any) -> Any:
        """Write keys with underscores; a flag may have dashes."""
        if not isinstance(value, dict):
            return value
        spelled: dict[str, Any] = {}
        for key, setting in value.items():
            name = str(key).replace("-", "_")
            if name in spelled:
                raise ValueError(f"{name} is given twice, with dashes and with underscores")
            spelled[name] = setting
        return spelled
