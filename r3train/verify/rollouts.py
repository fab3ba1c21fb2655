"""The one batch that every topology trains on, with routes that no router of the model would choose.

Every token id occurs once in the batch (0 is padding's only), so that the embedding in any row of
any rank says which sample and position it is, without believing a single index of the trainer.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from r3train.routing import wire
from r3train.types import Prompt, RolloutSample, TrainSample
from r3train.verify.model_zoo import VOCAB_SIZE, ModelVariant

PROMPT_LEN = 3
# microbatches of unequal size; groups are pairs, two of them of equal length
RAGGED_LENGTHS = (5, 5, 17, 29, 11, 11, 23, 8, 30, 14, 19, 26)
# four microbatches of exactly 36 rows: the wrong one's routes would fit without complaint
LEVEL_LENGTHS = (12, 24, 18, 18, 29, 7, 6, 30)
BATCHES = {"ragged": (RAGGED_LENGTHS, 48), "level": (LEVEL_LENGTHS, 36)}


@dataclass(frozen=True)
class RolloutBatch:
    """Samples' arrays, flat over tokens where per-token (F of them, sample after sample).

    routes: int32[F, L, K] with -1 where nothing was recorded (the last row of each sample always).
    Row-aligned streams (entry t belongs to the prediction of token t+1; 0 on last rows):
    old_log_probs, ref_log_probs, rollout_log_probs: float32[F].
    """

    lengths: np.ndarray  # int64[S]
    tokens: np.ndarray  # int32[F]
    routes: np.ndarray
    advantages: np.ndarray  # float32[S], one per sample
    old_log_probs: np.ndarray
    ref_log_probs: np.ndarray
    rollout_log_probs: np.ndarray
    token_budget: int  # of a microbatch, before context parallelism

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def labels(self) -> np.ndarray:
        """int64[F]: the next token of the sample, 0 on last rows."""
        labels = np.append(self.tokens[1:], 0).astype(np.int64)
        labels[self.starts + self.lengths - 1] = 0
        return labels

    @property
    def loss_mask(self) -> np.ndarray:
        """bool[F]: rows that predict a response token."""
        position = np.arange(len(self.tokens)) - np.repeat(self.starts, self.lengths)
        last = np.repeat(self.lengths, self.lengths) - 1
        return (position >= PROMPT_LEN - 1) & (position < last)

    @property
    def inner_rows(self) -> np.ndarray:
        """bool[F]: every row but the last of each sample."""
        inner = np.ones(len(self.tokens), dtype=bool)
        inner[self.starts + self.lengths - 1] = False
        return inner

    @property
    def row_of_token(self) -> np.ndarray:
        """int64[VOCAB_SIZE]: the flat row in which a token id stands, -1 for ids not in the batch."""
        rows = np.full(VOCAB_SIZE, -1, dtype=np.int64)
        rows[self.tokens] = np.arange(len(self.tokens))
        return rows

    def save(self, path: Path) -> None:
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> RolloutBatch:
        with np.load(path) as arrays:
            fields = {name: arrays[name] for name in arrays.files}
        fields["token_budget"] = int(fields["token_budget"])
        return cls(**fields)


def make_rollouts(variant: ModelVariant, kind: str) -> RolloutBatch:
    """Draw a batch; log-prob streams are zero until ``with_log_probs`` sets them.

    Holes: one slot, a whole row, a row of one layer, and the last four rows of an aborted sample.
    """
    lengths, budget = BATCHES[kind]
    lengths = np.array(lengths, dtype=np.int64)
    total = int(lengths.sum())
    generator = np.random.default_rng(0)
    tokens = generator.permutation(np.arange(1, VOCAB_SIZE))[:total].astype(np.int32)
    scores = generator.random((total, variant.num_layers, variant.num_experts))
    routes = np.argsort(scores, axis=-1)[..., : variant.topk].astype(np.int32)
    starts = np.cumsum(lengths) - lengths
    routes[starts + lengths - 1] = -1
    moe = [n - 1 for n in variant.moe_layer_numbers]
    routes[starts[2] + 2, moe[-1], 1] = -1
    routes[starts[3] + 4] = -1
    routes[starts[6] + 1, moe[0]] = -1
    last = len(lengths) - 1
    routes[starts[last] + lengths[last] - 5 : starts[last] + lengths[last]] = -1
    zeros = np.zeros(total, dtype=np.float32)
    return RolloutBatch(
        lengths=lengths,
        tokens=tokens,
        routes=routes,
        advantages=generator.standard_normal(len(lengths)).astype(np.float32),
        old_log_probs=zeros,
        ref_log_probs=zeros,
        rollout_log_probs=zeros,
        token_budget=budget,
    )


def with_log_probs(
    batch: RolloutBatch, log_probs: np.ndarray, *, old_spread: float = 0.2
) -> RolloutBatch:
    """Old, reference and rollout log-probs scattered round the model's own.

    log_probs: float[F], row-aligned.  Far enough from them that the PPO clip, the KL term and the
    importance weights' bounds are all at work; with a small ``old_spread`` no ratio is clipped, for
    runs too coarse to say on which side of the clip a token falls.
    """
    generator = np.random.default_rng(1)
    inner = batch.inner_rows

    def near(centre: np.ndarray, spread: float) -> np.ndarray:
        noise = spread * generator.standard_normal(len(centre))
        return np.where(inner, np.minimum(centre + noise, -1e-3), 0).astype(np.float32)

    old = near(log_probs, old_spread)
    streams = dict(
        old_log_probs=old,
        ref_log_probs=near(log_probs, 0.3),
        rollout_log_probs=near(old, 0.5),
    )
    return replace(batch, **streams)


def with_holes_filled(batch: RolloutBatch, variant: ModelVariant) -> RolloutBatch:
    """Every row but the last of a sample recorded in full, for runs whose own scores are coarse."""
    routes = batch.routes.copy()
    holes = (routes < 0).any(-1) & batch.inner_rows[:, None]
    routes[holes] = np.arange(variant.topk)
    return replace(batch, routes=routes)


def train_samples(batch: RolloutBatch, variant: ModelVariant) -> list[TrainSample]:
    """The batch as the rollout side would hand it over, its routes through the wire format.

    Holes (-1) become ``missing`` afterwards, as after the rows that an engine computes for no token.
    """
    samples = []
    for i, (start, length) in enumerate(zip(batch.starts.tolist(), batch.lengths.tolist())):
        rows = slice(start, start + length)
        # as SGLang sends them: little-endian int32.  It never sends a hole, so these are made afterwards
        recorded = batch.routes[start : start + length - 1].astype("<i4")
        holes = recorded < 0
        sent = np.where(
            holes.any(-1, keepdims=True), np.arange(variant.topk, dtype="<i4"), recorded
        )
        routed = wire.decode_routed_experts(
            base64.b64encode(sent.astype("<i4").tobytes()),
            variant.route_shape,
            num_tokens=length,
            sample=str(i),
        )
        routed = np.where(
            holes.any(-1, keepdims=True),
            np.where(holes, variant.route_shape.missing, recorded).astype(routed.dtype),
            routed,
        )
        mask = np.arange(length) >= PROMPT_LEN
        # token-aligned: what belongs to the prediction of token t stands at t
        rollout = np.append(np.zeros(1, np.float32), batch.rollout_log_probs[rows][:-1])
        samples.append(
            TrainSample(
                sample=RolloutSample(
                    sample_id=i,
                    group_id=i // 2,
                    prompt=Prompt(f"prompt-{i // 2}", i // 2, "", batch.tokens[rows][:3], None),
                    token_ids=batch.tokens[rows],
                    prompt_len=PROMPT_LEN,
                    loss_mask=mask,
                    rollout_log_probs=np.where(mask, rollout, 0).astype(np.float32),
                    routed_experts=routed,
                    weight_versions=np.where(mask, 0, -1).astype(np.int32),
                    finish_reason="stop",
                ),
                reward=0.0,
                advantages=np.where(mask, batch.advantages[i], 0).astype(np.float32),
            )
        )
    return samples
