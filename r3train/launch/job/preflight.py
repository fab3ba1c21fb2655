"""Every check that needs neither a server of our own nor a model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from r3train.algo.rule_checks import check_algorithm
from r3train.config import RunConfig
from r3train.config.cross_checks import (
    algorithm_warnings,
    check_evaluation,
    check_longest_chain,
    check_longest_sample,
    check_model,
    check_static,
    prompt_limit,
    rate_warnings,
    replay_warnings,
    replayed_index_topk,
)
from r3train.config.data_settings import LABEL_KEY, METADATA_KEY
from r3train.config.hf_facts import HfModelFacts, load_json_object, read_hf_facts
from r3train.config.sources import ConfigError, raise_all
from r3train.families import (
    FAMILIES,
    TINY_MODELS,
    has_linear_attention,
    has_sinks,
    is_of_text_and_images,
)
from r3train.families.checks import untrained_parts
from r3train.cuda_environment import visible_gpus
from r3train.data.file_fingerprint import FileFingerprint
from r3train.data.prompts import unknown_tokens
from r3train.data.templates import check_variables
from r3train.data.tokenizer import check_vocabulary, load_tokenizer, stop_token
from r3train.engine.address_files import read_addresses
from r3train.engine.addresses import host_of, interface_of
from r3train.engine.backend import EngineError
from r3train.engine.control import EngineControl
from r3train.engine.flags import check_server_flags, server_fields
from r3train.engine.key import engine_api_key
from r3train.engine.refusals import foreign, refused
from r3train.environments.named_environments import begin_environment, get_environment, get_tools
from r3train.hf_checkpoint import (
    check_export,
    check_export_directory,
    rounded_tensors,
    TensorKind,
)
from r3train.launch.job.read_data import (
    JUDGE_KEY,
    check_longest_conversation,
    check_not_all_equal,
    check_rewards,
    check_tools,
    read_conversations,
    read_eval_data,
    read_prompts,
    token_that_does_not_stop,
)
from r3train.launch.job.agents import rehearse
from r3train.launch.gpus import torchruns_number
from r3train.launch.job.checked_job import EvalData, Job, JobWarning
from r3train.launch.job.limits import check_node, little_memory, little_shared_memory
from r3train.launch.job.other_models import (
    check_other_model,
    check_served_teacher,
    check_teacher,
    check_trainable,
)
from r3train.launch.job.resume import resume_point
from r3train.launch.job.run_dir import check_can_be_made, taken_directories
from r3train.observe.sinks import check_trackers
from r3train.peft_files import check_adapter, not_in_peft
from r3train.rewards.code import isolation
from r3train.rewards.scoring import Scorer
from r3train.rewards.trial import try_reward
from r3train.trainer.megatron.freezing import check_freezing
from r3train.trainer.megatron.overrides import check_overrides
from r3train.types import Prompt, RolloutSample

T = TypeVar("T")

SETTINGS = "configuration"  # subject of their faults
# a server that others use too may take a while
_ANSWER_S = 30.0


class PreflightError(ConfigError):
    """The faults of a job: its text has one per line, ``faults`` holds (subject, line) of each.

    Subjects: configuration, key of the servers, server ADDRESS, checkpoint, tokenizer, teacher, prompts,
    reward, run directory, checkpoints, machine.  ``warnings`` holds what was found apart from the faults.
    """

    def __init__(self, faults: list[tuple[str, str]], warnings: list[JobWarning]):
        super().__init__("\n".join(line for _, line in faults))
        self.faults = faults
        self.warnings = warnings

    @property
    def outside_settings(self) -> list[str]:
        """The faults, where all are about files, servers and this machine; [] where a setting is wrong."""
        setting_subjects = ("configuration", "key of the servers", "reward")
        wrong = any(subject in setting_subjects for subject, _ in self.faults)
        return [] if wrong else [line for _, line in self.faults]


def preflight(
    config: RunConfig,
    world_size: int,
    *,
    for_all_ranks: bool = False,
    for_node: bool = True,
    starts: bool = True,
    num_ranks: int | None = None,
) -> Job:
    """Check everything that can be checked before a server or an actor is built.

    The training command, its dry run and the doctor all come through here.  for_all_ranks: do too what
    one rank does for all: ask the servers of --rollout-external-engine-addrs, and let the reward look
    at the data.  for_node: read the data, which one rank of a node does for the others.  starts: False
    where nothing will be written: another run in --run-dir is a warning then.  num_ranks: of this node; unset,
    torchrun's.
    Raises PreflightError with every fault that was found.
    """
    checks = _Checks(config, world_size, for_all_ranks, for_node, starts, num_ranks)
    for check in (
        checks.settings,
        checks.directories,
        checks.checkpoints,
        checks.machine,
        checks.servers,
        checks.model,
        checks.tokenizer_and_environment,
        checks.prompts_fit,
        checks.rewards,
        checks.evaluation_sets,
    ):
        check()
    return checks.job()


class _Checks:
    """The checks of a job, in groups; a group uses what earlier ones have read.

    What a group could not read stays None or empty, and what needs it is not checked.
    """

    def __init__(
        self,
        config: RunConfig,
        world_size: int,
        for_all_ranks: bool,
        for_node: bool,
        starts: bool,
        num_ranks: int | None,
    ) -> None:
        self.config, self.world_size = config, world_size
        # unset and 0: this is no node of the job
        self.num_ranks = num_ranks or torchruns_number("LOCAL_WORLD_SIZE", 0)
        self.for_all_ranks, self.for_node, self.starts = for_all_ranks, for_node, starts
        self.faults: list[tuple[str, str]] = []
        self.warnings = list(_warnings(config))
        self.hf: HfModelFacts | None = None
        self.tokenizer: Any = None
        self.environment: Any = None
        self.tools: list[dict[str, Any]] = []
        self.agent_facts: tuple[str, ...] = ()
        self.prompts: list[Prompt] = []
        self.sizes: tuple[int, ...] = ()  # prompts per file
        self.conversations: list[RolloutSample] = []
        self.reward: Scorer | None = None
        self.first_reward: str | None = None
        self.eval_data: list[EvalData] = []

    def attempt(self, subject: str, check: Callable[..., T], *arguments: Any) -> T | None:
        """Return what a check gives; None after a fault, which is kept under its subject."""
        try:
            return check(*arguments)
        except ConfigError as error:
            self.faults.extend((subject, line) for line in str(error).splitlines())
        except ValueError as error:
            self.faults.append((subject, " ".join(str(error).split())))
        return None

    def warn(self, subject: str, text: str, remedy: str) -> None:
        """Keep a warning."""
        self.warnings.append(JobWarning(subject, text, remedy))

    @property
    def scores(self) -> bool:
        """True where a reward scores what is generated."""
        return self.config.scores_answers

    def settings(self) -> None:
        """Check what the settings say, by themselves and for this machine."""
        config, attempt = self.config, partial(self.attempt, SETTINGS)
        attempt(check_static, config, self.world_size)
        attempt(check_overrides, config)
        flags = {
            "replay": config.replay.use_rollout_routing_replay,
            "kept_top_k": config.rollout.kept_top_k,
            "adapters": config.serves_adapters,
        }
        attempt(partial(check_server_flags, config.rollout.sglang, **flags))
        attempt(check_layers_here, config)
        attempt(check_memory_history, config)
        attempt(check_trackers, config)
        attempt(check_algorithm, config.algorithm, config.rollout.n_samples_per_prompt)

    def servers(self) -> None:
        """Check the key that HTTP must carry and the variables to hand on, and ask the servers of others."""
        config = self.config
        for flag, names in (
            ("rollout-server-env", config.rollout.rollout_server_env),
            ("agent-env", config.agent.agent_env),
        ):
            if unset := [name for name in names if name not in os.environ]:
                text = f"{', '.join(unset)}: not in this environment (--{flag})"
                self.warn("environment", text, "set it, or leave the name out")
        api_key = self.attempt("key of the servers", engine_api_key, os.environ)
        if self.for_all_ranks and self.config.has_engines:
            if (source := self.config.rollout.rollout_engines_file) and source.exists():
                self.attempt("servers", read_addresses, source)
            for address in self.config.rollout.rollout_external_engine_addrs:
                subject = f"server {address}"
                self.attempt(subject, check_external_server, self.config, self.hf, address, api_key)

    def directories(self) -> None:
        """Check that what will be written can be, and that no other run is in the way."""
        config, checkpoint = self.config, self.config.checkpoint
        run_dir = config.run.run_dir
        self.attempt("run directory", check_can_be_made, run_dir or Path("runs"), "run_dir")
        if checkpoint.dump_rollouts and run_dir is not None:
            dumps = run_dir / "rollouts"
            self.attempt("run directory", check_can_be_made, dumps, "dump_rollouts")
        if self.for_all_ranks:
            self.attempt("checkpoints", self._taken)
        if checkpoint.save is not None:
            self.attempt("checkpoints", check_can_be_made, checkpoint.save, "save")
        if checkpoint.save_hf is not None:
            self.attempt(SETTINGS, check_export_directories, config)

    def _taken(self) -> None:
        for subject, text in taken_directories(self.config, os.environ):
            if self.starts:
                self.faults.append((subject, text))
            else:
                self.warn(subject, text, "a new start there is refused")

    def machine(self) -> None:
        """Check this node; the doctor shows its memory by itself."""
        if not self.for_all_ranks:
            return
        for lack in self.attempt("machine", check_node, self.config) or ():
            self.warn("machine", *lack)
        if not (self.starts and self.num_ranks):
            return
        if lack := little_shared_memory(self.num_ranks):
            self.warn("shared memory", *lack)
        arguments = (self.config, self.hf, self.world_size, self.num_ranks)
        if self.hf is not None and (lack := self.attempt("machine", little_memory, *arguments)):
            self.warn("memory", *lack)

    def checkpoints(self) -> None:
        """Read the checkpoints' facts; the ranks check the weights when they load them."""
        model = self.config.model
        if self.for_node:
            other_models = (model.ref_load, model.opd_teacher_load)
            for directory in (model.hf_checkpoint, *filter(None, other_models)):
                self.attempt("checkpoint", partial(check_export, directory, weights=False))
        self.hf = self.attempt("checkpoint", read_hf_facts, model.hf_checkpoint)
        if self.for_node and (model.hf_checkpoint / "config.json").is_file():
            self.tokenizer = self.attempt("tokenizer", load_tokenizer, model.hf_checkpoint)

    def model(self) -> None:
        """Check that this model can be trained with these settings."""
        config, hf = self.config, self.hf
        if hf is None:
            return
        self.attempt(SETTINGS, check_model, config, hf, self.world_size)
        self.attempt(SETTINGS, check_freezing, config, hf)
        if config.has_engines and not config.rollout.has_external_servers:
            self.attempt("checkpoint", check_class, hf)
            self.attempt(SETTINGS, check_server_split, config, hf)
            self.attempt(SETTINGS, check_says_choices, config, hf)
        if visible_gpus() and has_sinks(hf.model_type):
            with suppress(PackageNotFoundError):  # which check_layers_here has said
                engine = version("transformer_engine")
                self.attempt(SETTINGS, check_sinks, hf.model_type, engine, config)
        if visible_gpus() and has_linear_attention(hf.model_type):
            self.attempt(SETTINGS, check_linear_kernels, hf.model_type)
        self.attempt(SETTINGS, check_adapter, config.lora, hf)
        kinds: Mapping[str, TensorKind] = {}
        if self.for_node:
            # reads the headers of all weights, of which a large checkpoint has hundreds of files
            kinds = self.attempt("checkpoint", check_trainable, hf) or {}
        self.warnings += _model_warnings(config, hf, kinds)
        if not self.for_node:
            return
        if config.model.ref_load is not None:
            directory = config.model.ref_load
            self.attempt("checkpoint", check_other_model, "--ref-load", directory, hf)
        teacher = config.model.opd_teacher_load
        if teacher is not None and config.algorithm.holds_teacher:
            self.attempt("checkpoint", check_teacher, teacher, hf, self.tokenizer)

    def tokenizer_and_environment(self) -> None:
        """Check the environment's tools and what the tokenizer must know; read the prompts."""
        config, tokenizer, name = self.config, self.tokenizer, self.config.rollout.environment
        if name is not None:
            self.environment = self.attempt(SETTINGS, get_environment, name)
            self.tools = [] if self.environment is None else get_tools(self.environment)
        if tokenizer is None:
            return
        self.attempt(SETTINGS, check_tools, config, tokenizer, self.tools)
        self.attempt(SETTINGS, check_variables, tokenizer, config.data)
        stops = [
            self.attempt(SETTINGS, stop_token, text, tokenizer)
            for text in config.rollout.rollout_stop
        ]
        if self.hf is None or None in stops:
            return
        token = token_that_does_not_stop(config, self.hf, tokenizer)
        if token is not None:
            name = tokenizer.convert_ids_to_tokens(token)
            text = f"answers end with {name!r} ({token}), and no server stops there"
            self.warn("tokenizer", text, f"add --rollout-stop-token-ids {token}")
        self.attempt("tokenizer", check_vocabulary, tokenizer, self.hf)
        teacher = config.rollout.opd_teacher_url
        if self.for_all_ranks and config.has_engines and teacher is not None:
            self.attempt("teacher", check_served_teacher, config, tokenizer)
        if prompt_limit(config, self.hf)[0] > 0:  # or check_model has refused the lengths
            self._read_prompts()

    def _read_prompts(self) -> None:
        arguments = (self.config, self.hf, self.tokenizer, partial(self.warn, "prompts"))
        if self.config.learns_conversations:
            found = self.attempt("prompts", read_conversations, *arguments) or []
            self.conversations = [conversation for part in found for conversation in part]
            parts = [[conversation.prompt for conversation in part] for part in found]
        else:
            parts = self.attempt("prompts", read_prompts, *arguments, self.tools) or []
        self.prompts = [prompt for part in parts for prompt in part]
        self.sizes = tuple(map(len, parts))

    def _check_labels(self) -> None:
        key, prompts = self.config.data.label_key, self.prompts
        lack = [prompt.prompt_id for prompt in prompts if prompt.label is None]
        if len(lack) < len(prompts):
            if lack:
                text = f"{len(lack):,} of {len(prompts):,} prompts have no label (key {key}), the first: {lack[0]}"
                self.warn(
                    "prompts", text, "label them, or leave them out, if the reward needs labels"
                )
        elif key != LABEL_KEY:
            self.faults.append(("prompts", f"no row has the key {key} (--label-key)"))
        else:
            text = f"no prompt has a label (key {key})"
            self.warn("prompts", text, "name its key with --label-key, if the reward needs one")

    def prompts_fit(self) -> None:
        """Check the prompts against the settings, and begin an episode with the first one."""
        config, prompts = self.config, self.prompts
        if self.conversations:
            self.attempt(SETTINGS, check_longest_conversation, config, self.conversations)
        elif prompts and config.agent.named is not None:
            self.attempt(SETTINGS, check_longest_chain, config, self.hf)
        elif prompts:
            if not config.reward_is_optional:
                self._check_labels()
            if config.data.metadata_key != METADATA_KEY and not any(p.metadata for p in prompts):
                text = f"no prompt has metadata (key {config.data.metadata_key})"
                self.warn(
                    "prompts", text, "name its key with --metadata-key, or leave the flag out"
                )
            longest = max(len(prompt.token_ids) for prompt in prompts)
            self.attempt(SETTINGS, check_longest_sample, config, longest)
        if not prompts:
            return
        batch = config.rollout.rollout_batch_size
        if batch > len(prompts):
            text = f"a rollout of {batch:,} prompts (--rollout-batch-size) takes each of the {len(prompts):,}"
            text += f" prompts {batch / len(prompts):,.1f} times"
            self.warn("prompts", text, "lower it, or give more prompts")
        unknown = self.attempt("prompts", unknown_tokens, prompts, self.tokenizer.unk_token_id)
        if unknown is not None:
            remedy = "look at the first prompt as it is shown, and at the checkpoint's tokenizer (of a tiny model:"
            remedy += " make-tiny-model --tokenizer-from)"
            self.warn("prompts", unknown, remedy)
        if config.agent.named is not None and self.for_node:
            self.agent_facts = (
                self.attempt(SETTINGS, rehearse, config, self.hf, self.tokenizer) or ()
            )
        if self.environment is not None:
            name = config.rollout.environment
            self.attempt(SETTINGS, begin_environment, name, self.environment, prompts[0])

    def rewards(self) -> None:
        """Make the reward, and let it look at the prompts."""
        config, prompts, optional = self.config, self.prompts, self.config.reward_is_optional
        options = {
            "judge_key": os.environ.get(JUDGE_KEY),
            "optional": optional,
            "weight_of_key": config.algorithm.weight_of_key,
        }
        self.reward = self.attempt("reward", partial(Scorer, config.data, **options))
        if optional and prompts and "zero_variance" in config.rollout.rollout_filter:
            self.attempt("reward", check_not_all_equal, prompts)
        if self.for_all_ranks and self.scores and prompts and self.reward is not None:
            self.first_reward = self.attempt("reward", self._try_reward, self.reward, prompts, "")

    def _try_reward(self, reward: Scorer, prompts: list[Prompt], name: str) -> str | None:
        """Let a reward look at its prompts and score some of them; returns the first one's rewards in words.

        name: the evaluation set's, "" for the prompts of training.
        """
        reward.check(prompts)
        end = self.hf.eos_token_ids[:1] or (0,)  # an answer has a token

        def tokens_of(text: str) -> list[int]:
            return [*self.tokenizer.encode(text, add_special_tokens=False), *end]

        size = self.config.rollout.n_samples_per_prompt
        first, warnings = try_reward(reward, prompts, tokens_of, size)
        for text in warnings:
            remedy = "look at these labels (--label-key) and at what the reward reads of an answer"
            self.warn("reward", f"{name}{text}", remedy)
        return first

    def evaluation_sets(self) -> None:
        """Read the evaluation's data, and let its rewards look at it."""
        if self.hf is None or self.tokenizer is None:
            return
        arguments = (self.hf, self.tokenizer, self.tools, partial(self.warn, "prompts"))
        for dataset in self.config.eval_sets:
            found = self.attempt("prompts", read_eval_data, self.config, dataset, *arguments)
            if found is not None:
                self.eval_data.append(found)
                if self.for_all_ranks and self.scores:
                    self.attempt("reward", check_rewards, found, self._try_reward)

    def job(self) -> Job:
        """Return what was found; raises PreflightError with every fault."""
        rewards = [self.reward, *(data.reward for data in self.eval_data)]
        made = [reward for reward in rewards if reward is not None]
        self.warnings += _reward_warnings(made)
        self._raise_faults(made)
        files = self.config.data.prompt_files if self.for_node else ()
        job = Job(
            config=self.config,
            hf=self.hf,
            prompts=self.prompts,
            tokenizer=self.tokenizer,
            reward=self.reward,
            prompt_file=FileFingerprint.of(*(f.path for f in files)) if self.for_node else None,
            warnings=tuple(self.warnings),
            eval_data=tuple(self.eval_data),
            sizes=self.sizes,
            conversations=tuple(self.conversations),
            first_reward=self.first_reward,
            agent_facts=self.agent_facts,
        )
        point = self.attempt("checkpoints", resume_point, job)
        self._raise_faults([job])
        if point.start_rollout_id == (last := self.config.rollout.num_rollout):
            text = f"{last} of {last} rollouts were trained before: nothing is left to train"
            warning = JobWarning("checkpoints", text, "--num-rollout counts the whole run")
            job = replace(job, warnings=(*job.warnings, warning))
        return job

    def _raise_faults(self, opened: Iterable[Any]) -> None:
        if self.faults:
            for each in opened:
                each.close()
            raise PreflightError(self.faults, self.warnings)


