"""The training command's own checks as findings, and the weights, which it does not look at."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts
from r3train.config.lora_settings import LoraSection
from r3train.data.prompts import shown
from r3train.doctor.finding import Finding, Findings, fact, ok, problem, warning
from r3train.engine.control import EngineControl
from r3train.engine.key import engine_api_key
from r3train.hf_checkpoint import TensorKind, trained_tensors, weight_files
from r3train.launch.job import JobWarning
from r3train.launch.preflight import PreflightError, preflight
from r3train.routing.layers import layers_by_stage

# ends of names of matrices that tensor ranks do not share out
_WHOLE = (".q_a_proj.weight", ".kv_a_proj_with_mqa.weight", ".gate.weight", ".router.weight")


@dataclass(frozen=True)
class Weights:
    """Parameters that the actor holds of a checkpoint, counted from the headers of its files.

    Layers of multi-token prediction are on disk only, and not here.
    ``adapter_dense``, ``adapter_expert``: those of the adapters that LoRA would put on it.  ``whole``: those of
    ``dense`` that every tensor rank has: matrices of routers, and the first of MLA's.
    """

    dense: int
    expert: int
    adapter_dense: int = 0
    adapter_expert: int = 0
    whole: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.expert


def check_job(config: RunConfig, world_size: int) -> Generator[Finding, None, int | None]:
    """The training command's own checks, a finding each; those of a good job come with its facts.

    Returns the tokens of a good job's longest prompt.
    """
    if config.run.estimate:  # printed here as by the dry run that it asks for
        run = config.run.model_copy(update={"dry_run": True})
        config = config.model_copy(update={"run": run})
    try:
        job = preflight(config, world_size, for_all_ranks=True, starts=False)
    except PreflightError as error:
        yield from _warnings(error.warnings)
        for subject, text in error.faults:
            remedy = "fix the setting or the file that it names (docs/configuration.md)"
            if subject.startswith("server "):
                remedy = (
                    "start it (r3train serve), or fix --rollout-external-engine-addrs or our key"
                )
            yield problem(subject, text.strip(), remedy)
        return None
    job.reward.close()
    yield from _warnings(job.warnings)
    for address in config.rollout.rollout_external_engine_addrs:
        yield ok(f"server {address}", "answers, and its settings go with this run")
    yield ok("configuration", f"its rules hold for {world_size} rank(s)")
    yield ok("tokenizer", f"{len(job.tokenizer)} tokens")
    yield ok("prompts", f"{len(job.prompts)}, the longest {job.longest_prompt} tokens")
    for line in shown(job.prompts[0], job.tokenizer):
        yield fact("prompts", line)
    yield ok("reward", f"{job.reward.name}, which can use the labels")
    yield from check_pools(config, job.longest_prompt)
    return job.longest_prompt


def check_pools(config: RunConfig, longest_prompt: int) -> Findings:
    """The servers' KV pools, where their size is known, against what the requests need under R3.

    longest_prompt: its tokens.
    """
    if not (config.replay.use_rollout_routing_replay and config.has_engines):
        return
    rollout = config.rollout
    addrs = rollout.rollout_external_engine_addrs
    if addrs:
        # preflight has asked them for other facts
        with EngineControl(addrs, api_key=engine_api_key(os.environ), timeout_s=5.0) as control:
            pool = control.pool_tokens()
    else:
        given = rollout.sglang.get("max_total_tokens")
        pool = int(given) * rollout.rollout_num_engines if type(given) is int else None
    shortage = rollout.pool_shortage(pool, longest_prompt)
    if shortage is not None:
        remedy = (
            "lower --rollout-max-concurrency, or raise --sglang-max-total-tokens or"
            " --sglang-mem-fraction-static"
        )
        yield warning("KV pools", shortage, remedy)
    elif pool is not None:
        yield ok("KV pools", rollout.pool_facts(pool, longest_prompt))


def _warnings(found: Iterable[JobWarning]) -> Findings:
    for each in found:
        yield warning(each.subject, each.text, each.remedy)


def check_weights(hf: HfModelFacts, lora: LoraSection) -> Generator[Finding, None, Weights | None]:
    """The model's facts, and whether every weight file is there and whole; returns the weights."""
    layers = f"{hf.model_type}: {hf.num_hidden_layers} layers, "
    if hf.is_moe:
        experts = f"{hf.num_experts} experts, top {hf.num_experts_per_tok}"
        yield fact("model", f"{layers}{len(hf.moe_layer_numbers)} of them with {experts}")
    else:
        yield fact("model", f"{layers}dense: R3 has nothing to replay")
    try:
        weights = read_weights(hf, lora)
    except ValueError:
        return None  # check_job has said so
    text = f"{weights.total:,} parameters in {len(weight_files(hf.path))} file(s), all there"
    yield ok("checkpoint", text)
    return weights


def checkpoint_bytes(hf: HfModelFacts) -> int:
    """Bytes of a checkpoint's files; raises ValueError as ``read_weights`` does."""
    return sum(file.stat().st_size for file in weight_files(hf.path))


def read_weights(hf: HfModelFacts, lora: LoraSection = LoraSection()) -> Weights:
    """Count parameters from the headers of *.safetensors, and compare with the index.

    Raises ValueError naming the file that is missing, cut or unreadable.
    """
    return count_weights(trained_tensors(hf), lora)


def count_weights(kinds: Mapping[str, TensorKind], lora: LoraSection) -> Weights:
    """Count the parameters of tensors by name, and those of the adapters that LoRA would put on them."""
    sizes = {name: kind.num_elements for name, kind in kinds.items()}
    expert = sum(size for name, size in sizes.items() if ".experts." in name)
    adapters = {True: 0, False: 0}  # by: is it an expert's
    for name in lora.targets(kinds) if lora.enabled else ():
        *experts, rows, columns = kinds[name].shape
        adapters[".experts." in name] += lora.lora_rank * math.prod(experts) * (rows + columns)
    whole = sum(size for name, size in sizes.items() if name.endswith(_WHOLE))
    dense = sum(sizes.values()) - expert
    return Weights(dense, expert, adapters[False], adapters[True], whole)


def read_stages(config: RunConfig, hf: HfModelFacts) -> list[dict[str, TensorKind]]:
    """Kinds of the checkpoint's tensors by name, for each pipeline stage those that its ranks share.

    A tied embedding is in the first and the last.  Raises ValueError as ``read_weights`` does, and for a
    layer that no stage has.
    """
    stage_of = {
        layer: number
        for number, chunks in enumerate(layers_by_stage(config.parallel, hf))
        for chunk in chunks
        for layer in chunk
    }
    stages: list[dict[str, TensorKind]] = [
        {} for _ in range(config.parallel.pipeline_model_parallel_size)
    ]
    for name, kind in trained_tensors(hf).items():
        _, in_layer, rest = name.partition(".layers.")
        is_embedding = "embed_tokens" in name
        if in_layer:
            layer = int(rest.partition(".")[0]) + 1
            if layer not in stage_of:
                raise ValueError(f"{name}: no pipeline stage has layer {layer}")
            stages[stage_of[layer]][name] = kind
            continue
        if is_embedding:
            stages[0][name] = kind
        if not is_embedding or hf.tie_word_embeddings:
            stages[-1][name] = kind
    return stages
