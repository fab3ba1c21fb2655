"""One rank of the agreement study: a dumped rollout through the actor, R3 off and on.

Started by ``benchmarks.agreement`` under torchrun; writes what rank 0 found as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from r3train.cpu.device import prepare_device

DEVICE = prepare_device()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from r3train.config import RunConfig  # noqa: E402
from r3train.launch.build_actor import build_actor  # noqa: E402
from r3train.launch.job import Job  # noqa: E402
from r3train.launch.preflight import preflight  # noqa: E402
from r3train.launch.resume import resume_point  # noqa: E402
from r3train.layout.microbatch import slice_microbatch  # noqa: E402
from r3train.loop.prepare import prepare, train_samples  # noqa: E402
from r3train.loop.replay_source import load_rollout  # noqa: E402
from r3train.loop.distribute import gather_topologies  # noqa: E402
from r3train.algo.corrections import log_prob_gap_sums  # noqa: E402
from r3train.trainer.megatron import topology  # noqa: E402
from r3train.trainer.megatron.actor import MegatronActor  # noqa: E402
from r3train.trainer.megatron.replay import decoder_routers  # noqa: E402
from r3train.types import RankSlice, missing_marker  # noqa: E402

ACTORS = {"float32": False, "bfloat16": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--rollouts", type=Path, required=True, help="directory of the dump")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = RunConfig.from_toml(arguments.config)
    job = preflight(config, int(os.environ["WORLD_SIZE"]))
    topology.init_distributed("auto", config.parallel.distributed_timeout_minutes)
    groups = load_rollout(arguments.rollouts, 0)
    samples, _ = train_samples(groups, config.algorithm, config.rollout.rollout_max_response_len)
    found: dict[str, Any] = {}
    for name, bf16 in ACTORS.items():
        model = config.model.model_copy(update={"bf16": bf16})
        own = replace(job, config=config.model_copy(update={"model": model}))
        found[name] = measure(own, samples)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        arguments.output.write_text(json.dumps(found), encoding="utf-8")
    topology.shutdown()


def measure(job: Job, samples: Sequence) -> dict[str, Any]:
    """Gap and routing of one actor without and with replay, over the same tokens; a collective."""
    actor = build_actor(job, DEVICE, resume_point(job))
    topologies = gather_topologies(actor.topology)
    shape = job.hf.route_shape
    prepared = prepare(0, samples, job.config, job.hf, shape, topologies, passes=())
    built = prepared.microbatches
    slices = [slice_microbatch(m, actor.topology) for m in built[actor.topology.dp_rank]]
    with watched_routers(actor, slices) as native:
        off = actor.compute_log_probs(slices, None)  # outside a pass the routers choose themselves
    on = actor.compute_log_probs(slices, "old_log_prob")
    own_choice = layer_counts()
    for e in actor.collect_evidence(0):
        if e.counts_tokens:
            others = e.rows_overlap + e.rows_mismatch
            own_choice[e.layer_number] += (e.rows_equal + others, others, e.rows_mismatch, 0, 0)
    return {
        "off": gap(actor, slices, off),
        "on": gap(actor, slices, on),
        "layers_off": shares(native),
        "layers_on": shares(own_choice),
    }


def layer_counts() -> dict[int, np.ndarray]:
    """{1-based layer: float64[5]}, sums over rows.

    They are: rows, rows of another set, rows without a common expert, the margin between the k-th
    and the next logit, the standard deviation of the logits.
    """
    return defaultdict(lambda: np.zeros(5))


@contextmanager
def watched_routers(
    actor: MegatronActor, slices: Sequence[RankSlice]
) -> Iterator[dict[int, np.ndarray]]:
    """Compare every router's choice with the recorded routes while the block runs; yields the counts."""
    place = actor.topology
    counts = layer_counts()
    calls: dict[int, int] = defaultdict(int)

    def look(router: Any, args: tuple, output: tuple) -> None:
        layer = router.layer_number
        s = slices[calls[layer]]  # a router sees the microbatches in their order
        calls[layer] += 1
        if not (place.sequence_parallel or place.tp_rank == 0):
            return  # another rank's rows
        column = s.layer_numbers.tolist().index(layer)
        recorded = s.routes[:, column]
        there = (recorded != missing_marker(recorded.dtype)).all(1)
        whole = np.flatnonzero((s.route_uids >= 0) & there)
        chosen = output[1].cpu()[whole]
        theirs = torch.zeros_like(chosen)
        theirs.scatter_(1, torch.from_numpy(recorded[whole].astype(np.int64)), True)
        shared = (chosen & theirs).sum(1)
        logits = router.gating(args[0]).float().reshape(-1, chosen.shape[1]).cpu()[whole]
        highest = logits.topk(recorded.shape[1] + 1, dim=1).values
        counts[layer] += (
            len(whole),
            float((shared < recorded.shape[1]).sum()),
            float((shared == 0).sum()),
            float((highest[:, -2] - highest[:, -1]).sum()),
            float(logits.std(dim=1).sum()),
        )

    hooks = [
        r.register_forward_hook(look) for c in actor.model.unwrapped for r in decoder_routers(c)
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def shares(counts: dict[int, np.ndarray]) -> dict[str, list[float]]:
    """Of each layer in order, over all ranks: shares of rows, mean margin, mean logit spread."""
    total = layer_counts()
    for part in gathered(dict(counts)):
        for layer, values in part.items():
            total[layer] += values
    names = ("differ", "disjoint", "margin", "logit_std")
    table = [total[layer][1:] / max(total[layer][0], 1) for layer in sorted(total)]
    return {name: [float(row[i]) for row in table] for i, name in enumerate(names)}


def gathered(value: Any) -> list[Any]:
    """The values of all ranks; a collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gap(
    actor: MegatronActor, slices: Sequence[RankSlice], log_probs: dict[int, torch.Tensor]
) -> dict[str, float]:
    """The log-prob gap over all response tokens of all ranks."""
    ours, theirs = [np.zeros(0)], [np.zeros(0)]
    if actor.topology.tp_rank == 0:
        for s in slices:
            if s.microbatch_id in log_probs:  # the last pipeline stage alone
                rows = s.loss_mask & (s.token_uids >= 0)
                ours.append(log_probs[s.microbatch_id].double().cpu().numpy()[rows])
                theirs.append(s.rollout_log_probs[rows].astype(np.float64))
    parts = gathered((np.concatenate(ours), np.concatenate(theirs)))
    ours_all = torch.from_numpy(np.concatenate([a for a, _ in parts]))
    theirs_all = torch.from_numpy(np.concatenate([b for _, b in parts]))
    everywhere = torch.ones(len(ours_all), dtype=torch.bool)
    sums = log_prob_gap_sums(ours_all, theirs_all, everywhere)
    sizes = (ours_all - theirs_all).abs().numpy()
    return {
        "mean": float(sums["log_prob_gap_abs"]) / len(sizes),
        "k3": float(sums["log_prob_gap_k3"]) / len(sizes),
        "far_share": float(sums["log_prob_gap_far"]) / len(sizes),
        "max": float(sums["log_prob_gap_max"]),
        "p999": float(np.quantile(sizes, 0.999)),
        "tokens": len(sizes),
    }


if __name__ == "__main__":
    main()