def preflight_evaluation(config: RunConfig) -> Job:
    """Check what an evaluation without training needs; raises ValueError naming the fault.

    Its prompts are those of all sets.
    """
    if not config.eval_sets:
        raise ConfigError("--eval-prompt-data is required: there is no evaluation set")
    check_evaluation(config)
    if config.rollout.rollout_engines_file is not None:
        raise ConfigError(
            "--rollout-engines-file is for training: name a server by --rollout-external-engine-addrs"
        )
    raise_all(
        f"--use-{name} has no effect on an evaluation without training, whose numbers stay in --run-dir:"
        f" --no-use-{name}"
        for name in ("wandb", "mlflow")
        if getattr(config.trackers, f"use_{name}")
    )
    check_server_flags(config.rollout.sglang, replay=False)
    starts_server = not (config.run.dry_run or config.rollout.has_external_servers)
    check_export(config.model.hf_checkpoint, weights=starts_server)
    hf = read_hf_facts(config.model.hf_checkpoint)
    if not config.rollout.has_external_servers:
        check_class(hf)
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    check_vocabulary(tokenizer, hf)
    for text in config.rollout.rollout_stop:
        stop_token(text, tokenizer)
    name = config.rollout.environment
    tools = get_tools(get_environment(name)) if name is not None else []
    check_tools(config, tokenizer, tools)
    check_variables(tokenizer, config.data)
    if config.agent.named is not None:
        rehearse(config, hf, tokenizer)
    data = tuple(read_eval_data(config, each, hf, tokenizer, tools) for each in config.eval_sets)
    for each in data:
        if config.agent.named is None or config.scores_answers:
            check_rewards(each, lambda reward, prompts, name: reward.check(prompts))
    prompts = [prompt for each in data for prompt in each.prompts]
    warnings = tuple(_reward_warnings(each.reward for each in data))
    return Job(
        config,
        hf,
        prompts,
        tokenizer,
        reward=data[0].reward,
        prompt_file=data[0].prompt_file,
        warnings=warnings,
        eval_data=data,
    )


