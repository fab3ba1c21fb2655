"""Preflight: one table of checks, for a start, its dry run and the doctor, and what they have found."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from r3train.algo.rule_checks import check_algorithm
from r3train.config import cross_checks, RunConfig
from r3train.config.data_settings import LABEL_KEY, METADATA_KEY
from r3train.families.checks import settings_checks
from r3train.families.hf_facts import HfModelFacts
from r3train.families.read_facts import read_hf_facts
from r3train.config.sources import ConfigError, raise_all
from r3train.data.file_fingerprint import FileFingerprint
from r3train.data.prompts import unknown_tokens
from r3train.data.templates import check_variables
from r3train.data.tokenizer import check_vocabulary, load_tokenizer, stop_token
from r3train.engine.address_files import read_addresses
from r3train.engine.flags import check_server_flags
from r3train.engine.key import engine_api_key
from r3train.environments.named_environments import begin_environment, get_environment, get_tools
from r3train.hf_checkpoint import check_export, TensorKind
from r3train.launch.gpus import torchruns_number
from r3train.launch.job import limits, model_checks, other_models, read_data
from r3train.launch.job.agents import rehearse
from r3train.launch.job.checked_job import EvalData, Job
from r3train.launch.job.finding import Finding, Findings, problem, PROBLEM, warning, WARNING
from r3train.launch.job.resume import resume_point
from r3train.launch.job.run_dir import check_can_be_made, taken_directories
from r3train.observe.sinks import check_trackers
from r3train.peft_files import check_adapter
from r3train.rewards.code import isolation
from r3train.rewards.scoring import Scorer
from r3train.rewards.trial import try_reward
from r3train.trainer.megatron.freezing import check_freezing
from r3train.trainer.megatron.overrides import check_overrides
from r3train.types import Prompt, RolloutSample

T = TypeVar("T")

SETTINGS = "configuration"  # subject of their faults


class PreflightError(ConfigError):
    """The faults of a job: its text has one per line, ``findings`` holds warnings too.

    Subjects: configuration, key of the servers, server ADDRESS, checkpoint, tokenizer, teacher, prompts,
    reward, run directory, checkpoints, machine.
    """

    def __init__(self, findings: Sequence[Finding]):
        self.findings = findings
        self.faults = [found for found in findings if found.level == PROBLEM]
        super().__init__("\n".join(map(str, self.faults)))

    @property
    def outside_settings(self) -> list[str]:
        """The faults, where all are about files, servers and this machine; [] where a setting is wrong."""
        setting_subjects = ("configuration", "key of the servers", "reward")
        wrong = any(fault.subject in setting_subjects for fault in self.faults)
        return [] if wrong else [str(fault) for fault in self.faults]


class By(IntEnum):
    """Process that checks: each does what those before it do, too."""

    RANK = 0  # any rank
    NODE = 1  # the first rank of a node, which reads the data for the others
    JOB = 2  # rank 0, which asks servers and tries rewards for all
    DOCTOR = 3  # starts nothing: another run in --run-dir is a warning


@dataclass(frozen=True)
class Check:
    """A row of the table: what its faults are about, what is done, and from whom on.

    run: its parameters are fields of ``Found`` and say what it needs: it is left out where one of them is None.
    It raises ValueError, or returns findings, or what it ``gives``: a field of ``Found``.
    evaluates: it is done before an evaluation without training, too.
    """

    subject: str
    run: Callable[..., Any]
    by: By = By.RANK
    gives: str = ""
    evaluates: bool = False


@dataclass
class Found:
    """Facts and findings of the checks so far; a field is None until a row gives it, or where there is none."""

    config: RunConfig
    world_size: int
    by: By
    num_ranks: int | None = None  # of this node, None where it is no node of the job
    findings: list[Finding] = field(default_factory=list)
    hf: HfModelFacts | None = None
    api_key: str | None = None
    tokenizer: Any = None
    tensors: Mapping[str, TensorKind] | None = None  # of the checkpoint, by name
    environment: Any = None
    stops: Sequence[int] | None = None  # tokens of --rollout-stop
    parts: list[list[Prompt]] | list[list[RolloutSample]] | None = None  # of each file
    agent_facts: tuple[str, ...] | None = None
    reward: Scorer | None = None
    first_reward: str | None = None
    eval_data: Sequence[EvalData] | None = None
    job: Job | None = None

    def do(self, check: Check) -> list[Finding]:
        """Do a check, if this process does it and what it needs is there; returns what it has found."""
        before, names = len(self.findings), inspect.signature(check.run).parameters
        needed = {name: getattr(self, name) for name in names}
        if self.by >= check.by and None not in needed.values():
            given = self.attempt(check.subject, check.run, *needed.values())
            if check.gives:
                setattr(self, check.gives, given)
        return self.findings[before:]

    def attempt(self, subject: str, check: Callable[..., T], *arguments: Any) -> T | None:
        """Return what a check gives, its findings kept; None after a fault, which is kept under its subject."""
        try:
            given = check(*arguments)
            if isinstance(given, Iterator):
                self.findings.extend(given)
            return given
        except ConfigError as error:
            self.findings.extend(problem(subject, line) for line in str(error).splitlines())
        except ValueError as error:
            self.findings.append(problem(subject, " ".join(str(error).split())))
        return None

    def note(self, text: str, remedy: str) -> None:
        """Keep a warning of prompts."""
        self.findings.append(warning("prompts", text, remedy))

    @property
    def found(self) -> Found:
        return self

    @property
    def has_faults(self) -> bool:
        return any(finding.level == PROBLEM for finding in self.findings)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == WARNING)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The environment's; [] without one."""
        return [] if self.environment is None else get_tools(self.environment)

    @property
    def conversations(self) -> list[RolloutSample]:
        """Those of --loss-type sft, file after file."""
        learns = self.config.learns_conversations
        return [each for part in self.parts or () for each in part] if learns else []

    @property
    def prompts(self) -> list[Prompt] | None:
        """The prompts, or the beginnings of conversations, file after file."""
        if self.conversations:
            return [conversation.prompt for conversation in self.conversations]
        return [prompt for part in self.parts or () for prompt in part] or None

    @property
    def rewards(self) -> list[Scorer]:
        """The reward and those of evaluation sets, as far as they are made."""
        made = (self.reward, *(data.reward for data in self.eval_data or ()))
        return [reward for reward in made if reward is not None]


