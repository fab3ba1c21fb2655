"""A job whose settings were checked, before any server or model is built."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from r3train.algo.check import check_algorithm
from r3train.config import RunConfig
from r3train.config.cross_checks import (
    algorithm_warnings,
    check_longest_sample,
    check_model,
    check_static,
    eval_prompt_limit,
    prompt_limit,
    replay_warnings,
)
from r3train.config.data import DataSection
from r3train.config.eval_checks import eval_conflicts
from r3train.config.evaluation import EvalDataset
from r3train.config.families import FAMILIES, check_family, untrained_parts
from r3train.config.hf_facts import OF_TEXT_AND_IMAGES, HfModelFacts, read_hf_facts
from r3train.config.sources import ConfigError, plain
from r3train.data.conversations import load_conversations
from r3train.data.fingerprint import FileFingerprint, facts_fingerprint
from r3train.data.order import MixedOrder, PromptOrder
from r3train.data.prompts import ChatTemplate, load_prompts, unknown_tokens
from r3train.data.tokenizer import load_tokenizer
from r3train.environments.registry import get_environment, get_tools
from r3train.rewards.code import isolation
from r3train.rewards.scoring import Scorer
from r3train.engine.backend import EngineError
from r3train.engine.control import EngineControl
from r3train.engine.key import engine_api_key
from r3train.engine.flags import check_server_flags
from r3train.engine.teacher import TEACHER_KEY, ServedTeacher
from r3train.launch.run_dir import check_fresh
from r3train.observe.sinks import check_trackers
from r3train.trainer.megatron.freezing import check_freezing
from r3train.trainer.megatron.overrides import check_overrides
from r3train.types import Prompt, RolloutSample
from r3train.hf_checkpoint import (
    check_export_directory,
    check_tensors,
    read_transformers_config,
)
from r3train.peft_files import check_adapter, lost_by_peft
from r3train.torchvision_stub import declare_torchvision_ops

T = TypeVar("T")

# a server that others use too may take a while
_ANSWER_S = 30.0
# environment variable with the key of --judge-url
JUDGE_KEY = "R3TRAIN_JUDGE_API_KEY"
# facts in which a KL reference, or a teacher that the ranks hold, must be the actor's model
_SAME_MODEL = (
    *("model_type", "num_hidden_layers", "num_experts", "num_experts_per_tok", "vocab_size"),
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "moe_layer_numbers"),
)
# keys of config.json, or patterns of them, that change no log-prob of the actor; all others must be equal
_WITHOUT_EFFECT = """
    _* architectures auto_map transformers_version dtype torch_dtype *_token_id use_cache return_dict
    output_attentions output_hidden_states output_router_logits id2label label2id problem_type
    initializer_range attention_dropout router_aux_loss_coef max_position_embeddings max_window_layers
    num_nextn_predict_layers *mtp_*""".split()


@dataclass(frozen=True)
class EvalData:
    """An evaluation set that was checked: its settings, its prompts and its reward."""

    dataset: EvalDataset
    prompts: list[Prompt]
    reward: Scorer
    prompt_file: FileFingerprint


@dataclass(frozen=True)
class Job:
    """A checked configuration, with the files that its checks have read.

    Data and tokenizer are read once a node: its other ranks have no prompts, tokenizer, prompt_file,
    evaluation sets and conversations.
    """

    config: RunConfig
    hf: HfModelFacts
    prompts: list[Prompt]  # file after file
    tokenizer: Any
    reward: Scorer
    prompt_file: FileFingerprint | None
    warnings: tuple[JobWarning, ...] = ()
    eval_data: tuple[EvalData, ...] = ()
    sizes: tuple[int, ...] = ()  # prompts of each file
    # of --loss-type sft; ``prompts`` holds their beginnings
    conversations: tuple[RolloutSample, ...] = ()

    @property
    def order(self) -> PromptOrder | MixedOrder:
        """The order in which prompts are drawn."""
        seed, data = self.config.rollout.rollout_seed, self.config.data
        weights = [file.weight for file in data.prompt_files]
        if None in weights:
            return PromptOrder(len(self.prompts), seed, data.rollout_shuffle)
        return MixedOrder(self.sizes, weights, seed, data.rollout_shuffle)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: the checkpoint's own, and those of the flags."""
        rollout = self.config.rollout
        named = (stop_token(text, self.tokenizer) for text in rollout.rollout_stop)
        own = self.hf.eos_token_ids
        return tuple(dict.fromkeys((*own, *rollout.rollout_stop_token_ids, *named)))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of the rollouts."""
        return max(len(prompt.token_ids) for prompt in self.prompts)

    def close(self) -> None:
        """End the helpers of all rewards."""
        self.reward.close()
        for data in self.eval_data:
            data.reward.close()


@dataclass(frozen=True)
class JobWarning:
    """Settings or data that work, and probably not as they were meant."""

    subject: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return plain(f"warning: {self.text}: {self.remedy}")


class PreflightError(ConfigError):
    """The faults of a job: its text has one a line, ``faults`` holds (subject, line) of each.

    Subjects: configuration, key of the servers, server ADDRESS, checkpoint, tokenizer, teacher, prompts,
    reward, run directory, checkpoints.  ``warnings`` holds what was found beside the faults.
    """

    def __init__(self, faults: list[tuple[str, str]], warnings: list[JobWarning]):
        super().__init__("\n".join(line for _, line in faults))
        self.faults = faults
        self.warnings = warnings


def preflight(
    config: RunConfig,
    world_size: int,
    *,
    for_all_ranks: bool = False,
    for_node: bool = True,
    starts: bool = True,
) -> Job:
    """Check everything that can be checked before a server or an actor is built.

    The training command, its dry run and the doctor all come through here.  for_all_ranks: do too what
    one rank does for all: ask the servers of --rollout-external-engine-addrs, and let the reward look
    at the data.  for_node: read the data, which one rank of a node does for the others.  starts: False
    where nothing will be written: another run in --run-dir is a warning then.
    Raises PreflightError with every fault that was found.
    """
    faults: list[tuple[str, str]] = []

    def attempt(subject: str, check: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return check(*arguments)
        except ConfigError as error:
            faults.extend((subject, line) for line in str(error).splitlines())
        except ValueError as error:
            faults.append((subject, " ".join(str(error).split())))
        return None

    data, model, settings = config.data, config.model.hf_checkpoint, "configuration"
    warnings = list(_warnings(config))
    attempt(settings, check_static, config, world_size)
    attempt(settings, check_overrides, config)
    replay = config.replay.use_rollout_routing_replay
    rollout = config.rollout
    kept_top_k = rollout.rollout_top_k if rollout.replays_kept_tokens else None
    attempt(
        settings,
        lambda: check_server_flags(
            rollout.sglang,
            replay=replay,
            kept_top_k=kept_top_k,
            adapters=config.serves_adapters,
        ),
    )
    attempt(settings, check_layers_here, config)
    attempt(settings, check_memory_history, config)
    attempt(settings, check_trackers, config)
    # refuses a key that HTTP cannot send
    api_key = attempt("key of the servers", engine_api_key, os.environ)
    if for_all_ranks and config.has_engines:
        for address in config.rollout.rollout_external_engine_addrs:
            attempt(f"server {address}", check_external_server, config, address, api_key)
    attempt("run directory", check_can_be_made, config.run.run_dir or Path("runs"), "run_dir")
    if config.checkpoint.dump_rollouts and config.run.run_dir is not None:
        dumps = config.run.run_dir / "rollouts"
        attempt("run directory", check_can_be_made, dumps, "dump_rollouts")
    if for_all_ranks and starts:
        attempt("run directory", check_fresh, config, os.environ)
    elif for_all_ranks:
        try:
            check_fresh(config, os.environ)
        except ValueError as error:
            remedy = "a new start there is refused"
            warnings.append(JobWarning("run directory", str(error), remedy))
    if config.checkpoint.save is not None:
        attempt("checkpoints", check_can_be_made, config.checkpoint.save, "save")
    if config.checkpoint.save_hf is not None:
        attempt(settings, check_export_directories, config)
    samples_per_prompt = config.rollout.n_samples_per_prompt
    attempt(settings, check_algorithm, config.algorithm, samples_per_prompt)
    hf = attempt("checkpoint", read_hf_facts, model)
    tokenizer = attempt("tokenizer", load_tokenizer, model) if for_node and model.is_dir() else None
    prompts = parts = conversations = None
    if hf is not None:
        attempt(settings, check_model, config, hf, world_size)
        attempt(settings, check_freezing, config, hf)
        attempt(settings, check_adapter, config.lora, hf)
        names = attempt("checkpoint", check_trainable, hf) or ()
        warnings += _model_warnings(config, hf, names)
        if config.model.ref_load is not None:
            attempt("checkpoint", check_other_model, "--ref-load", config.model.ref_load, hf)
        if config.algorithm.holds_teacher and config.model.opd_teacher_load is not None:
            attempt("checkpoint", check_teacher, config.model.opd_teacher_load, hf, tokenizer)
    environment, tools = None, []
    if config.rollout.environment is not None:
        environment = attempt(settings, get_environment, config.rollout.environment)
        tools = get_tools(environment) if environment is not None else []
    if tokenizer is not None:
        attempt(settings, check_tools, config, tokenizer, tools)
        for text in config.rollout.rollout_stop:
            attempt(settings, stop_token, text, tokenizer)
    if hf is not None and tokenizer is not None:
        dropped: list[str] = []
        attempt("tokenizer", check_vocabulary, tokenizer, hf)
        if for_all_ranks and config.has_engines and config.rollout.opd_teacher_url is not None:
            attempt("teacher", check_served_teacher, config, tokenizer)
        if config.learns_conversations:
            found = attempt("prompts", read_conversations, config, hf, tokenizer, dropped.append)
            if found is not None:
                conversations = [conversation for part in found for conversation in part]
                parts = [[conversation.prompt for conversation in part] for part in found]
        else:
            parts = attempt("prompts", read_prompts, config, hf, tokenizer, dropped.append, tools)
        for text in dropped:
            remedy = "raise the limit, or refuse such data with --overlong-prompts error"
            warnings.append(JobWarning("prompts", text, remedy))
        prompts = None if parts is None else [prompt for part in parts for prompt in part]
    if conversations:
        attempt(settings, check_longest_conversation, config, conversations)
    elif prompts:
        if not config.reward_is_optional and all(prompt.label is None for prompt in prompts):
            text = f"no prompt has a label (key {data.label_key})"
            remedy = "name its key with --label-key, if the reward needs one"
            warnings.append(JobWarning("prompts", text, remedy))
        longest = max(len(prompt.token_ids) for prompt in prompts)
        attempt(settings, check_longest_sample, config, longest)
    if prompts:
        unknown = attempt("prompts", unknown_tokens, prompts, tokenizer.unk_token_id)
        if unknown is not None:
            remedy = "look at the first prompt as it is shown, and at the checkpoint's tokenizer"
            warnings.append(JobWarning("prompts", unknown, remedy))
    if prompts and environment is not None:
        attempt(settings, environment, prompts[0])  # it may refuse the prompts
    judge_key, optional = os.environ.get(JUDGE_KEY), config.reward_is_optional
    weights = config.algorithm.weight_of_key
    reward = attempt(
        "reward",
        lambda: Scorer(data, judge_key=judge_key, optional=optional, weight_of_key=weights),
    )
    if optional and prompts and "zero_variance" in config.rollout.rollout_filter:
        attempt("reward", check_not_all_equal, prompts)
    # an environment gives rewards of its own, and dumped rollouts have theirs
    scores = config.has_engines and config.rollout.environment is None
    if for_all_ranks and scores and prompts and reward is not None:
        attempt("reward", reward.check, prompts)
    eval_data: list[EvalData] = []
    if hf is not None and tokenizer is not None:
        for dataset in config.eval_sets:
            found = attempt("prompts", read_eval_data, config, dataset, hf, tokenizer, tools)
            if found is not None:
                eval_data.append(found)
                if for_all_ranks and scores:
                    attempt("reward", check_rewards, found)
    rewards = [made for made in (reward, *(data.reward for data in eval_data)) if made is not None]
    warnings += _reward_warnings(rewards)
    if faults:
        for made in rewards:
            made.close()
        raise PreflightError(faults, warnings)
    assert hf is not None and reward is not None
    assert not for_node or prompts is not None and parts is not None
    prompt_file = FileFingerprint.of(*(f.path for f in data.prompt_files)) if for_node else None
    sizes = tuple(map(len, parts or ()))
    job = Job(
        *(config, hf, prompts or [], tokenizer, reward, prompt_file),
        *(tuple(warnings), tuple(eval_data), sizes, tuple(conversations or ())),
    )
    from r3train.launch.resume import resume_point  # it takes a Job

    attempt("checkpoints", resume_point, job)
    if faults:
        job.close()
        raise PreflightError(faults, warnings)
    return job


def preflight_evaluation(config: RunConfig) -> Job:
    """Check what an evaluation without training needs; raises ValueError naming the fault.

    Its prompts are those of all sets.
    """
    if not config.eval_sets:
        raise ConfigError("--eval-prompt-data is required: there is no evaluation set")
    complaints = list(eval_conflicts(config))
    for name in ("wandb", "mlflow"):
        if getattr(config.trackers, f"use_{name}"):
            complaints.append(
                f"--use-{name} has no effect on an evaluation without training, whose numbers stay in"
                f" --run-dir: --no-use-{name}"
            )
    if complaints:
        raise ConfigError("\n".join(complaints))
    check_server_flags(config.rollout.sglang, replay=False)
    hf = read_hf_facts(config.model.hf_checkpoint)
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    check_vocabulary(tokenizer, hf)
    for text in config.rollout.rollout_stop:
        stop_token(text, tokenizer)
    name = config.rollout.environment
    tools = get_tools(get_environment(name)) if name is not None else []
    check_tools(config, tokenizer, tools)
    data = tuple(read_eval_data(config, each, hf, tokenizer, tools) for each in config.eval_sets)
    for each in data:
        check_rewards(each)
    prompts = [prompt for each in data for prompt in each.prompts]
    warnings = tuple(_reward_warnings(each.reward for each in data))
    return Job(
        *(config, hf, prompts, tokenizer, data[0].reward, data[0].prompt_file, warnings),
        eval_data=data,
    )


def _warnings(config: RunConfig) -> Iterator[JobWarning]:
    for text in replay_warnings(config):
        yield JobWarning("configuration", text, "add it, or drop the check")
    for text in algorithm_warnings(config):
        yield JobWarning("configuration", text, "docs/configuration.md has them all")


def _reward_warnings(rewards: Iterable[Scorer]) -> Iterator[JobWarning]:
    if any(reward.runs_programs for reward in rewards) and not isolation():
        text = "programs of the reward code have the network: this machine makes no namespaces"
        yield JobWarning("reward", text, "docs/code_rewards.md says what that means")


def _model_warnings(
    config: RunConfig, hf: HfModelFacts, names: Iterable[str]
) -> Iterator[JobWarning]:
    """Warn of what a run of this model leaves out; names: those of its checkpoint's tensors."""
    if hf.is_moe and not (config.replay.use_rollout_routing_replay or config.learns_conversations):
        text = "mixture of experts without R3: rollout and trainer will choose different experts"
        yield JobWarning("model", text, "add --use-rollout-routing-replay")
    lora, form = config.lora, config.lora.lora_save_hf
    known = hf.model_type in FAMILIES  # or it is refused
    if config.checkpoint.save_hf is not None and lora.enabled and form != "merged" and known:
        lost = lost_by_peft(lora, hf)
        if lost is not None:
            text = (
                f"--save-hf will be the merged checkpoint alone: PEFT drops the adapter of {lost}"
            )
            yield JobWarning(
                "configuration", text, "docs/lora.md says which targets PEFT reads whole"
            )
    parts = untrained_parts(hf)
    if parts is None and any(name.startswith("mtp.") for name in names):
        parts = (
            "layers of multi-token prediction (mtp.*) are neither served nor trained nor exported"
        )
    if parts is not None:
        yield JobWarning("checkpoint", parts, "an export lacks them too: decode without them")
    if hf.model_type in OF_TEXT_AND_IMAGES:
        text = (
            f"{hf.model_type}: text alone is trained, its vision tower is neither served nor moved"
        )
        yield JobWarning("checkpoint", text, "an export has the tower as it was")
    rollout = config.rollout
    if not (hf.eos_token_ids or rollout.rollout_stop_token_ids or rollout.rollout_stop):
        text = "no eos_token_id in config.json or generation_config.json"
        yield JobWarning("checkpoint", text, "set it, or --rollout-stop-token-ids")