def _warnings(config: RunConfig) -> Iterator[JobWarning]:
    for text in replay_warnings(config):
        yield JobWarning("configuration", text, "add it, or drop the check")
    for text, remedy in rate_warnings(config):
        yield JobWarning("configuration", text, remedy)
    for text in algorithm_warnings(config):
        yield JobWarning("configuration", text, "r3train docs algorithms has them all")
    checkpoint, rollout, data = config.checkpoint, config.rollout, config.data
    if rollout.num_rollout > 100 and not (checkpoint.save or checkpoint.debug_rollout_only):
        text = f"{rollout.num_rollout:,} rollouts and no checkpoint: what ends the run loses all"
        yield JobWarning("configuration", text, "add --save DIRECTORY")
    by_group = config.trainer.update_weight_transfer_mode == "distributed"
    if rollout.colocate and by_group and not config.serves_adapters:
        text = "--colocate sends all weights over a process group to servers on the same GPUs"
        yield JobWarning(
            "configuration", text, "--update-weight-transfer-mode shared_memory is faster"
        )
    if data.custom_rm_path is not None and data.rm_type is not None:
        text = f"{data.custom_rm_path} scores the answers, and rm_type {data.rm_type} does not"
        yield JobWarning("reward", text, "leave one of the two out")


def _reward_warnings(rewards: Iterable[Scorer]) -> Iterator[JobWarning]:
    if any(reward.runs_programs for reward in rewards) and not isolation():
        text = "programs of the reward code have the network: this machine makes no namespaces"
        yield JobWarning("reward", text, "r3train docs data_and_rewards says what that means")


