"""A real server and a real actor, one text through both and through Hugging Face's own model.

One rank, no parallelism: this finds an engine or a build that computes something else, not a
topology that does (``r3train verify`` is for those).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts, read_hf_facts
from r3train.doctor.engine_probe import SUBJECT, Situations, draw_situations
from r3train.doctor.finding import Finding, ok, problem

_CHUNK = 64
_LONG = 200
_SHORT = 24
# float32 on one machine agrees far closer; bfloat16 differs by rounding alone
_TOLERANCE = {False: 1e-3, True: 0.5}
# near-ties of the router flip between two correct implementations; shifted rows differ nearly all
_ROUTE_SHARE = {False: 0.99, True: 0.7}


@dataclass(frozen=True)
class Reference:
    """What Hugging Face's model makes of texts."""

    log_probs: Callable[[np.ndarray], np.ndarray]  # int32[T] -> float32[T], entry 0 is 0
    routes: Callable[[np.ndarray], np.ndarray]  # int32[T] -> int64[T-1, L_moe, K]


def probe_engines(config: RunConfig) -> Iterator[Finding]:
    """Start a server and an actor of this checkpoint, compare them, stop them."""
    hf = read_hf_facts(config.model.hf_checkpoint)
    texts = _texts(config, hf)
    try:
        from r3train.trainer.megatron.cpu_device import prepare_device

        device = prepare_device()  # before anything imports megatron-core
        reference = _reference(config)
    except Exception as error:
        text = f"Hugging Face's model cannot be built: {_first_line(error)}"
        yield problem("probe", text, "look at the checkpoint and at memory")
        return
    yield from _guarded("Megatron probe", lambda: _megatron(config, device, texts, reference))
    yield from _guarded(SUBJECT, lambda: _sglang(config, hf, texts, reference))


def judge_log_probs(
    subject: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float, what: str
) -> Finding:
    """Two float32[T] of log-probs of one text."""
    gap = np.abs(ours - theirs)
    worst = int(gap.argmax())
    text = f"{what}: largest gap of log-probs {gap[worst]:.2g}"
    if gap[worst] <= tolerance:
        return ok(subject, text)
    remedy = "compare versions with r3train doctor; look for quantisation or another attention"
    return problem(subject, f"{text} at token {worst}, at most {tolerance:g} expected", remedy)


def judge_routes(
    subject: str, got: np.ndarray, wanted: np.ndarray, least_share: float, what: str
) -> Finding:
    """Two int[T-1, L, K] of experts; their order within a row does not matter."""
    if got.shape != wanted.shape:
        text = f"{what}: routed experts are {got.shape}, expected {wanted.shape}"
        return problem(subject, text, "this SGLang does not return what r3train reads: 0.5.23 does")
    same = (np.sort(got, -1) == np.sort(wanted, -1)).all(-1)
    text = f"{what}: {same.mean():.1%} of rows are the reference's"
    if same.mean() >= least_share:
        return ok(subject, text)
    rows, layers = np.nonzero(~same)
    place = f"first at token {rows[0]}, MoE layer {layers[0] + 1} of {same.shape[1]}"
    remedy = "do not train with R3 on this server: its routes are of another forward"
    return problem(subject, f"{text} ({place})", remedy)


def _texts(config: RunConfig, hf: HfModelFacts) -> tuple[np.ndarray, np.ndarray]:
    """A short and a long text of random tokens; the long one is prefilled in chunks."""
    context = _context(config, hf)
    rng = np.random.default_rng(0)
    lengths = (_SHORT, min(_LONG, context - _SHORT))
    short, long = (rng.integers(0, hf.vocab_size, n).astype(np.int32) for n in lengths)
    return short, long


def _reference(config: RunConfig) -> Reference:
    from r3train.torchvision_stub import declare_torchvision_ops

    declare_torchvision_ops()
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    path = config.model.hf_checkpoint
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
    topk = getattr(model.config, "num_experts_per_tok", 0)

    @torch.no_grad()
    def log_probs(ids: np.ndarray) -> np.ndarray:
        logits = model(torch.from_numpy(ids).long()[None]).logits[0].float()
        every = logits.log_softmax(-1)[:-1]
        chosen = every.gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0]
        return np.concatenate([[0.0], chosen.numpy()]).astype(np.float32)

    @torch.no_grad()
    def routes(ids: np.ndarray) -> np.ndarray:
        out = model(torch.from_numpy(ids).long()[None], output_router_logits=True)
        layers = [logits.reshape(len(ids), -1).topk(topk).indices for logits in out.router_logits]
        return torch.stack(layers, dim=1)[:-1].numpy()

    return Reference(log_probs, routes)


