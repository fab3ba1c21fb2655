"""The frozen records that flow through r3train, each field with its shape and dtype.

Letters: T tokens of one sample, P its prompt tokens, L all decoder layers, K experts a token
uses (top-k), N rows of a padded pack, n rows of one rank's share of a pack.

Row t of ``routed_experts`` holds the experts chosen when token t was the *input* (the forward
that predicts token t+1).  The last token of a sample was never an input: it has no row.

This module needs numpy and msgspec alone: every record is built and checked on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the prompt data, tokenised.

    ``index`` is the line's 0-based place in the file, which makes ids stable across runs.
    """

    prompt_id: str
    index: int
    text: str
    token_ids: np.ndarray  # int32[P]
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)


def missing_marker(dtype: np.dtype | type) -> int:
    """The value of a route slot that the engine did not report: the largest of ``dtype``."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The size of one token's routes, which the wire does not carry: a row is [L, K] expert ids.

    Qwen3-30B-A3B has 48 layers, 8 experts a token and 128 experts: ``RouteShape(48, 8, 128)``,
    rows of uint8[48, 8].
    """

    num_layers: int  # L, all decoder layers
    topk: int  # K
    num_experts: int

    @property
    def row(self) -> tuple[int, int]:
        """(L, K)."""
        return self.num_layers, self.topk

    @property
    def dtype(self) -> np.dtype:
        """uint8 while every expert id and the missing marker fit in it, else uint16.

        Raises ValueError above 65535 experts.
        """
        for dtype in (np.uint8, np.uint16):
            if self.num_experts <= np.iinfo(dtype).max:
                return np.dtype(dtype)
        raise ValueError(f"num_experts is {self.num_experts}: routes hold at most 65535 experts")

    @property
    def missing(self) -> int:
        """The value of a slot that the engine did not report: the largest of ``dtype``."""
        return missing_marker(self.dtype)


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One finished generation, exactly as the engine reported it.

    Per-token arrays cover prompt and response; prompt entries of ``rollout_log_probs`` are 0.
    ``routed_experts`` holds ``missing_marker(dtype)`` (255 or 65535) in slots that the engine did
    not report; it is None when the rollout ran without R3.
    """

    sample_id: int  # unique within a run, also the high half of every token uid
    group_id: int  # samples of one prompt share it
    prompt: Prompt
    token_ids: np.ndarray  # int32[T]
    prompt_len: int
    loss_mask: np.ndarray  # bool[T], True on the model's own tokens
    rollout_log_probs: np.ndarray  # float32[T]
    routed_experts: np.ndarray | None  # uint8 or uint16 [T-1, L, K]
    weight_versions: np.ndarray  # int32[T], -1 on prompt tokens
    finish_reason: str  # stop | length | abort
    text: str = ""
    # step-wise samples alone, one a turn: the episode they are a step of, and whether it ends here
    trajectory_id: int | None = None
    is_last_step: bool | None = None
    # waited for the engines' answers, over all turns and parts of the rollout it comes from
    generation_s: float = 0.0
    # the rows of each answer as they were decoded, (row of the first, rows [r, L, K]): the evidence
    # counts these, not what stitching and cutting made of them; () for a sample out of a file
    decoded: tuple[tuple[int, np.ndarray], ...] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def response_len(self) -> int:
        return self.num_tokens - self.prompt_len


# a finished sample and its reward
Scored = tuple[RolloutSample, float]


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A rollout sample with what the algorithm made of it."""

    sample: RolloutSample
    reward: float
    advantages: np.ndarray  # float32[T], 0 outside the loss mask


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Where the tokens of a microbatch's samples sit in its padded pack.

    ``rows[i]`` is the flat index of the token in padded row i, or -1 for padding.  Each sample is
    padded to a multiple of 2*cp; a tail of padding, when the pack needs one, is a last
    pseudo-sequence of its own in ``cu_seqlens_padded``.
    """

    lengths: np.ndarray  # int32[B] unpadded tokens of each sample
    cu_seqlens_padded: np.ndarray  # int32[B' + 1], B' = B or B + 1 with a tail
    rows: np.ndarray  # int64[N]

    @property
    def num_rows(self) -> int:
        return int(self.rows.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward pass, as flat unpadded streams over their tokens (F = sum of T).

    Streams are aligned to *rows*: entry t describes the forward whose input is token t, so labels,
    masks, log-probs and advantages are those of token t+1, and the last token of a sample carries
    no label (0), no mask and no route.
    """

    microbatch_id: int
    layout: TokenLayout
    sample_ids: np.ndarray  # int64[B]
    tokens: np.ndarray  # int64[F]
    labels: np.ndarray  # int64[F]
    positions: np.ndarray  # int64[F]
    loss_mask: np.ndarray  # bool[F]
    rollout_log_probs: np.ndarray  # float32[F]
    advantages: np.ndarray  # float32[F]
    row_uids: np.ndarray  # int64[F], see routing.fingerprint.token_uids
    routes: np.ndarray | None  # uint8/uint16 [F, L, K], missing marker where there is no route


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Where one rank stands; sizes and ranks alone, process groups stay in the trainer."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    vpp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    sequence_parallel: bool = False
    # 1-based numbers of the MoE layers this rank holds, one tuple per model chunk
    moe_layer_numbers: tuple[tuple[int, ...], ...] = ()

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