def _model_warnings(
    config: RunConfig, hf: HfModelFacts, kinds: Mapping[str, TensorKind]
) -> Iterator[JobWarning]:
    """Warn of what a run of this model leaves out or widens; kinds: its checkpoint's tensors by name."""
    narrow = sum(kind.dtype == "bfloat16" for kind in kinds.values())
    if narrow > len(kinds) / 2 and not config.model.bf16:
        text = "the checkpoint is in bfloat16 and will train in float32, with twice the memory"
        yield JobWarning("model", text, "add --bf16")
    if hf.is_moe and not (config.replay.use_rollout_routing_replay or config.learns_conversations):
        text = "mixture of experts without R3: rollout and trainer will choose different experts"
        yield JobWarning("model", text, "add --use-rollout-routing-replay")
    lora, form = config.lora, config.lora.lora_save_hf
    known = hf.model_type in FAMILIES  # or it is refused
    if config.checkpoint.save_hf is not None and lora.enabled and form != "merged" and known:
        reason = not_in_peft(lora, hf)
        if reason is not None:
            text = f"--save-hf will be the merged checkpoint only: {reason}"
            yield JobWarning(
                "configuration", text, "r3train docs lora says which targets PEFT reads whole"
            )
    parts = untrained_parts(hf)
    if parts is None and any(name.startswith("mtp.") for name in kinds):
        parts = (
            "layers of multi-token prediction (mtp.*) are neither served nor trained nor exported"
        )
    if parts is not None:
        yield JobWarning("checkpoint", parts, "an export lacks them too: decode without them")
    if is_of_text_and_images(hf.model_type):
        text = f"{hf.model_type}: text alone is trained and served, its vision tower does not move"
        yield JobWarning("checkpoint", text, "an export has the tower as it was")
    rounded = rounded_tensors(hf) if config.model.bf16 and kinds else []
    if rounded:
        text = f"{', '.join(rounded)}: in float32 on disk, and --bf16 rounds them"
        yield JobWarning("checkpoint", text, "the servers get them so, and an export")
    rollout = config.rollout
    if not (hf.eos_token_ids or rollout.rollout_stop_token_ids or rollout.rollout_stop):
        text = "no eos_token_id in config.json or generation_config.json"
        yield JobWarning("checkpoint", text, "set it, or --rollout-stop-token-ids")