def preflight(
    config: RunConfig, world_size: int, by: By = By.NODE, num_ranks: int | None = None
) -> Job:
    """Check everything that can be checked before a server or an actor is built.

    num_ranks: of this node; unset, torchrun's.  Raises PreflightError with every fault that was found.
    """
    here = num_ranks or torchruns_number("LOCAL_WORLD_SIZE", 0)
    return _checked(Found(config, world_size, by, here or None), CHECKS)


def preflight_evaluation(config: RunConfig) -> Job:
    """Check what an evaluation without training needs; raises PreflightError with every fault.

    The prompts of the job are those of all sets.
    """
    return _checked(Found(config, 1, By.JOB), EVALUATION_CHECKS)


def _checked(found: Found, checks: Sequence[Check]) -> Job:
    for check in checks:
        found.do(check)
    if found.job is None:
        for reward in found.rewards:
            reward.close()
        raise PreflightError(found.findings)
    return found.job


def _flags_of_servers(config: RunConfig) -> None:
    check_server_flags(
        config.rollout.sglang,
        replay=config.replay.use_rollout_routing_replay,
        kept_top_k=config.rollout.kept_top_k,
        adapters=config.serves_adapters,
    )


def _settings_that_worry(config: RunConfig) -> Findings:
    for text in cross_checks.replay_warnings(config):
        yield warning(SETTINGS, text, "add it, or drop the check")
    for text, remedy in cross_checks.rate_warnings(config):
        yield warning(SETTINGS, text, remedy)
    for text in cross_checks.algorithm_warnings(config):
        yield warning(SETTINGS, text, "r3train docs algorithms has them all")
    checkpoint, rollout, data = config.checkpoint, config.rollout, config.data
    if rollout.num_rollout > 100 and not (checkpoint.save or checkpoint.debug_rollout_only):
        text = f"{rollout.num_rollout:,} rollouts and no checkpoint: what ends the run loses all"
        yield warning(SETTINGS, text, "add --save DIRECTORY")
    by_group = config.trainer.update_weight_transfer_mode == "distributed"
    if rollout.colocate and by_group and not config.serves_adapters:
        text = "--colocate sends all weights over a process group to servers on the same GPUs"
        yield warning(SETTINGS, text, "--update-weight-transfer-mode shared_memory is faster")
    if data.custom_rm_path is not None and data.rm_type is not None:
        text = f"{data.custom_rm_path} scores the answers, and rm_type {data.rm_type} does not"
        yield warning("reward", text, "leave one of the two out")