def _megatron(config: RunConfig, device, texts, reference: Reference) -> Iterator[Finding]:
    import torch

    from r3train.config.parallel import ParallelSection
    from r3train.launch.actor import build_actor
    from r3train.launch.job import preflight
    from r3train.launch.resume import ResumePoint
    from r3train.loop import weight_probe
    from r3train.trainer.megatron import topology

    alone = config.model_copy(update={"parallel": ParallelSection()})
    job = preflight(alone, 1)
    with tempfile.TemporaryDirectory() as directory:
        store = torch.distributed.FileStore(str(Path(directory) / "store"), 1)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            actor = build_actor(job, device, ResumePoint())
            for name, ids in zip(("a short text", "a long text"), texts):
                ours = weight_probe.actor_log_probs(actor, [actor.topology], ids)
                wanted = reference.log_probs(ids)
                limit = _TOLERANCE[config.model.bf16]
                yield judge_log_probs("Megatron probe", ours, wanted, limit, f"{name} against HF")
        finally:
            topology.shutdown()
            job.reward.close()


def _sglang(config: RunConfig, hf: HfModelFacts, texts, reference: Reference) -> Iterator[Finding]:
    from r3train.rollout.engine_key import engine_api_key
    from r3train.rollout.sglang_answer import ExpectedRoutes
    from r3train.rollout.sglang_server import SGLangServer

    shape = ExpectedRoutes(hf.num_hidden_layers, hf.num_experts_per_tok, hf.num_experts)
    context = _context(config, hf)
    with tempfile.TemporaryDirectory() as directory:
        server = SGLangServer(
            config.model.hf_checkpoint,
            Path(directory) / "sglang.log",
            dtype="bfloat16" if config.model.bf16 else "float32",
            server_args={
                **config.rollout.sglang,
                "chunked_prefill_size": min(_CHUNK, len(texts[1]) // 2),
            },
            return_routed_experts=hf.is_moe,
            start_timeout_s=config.rollout.rollout_server_start_timeout_s,
        )
        with server:
            server.wait_ready()
            expected = shape if hf.is_moe else None
            situations = asyncio.run(
                draw_situations(
                    server.addr, expected, texts, context=context, api_key=server.api_key
                )
            )
    yield from judge_situations(
        situations,
        reference,
        moe_layers=hf.moe_layer_numbers,
        tolerance=_TOLERANCE[config.model.bf16],
        least_share=_ROUTE_SHARE[config.model.bf16],
    )


def judge_situations(
    situations: Situations,
    reference: Reference,
    *,
    moe_layers: Sequence[int],
    tolerance: float,
    least_share: float,
) -> Iterator[Finding]:
    """What did not happen, and every answer against the reference's forward of its tokens.

    moe_layers: 1-based numbers of the layers with experts; none for a dense model.
    """
    yield from situations.findings
    columns = np.asarray(moe_layers, dtype=np.int64) - 1
    for what, sample in situations.drawn.items():
        wanted = reference.log_probs(sample.token_ids)[sample.prompt_len :]
        ours = sample.rollout_log_probs[sample.prompt_len :]
        yield judge_log_probs(SUBJECT, ours, wanted, tolerance, what)
        if len(columns):
            got, routes = sample.routed_experts[:, columns], reference.routes(sample.token_ids)
            yield judge_routes(SUBJECT, got, routes, least_share, what)


def _context(config: RunConfig, hf: HfModelFacts) -> int:
    return config.rollout.rollout_max_context_len or hf.max_position_embeddings


def _guarded(subject: str, probe: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from probe()
    except Exception as error:  # a probe meets whatever a broken set-up raises
        text = f"{type(error).__name__}: {_first_line(error)}"
        yield problem(
            subject, text, "the log lines above tell more; compare versions with the pins"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:300]
