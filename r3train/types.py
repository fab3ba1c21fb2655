"""The frozen records that flow through r3train, each field with its shape and dtype.

Letters: T tokens of one sample, P its prompt tokens, L all decoder layers, K experts of a token
(top-k), B samples of a microbatch, F their tokens together, N rows of a padded pack, n rows of one
rank's share of it.

Row t of ``routed_experts`` holds the experts chosen when token t was the *input*: the forward that
predicts token t+1.  The last token of a sample is never an input.  It has no row.

One sample, followed from the server to a rank.  The model has 2 layers and uses 2 of 4 experts for
each token.  The prompt has 2 tokens, 5 and 6.  The answer is 7 and 1 (1 is the end token):

>>> shape = RouteShape(num_layers=2, topk=2, num_experts=4)
>>> shape.row, shape.dtype, shape.missing
((2, 2), dtype('uint8'), 255)
>>> sample = RolloutSample(
...     sample_id=3,
...     group_id=0,
...     prompt=Prompt("p0", 0, "name tools", np.array([5, 6], np.int32), label=["saw"]),
...     token_ids=np.array([5, 6, 7, 1], np.int32),
...     prompt_len=2,
...     loss_mask=np.array([False, False, True, True]),
...     rollout_log_probs=np.array([0, 0, -0.5, -0.25], np.float32),
...     routed_experts=np.array(
...         [  # layer 1, layer 2
...             [[0, 1], [2, 3]],  # input 5
...             [[1, 2], [3, 0]],  # input 6, predicts 7
...             [[0, 3], [1, 2]],  # input 7, predicts 1
...         ],
...         np.uint8,
...     ),
...     weight_versions=np.array([-1, -1, 0, 0], np.int32),
...     finish_reason="stop",
...     # with --rollout-top-k 20: 7 was sampled among 7 and 9, and 1 was the only one kept
...     mask_counts=np.array([0, 0, 2, 1], np.int32),
...     mask_ids=np.array([7, 9, 1], np.int32),
... )
>>> sample.routed_experts.shape  # [T-1, L, K]
(3, 2, 2)

The learning rule adds an advantage to each token of the answer:

>>> train = TrainSample(sample, reward=1.0, advantages=np.array([0, 0, 2, 2], np.float32))

A microbatch holds streams that are aligned to rows.  Row t has token t as its input, so whatever
belongs to token t+1 moves back by one: labels, mask, log-probs, advantages, sampling masks.  Tokens and
routes do not move:

>>> from r3train.layout.microbatch import build_microbatch, slice_microbatch, Streams
>>> batch = build_microbatch(0, [train], Streams(shape, sampling_mask=True), cp_size=2, tp_size=1)
>>> batch.tokens.tolist()
[5, 6, 7, 1]
>>> batch.labels.tolist()
[6, 7, 1, 0]
>>> batch.loss_mask.tolist()
[False, True, True, False]
>>> batch.rollout_log_probs.tolist()
[0.0, -0.5, -0.25, 0.0]
>>> batch.advantages.tolist()
[0.0, 2.0, 2.0, 0.0]
>>> np.concatenate(batch.routes)[:, 1].tolist()  # of layer 2; the last token has none
[[2, 3], [3, 0], [1, 2], [255, 255]]
>>> batch.mask_counts.tolist(), batch.mask_ids.tolist()
([0, 2, 1, 0], [7, 9, 1])
>>> batch.layout.rows.tolist()  # 4 rows divide by 2 * cp_size: no padding
[0, 1, 2, 3]

A rank of 2 pipeline stages and 2 context-parallel ranks: the second of each.  It gets rows 1 and 2
(context-parallel rank 0 gets rows 0 and 3), and the routes of layer 2, its only MoE layer:

>>> place = RankTopology(
...     rank=3, world_size=4, cp_rank=1, cp_size=2, pp_rank=1, pp_size=2, moe_layer_numbers=((2,),)
... )
>>> share = slice_microbatch(batch, place)
>>> share.tokens.tolist(), share.labels.tolist()
([6, 7], [7, 1])
>>> share.routes.tolist()  # [m, l, K]: 2 rows, 1 layer, 2 experts
[[[3, 0]], [[1, 2]]]
>>> [uid - (3 << 24) for uid in share.route_uids.tolist()]  # uid: sample id << 24, plus position
[1, 2]
>>> share.mask_counts.tolist(), share.mask_ids.tolist()
([2, 1], [7, 9, 1])

This module needs numpy and msgspec only: every record is built and checked on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the prompt data, tokenised."""

    prompt_id: str  # FILE:N, the N-th line of the file, from 1
    index: int  # of the same line, from 0
    text: str
    token_ids: np.ndarray  # int32[P]
    label: Any  # JSON value that the reward compares the answer with
    metadata: dict[str, Any] = field(default_factory=dict)  # JSON object for reward and environment
    content: Any = None  # the row's text, or its messages as they were read
    # other columns of the row, where a user's function scores
    columns: dict[str, Any] | None = None


