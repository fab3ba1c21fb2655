"""Real actors on gloo ranks, for tests of the trainer's settings: several in turn, in one start of ranks.

``in_ranks`` starts the processes.  In them ``actor_of`` builds an actor as a job does.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.generation import stitch
from r3train.host_group import host_group
from r3train.layout.microbatch import slice_microbatch, Streams
from r3train.loop.prepare import build_microbatches
from r3train.routing.indexer_topk import num_words, to_bits
from r3train.types import Prompt, RankSlice, RankTopology, RolloutSample, TrainSample

SEARCHED: list[str] = []  # directories in which ranks look for packages first


def in_ranks(world_size: int, scratch: Path, function: Callable, *arguments: Any) -> list[Any]:
    """Call a module's function in each of ``world_size`` processes; returns what each returned.

    The values travel through torch's files, so they are tensors, numbers, text and their containers.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    context = rank_context()
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, str(scratch), function, arguments))
        for rank in range(world_size)
    ]
    # new processes take it over; this one, with transformers in it, must not see it
    sys.path[:0] = SEARCHED
    try:
        for process in ranks:
            process.start()
    finally:
        del sys.path[: len(SEARCHED)]
    for process in ranks:
        process.join(timeout=300)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert codes == [0] * world_size, codes
    return [torch.load(scratch / f"rank{rank}.pt") for rank in range(world_size)]


_SERVERS: dict[str, forkserver.ForkServer] = {}  # by the path on which their forks find packages


def rank_context() -> Any:
    """multiprocessing's way to start ranks: forks of a process that has imported what they need.

    New processes where CUDA would not survive a fork.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    path = os.pathsep.join([*SEARCHED, *filter(None, [os.environ.get("PYTHONPATH")])])
    server = _SERVERS.setdefault(path, forkserver.ForkServer())
    server.set_forkserver_preload(["tests.oracle.imported"])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        server.ensure_running()
    # multiprocessing itself keeps but one
    forkserver.connect_to_new_process = server.connect_to_new_process
    return multiprocessing.get_context("forkserver")


def _rank(rank: int, world_size: int, scratch: str, function: Callable, arguments: tuple) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    from r3train.cpu.device import prepare_device

    prepare_device()
    from r3train.host_group import host_barrier, join_ranks, leave_ranks

    store = torch.distributed.FileStore(f"{scratch}/store", world_size)
    join_ranks("gloo", store, rank, world_size, timeout=timedelta(minutes=2))
    torch.save(function(*arguments), Path(scratch) / f"rank{rank}.pt")
    host_barrier()
    leave_ranks()


def configuration(checkpoint: Path, **fields: Any) -> RunConfig:
    """A run's configuration; ``fields`` are those of any section, by their own names."""
    values = dict(
        hf_checkpoint=checkpoint,
        prompt_data="none",
        num_rollout=10,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        rollout_max_response_len=64,
        use_distributed_optimizer=False,
        lr=1e-3,
    )
    return RunConfig.from_sources(flags=values | fields)


@contextmanager
def actor_of(
    config: RunConfig,
    checkpoint: Path | None = None,
    device: str = "cpu",
    *,
    model_only: bool = False,
) -> Iterator[Any]:
    """Build this rank's actor as a job does, resumed from ``checkpoint``; it ends with the context."""
    from r3train.families.read_facts import read_hf_facts
    from r3train.launch.start.build_actor import build_actor
    from r3train.launch.job.checked_job import Job
    from r3train.launch.job.resume import ResumePoint
    from r3train.verify.topology_worker import drop_gradient_hooks, leave_model_parallel

    hf = read_hf_facts(config.model.hf_checkpoint)
    job = Job(config, hf, prompts=[], tokenizer=None, reward=None, prompt_file=None)
    actor = build_actor(job, torch.device(device), ResumePoint(checkpoint, model_only=model_only))
    try:
        yield actor
    finally:
        drop_gradient_hooks(actor)
        del actor
        leave_model_parallel()