def check_external_server(
    config: RunConfig, hf: HfModelFacts | None, address: str, api_key: str | None
) -> None:
    """Raise ValueError for a server that does not answer, or that the run refuses; hf: None if not known."""
    in_memory = config.trainer.update_weight_transfer_mode == "shared_memory"
    if in_memory and interface_of(host_of(address)) is None:
        raise ValueError(
            f"{address}: this server is on another node, and --update-weight-transfer-mode shared_memory is"
            " for servers on rank 0's: use distributed or disk"
        )
    try:
        with EngineControl([address], api_key=api_key, timeout_s=_ANSWER_S) as control:
            model, info = control.model_info()[0], control.server_info()[0]
            raise_all([f"engine {address} {text}" for text in foreign(info, model)])
            control.require_settings(
                replay=config.replay.use_rollout_routing_replay,
                indexer=hf is not None and replayed_index_topk(config, hf) is not None,
                kept_top_k=config.rollout.kept_top_k,
                exact_boundaries=config.rollout.exact_boundaries,
            )
    except EngineError as error:
        remedy = "r3train serve starts a server; --dry-run --estimate needs none"
        raise ValueError(f"{address}: does not answer as it should: {error}; {remedy}") from None


def check_class(hf: HfModelFacts) -> None:
    """Raise ValueError where config.json does not name the class by which our servers find the model."""
    tiny, file = TINY_MODELS.get(hf.model_type), hf.path / "config.json"
    if tiny is None:  # the family's check refuses it
        return
    name = f"{tiny.kind}For{'ConditionalGeneration' if tiny.vision else 'CausalLM'}"
    name = name.replace("Kimi_", "Kimi")  # SGLang's name is without transformers' underscore
    found = load_json_object(file).get("architectures")
    if found != [name]:
        raise ValueError(
            f"{file}: architectures is {json.dumps(found)}, and servers find the model by it: write"
            f' "architectures": ["{name}"]'
        )