def _algorithm(config: RunConfig) -> None:
    check_algorithm(config.algorithm, config.rollout.n_samples_per_prompt)


def _run_directory(config: RunConfig) -> None:
    run_dir = config.run.run_dir
    check_can_be_made(run_dir or Path("runs"), "run_dir")
    if config.checkpoint.dump_rollouts and run_dir is not None:
        check_can_be_made(run_dir / "rollouts", "dump_rollouts")


def _taken(config: RunConfig, by: By) -> Findings:
    for subject, text in taken_directories(config, os.environ):
        if by == By.DOCTOR:
            yield warning(subject, text, "a new start there is refused")
        else:
            yield problem(subject, text)


def _save(config: RunConfig) -> None:
    if config.checkpoint.save is not None:
        check_can_be_made(config.checkpoint.save, "save")


def _exports(found: Found) -> None:
    model = found.config.model
    for directory in (model.hf_checkpoint, model.ref_load, model.opd_teacher_load):
        if directory is not None:
            found.attempt("checkpoint", partial(check_export, directory, weights=False))


def _facts(config: RunConfig) -> HfModelFacts:
    return read_hf_facts(config.model.hf_checkpoint)


def _tokenizer(config: RunConfig) -> Any:
    directory = config.model.hf_checkpoint
    return load_tokenizer(directory) if (directory / "config.json").is_file() else None


def _unset_variables(config: RunConfig) -> Findings:
    rollout, agent = config.rollout, config.agent
    for flag, names in (
        ("rollout-server-env", rollout.rollout_server_env),
        ("agent-env", agent.agent_env),
    ):
        if unset := [name for name in names if name not in os.environ]:
            text = f"{', '.join(unset)}: not in this environment (--{flag})"
            yield warning("environment", text, "set it, or leave the name out")


def check_engines_file(path: Path | None) -> None:
    """Raise ValueError for a file of addresses, or a directory, that is there and cannot be used."""
    if path is not None and path.exists():
        try:
            read_addresses(path)
        except OSError as error:
            raise ValueError(f"--rollout-engines-file: {error}") from None


def _external_servers(found: Found) -> None:
    config = found.config
    found.attempt("servers", check_engines_file, config.rollout.rollout_engines_file)
    for address in config.rollout.rollout_external_engine_addrs if config.has_engines else ():
        arguments = (config, found.hf, address, found.api_key)
        found.attempt(f"server {address}", model_checks.check_external_server, *arguments)


def _served_model(found: Found, config: RunConfig, hf: HfModelFacts) -> None:
    if config.has_engines and not config.rollout.has_external_servers:
        found.attempt("checkpoint", model_checks.check_class, hf)
        found.attempt(SETTINGS, model_checks.check_server_split, config, hf)
        found.attempt(SETTINGS, model_checks.check_indexer_flags, config, hf)


def _other_models(found: Found, config: RunConfig, hf: HfModelFacts) -> None:
    model = config.model
    if model.ref_load is not None:
        found.attempt(
            "checkpoint", other_models.check_other_model, "--ref-load", model.ref_load, hf
        )
    if model.opd_teacher_load is not None and config.algorithm.holds_teacher:
        found.attempt(
            "checkpoint", other_models.check_teacher, model.opd_teacher_load, hf, found.tokenizer
        )


def _environment(config: RunConfig) -> Any:
    name = config.rollout.environment
    return None if name is None else get_environment(name)