# of a model, that routes and their checksums hold
MOST_LAYERS, MOST_EXPERTS = 512, 4095


def missing_marker(dtype: np.dtype | type) -> int:
    """The largest value of ``dtype``.  It marks a route slot that the engine did not report."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The shape of one token's routes, a row of [L, K] expert ids.  The wire does not carry it.

    Qwen3-30B-A3B has 48 layers, 8 experts per token and 128 experts: ``RouteShape(48, 8, 128)``,
    rows of uint8[48, 8].
    """

    num_layers: int  # L, all decoder layers, dense ones too
    topk: int  # K
    num_experts: int  # of one layer
    dense_layer_ids: tuple[int, ...] = ()  # 0-based; the wire holds zeros for them

    @property
    def row(self) -> tuple[int, int]:
        """(L, K)."""
        return self.num_layers, self.topk

    @property
    def dtype(self) -> np.dtype:
        """uint8 if it holds every expert id and the missing marker, else uint16.

        Raises ValueError above ``MOST_EXPERTS``.
        """
        if self.num_experts > MOST_EXPERTS:
            text = f"num_experts is {self.num_experts}: routes hold at most {MOST_EXPERTS} experts"
            raise ValueError(text)
        return np.dtype(np.uint8 if self.num_experts <= np.iinfo(np.uint8).max else np.uint16)

    @property
    def missing(self) -> int:
        """The value of a slot that the engine did not report, 255 or 65535."""
        return missing_marker(self.dtype)


class RowClass(IntEnum):
    """Origin of a row of routes: how the server produced it.

    DECODED: while its token was sampled.  PREFILLED: in the prefill of a request.
    PREFILLED_AGAIN: in the prefill of a request that goes on with tokens which older weights sampled, after an
    update; also every row of an answer that its server retracted (``num_retractions``), because the server does not
    say which of them it computed again.  CACHED: taken from the prefix cache.  FILLED: by the trainer, because no
    server computed the row.
    """

    DECODED = 0
    PREFILLED = 1
    PREFILLED_AGAIN = 2
    CACHED = 3
    FILLED = 4

    @property
    def label(self) -> str:
        """The name in metrics and evidence."""
        return self.name.lower()


# of a row of a sample that was read from a file without classes
UNKNOWN_CLASS = 255