def check_server_split(config: RunConfig, hf: HfModelFacts) -> None:
    """Raise ValueError for servers of our own that cannot split the model's attention heads."""
    size: Any = 1
    with suppress(ConfigError):  # of a flag that the settings' checks have refused
        size = server_fields(config.rollout.sglang).get("tp_size", 1)
    if type(size) is int and size > 0 and hf.num_attention_heads % size:
        raise ValueError(
            f"--sglang-tp-size {size}: the {hf.num_attention_heads} attention heads of {hf.path} do not"
            " divide by it"
        )


def check_says_choices(config: RunConfig, hf: HfModelFacts) -> None:
    """Raise ConfigError for servers of our own that could not say what the model's indexers chose."""
    if replayed_index_topk(config, hf) is None:
        return
    fields: dict[str, Any] = {}
    with suppress(ConfigError):  # of a flag that the settings' checks have refused
        fields = server_fields(config.rollout.sglang)
    found = refused(fields, indexer=True)
    raise_all(f"sglang.{field} = {value!r} {reason}" for field, value, reason in found)


def check_export_directories(config: RunConfig) -> None:
    """Raise ValueError for the first export whose directory cannot be made, or holds something else."""
    for directory in config.checkpoint.hf_directories(config.rollout.num_rollout):
        check_export_directory(directory, config.model.hf_checkpoint)
        # an export is written next to its place and renamed
        check_can_be_made(directory, "save_hf", parents_only=True)