def _template(config: RunConfig, tokenizer: Any) -> None:
    check_variables(tokenizer, config.data)


def _stops(config: RunConfig, tokenizer: Any) -> list[int]:
    return [stop_token(text, tokenizer) for text in config.rollout.rollout_stop]


def _unstopped_answers(
    config: RunConfig, hf: HfModelFacts, tokenizer: Any, stops: Sequence[int]
) -> Findings:
    token = read_data.token_that_does_not_stop(config, hf, tokenizer)
    if token is not None:
        name = tokenizer.convert_ids_to_tokens(token)
        text = f"answers end with {name!r} ({token}), and no server stops there"
        yield warning("tokenizer", text, f"add --rollout-stop-token-ids {token}")


def _served_teacher(
    config: RunConfig, hf: HfModelFacts, tokenizer: Any, stops: Sequence[int]
) -> None:
    if config.has_engines and config.rollout.opd_teacher_url is not None:
        other_models.check_served_teacher(config, tokenizer)


def _read_prompts(
    found: Found, config: RunConfig, hf: HfModelFacts, tokenizer: Any, stops: Sequence[int]
) -> list[list[Prompt]] | list[list[RolloutSample]] | None:
    if (
        settings_checks.prompt_limit(config, hf)[0] <= 0
    ):  # settings_checks.check_model has refused the lengths
        return None
    arguments = (config, hf, tokenizer, found.note)
    if config.learns_conversations:
        return read_data.read_conversations(*arguments)
    return read_data.read_prompts(*arguments, found.tools)


def _labels(
    config: RunConfig, prompts: list[Prompt], conversations: list[RolloutSample]
) -> Findings:
    key = config.data.label_key
    if config.reward_is_optional or conversations or config.agent.named is not None:
        return
    lack = [prompt.prompt_id for prompt in prompts if prompt.label is None]
    if len(lack) < len(prompts):
        if lack:
            text = f"{len(lack):,} of {len(prompts):,} prompts have no label (key {key}), the first: {lack[0]}"
            remedy = "label them, or leave them out, if the reward needs labels"
            yield warning("prompts", text, remedy)
    elif key != LABEL_KEY:
        yield problem("prompts", f"no row has the key {key} (--label-key)")
    else:
        text = f"no prompt has a label (key {key})"
        yield warning("prompts", text, "name its key with --label-key, if the reward needs one")


def _lengths(
    config: RunConfig, hf: HfModelFacts, prompts: list[Prompt], conversations: list[RolloutSample]
) -> None:
    if conversations:
        read_data.check_longest_conversation(config, conversations)
    elif config.agent.named is not None:
        settings_checks.check_longest_chain(config, hf)
    else:
        cross_checks.check_longest_sample(config, max(len(prompt.token_ids) for prompt in prompts))


def _prompts_that_worry(config: RunConfig, tokenizer: Any, prompts: list[Prompt]) -> Findings:
    key, batch = config.data.metadata_key, config.rollout.rollout_batch_size
    has_rows = not config.learns_conversations and config.agent.named is None
    if has_rows and key != METADATA_KEY and not any(prompt.metadata for prompt in prompts):
        text = f"no prompt has metadata (key {key})"
        yield warning("prompts", text, "name its key with --metadata-key, or leave the flag out")
    if batch > len(prompts):
        text = f"a rollout of {batch:,} prompts (--rollout-batch-size) takes each of the {len(prompts):,}"
        text += f" prompts {batch / len(prompts):,.1f} times"
        yield warning("prompts", text, "lower it, or give more prompts")
    unknown = unknown_tokens(prompts, tokenizer.unk_token_id)
    if unknown is not None:
        remedy = "look at the first prompt as it is shown, and at the checkpoint's tokenizer (of a tiny model:"
        remedy += " make-tiny-model --tokenizer-from)"
        yield warning("prompts", unknown, remedy)


def _begin_episode(config: RunConfig, environment: Any, prompts: list[Prompt]) -> None:
    begin_environment(config.rollout.environment, environment, prompts[0])