def stop_token(text: str, tokenizer: Any) -> int:
    """The token of --rollout-stop TEXT; raises ValueError unless TEXT is a token of its own."""
    token = tokenizer.get_added_vocab().get(text)
    if token is None:
        raise ValueError(
            f"--rollout-stop {text!r} is not one of the tokenizer's added tokens: servers have no"
            " tokenizer here and stop at tokens alone; add the token, or score the text up to it"
        )
    return token


def chat_template(
    config: RunConfig, tokenizer: Any, tools: Sequence[dict[str, Any]]
) -> ChatTemplate:
    """Return the tokenizer's chat template with what the settings give it; tools: an environment's."""
    data = config.data
    return ChatTemplate(tokenizer, data.apply_chat_template_kwargs, data.tool_key, tools)


def check_tools(config: RunConfig, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError for tools of an environment that its prompts or replies would not show."""
    if not tools:
        return
    name = f"--environment {config.rollout.environment}"
    if not config.data.apply_chat_template:
        raise ValueError(f"{name} has tools, which the model sees with --apply-chat-template alone")
    try:
        chat_template(config, tokenizer, tools).check_tools()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_can_be_made(directory: Path, setting: str, *, beside: bool = False) -> None:
    """Raise ValueError unless ``directory`` or its nearest parent that exists can be written to.

    beside: a parent must be, for the directory is put in its place by its name.
    """
    places, there = (directory.absolute(), *directory.absolute().parents)[beside:], directory
    try:
        there = next(p for p in places if p.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"{directory}: cannot be made ({setting}): {there}: cannot be written: {error.strerror}"
        ) from None


def check_trainable(hf: HfModelFacts) -> list[str]:
    """Return the names of a checkpoint's tensors.

    Raises ValueError for a family that nobody verified, and for a tensor too many or too few.
    """
    check_family(hf)
    return check_tensors(hf)


def check_other_model(flag: str, path: Path, actor: HfModelFacts) -> None:
    """Raise ValueError unless ``path`` is a checkpoint of the actor's model (--ref-load, a teacher)."""
    try:
        hf = read_hf_facts(path)
        check_trainable(hf)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    for field in dataclasses.fields(hf):
        ours, theirs = getattr(actor, field.name), getattr(hf, field.name)
        if ours != theirs and field.name in _SAME_MODEL:
            raise ValueError(f"{flag} {path}: {field.name} is {theirs}, the actor has {ours}")
    # the ranks build it from the actor's config.json
    mine, other = _computed(actor.path), _computed(path)
    for key in sorted(mine.keys() | other):
        if mine.get(key) != other.get(key):
            raise ValueError(
                f"{flag} {path}: {key} is {other.get(key)!r} in config.json, the actor has"
                f" {mine.get(key)!r}: it would be computed as the actor, and its log-probs be others"
            )


def _computed(path: Path) -> dict[str, Any]:
    """Return the keys of a checkpoint's config.json that decide log-probs, with transformers' defaults."""
    declare_torchvision_ops()
    try:
        content = read_transformers_config(path).get_text_config().to_dict()
    except Exception as error:  # transformers raises many kinds for a bad file
        raise ValueError(f"{path}/config.json: transformers cannot read it: {error}") from error
    return {
        key: value
        for key, value in content.items()
        if not any(fnmatchcase(key, pattern) for pattern in _WITHOUT_EFFECT)
    }


def check_teacher(path: Path, actor: HfModelFacts, tokenizer: Any) -> None:
    """Raise ValueError unless ``path`` is a checkpoint of the actor's model with its vocabulary.

    tokenizer: the actor's, or None if it has none.
    """
    check_other_model("--opd-teacher-load", path, actor)
    if tokenizer is None:
        return
    try:
        theirs = load_tokenizer(path).get_vocab()
    except ValueError as error:
        raise ValueError(f"--opd-teacher-load: {error}") from None
    ours = tokenizer.get_vocab()
    other = sorted(token for token in ours.keys() | theirs if ours.get(token) != theirs.get(token))
    if other:
        raise ValueError(
            f"--opd-teacher-load {path}: its tokenizer is another one: {other[0]!r} is token"
            f" {theirs.get(other[0])}, the actor has {ours.get(other[0])} ({len(other)} differ)"
        )


def served_teacher(config: RunConfig) -> ServedTeacher:
    """Make the client of --opd-teacher-url; raises ValueError for a URL or a key that HTTP cannot take."""
    rollout = config.rollout
    assert rollout.opd_teacher_url is not None
    return ServedTeacher(
        rollout.opd_teacher_url,
        api_key=engine_api_key(os.environ, TEACHER_KEY),
        request_timeout_s=rollout.rollout_request_timeout_s,
        max_concurrency=rollout.max_concurrency,
        max_tries=config.faults.max_bad_answers,
    )


def check_served_teacher(config: RunConfig, tokenizer: Any) -> None:
    """Raise ValueError for a teacher that does not answer, or whose tokenizer is not the actor's."""
    vocabulary = sorted(tokenizer.get_vocab().values())

    async def ask() -> None:
        teacher = served_teacher(config)
        try:
            await teacher.check_vocabulary(tokenizer.decode, vocabulary)
        finally:
            await teacher.aclose()

    try:
        asyncio.run(ask())
    except EngineError as error:
        raise ValueError(f"--opd-teacher-url: does not answer as it should: {error}") from None


def check_vocabulary(tokenizer: Any, hf: HfModelFacts) -> None:
    """Raise ValueError for a tokenizer whose tokens the model does not have."""
    count = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    if count > hf.vocab_size:
        raise ValueError(
            f"{hf.path}: the tokenizer has {count} tokens, the model has {hf.vocab_size}: ids"
            " past them crash it; copy the tokenizer files of the model's own release there"
        )


def check_external_server(config: RunConfig, address: str, api_key: str | None) -> None:
    """Raise ValueError for a server that does not answer, or that the run refuses."""
    try:
        with EngineControl([address], api_key=api_key, timeout_s=_ANSWER_S) as control:
            control.model_info()
            if config.replay.use_rollout_routing_replay:
                control.require_routed_experts()
            if config.rollout.replays_kept_tokens:
                control.require_kept_tokens(config.rollout.rollout_top_k)
            if config.rollout.pause_generation_mode != "drain":
                control.require_exact_boundaries()
    except EngineError as error:
        raise ValueError(f"{address}: does not answer as it should: {error}") from None


def check_export_directories(config: RunConfig) -> None:
    """Raise ValueError for the first export whose directory cannot be made, or holds something else."""
    for directory in config.checkpoint.hf_directories(config.rollout.num_rollout):
        check_export_directory(directory, config.model.hf_checkpoint)
        # an export is written beside its place and renamed
        check_can_be_made(directory, "save_hf", beside=True)


def check_layers_here(config: RunConfig) -> None:
    """Raise ValueError where a visible CUDA device lacks what the actor's layers need there."""
    import torch

    from r3train.trainer.megatron.cpu_device import uses_transformer_engine

    if torch.cuda.is_available():  # a login node without a device is no reason to refuse
        uses_transformer_engine(config.model.attention_backend, on_cuda=True)
    if config.lora.enabled and (
        torch.cuda.is_available() or config.model.attention_backend not in ("auto", "local")
    ):
        raise ValueError(
            "--lora-rank: adapters are built on Megatron's own layers, which run on a CPU alone; those"
            " of Transformer Engine, which a CUDA device needs, have none yet"
        )


def check_memory_history(config: RunConfig) -> None:
    """Raise ValueError for --record-memory-history where no CUDA device is visible."""
    import torch

    if config.run.record_memory_history and not torch.cuda.is_available():
        raise ValueError(
            "--record-memory-history records the memory of CUDA devices, and none is visible here"
        )


def read_prompts(
    config: RunConfig,
    hf: HfModelFacts,
    tokenizer: Any,
    note: Callable[[str], None] | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> list[list[Prompt]]:
    """Read the prompts of each file; each leaves room for the longest response in the context.

    note: told of prompts that were dropped (--overlong-prompts); tools: those of rows without any.
    Raises ValueError naming file and line, also for a prompt that is read twice.
    """
    data = config.data
    limit, limit_name = prompt_limit(config, hf)
    files = data.prompt_files
    found = [
        load_prompts(
            file.path,
            rows=slice(file.start, file.stop),
            tokenizer=tokenizer,
            input_key=data.input_key,
            label_key=data.label_key,
            metadata_key=data.metadata_key,
            apply_chat_template=data.apply_chat_template,
            template_kwargs=data.apply_chat_template_kwargs,
            tool_key=data.tool_key,
            tools=tools,
            max_prompt_len=limit,
            limit_name=limit_name,
            note=note if data.overlong_prompts == "drop" else None,
        )
        for file in files
    ]
    if len({file.path.name for file in files}) < len({file.path for file in files}):
        found = [
            [
                dataclasses.replace(prompt, prompt_id=f"{file.path}:{prompt.index}")
                for prompt in part
            ]
            for file, part in zip(files, found)
        ]
    counts = Counter(prompt.prompt_id for part in found for prompt in part)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ValueError(
            f"prompt {twice} is read twice (prompt_data): for more of a file give it a weight"
        )
    return found


def read_conversations(
    config: RunConfig,
    hf: HfModelFacts,
    tokenizer: Any,
    note: Callable[[str], None] | None = None,
) -> list[list[RolloutSample]]:
    """Read the conversations of each file (--loss-type sft); raises ValueError naming file and line.

    note: told of conversations that were dropped (--overlong-prompts).
    """
    data = config.data
    limit, limit_name = prompt_limit(config, hf)
    return [
        load_conversations(
            file.path,
            rows=slice(file.start, file.stop),
            tokenizer=tokenizer,
            input_key=data.input_key,
            template_kwargs=data.apply_chat_template_kwargs,
            tool_key=data.tool_key,
            max_prompt_len=limit,
            prompt_limit_name=limit_name,
            max_response_len=config.rollout.rollout_max_response_len,
            note=note if data.overlong_prompts == "drop" else None,
        )
        for file in data.prompt_files
    ]


def check_longest_conversation(config: RunConfig, conversations: Sequence[RolloutSample]) -> None:
    """Raise ValueError for a conversation that no microbatch can hold."""
    longest = max(conversations, key=lambda conversation: conversation.num_tokens)
    tokens, cp = config.trainer.max_tokens_per_gpu, config.parallel.context_parallel_size
    if longest.num_tokens > tokens * cp:
        raise ValueError(
            f"{longest.prompt.prompt_id}: the conversation has {longest.num_tokens} tokens, expected at"
            f" most max_tokens_per_gpu {tokens} * context_parallel_size {cp} = {tokens * cp}"
        )


def read_eval_data(
    config: RunConfig,
    dataset: EvalDataset,
    hf: HfModelFacts,
    tokenizer: Any,
    tools: Sequence[dict[str, Any]] = (),
) -> EvalData:
    """Read an evaluation set and make its reward; raises ValueError naming file, line or flag.

    tools: those of rows without any.
    """
    limit, limit_name = eval_prompt_limit(config, hf, dataset)
    try:
        prompts = load_prompts(
            dataset.path,
            tokenizer=tokenizer,
            input_key=dataset.input_key,
            label_key=dataset.label_key,
            metadata_key=dataset.metadata_key,
            apply_chat_template=dataset.apply_chat_template,
            template_kwargs=config.data.apply_chat_template_kwargs,
            tool_key=config.data.tool_key,
            tools=tools,
            max_prompt_len=limit,
            limit_name=limit_name,
        )
        settings, key = scored_by(config.data, dataset), os.environ.get(JUDGE_KEY)
        own = dataset.rm_type is not None and ":" not in dataset.rm_type
        weights = None if own else config.algorithm.weight_of_key
        reward = Scorer(settings, rm_type=dataset.rm_type, judge_key=key, weight_of_key=weights)
    except ValueError as error:
        raise ValueError(f"evaluation set {dataset.name}: {error}") from None
    return EvalData(dataset, prompts, reward, FileFingerprint.of(dataset.path))


def check_rewards(data: EvalData) -> None:
    """Raise ValueError naming the set and a prompt that its reward cannot score."""
    try:
        data.reward.check(data.prompts)
    except ValueError as error:
        raise ValueError(f"evaluation set {data.dataset.name}: {error}") from None


def check_not_all_equal(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError where no row has a reward, and groups of equal rewards are dropped."""
    if not any(prompt.metadata.get("rm_type") for prompt in prompts):
        raise ValueError(
            "--rollout-filter zero_variance drops every group: no reward is named (--rm-type), so all"
            " rewards are 0"
        )


def scored_by(data: DataSection, dataset: EvalDataset) -> DataSection:
    """The reward's settings for an evaluation set.

    --group-rm is of --custom-rm-path alone; --reward-key is of the functions of the user.
    """
    if dataset.rm_type is None:
        return data
    key = data.reward_key if ":" in dataset.rm_type else None
    return data.model_copy(update={"group_rm": False, "reward_key": key})


def would_run(job: Job, world_size: int) -> list[str]:
    """Lines that say what a run of the job would do, for its dry run."""
    from r3train.host_group import RANK_DEFAULTS

    config, lengths = job.config, sorted(len(prompt.token_ids) for prompt in job.prompts)
    rollout, num, steps = config.rollout, len(lengths), config.steps_per_rollout
    kind = "conversations" if config.learns_conversations else "prompts"
    per_epoch = num / rollout.rollout_batch_size
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    dp_size = world_size // config.parallel.dense_ranks
    return [
        f"{num:,} {kind} of {lengths[0]:,} to {lengths[-1]:,} tokens, median {lengths[num // 2]:,}",
        f"{rollout.num_rollout:,} rollouts of {rollout.rollout_batch_size:,} {kind}: an epoch is"
        f" {per_epoch:,.4g} rollouts, the run {rollout.num_rollout / per_epoch:,.3g} epochs",
        f"a rollout is {samples:,} samples and {steps:,} optimizer step{'s' * (steps != 1)} of"
        f" {samples // steps:,}",
        f"{world_size} rank{'s' * (world_size != 1)}, data-parallel size {dp_size}",
        "on CUDA every rank sets, unless you do: "
        + ", ".join(f"{name}={value}" for name, value in RANK_DEFAULTS.items()),
    ]


def eval_settings(job: Job, weights: Path | None = None) -> dict[str, str]:
    """Fingerprint, by name, all that the answers of an evaluation set depend on beside its version.

    weights: the checkpoint that training began with; None: hf_checkpoint.
    """
    rollout, data = job.config.rollout, job.config.data
    shared = {
        "weights": str(weights or job.config.model.hf_checkpoint),
        "seed": rollout.rollout_seed,
        "stop": job.stop_token_ids,
        "context": rollout.rollout_max_context_len,
        "reward": (data.rm_type, data.custom_rm_path, data.reward_key),
        **(
            {"reward_keys": weights_of}
            if (weights_of := job.config.algorithm.weight_of_key)
            else {}
        ),
        "environment": rollout.environment,
        "turns": (rollout.environment_max_turns, rollout.environment_max_turn_len),
    }
    return {
        each.dataset.name: facts_fingerprint(
            {
                **shared,
                **each.dataset.model_dump(mode="json", exclude={"path"}),
                "sha256": each.prompt_file.sha256,
            }
        )
        for each in job.eval_data
    }