def samples(
    hf: HfModelFacts, lengths: Sequence[tuple[int, int]], *, advantage: float = 1.0, seed: int = 0
) -> list[TrainSample]:
    """Random samples of (prompt, response) tokens, with routes that no router would choose."""
    generator = np.random.default_rng(seed)
    shape, out = hf.route_shape, []
    for i, (prompt, response) in enumerate(lengths):
        length = prompt + response
        tokens = generator.integers(1, hf.vocab_size, length).astype(np.int32)
        mask = np.arange(length) >= prompt
        scores = generator.random((length - 1, shape.num_layers, shape.num_experts))
        routes = np.argsort(scores, axis=-1)[..., : shape.topk].astype(shape.dtype)
        sample = RolloutSample(
            sample_id=i,
            group_id=i,
            prompt=Prompt(f"prompt-{i}", i, "", tokens[:prompt], None),
            token_ids=tokens,
            prompt_len=prompt,
            loss_mask=mask,
            rollout_log_probs=np.where(mask, -1.0, 0).astype(np.float32),
            routed_experts=routes,
            weight_versions=np.where(mask, 0, -1).astype(np.int32),
            finish_reason="stop",
            indexer_topk=None if hf.index_topk is None else random_choices(hf, length, generator),
        )
        sign = advantage * (-1) ** i
        out.append(TrainSample(sample, 0.0, np.where(mask, sign, 0).astype(np.float32)))
    return out


def random_choices(hf: HfModelFacts, length: int, generator: np.random.Generator) -> np.ndarray:
    """Choices that no indexer would make, as ``RolloutSample.indexer_topk`` of a sample of ``length`` tokens."""
    topk, layers = hf.index_topk, hf.num_hidden_layers
    ids = [
        [generator.permutation(position + 1)[:topk] for _ in range(layers)]
        for position in range(topk, length - 1)
    ]
    return to_bits(np.array(ids, int).reshape(-1, layers, topk), num_words(length))


def actor_log_probs(
    actor: Any, topologies: Sequence[RankTopology], token_ids: np.ndarray
) -> np.ndarray:
    """The actor's log-prob of each token after those before it, float32[T], entry 0 is 0; a collective.

    The actor routes for itself, at temperature 1.
    """
    prompt = Prompt("text", 0, "", token_ids, None)
    sample = stitch.begin(prompt, sample_id=0, group_id=0)
    text = TrainSample(sample, 0.0, np.zeros(len(token_ids), dtype=np.float32))
    mine = actor.topology
    # data-parallel ranks other than 0 take part with a pack of padding only
    count = topologies[0].pp_size if topologies[0].vpp_size > 1 else 1
    slices = []
    for j in range(count):
        packed = [text] if mine.dp_rank == 0 and j == 0 else []
        [[microbatch]] = build_microbatches([[packed]], mine, Streams(), first_microbatch_id=j)
        slices.append(slice_microbatch(microbatch, mine))
    log_probs = actor.compute_log_probs(slices, None, temperature=1.0)
    out = torch.zeros(len(token_ids), dtype=torch.float32)
    if mine.tp_rank == 0:
        for s in slices:
            rows = np.flatnonzero((s.token_uids >= 0) & (s.positions < len(token_ids) - 1))
            if s.microbatch_id in log_probs and len(rows):
                found = log_probs[s.microbatch_id].float().cpu()
                out[torch.from_numpy(s.positions[rows]) + 1] = found[torch.from_numpy(rows)]
    torch.distributed.all_reduce(out, group=host_group())
    return out.numpy()


def slices_of(
    actor: Any, config: RunConfig, hf: HfModelFacts, batch: Sequence[TrainSample]
) -> tuple[list[RankSlice], list[list[list[int]]]]:
    """This rank's slices of one optimizer step, and the sample ids of [dp rank][microbatch]."""
    from r3train.launch.start.build_actor import build_routes
    from r3train.loop.prepare import Preparation
    from r3train.loop.distribute import broadcast_json, gather_topologies

    topologies, prepared = gather_topologies(actor.topology), None
    routes = build_routes(config, hf)
    routes.open(actor.topology)
    plan = None
    if actor.topology.rank == 0:
        given = (config, hf, routes.row_shape, topologies, ("train",))
        prepared = Preparation(*given).prepare(0, batch)
        ids = [[[s.sample.sample_id for s in m] for m in own] for own in prepared.steps[0]]
        plan = [prepared.counts[0], ids]
    count, ids = broadcast_json(plan)
    return routes.slices(prepared, count), ids