def _rehearsal(config: RunConfig, hf: HfModelFacts, tokenizer: Any) -> tuple[str, ...] | None:
    return None if config.agent.named is None else rehearse(config, hf, tokenizer)


def _reward(config: RunConfig) -> Scorer:
    return Scorer(
        config.data,
        judge_key=os.environ.get(read_data.JUDGE_KEY),
        optional=config.reward_is_optional,
        weight_of_key=config.algorithm.weight_of_key,
    )


def _equal_rewards(config: RunConfig, prompts: list[Prompt]) -> None:
    if config.reward_is_optional and "zero_variance" in config.rollout.rollout_filter:
        read_data.check_not_all_equal(prompts)


def _try_reward(found: Found, reward: Scorer, prompts: list[Prompt], name: str = "") -> str | None:
    """Let a reward look at its prompts and score some of them; returns the first one's rewards in words.

    name: the evaluation set's, "" for the prompts of training.
    """
    reward.check(prompts)
    end = found.hf.eos_token_ids[:1] or (0,)  # an answer has a token

    def tokens_of(text: str) -> list[int]:
        return [*found.tokenizer.encode(text, add_special_tokens=False), *end]

    size = found.config.rollout.n_samples_per_prompt
    first, warnings = try_reward(reward, prompts, tokens_of, size)
    for text in warnings:
        remedy = "look at these labels (--label-key) and at what the reward reads of an answer"
        found.findings.append(warning("reward", f"{name}{text}", remedy))
    return first


def _first_reward(found: Found, reward: Scorer, prompts: list[Prompt]) -> str | None:
    return _try_reward(found, reward, prompts) if found.config.scores_answers else None


def _eval_data(found: Found, hf: HfModelFacts, tokenizer: Any) -> list[EvalData]:
    arguments = (hf, tokenizer, found.tools, found.note)
    sets = (
        found.attempt("prompts", read_data.read_eval_data, found.config, dataset, *arguments)
        for dataset in found.config.eval_sets
    )
    return [data for data in sets if data is not None]


def _eval_rewards(found: Found, eval_data: Sequence[EvalData]) -> None:
    if found.config.scores_answers:
        for data in eval_data:
            found.attempt("reward", read_data.check_rewards, data, partial(_try_reward, found))


def _programs(rewards: list[Scorer]) -> Findings:
    if any(reward.runs_programs for reward in rewards) and not isolation():
        text = "programs of the reward code have the network: this machine makes no namespaces"
        yield warning("reward", text, "r3train docs data_and_rewards says what that means")


def _job(found: Found) -> Job | None:
    """Make the job, if nothing is at fault: its checkpoint is compared with the whole of it."""
    if found.has_faults:
        return None
    files = found.config.data.prompt_files if found.by >= By.NODE else ()
    job = Job(
        config=found.config,
        hf=found.hf,
        prompts=found.prompts or [],
        tokenizer=found.tokenizer,
        reward=found.reward,
        prompt_file=FileFingerprint.of(*(file.path for file in files)) if files else None,
        eval_data=tuple(found.eval_data or ()),
        sizes=tuple(map(len, found.parts or ())),
        conversations=tuple(found.conversations),
        first_reward=found.first_reward,
        agent_facts=found.agent_facts or (),
    )
    if resume_point(job).start_rollout_id == (last := found.config.rollout.num_rollout):
        text = f"{last} of {last} rollouts were trained before: nothing is left to train"
        found.findings.append(warning("checkpoints", text, "--num-rollout counts the whole run"))
    return replace(job, warnings=found.warnings)


