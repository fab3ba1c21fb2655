"""``doctor --probe``: the same texts through a server, an actor and Hugging Face's own model.

One rank, no parallelism: this finds an engine or a build that computes something else.  Topologies
that do are found by ``r3train verify``.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts, read_hf_facts
from r3train.config.parallel_settings import ParallelSection
from r3train.doctor.engine_probe import SUBJECT, Situations, draw_situations
from r3train.doctor.finding import PROBLEM, Finding, Findings, problem, room
from r3train.doctor.judgement import (
    ACTOR,
    BFLOAT16,
    FLOAT32,
    judge_answers,
)
from r3train.doctor.memory import PROCESS_BYTES
from r3train.doctor.reference import load_reference
from r3train.launch.estimate import Model, stages, value_bytes

if TYPE_CHECKING:
    import torch

Got = TypeVar("Got")
_CHUNK = 64
_LONG = 200
_SHORT = 24


def probe_engines(config: RunConfig, gpu_bytes: int = 0) -> Findings:
    """Start a server and an actor of this checkpoint, compare them, stop them.

    gpu_bytes: memory of the GPU that the actor would be on; 0 without one.
    """
    import psutil

    hf = read_hf_facts(config.model.hf_checkpoint)
    refusal = no_room(config, Model(hf, config.lora), gpu_bytes, psutil.virtual_memory().available)
    if refusal is not None:
        yield refusal
        return
    context = config.rollout.rollout_max_context_len or hf.max_position_embeddings
    rng = np.random.default_rng(0)
    # of random tokens; the long one is prefilled in chunks
    short, long = (
        rng.integers(0, hf.vocab_size, n).astype(np.int32)
        for n in (_SHORT, min(_LONG, context - _SHORT))
    )
    texts = {"a short text": short, "a long text": long}
    # before anything imports megatron-core
    device = yield from _guarded(ACTOR, _prepare_device)
    reference = yield from _guarded(
        "Hugging Face's model",
        lambda: load_reference(config.model.hf_checkpoint, bf16=config.model.bf16),
    )
    if device is None or reference is None:
        return
    sampled = yield from _guarded(
        SUBJECT, lambda: _draw_situations(config, hf, (short, long), context)
    )
    situations = sampled or Situations({}, [])
    answers = {what: answer.token_ids for what, answer in situations.sampled.items()}
    actor = yield from _guarded(
        ACTOR, lambda: _actor_log_probs(config, device, {**texts, **answers})
    )
    judged = judge_answers(
        texts,
        situations,
        reference,
        actor or {},
        moe_layers=hf.moe_layer_numbers,
        tolerance=BFLOAT16 if config.model.bf16 else FLOAT32,
    )
    yield from (yield from _guarded("probe", lambda: list(judged))) or ()


def no_room(config: RunConfig, model: Model, gpu_bytes: int, host_bytes: int) -> Finding | None:
    """The finding that refuses a probe of a model that one device cannot train; None with room.

    The actor is whole and has its optimizer; Hugging Face's model is on the host next to it.
    """
    (alone,) = stages(_alone(config), model, 1)
    actor = {
        "the whole model with its optimizer": alone.held.rank,
        "the actor's process": PROCESS_BYTES,
    }
    host = {
        "Hugging Face's model": model.total.total * value_bytes(config),
        "its process": PROCESS_BYTES,
    }
    places = {"the host": (host_bytes, host if gpu_bytes else host | actor)}
    if gpu_bytes:
        places["one GPU"] = (gpu_bytes, actor)
    remedy = (
        "probe a smaller --hf-checkpoint of the same family on this machine: fewer layers and "
        "experts, made with r3train make-tiny-model or by cutting this one"
    )
    found = [room("probe", f"not run: {p}", *needs, remedy) for p, needs in places.items()]
    return next((finding for finding in found if finding.level == PROBLEM), None)


def _prepare_device() -> torch.device:
    from r3train.cpu.device import prepare_device

    return prepare_device()


def _alone(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"parallel": ParallelSection()})


def _draw_situations(
    config: RunConfig, hf: HfModelFacts, texts: tuple[np.ndarray, np.ndarray], context: int
) -> Situations:
    """The answers of a server of this checkpoint; it has ended when this returns."""
    from r3train.engine.server import SGLangServer

    chunk = min(_CHUNK, len(texts[1]) // 2)
    with tempfile.TemporaryDirectory() as directory:
        server = SGLangServer(
            config.model.hf_checkpoint,
            Path(directory) / "sglang.log",
            dtype=config.model.dtype_name,
            server_args={**config.rollout.sglang, "chunked_prefill_size": chunk},
            return_routed_experts=hf.is_moe,
            exact_boundaries=config.rollout.exact_boundaries,  # overlap as in the run
            start_timeout_s=config.rollout.rollout_server_start_timeout_s,
            api_key=secrets.token_hex(16),
            env_names=config.rollout.rollout_server_env,
        )
        with server:
            server.wait_ready()
            routes = hf.route_shape if hf.is_moe else None
            return asyncio.run(
                draw_situations(server.addr, routes, texts, context=context, api_key=server.api_key)
            )


def _actor_log_probs(
    config: RunConfig, device, ids: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """An actor's log-probs of every text, float32[T] by name; it has ended when this returns."""
    import torch

    from r3train.host_group import join_ranks
    from r3train.launch.build_actor import build_actor
    from r3train.launch.preflight import preflight
    from r3train.launch.resume import ResumePoint
    from r3train.loop import weight_probe
    from r3train.trainer.megatron import topology

    job = preflight(_alone(config), 1)
    with tempfile.TemporaryDirectory() as directory:
        store = torch.distributed.FileStore(str(Path(directory) / "store"), 1)
        join_ranks("auto", store, 0, 1, timeout=timedelta(minutes=5))
        try:
            actor = build_actor(job, device, ResumePoint())
            return {
                what: weight_probe.actor_log_probs(actor, [actor.topology], text)
                for what, text in ids.items()
            }
        finally:
            topology.shutdown()
            job.reward.close()


def _guarded(subject: str, work: Callable[[], Got]) -> Generator[Finding, None, Got | None]:
    """Return the result of ``work``, or None after a finding with the error that it raised."""
    try:
        return work()
    except Exception as error:  # a probe meets whatever a broken set-up raises
        first_line = (str(error).strip() or repr(error)).splitlines()[0][:300]
        text = f"{type(error).__name__}: {first_line}"
        remedy = "the log lines above tell more; compare versions with the pins"
        yield problem(subject, text, remedy)
        return None