@dataclass(frozen=True, slots=True)
class RankSlice:
    """One rank's share of one microbatch: its context-parallel rows, its layers, its SP rows.

    n = N / cp rows of the token streams; m = n / tp rows of the router under sequence
    parallelism, else m = n.  Padding rows hold 0 (streams), -1 (uids) and the marker (routes).
    """

    microbatch_id: int
    cu_seqlens_padded: np.ndarray  # int32[B' + 1], of the whole pack
    max_seqlen: int
    tokens: np.ndarray  # int64[n]
    labels: np.ndarray  # int64[n]
    positions: np.ndarray  # int64[n]
    loss_mask: np.ndarray  # bool[n]
    rollout_log_probs: np.ndarray  # float32[n]
    advantages: np.ndarray  # float32[n]
    token_uids: np.ndarray  # int64[n], -1 = padding
    layer_numbers: np.ndarray  # int32[L_local], 1-based, of this rank's MoE layers
    routes: np.ndarray | None  # uint8/uint16 [m, L_local, K]
    route_uids: np.ndarray  # int64[m], -1 = padding; the SP share of token_uids

    @property
    def num_rows(self) -> int:
        return int(self.tokens.shape[0])


# Far above any call's rows, and low enough for the sum of millions of calls to fit 64 bits.
Amount = Annotated[int, Meta(ge=0, le=1 << 40)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 17)]
LayerNumber = Annotated[int, Meta(ge=1, le=1 << 12)]
ReplayPass = Literal["old_log_prob", "ref_log_prob", "train"]
ReplayStage = Literal["replay_forward", "replay_backward"]  # replay_backward: a recomputation


class Fingerprint(int):
    """An unsigned 64-bit fingerprint of routes, written to files as "0x" and 16 hexadecimal digits.

    JSON readers outside Python lose the low bits of 64-bit integers.
    """


@dataclass(frozen=True, slots=True)
class ReplayEvidence:
    """One router call of one rank, counted on the device and read once a step.

    The types are the schema of ``evidence/rank_NNNNN.jsonl`` too (``r3train/proof/schema.py``).
    """

    step: Amount  # the rollout_id
    rank: Rank
    replay_pass: ReplayPass
    stage: ReplayStage
    vp_stage: Amount
    microbatch_id: Amount
    layer_number: LayerNumber
    num_rows: Amount  # rows of the call, padding included
    rows_replayed: Amount  # rows whose every slot came from the rollout
    rows_filled: Amount  # real rows with at least one filled slot
    rows_padding: Amount
    rows_native: Amount  # real rows the router chose itself: must be 0
    duplicate_rows: Amount  # rows that dispatch to fewer than topk experts: must be 0
    topk: Amount
    replay_idx_sum: Amount
    map_sum: Amount  # routing_map.sum(): must be num_rows * topk
    fingerprint: Fingerprint  # of the real recorded slots in the returned map
    rows_equal: Amount  # the trainer's own top-k is the same set
    rows_overlap: Amount  # some but not all experts shared
    rows_mismatch: Amount  # no expert shared
    rows_recompute_differ: Amount  # recomputed router scores are not the forward's: must be 0
    control_token_minus: Amount  # rows_equal under deliberate misalignments (old_log_prob alone)
    control_token_plus: Amount
    control_layer_minus: Amount
    control_layer_plus: Amount
    counts_tokens: bool = True  # False on ranks that see a copy of another rank's tokens