# in the order in which they are done: cheap ones first, then the files, then what they must be together
CHECKS = (
    Check(SETTINGS, _settings_that_worry),
    Check(SETTINGS, cross_checks.check_static),
    Check(SETTINGS, check_overrides),
    Check(SETTINGS, _flags_of_servers),
    Check(SETTINGS, model_checks.check_layers_here),
    Check(SETTINGS, model_checks.check_memory_history),
    Check(SETTINGS, check_trackers),
    Check(SETTINGS, _algorithm),
    Check("run directory", _run_directory),
    Check("checkpoints", _taken, By.JOB),
    Check("checkpoints", _save),
    Check(SETTINGS, model_checks.check_export_directories),
    Check("checkpoint", _exports, By.NODE),
    Check("checkpoint", _facts, gives="hf", evaluates=True),
    Check("tokenizer", _tokenizer, By.NODE, gives="tokenizer", evaluates=True),
    Check("machine", limits.check_node, By.JOB),
    Check("shared memory", limits.check_shared_memory, By.JOB),
    Check("memory", limits.check_memory, By.JOB),
    Check("environment", _unset_variables),
    Check("key of the servers", lambda: engine_api_key(os.environ), gives="api_key"),
    Check("server", _external_servers, By.JOB),
    Check(SETTINGS, settings_checks.check_model),
    Check(SETTINGS, check_freezing),
    Check("checkpoint", _served_model, evaluates=True),
    Check(SETTINGS, model_checks.check_kernels),
    Check(SETTINGS, lambda config, hf: check_adapter(config.lora, hf)),
    # reads the headers of all weights, of which a large checkpoint has hundreds of files
    Check("checkpoint", other_models.check_trainable, By.NODE, gives="tensors"),
    Check(
        "model",
        lambda found, hf: model_checks.model_warnings(found.config, hf, found.tensors or {}),
    ),
    Check("checkpoint", _other_models, By.NODE),
    Check(SETTINGS, _environment, gives="environment", evaluates=True),
    Check(SETTINGS, read_data.check_tools, evaluates=True),
    Check(SETTINGS, _template, evaluates=True),
    Check(SETTINGS, _stops, gives="stops", evaluates=True),
    Check("tokenizer", _unstopped_answers),
    Check("tokenizer", check_vocabulary, evaluates=True),
    Check("teacher", _served_teacher, By.JOB),
    Check("prompts", _read_prompts, gives="parts"),
    Check(SETTINGS, _lengths),
    Check("prompts", _labels),
    Check("prompts", _prompts_that_worry),
    Check(SETTINGS, _rehearsal, By.NODE, gives="agent_facts", evaluates=True),
    Check(SETTINGS, _begin_episode),
    Check("reward", _reward, gives="reward"),
    Check("reward", _equal_rewards),
    Check("reward", _first_reward, By.JOB, gives="first_reward"),
    Check("prompts", _eval_data, gives="eval_data", evaluates=True),
    Check("reward", _eval_rewards, By.JOB, evaluates=True),
    Check("reward", _programs, evaluates=True),
    Check("checkpoints", _job, gives="job"),
)


def _has_sets(config: RunConfig) -> None:
    if not config.eval_sets:
        raise ConfigError("--eval-prompt-data is required: there is no evaluation set")
    if config.rollout.rollout_engines_file is not None:
        raise ConfigError(
            "--rollout-engines-file is for training: name a server by --rollout-external-engine-addrs"
        )
    cross_checks.check_evaluation(config)
    raise_all(
        f"--use-{name} has no effect on an evaluation without training, whose numbers stay in --run-dir:"
        f" --no-use-{name}"
        for name in ("wandb", "mlflow")
        if getattr(config.trackers, f"use_{name}")
    )


def _evaluated_weights(config: RunConfig) -> None:
    starts = not (config.run.dry_run or config.rollout.has_external_servers)
    check_export(config.model.hf_checkpoint, weights=starts)


def _evaluation(found: Found) -> Job | None:
    if found.has_faults:
        return None
    first, prompts = found.eval_data[0], [
        prompt for each in found.eval_data for prompt in each.prompts
    ]
    return Job(
        found.config,
        found.hf,
        prompts,
        found.tokenizer,
        reward=first.reward,
        prompt_file=first.prompt_file,
        warnings=found.warnings,
        eval_data=tuple(found.eval_data),
    )


EVALUATION_CHECKS = (
    Check(SETTINGS, _has_sets),
    Check(SETTINGS, lambda config: check_server_flags(config.rollout.sglang, replay=False)),
    Check("checkpoint", _evaluated_weights),
    *(check for check in CHECKS if check.evaluates),
    Check("prompts", _evaluation, gives="job"),
)