# a kind of choice that servers record and the trainer replays
StreamName = Literal["routes", "sampling_mask", "indexer"]
ROUTES: StreamName = "routes"
SAMPLING_MASK: StreamName = "sampling_mask"
INDEXER: StreamName = "indexer"
SAMPLING_MASK_LAYER = 1  # the number of their only layer, which is the model's output


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One finished generation, exactly as the engine reported it.

    Arrays over tokens cover prompt and response.  ``routed_experts`` holds ``RouteShape.missing``
    in slots that the engine did not report.  It is None without R3.
    """

    sample_id: int  # unique within a run; the high bits of every token uid
    group_id: int  # equal for all samples of one prompt
    prompt: Prompt
    token_ids: np.ndarray  # int32[T]
    prompt_len: int  # P
    loss_mask: np.ndarray  # bool[T], True on the model's own tokens
    rollout_log_probs: np.ndarray  # float32[T], 0 on prompt tokens
    routed_experts: np.ndarray | None  # uint8 or uint16 [T-1, L, K]
    weight_versions: np.ndarray  # int32[T], -1 on tokens that no weights generated
    finish_reason: str  # stop | length | abort
    text: str = ""  # the response, decoded
    # set for --environment-samples turn only: the episode's id, and True on its last turn
    trajectory_id: int | None = None
    is_last_step: bool | None = None
    # seconds spent waiting for answers, over all requests of the rollout
    generation_s: float = 0.0
    # retractions by the servers, over the answers that were kept (--retraction-policy accept)
    num_retractions: int = 0
    # Rows as each answer brought them: (index of the first row, rows [r, L, K]).  The evidence
    # counts these, so an error in joining answers shows.  () for a sample read from a file.
    decoded: tuple[tuple[int, np.ndarray], ...] = ()
    # With rollout_top_k: the tokens that sampling kept, among which each token was sampled.  Token t has
    # the next mask_counts[t] of mask_ids; 0 for tokens that the model did not draw.  None without.
    mask_counts: np.ndarray | None = None  # int32[T]
    mask_ids: np.ndarray | None = None  # int32[mask_counts.sum()]
    # with --opd-type sglang: the teacher's, 0 outside the model's own tokens.  None without.
    teacher_log_probs: np.ndarray | None = None  # float32[T]
    # sampling masks as each answer brought them: (index of the first token, counts, ids)
    decoded_masks: tuple[tuple[int, np.ndarray, np.ndarray], ...] = ()
    # With a replayed indexer: tokens that it chose for the rows that are not implied, the last R of T - 1, as bits
    # (see ``routing.indexer_topk``); no bit where no server computed the row.  None without.
    indexer_topk: np.ndarray | None = None  # uint64[R, L, W]
    # the same as each answer brought them: (index of the first row, bits); the first part begins at row K
    decoded_indexer: tuple[tuple[int, np.ndarray], ...] = ()
    # of an agent's session, on its last sample: (sample id, first token, end, crc32 of the tokens up to there, whether
    # it was cut) of each call that was delivered, see chat/token_ledger.py
    token_ledger: Sequence[Sequence[int]] | None = None
    # of an agent's session: the messages up to the last answer, as people read them; in no file of samples
    conversation: tuple[str, ...] = ()
    # with reward_keys: the numbers of the reward's table at these keys, in their order
    reward_parts: Sequence[float] | None = None
    # with routes: the RowClass of each row, FILLED for the last token; None where it is not known
    row_classes: np.ndarray | None = None  # uint8[T]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def response_len(self) -> int:
        return self.num_tokens - self.prompt_len


# a finished sample and its reward
Scored = tuple[RolloutSample, float]


@dataclass(frozen=True, slots=True)
class Rechecked:
    """A part of a sample's text as its server computed it again, in one prefill without a new token.

    Rows ``first_row``..T-2 of T tokens.  Log-prob i is that of token first_row + 1 + i, at temperature 1.
    """

    sample_id: int
    part: RecheckPart
    server: int  # index of the server
    weight_version: int  # of the part's tokens
    held_version: int  # that the server said it holds
    token_ids: np.ndarray  # int32[T]
    first_row: int
    rows: np.ndarray  # uint8 or uint16 [T-1-first_row, L, K]
    log_probs: np.ndarray  # float32[T-1-first_row]


@dataclass(frozen=True, slots=True)
class RecheckedRollout:
    """All that was rechecked of one rollout, and what rounding alone does.

    noise: samples that were sampled at the start of generation and rechecked at once.
    """

    parts: list[Rechecked]
    missed: int  # chosen samples of which no part was rechecked
    noise: list[tuple[RolloutSample, Rechecked]]


@dataclass(frozen=True, slots=True)
class Scores:
    """A text of T tokens as one server scores it: a given text, and the n tokens of them that it drew after that.

    Log-prob i is that of token T - len(log_probs) + i, at temperature 1; the first is 0, which no row predicts.
    """

    log_probs: np.ndarray  # float32[T - s], from token s on
    # uint8 or uint16 [T-1-r, L, K] from row r on, those of cached tokens too; [T-1, 0, 0] without routes
    rows: np.ndarray
    cached_tokens: int  # tokens that came from the prefix cache
    # int32[n], greedily, with log-probs and rows like the others; most texts are only read
    sampled: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    weight_version: str | None = None  # that the server says of its weights, or an adapter's base


@dataclass(frozen=True, slots=True)
class CanaryScores:
    """Scores of one canary text by one server after an update, in the order of the requests.

    early and warm compare an empty cache with a filled one; None for texts on which this is not compared.
    """

    early: Scores | None  # the second half, on an empty cache
    warm: Scores | None  # the second half again, on the cached first half
    whole: Scores  # the whole text without the cache: what the actor is compared with


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A rollout sample with its reward and its advantages."""

    sample: RolloutSample
    reward: float  # as the learning rule used it
    advantages: np.ndarray  # float32[T], 0 outside the loss mask
    loss_weight: float = 1.0  # of each of its rows, see algo/trajectories.py


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The places of a microbatch's tokens in its padded pack.

    Each sample is padded to a multiple of 2*cp.  A pack that must be longer ends in a tail of
    padding, which ``cu_seqlens_padded`` lists as one more sequence.
    """

    lengths: np.ndarray  # int32[B], unpadded tokens of each sample
    cu_seqlens_padded: np.ndarray  # int32[B' + 1], B' = B, or B + 1 with a tail
    rows: np.ndarray  # int64[N], flat index of the token in each padded row, -1 = padding

    @property
    def num_rows(self) -> int:
        return int(self.rows.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward pass, as flat unpadded streams over their tokens.

    Streams are aligned to *rows*: entry t describes the forward whose input is token t.  Labels,
    mask, log-probs and advantages are therefore those of token t+1.  The last token of a sample has
    label 0, mask False and no route.
    """

    microbatch_id: int  # from 0 within an optimizer step
    layout: TokenLayout
    sample_ids: np.ndarray  # int64[B]
    loss_weights: np.ndarray  # float32[B]
    tokens: np.ndarray  # int64[F]
    labels: np.ndarray  # int64[F]
    positions: np.ndarray  # int64[F], from 0 within each sample
    loss_mask: np.ndarray  # bool[F]
    rollout_log_probs: np.ndarray  # float32[F]
    advantages: np.ndarray  # float32[F]
    row_uids: np.ndarray  # int64[F], see ids.token_uids
    row_versions: np.ndarray  # int32[F], see layout.microbatch.current_versions
    # int32[F], rollouts by which the weights that sampled the label were behind, else 0
    ages: np.ndarray
    # uint8 or uint16 [f, L, K], end to end [F, L, K]: the samples' own arrays; None without R3
    routes: tuple[np.ndarray, ...] | None
    # tokens among which the label was sampled, as in RolloutSample; None without rollout_top_k
    mask_counts: np.ndarray | None = None  # int32[F]
    mask_ids: np.ndarray | None = None  # int32[mask_counts.sum()]
    teacher_log_probs: np.ndarray | None = None  # float32[F], with --opd-type sglang
    row_classes: np.ndarray | None = None  # uint8[F], RowClass or UNKNOWN_CLASS; None without R3
    # with a replayed indexer: all samples' bits, and the row there of each token, -1 for none
    indexer_topk: np.ndarray | None = None  # uint64[r, L, W]
    indexer_rows: np.ndarray | None = None  # int64[F]