def check_layers_here(config: RunConfig) -> None:
    """Raise ValueError where a visible CUDA device lacks what the actor's layers need there."""
    if not visible_gpus():  # a login node without a device is no reason to refuse
        return
    from r3train.cpu.device import uses_transformer_engine

    uses_transformer_engine(config.model.attention_backend, on_cuda=True)
    if config.parallel.context_parallel_size > 1 and not config.model.bf16:
        raise ValueError(
            "--context-parallel-size above 1 on a CUDA device needs --bf16: Transformer Engine has no attention"
            " of cut sequences in float32"
        )


def check_sinks(model_type: str, transformer_engine: str, config: RunConfig) -> None:
    """Raise ValueError where this Transformer Engine has no attention with the model's sinks.

    Source: ``get_attention_backend`` of 2.11 and 2.12: with sinks and packed sequences 2.11 leaves none, and
    2.12 over context-parallel ranks the fused one only, with all-to-all.
    """
    if tuple(int(part) for part in transformer_engine.split(".")[:2]) < (2, 12):
        raise ValueError(
            f"{model_type}: Transformer Engine {transformer_engine} has no attention with sinks for packed"
            " sequences; expected 2.12.0, as in requirements/gpu.txt"
        )
    exchange = config.model.transformer_overrides.get("cp_comm_type", "p2p")
    if config.parallel.context_parallel_size > 1 and exchange != "a2a":
        raise ValueError(
            f"{model_type}: --context-parallel-size above 1 with cp_comm_type {exchange!r}: Transformer Engine has"
            " attention with sinks over ranks for --transformer-override cp_comm_type=a2a only"
        )


