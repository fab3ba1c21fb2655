"""The training command's own checks as findings."""

from __future__ import annotations

import os
from collections.abc import Iterable

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts
from r3train.doctor.finding import Findings, fact, ok, problem, warning
from r3train.engine.control import EngineControl
from r3train.engine.key import engine_api_key
from r3train.launch.job.checked_job import JobWarning
from r3train.launch.job.preflight import PreflightError, preflight


def check_job(config: RunConfig, world_size: int) -> Findings:
    """The training command's own checks, a finding each; those of a good job come with its facts."""
    try:
        job = preflight(config, world_size, for_all_ranks=True, starts=False)
    except PreflightError as error:
        yield from _warnings(error.warnings)
        for subject, text in error.faults:
            remedy = "fix the setting or the file that it names (r3train docs configuration)"
            yield problem(subject, text.strip(), remedy)
        return
    job.reward.close()
    yield from _warnings(job.warnings)
    for address in config.rollout.rollout_external_engine_addrs:
        yield ok(f"server {address}", "answers, and its settings go with this run")
    yield ok("configuration", f"its rules hold for {world_size} rank(s)")
    yield ok("tokenizer", f"{len(job.tokenizer)} tokens")
    yield ok("prompts", f"{len(job.prompts)}, the longest {job.longest_prompt} tokens")
    for line in job.first_prompt:
        yield fact("prompts", line)
    yield ok("reward", f"{job.reward.name}, which can use the labels")
    yield from check_pools(config, job.longest_prompt)
    yield ok("model", _model_text(job.hf))


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


def _model_text(hf: HfModelFacts) -> str:
    layers = f"{hf.model_type}: {hf.num_hidden_layers} layers, "
    if not hf.is_moe:
        return f"{layers}dense: R3 has nothing to replay"
    experts = f"{hf.num_experts} experts, top {hf.num_experts_per_tok}"
    return f"{layers}{len(hf.moe_layer_numbers)} of them with {experts}"
