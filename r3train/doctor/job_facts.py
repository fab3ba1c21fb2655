"""Facts of a job that has passed its checks, and its servers' pools."""

from __future__ import annotations

import os

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.engine.control import EngineControl
from r3train.engine.key import engine_api_key
from r3train.engine.sglang_http import HTTPSettings
from r3train.launch.job.checked_job import Job
from r3train.launch.job.finding import Findings, fact, ok, warning


def facts_of_job(config: RunConfig, world_size: int, job: Job) -> Findings:
    """The facts of a job without faults."""
    for address in config.rollout.rollout_external_engine_addrs:
        yield ok(f"server {address}", "answers, and its settings go with this run")
    yield ok("configuration", f"its rules hold for {world_size} rank(s)")
    yield ok("tokenizer", f"{len(job.tokenizer)} tokens")
    yield ok("prompts", f"{len(job.prompts)}, the longest {job.longest_prompt} tokens")
    for line in job.first_prompt:
        yield fact("prompts", line)
    yield ok("reward", f"{job.reward.name}, which can use the labels")
    yield ok("model", _model_text(job.hf))


def check_pools(config: RunConfig, job: Job) -> Findings:
    """The servers' KV pools, where their size is known, against what the requests need under R3."""
    if not (config.replay.use_rollout_routing_replay and config.has_engines):
        return
    rollout = config.rollout
    addrs = rollout.rollout_external_engine_addrs
    if addrs:
        # preflight has asked them for other facts
        settings = HTTPSettings(api_key=engine_api_key(os.environ), request_timeout_s=5.0)
        with EngineControl(addrs, settings) as control:
            pool = control.pool_tokens()
    else:
        given = rollout.sglang.get("max_total_tokens")
        pool = int(given) * rollout.rollout_num_engines if type(given) is int else None
    shortage = rollout.pool_shortage(pool, job.longest_prompt)
    if shortage is not None:
        remedy = (
            "lower --rollout-max-concurrency, or raise --sglang-max-total-tokens or"
            " --sglang-mem-fraction-static"
        )
        yield warning("KV pools", shortage, remedy)
    elif pool is not None:
        yield ok("KV pools", rollout.pool_facts(pool, job.longest_prompt))


def _model_text(hf: HfModelFacts) -> str:
    layers = f"{hf.model_type}: {hf.num_hidden_layers} layers, "
    if not hf.is_moe:
        return f"{layers}dense: R3 has nothing to replay"
    experts = f"{hf.num_experts} experts, top {hf.num_experts_per_tok}"
    return f"{layers}{len(hf.moe_layer_numbers)} of them with {experts}"