def check_linear_kernels(model_type: str) -> None:
    """Raise ValueError where the kernels of linear attention are not installed, or are older than those compared.

    Before 0.5 those of flash-linear-attention are silently wrong on Hopper with Triton 3.4 and later: the gradients of
    decays and betas.  Source: issue 640 of flash-linear-attention, and its ``chunk_bwd_dqkwg`` of 0.4.2 and 0.5.2.
    Those of Mamba mixers know packed sequences from the versions here on.  Source: Megatron's ``mamba_mixer``.
    """
    for package, least, expected in _LINEAR_KERNELS[FAMILIES[model_type].layers]:
        try:
            found = version(package)
        except PackageNotFoundError:
            found = ""
        if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < least:
            raise ValueError(
                f"{model_type} on a CUDA device: {package} {found or 'is not installed'}; expected {expected}"
            )


_LINEAR_KERNELS = {
    "gated_delta_net": (("fla-core", (0, 5), "0.5.2, as in requirements/gpu.txt"),),
    "mamba": (("mamba-ssm", (2, 0), "2.0 or later"), ("causal-conv1d", (1, 4), "1.4 or later")),
}


def check_memory_history(config: RunConfig) -> None:
    """Raise ValueError for --record-memory-history where no CUDA device is visible."""
    if config.run.record_memory_history and not visible_gpus():
        raise ValueError(
            "--record-memory-history records the memory of CUDA devices, and none is visible here"
        )