@dataclass(frozen=True, slots=True)
class RankTopology:
    """The place of one rank: its number in each dimension of parallelism, and their sizes."""

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
    etp_size: int = 1
    sequence_parallel: bool = False
    # 1-based numbers of the MoE layers that this rank holds, one tuple a model chunk
    moe_layer_numbers: tuple[tuple[int, ...], ...] = ()
    # the same of the layers with an indexer
    indexer_layer_numbers: tuple[tuple[int, ...], ...] = ()

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


@dataclass(frozen=True, slots=True)
class RankSlice:
    """One rank's share of one microbatch: its context-parallel rows, its layers, its SP rows.

    Token streams have n = N / cp rows.  Routers see m = n / tp rows under sequence parallelism,
    else m = n.  Padding rows hold 0 in streams, -1 in uids and the missing marker in routes.
    l is the number of MoE layers of this rank.
    """

    microbatch_id: int
    cu_seqlens_padded: np.ndarray  # int32[B' + 1], of the whole pack
    max_seqlen: int  # longest padded sequence of the whole pack
    loss_weights: np.ndarray  # float32[B'], 0 for the tail
    tokens: np.ndarray  # int64[n]
    labels: np.ndarray  # int64[n]
    positions: np.ndarray  # int64[n]
    loss_mask: np.ndarray  # bool[n]
    rollout_log_probs: np.ndarray  # float32[n]
    advantages: np.ndarray  # float32[n]
    token_uids: np.ndarray  # int64[n], -1 = padding
    layer_numbers: np.ndarray  # int32[l], 1-based
    # uint8 or uint16 [m, l, K], in memory layer by layer; None without R3.  Staging fills padding rows
    routes: np.ndarray | None
    route_uids: np.ndarray  # int64[m], -1 = padding; the sequence-parallel share of token_uids
    route_versions: (
        np.ndarray
    )  # int32[m], weights that computed the row and all before it, -1 = none
    # with rollout_top_k, on the last pipeline stage only: tokens among which the label was sampled
    mask_counts: np.ndarray | None = None  # int32[n], 0 for padding and labels that nobody drew
    mask_ids: np.ndarray | None = None  # int32[mask_counts.sum()], row after row
    mask_versions: np.ndarray | None = None  # int32[n], as route_versions
    teacher_log_probs: np.ndarray | None = None  # float32[n], with --opd-type sglang
    ages: np.ndarray | None = None  # int32[n], see MicroBatch; None counts all rows as new
    row_classes: np.ndarray | None = None  # uint8[n], see MicroBatch; FILLED for padding
    # With a replayed indexer, of i layers: bits of the chosen tokens, none in rows where all are chosen or that no
    # server computed; in memory layer by layer
    indexer_topk: np.ndarray | None = None  # uint64[n, i, W]
    indexer_layers: np.ndarray | None = None  # int32[i], 1-based
    token_versions: np.ndarray | None = None  # int32[n], as route_versions

    @property
    def num_rows(self) -> int:
        return int(self.tokens.shape[0])


