"""Check after a weight update that the servers hold the actor's weights.

Actor and servers score the same text.  In float32 the log-probs of every token must agree closely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from r3train.config.hf_facts import HfModelFacts
from r3train.families import FAMILIES
from r3train.generation import stitch
from r3train.host_group import host_group
from r3train.layout.microbatch import slice_microbatch
from r3train.loop.prepare import build_microbatches
from r3train.types import Prompt, RankTopology, TrainSample

if TYPE_CHECKING:
    from r3train.trainer.megatron.actor import MegatronActor

PROBE_LEN = 32


def probe_tokens(vocab_size: int) -> np.ndarray:
    """A text of random tokens, int32[32], the same in every run: any text will do."""
    return np.random.default_rng(0).integers(0, vocab_size, PROBE_LEN).astype(np.int32)


def tolerance(hf: HfModelFacts, *, bf16: bool) -> float:
    """The largest gap between log-probs, in nats, that rounding explains."""
    return 0.5 if bf16 else FAMILIES[hf.model_type].log_prob_gap


def actor_log_probs(
    actor: MegatronActor, topologies: Sequence[RankTopology], token_ids: np.ndarray
) -> np.ndarray:
    """The actor's log-prob of each token after those before it, float32[T], entry 0 is 0.

    A collective; every rank gets the result.  The actor routes by itself, at temperature 1.
    """
    prompt = Prompt("probe", 0, "", token_ids, None)
    sample = stitch.begin(prompt, sample_id=0, group_id=0)
    text = TrainSample(sample, 0.0, np.zeros(len(token_ids), dtype=np.float32))
    mine = actor.topology
    # data-parallel ranks other than 0 take part with a pack of padding only
    some = topologies[0]
    count = some.pp_size if some.vpp_size > 1 else 1
    slices = []
    for j in range(count):
        own = [text] if mine.dp_rank == 0 and j == 0 else []
        [[microbatch]] = build_microbatches([[own]], mine, first_microbatch_id=j, route_shape=None)
        slices.append(slice_microbatch(microbatch, mine))
    log_probs = actor.compute_log_probs(slices, None, temperature=1.0)
    out = torch.zeros(len(token_ids), dtype=torch.float32)
    if mine.tp_rank == 0:
        for s in slices:
            rows = np.flatnonzero((s.token_uids >= 0) & (s.positions < len(token_ids) - 1))
            if s.microbatch_id in log_probs and len(rows):
                found = log_probs[s.microbatch_id].float().cpu()
                out[torch.from_numpy(s.positions[rows]) + 1] = found[torch.from_numpy(rows)]
    dist.all_reduce(out, group=host_group())
    return out.numpy()


def compare(
    actor: np.ndarray, engine: np.ndarray, weight_version: int, *, tolerance: float
) -> float:
    """The largest difference of log-probs float32[T] and float32[T], in nats.

    Raises AssertionError past the tolerance, naming the token.
    """
    gap = np.abs(actor - engine)
    worst = int(gap.argmax())
    if not gap[worst] <= tolerance:
        raise AssertionError(
            f"weight update {weight_version}: the server's log-prob of probe token {worst} is "
            f"{engine[worst]:.6f}, the actor's {actor[worst]:.6f}; they must agree to {tolerance:g}"
        )
    return float(gap[worst])
