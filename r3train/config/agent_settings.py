"""Agents: programs of their own that call the model through a chat endpoint."""

from __future__ import annotations

import shlex
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from r3train.config.requirements import excludes, only_with, requires, Requirement
from r3train.config.section import Section
from r3train.config.sources import HOST, IMPORT_PATH, URL


_OF_AGENTS = (
    requires("apply_chat_template: its requests are written by the chat template"),
    requires(
        "steps_per_rollout = 1: a session has any number of samples: leave global_batch_size unset"
    ),
    excludes("environment: both would make the turns"),
    excludes("group_rm: a session has several samples"),
    excludes("rollout_ignore_eos: no answer would end"),
    excludes("learns_conversations: nothing is generated"),
)


class AgentSection(Section):
    """An agent makes each rollout: it gets the address of a chat endpoint, and calls the model as it likes."""

    title: ClassVar[str] = "Agents"
    every_field: ClassVar[tuple[Requirement, ...]] = (only_with("agent or agent_command"),)

    agent: Annotated[
        str | None, excludes("agent_command: one of them makes the rollouts"), *_OF_AGENTS
    ] = Field(default=None, pattern=IMPORT_PATH)
    """Agent, an async function as module:function: it gets an AgentTask (docs/guide/agents.md) and returns its reward, or
    nothing for that of --rm-type; unset: no agent."""
    agent_command: Annotated[str | None, *_OF_AGENTS] = Field(default=None, min_length=1)
    """Agent that is a command, split as a shell does it and run without one.  It gets OPENAI_BASE_URL, OPENAI_API_KEY,
    R3TRAIN_TASK_FILE and R3TRAIN_REWARD_FILE (docs/guide/agents.md)."""
    agent_env: Annotated[tuple[str, ...], only_with("agent_command")] = Field(
        default=(), strict=False
    )
    """Names of environment variables that the command inherits besides the usual ones."""
    agent_exit_code_fails: Annotated[bool, only_with("agent_command")] = False
    """An exit code other than 0 is a failure even where the command has written a reward; else the reward counts."""
    agent_workers: Annotated[int | None, only_with("agent_command")] = Field(default=None, ge=1)
    """Processes of the command that stay and take one task after another, as lines on stdin (docs/guide/agents.md): for
    harnesses that take long to import.  There are as many sessions at once, and as many of an evaluation; unset: a process
    for each session."""
    agent_history: Literal["append", "template"] = "append"
    """append: thoughts stay where the model wrote them.  template: a conversation goes on only where the chat
    template renders the whole of it so, else it begins anew: what a deployed agent would see."""
    agent_tool_call_parser: str = Field(default="auto", min_length=1)
    """Parser of the calls of tools in an answer: one of SGLang's by name, auto for the one that fits the chat template,
    none, or module:function."""
    agent_reasoning_parser: str = Field(default="auto", min_length=1)
    """Parser of the thoughts in an answer: one of SGLang's by name, auto for the one that fits the chat template, or
    none."""
    agent_max_calls: int = Field(default=64, ge=1, le=4096)
    """Most calls of the model in a session; one that is refused another has not failed."""
    agent_max_answer_len: int | None = Field(default=None, ge=1)
    """Most tokens of one answer; unset: what the context and rollout_max_response_len, which bounds all that follows the
    first request of a sample, have left."""
    agent_max_sessions: int | None = Field(default=None, ge=1)
    """Most sessions of rollouts at once, and as many of an evaluation; unset: rollout_max_concurrency.  A session is in
    flight only while a call of it is."""
    agent_max_parallel: int = Field(default=8, ge=1)
    """Most requests of one session that are answered at once; more wait."""
    agent_model: str | None = Field(default=None, min_length=1)
    """Name of the model that is trained; requests for another get 404.  Unset: any name but those of other providers
    (docs/guide/agents.md), such as gpt-4.1 and claude-sonnet-4-5."""
    agent_other_base_url: str | None = Field(default=None, pattern=URL)
    """OpenAI's base_url of an endpoint that answers requests for other models, which are not trained: judges, simulated
    users, titles.  Its key is R3TRAIN_AGENT_OTHER_API_KEY."""
    agent_strict: bool = False
    """Refuse requests with fields that have no effect and change what a harness gets, such as response_format and n, and
    those with pictures; else the fields are ignored and counted, and a text stands for a picture."""
    agent_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds that a session may take."""
    agent_on_failure: Literal["error", "drop", "train"] = "drop"
    """Treatment of an agent that raises, takes too long, or never calls the model.  error: end the run.  drop:
    replace its group by another prompt's; the run ends where more than 64 * rollout_batch_size groups in a row are
    replaced.  train: with --agent-failure-reward, if it called the model, else drop."""
    agent_failure_reward: Annotated[float, only_with("agent_on_failure = train")] = 0.0
    """Reward of an agent that failed."""
    agent_reward_post: bool = False
    """Take the reward of a session that its agent posts to /v1/r3train/reward, if it returns none."""
    agent_host: Annotated[
        str,
        requires(
            "agent_base_url: agents need an address to call, and it is none", "0.0.0.0|::|0|::0"
        ),
    ] = Field(default="127.0.0.1", pattern=HOST)
    """Address on which the endpoint listens; agents on other hosts and in containers need one that reaches there."""
    agent_port: int = Field(default=0, ge=0, le=65535)
    """Port of the endpoint; 0 takes a free one."""
    agent_base_url: str | None = Field(default=None, pattern=URL)
    """Address of the endpoint as agents are told it, in place of http://agent_host:agent_port: the name that a container, a
    tunnel or what ends TLS before it has for it, with or without /v1."""

    @field_validator("agent_command")
    @classmethod
    def _words(cls, value: str | None) -> str | None:
        if value is not None and not shlex.split(value):  # raises ValueError for an open quote
            raise ValueError("expected a command")
        return value

    @property
    def named(self) -> str | None:
        """The flag of the agent with its value; None without an agent."""
        if self.agent is not None:
            return f"--agent {self.agent}"
        return None if self.agent_command is None else f"--agent-command {self.agent_command}"
