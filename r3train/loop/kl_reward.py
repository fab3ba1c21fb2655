"""--kl-coef: advantages of rewards that pay for the KL from the reference, made after its pass.

Log-probs lie on the ranks that computed them, and advantages are rank 0's, which sees the whole
rollout.  So each rank sends rank 0 its rows' old - reference log-prob, 4 bytes per row and 8 of its name,
and gets its rows' advantages back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from r3train.algo.divergence import log_ratio
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.layout.microbatch import shifted, token_rows
from r3train.loop.prepare import Prepared, advantages_with_kl
from r3train.loop.distribute import broadcast_json, gather_arrays, scatter_arrays
from r3train.user_code import UserCodeFailed
from r3train.ids import split_uids
from r3train.types import MicroBatch, RankSlice, RankTopology, TrainSample


def add_kl_to_rewards(
    steps: Sequence[Sequence[RankSlice]],
    prepared: Prepared | None,
    old_log_probs: Mapping[int, torch.Tensor],
    ref_log_probs: Mapping[int, torch.Tensor],
    algorithm: AlgorithmSection,
    topologies: Sequence[RankTopology],
    rank: int,
) -> tuple[list[list[RankSlice]], dict[str, Any]]:
    """Give this rank's slices their final advantages; a collective.

    prepared: the rollout on rank 0, None elsewhere; the log-probs: of ``compute_log_probs``.
    Returns the slices and, on rank 0, metrics.  Raises UserCodeFailed, on all ranks, where the estimator fails.
    """
    uids, ratios = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    for s in (s for step in steps for s in step):
        if s.microbatch_id in old_log_probs and topologies[rank].tp_rank == 0:
            old, reference = (
                log_probs[s.microbatch_id] for log_probs in (old_log_probs, ref_log_probs)
            )
            uids.append(s.token_uids[s.loss_mask])
            ratios.append(held_ratios(old, reference).cpu().numpy()[s.loss_mask])
    rows = gather_arrays(np.concatenate(uids)), gather_arrays(np.concatenate(ratios))
    rank_advantages, metrics, failed = None, {}, ""
    if prepared is not None:
        found = np.concatenate(rows[0]), np.concatenate(rows[1])
        ratios_of = log_ratios(prepared.samples, *found)
        try:
            samples = advantages_with_kl(prepared.samples, algorithm, ratios_of)
        except ValueError as error:  # of an estimator of the user's
            failed = str(error)
    if failed := broadcast_json(failed):
        raise UserCodeFailed(failed)
    if prepared is not None:
        rank_advantages = _advantages_of_ranks(prepared.microbatches, samples, topologies)
        episodes = sum(s.sample.is_last_step is not False for s in samples)
        metrics = {
            "train/kl_in_reward": algorithm.kl_coef * float(found[1].sum()) / episodes,
            "rollout/taught_samples": sum(bool(np.any(s.advantages)) for s in samples),
        }
    advantages = scatter_arrays(rank_advantages, np.float32)
    ends = np.cumsum([s.num_rows for step in steps for s in step])
    assert ends[-1] == len(advantages), (ends[-1], len(advantages))
    local_advantages = iter(np.split(advantages, ends[:-1]))
    return [
        [replace(s, advantages=next(local_advantages)) for s in step] for step in steps
    ], metrics


def held_ratios(old: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The old - reference log-probs of rows, float32[n], held as every log-ratio is.

    0 where old is not finite: the loss of such a row is not finite either, and skips the step.  NaN where
    the reference's alone is NaN, which no loss would show.
    """
    old = old.float()
    return log_ratio(old, reference.float()).masked_fill(~old.isfinite(), 0.0)


def log_ratios(
    samples: Sequence[TrainSample], uids: np.ndarray, values: np.ndarray
) -> dict[int, np.ndarray]:
    """Sort values of rows, in any order, into those of tokens: {sample_id: float32[T]}, else 0.

    uids: int64[n], each row's name; the value of row t is that of token t+1.
    """
    ordered = sorted((s.sample for s in samples), key=lambda s: s.sample_id)
    ids = np.array([s.sample_id for s in ordered])
    ends = np.cumsum([s.num_tokens for s in ordered])
    flat = np.zeros(ends[-1], np.float32)
    sample_ids, positions = split_uids(uids)
    place = np.searchsorted(ids, sample_ids)
    assert (ids[place] == sample_ids).all(), "a row of a sample that is not in the rollout"
    flat[(ends - [s.num_tokens for s in ordered])[place] + positions + 1] = values
    return dict(zip(ids.tolist(), np.split(flat, ends[:-1])))


def _advantages_of_ranks(
    microbatches: Sequence[Sequence[MicroBatch]],
    samples: Sequence[TrainSample],
    topologies: Sequence[RankTopology],
) -> list[np.ndarray]:
    """The advantages of each rank's rows, float32[n], microbatch after microbatch."""
    advantages = {s.sample.sample_id: s.advantages for s in samples}
    streams = [
        [
            (m.layout, shifted([advantages[i] for i in m.sample_ids.tolist()], np.float32))
            for m in rank_microbatches
        ]
        for rank_microbatches in microbatches
    ]
    return [
        np.concatenate([token_rows(*stream, place) for stream in streams[place.dp_rank]])
        for place in topologies
    ]