# whole: all tokens; last: those after a weight update; prompt: its rows, as the request was sent
RecheckPart = Literal["whole", "last", "prompt"]
# Far more than the rows of one call; the sum of millions of calls still fits 64 bits.
Amount = Annotated[int, Meta(ge=0, le=1 << 40)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 17)]
LayerNumber = Annotated[int, Meta(ge=1, le=1 << 12)]
# a weight version, -1 where it is not known
Version = Annotated[int, Meta(ge=-1, le=1 << 31)]
ReplayPass = Literal["old_log_prob", "ref_log_prob", "train"]
# ..._backward: a recomputation
ReplayStage = Literal["replay_forward", "replay_backward"]


def next_checked(rollout_id: int, interval: int) -> int:
    """Return the first rollout after this one whose replay ``--r3-check-interval`` proves.

    >>> next_checked(2, 4), next_checked(3, 4), next_checked(4, 4), next_checked(6, 1)
    (3, 4, 8, 7)
    """
    following = rollout_id + 1
    return following if following < interval else -(-following // interval) * interval


def is_checked(rollout_id: int, interval: int) -> bool:
    """Tell whether ``--r3-check-interval`` proves the replay of a rollout.

    >>> [n for n in range(12) if is_checked(n, 4)]
    [0, 1, 2, 3, 4, 8]
    """
    return next_checked(rollout_id - 1, interval) == rollout_id


class Fingerprint(int):
    """An unsigned 64-bit fingerprint of routes.

    Files hold it as "0x" and 16 hexadecimal digits: many JSON readers round 64-bit integers.
    """


@dataclass(frozen=True, slots=True)
class ReplayEvidence:
    """One router call of one rank, or the sum of several.  Counted on the device, read once per step.

    A sum is of calls in which nothing is wrong (see ``proof.step_verdict.sums_of``): its counts and its
    fingerprint are theirs together, and its microbatch is the first of theirs.

    A record of stream sampling_mask is one application of sampling masks to logits.  A row is replayed if only its
    sampling masks were left, filled if its label is nobody's draw, native if a sampled label has no sampling mask, and duplicate if its label was not
    among them.  ``replay_idx_sum`` is the number of sampling masks that were applied, ``map_sum`` that of the
    tokens that were left.  rows_equal: the trainer's own likeliest tokens, as many as were kept, are the
    same set; rows_mismatch: its likeliest token was not kept.

    A record of stream indexer is one call of a layer's sparse attention; its top-k is ``index_topk``.  A row is
    replayed if the rollout has its choice.  A real row without one, most of them because all of its tokens are chosen, is filled.  ``replay_idx_sum`` and ``map_sum``
    are the numbers of tokens that replayed rows were to have and had.  rows_mismatch: the trainer's own choice has no
    more tokens in common with the replayed one than a random one would have on average, K * K / (p + 1).

    Its types are the schema of ``evidence/rank_NNNNN.jsonl`` too (``r3train/audit/evidence_schema.py``).
    """

    step: Amount  # the rollout_id
    rank: Rank  # of the whole job
    replay_pass: ReplayPass
    stream: StreamName
    stage: ReplayStage
    vp_stage: Amount  # model chunk of the rank, from 0
    microbatch_id: Amount
    layer_number: LayerNumber  # 1-based
    num_rows: Amount  # rows of the call, padding included
    rows_replayed: Amount  # rows whose every slot came from the rollout
    rows_filled: Amount  # real rows with at least one slot that the trainer filled
    rows_padding: Amount
    rows_native: Amount  # real rows whose experts the router chose itself: must be 0
    duplicate_rows: Amount  # rows that dispatch to fewer than topk experts: must be 0
    topk: Amount  # K
    replay_idx_sum: Amount  # sum of the expert ids that were replayed
    map_sum: Amount  # routing_map.sum(): must be num_rows * topk
    fingerprint: Fingerprint  # of the real recorded slots in the returned map
    rows_equal: Amount  # fully recorded rows whose own top-k in the trainer is the same set
    rows_overlap: Amount  # some experts shared, not all
    rows_mismatch: Amount  # no expert shared
    rows_recompute_differ: Amount  # recomputed router scores differ from the forward's: must be 0
    # rows_equal if the routes were one token or one layer off (first forwards only)
    control_token_minus: Amount
    control_token_plus: Amount
    control_layer_minus: Amount
    control_layer_plus: Amount
    # real rows of the weight version that the actor holds in this call, and how many of them are in
    # rows_equal and in rows_mismatch
    rows_current: Amount
    rows_current_equal: Amount
    rows_current_mismatch: Amount
    counts_tokens: bool = True  # False on a rank that sees a copy of another rank's tokens
    num_calls: Annotated[int, Meta(ge=1, le=1 << 40)] = 1  # above 1: the record is a sum
