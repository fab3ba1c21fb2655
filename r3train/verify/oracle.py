"""Oracle (b): a plain-PyTorch mixture-of-experts transformer that takes its routes as an argument.

One sample at a time, one expert at a time, float64, no code of the trainer.  Formulas are
those of the Hugging Face models of the same names and of the papers cited in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from r3train.config.algorithm_settings import AlgorithmSection
from r3train.config.trainer_settings import TrainerSection
from r3train.verify.model_zoo import (
    GLM_ROTARY_FRACTION,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    ROUTED_SCALING_FACTOR,
    ModelVariant,
)
from r3train.verify.rollouts import RolloutBatch

Weights = dict[str, Tensor]
BIAS = "e_score_correction_bias"
# the learning rule of the oracles and the actor alike
TEMPERATURE = 0.8
ALGORITHM = AlgorithmSection(
    eps_clip=0.2,
    eps_clip_high=0.28,
    kl_loss_coef=0.05,
    entropy_coef=0.01,
    use_tis=True,
    tis_clip=2.0,
    tis_clip_low=0.5,
)
# never reached: the norm is computed, nothing is clipped
_NO_CLIPPING = 1e9
# a large epsilon keeps the first AdamW step smooth where a gradient is next to nothing
ADAM = TrainerSection(
    optimizer="adam", lr=1e-3, weight_decay=0.01, adam_eps=1e-4, clip_grad=_NO_CLIPPING
)
SGD = TrainerSection(optimizer="sgd", lr=0.3, clip_grad=_NO_CLIPPING)


@dataclass
class SampleTrace:
    """The forward of one sample of T tokens, by 0-based layer.

    experts: int64[T, K]; logits, probs: [T, E] (probs 0 at experts not used); blocks: [T, hidden].
    """

    experts: dict[int, Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    probs: dict[int, Tensor] = field(default_factory=dict)
    blocks: dict[int, Tensor] = field(default_factory=dict)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: Tensor, fraction: float) -> Tensor:
    """Rotary embedding of [T, heads, dim] at positions 0..T-1; the rest of dim passes through."""
    dim = int(x.shape[-1] * fraction)
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def swiglu(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    gate = F.silu(x @ weights[f"{prefix}.gate_proj.weight"].T)
    return (gate * (x @ weights[f"{prefix}.up_proj.weight"].T)) @ weights[
        f"{prefix}.down_proj.weight"
    ].T


def attention(x: Tensor, weights: Weights, prefix: str, rotary_fraction: float) -> Tensor:
    length = x.shape[0]

    def project(name: str, heads: int) -> Tensor:
        out = x @ weights[f"{prefix}.{name}_proj.weight"].T
        bias = weights.get(f"{prefix}.{name}_proj.bias")
        return (out if bias is None else out + bias).view(length, heads, HEAD_DIM)

    q = rotate(rms_norm(project("q", HEADS), weights[f"{prefix}.q_norm.weight"]), rotary_fraction)
    k = rotate(
        rms_norm(project("k", KV_HEADS), weights[f"{prefix}.k_norm.weight"]), rotary_fraction
    )
    v = project("v", KV_HEADS)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = []
    for head in range(HEADS):
        group = head * KV_HEADS // HEADS
        scores = q[:, head] @ k[:, group].T / HEAD_DIM**0.5
        heads.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v[:, group])
    return torch.cat(heads, -1) @ weights[f"{prefix}.o_proj.weight"].T


def complete(given: list[int], scores: Tensor) -> list[int]:
    """One row's experts: those given, holes (-1) taken in turn by the best ones not yet used."""
    spare = [e for e in scores.argsort(descending=True).tolist() if e not in given]
    return [e if e >= 0 else spare.pop(0) for e in given]


def mixture(
    x: Tensor, weights: Weights, prefix: str, variant: ModelVariant, routes: np.ndarray
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the block's output, router logits, dense gate probabilities and the experts used."""
    logits = x @ weights[f"{prefix}.gate.weight"].T
    scores = {
        "softmax": logits,
        "pre_softmax": logits.softmax(-1),
        "sigmoid": logits.sigmoid(),
    }[variant.score]
    bias = weights.get(f"{prefix}.gate.{BIAS}")
    ranking = (scores if bias is None else scores + bias).detach()
    chosen = torch.tensor([complete(row.tolist(), rank) for row, rank in zip(routes, ranking)])
    gates = scores.gather(1, chosen)
    if variant.score == "softmax":
        gates = gates.softmax(-1)
    elif variant.score == "sigmoid":
        gates = gates / gates.sum(-1, keepdim=True)
    if variant.family == "glm4_moe":
        gates = gates * ROUTED_SCALING_FACTOR
    dense = torch.zeros_like(logits).scatter(1, chosen, gates)
    result = torch.zeros_like(x)
    for e in sorted(set(chosen.flatten().tolist())):
        rows = (chosen == e).any(1).nonzero()[:, 0]
        out = swiglu(x[rows], weights, f"{prefix}.experts.{e}")
        result = result.index_add(0, rows, dense[rows, e, None] * out)
    if variant.family == "glm4_moe":
        result = result + swiglu(x, weights, f"{prefix}.shared_experts")
    return result, logits, dense, chosen


def forward(
    weights: Weights, variant: ModelVariant, tokens: np.ndarray, routes: np.ndarray
) -> tuple[Tensor, SampleTrace]:
    """Logits [T, vocab] of one sample under the given routes int[T, L, K], and what led to them."""
    fraction = GLM_ROTARY_FRACTION if variant.family == "glm4_moe" else 1.0
    trace = SampleTrace()
    x = weights["model.embed_tokens.weight"][torch.from_numpy(tokens).long()]
    for i in range(variant.num_layers):
        layer = f"model.layers.{i}"
        normed = rms_norm(x, weights[f"{layer}.input_layernorm.weight"])
        x = x + attention(normed, weights, f"{layer}.self_attn", fraction)
        normed = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"])
        if i in variant.dense_layers:
            x = x + swiglu(normed, weights, f"{layer}.mlp")
        else:
            out, trace.logits[i], trace.probs[i], trace.experts[i] = mixture(
                normed, weights, f"{layer}.mlp", variant, routes[:, i]
            )
            x = x + out
        trace.blocks[i] = x
    output = weights["model.embed_tokens.weight" if variant.tied else "lm_head.weight"]
    return rms_norm(x, weights["model.norm.weight"]) @ output.T, trace


def loss_terms(
    new: Tensor, entropy: Tensor, batch: RolloutBatch
) -> tuple[Tensor, dict[str, float], dict[str, float]]:
    """Loss sum over the batch, each term's sum, and each term's sum of absolute values (its scale).

    new, entropy: float64[F], row-aligned.  PPO clip (arXiv 1707.06347 eq. 7, bounds apart as in
    arXiv 2503.14476), k3 KL (arXiv 2402.03300 eq. 4), truncated importance weights.
    """
    mask = torch.from_numpy(batch.loss_mask)
    old, ref, rollout = (
        torch.from_numpy(s).double()[mask]
        for s in (batch.old_log_probs, batch.ref_log_probs, batch.rollout_log_probs)
    )
    advantage = torch.from_numpy(np.repeat(batch.advantages, batch.lengths)).double()[mask]
    new, entropy = new[mask], entropy[mask]
    ratio = (new - old).exp()
    clipped_ratio = ratio.clamp(1 - ALGORITHM.eps_clip, 1 + ALGORITHM.clip_high)
    weight = (old - rollout).exp().clamp(ALGORITHM.tis_clip_low, ALGORITHM.tis_clip)
    pg = -torch.minimum(ratio * advantage, clipped_ratio * advantage) * weight
    kl = (ref - new).exp() - (ref - new) - 1
    tokens = {
        "pg_loss": pg,
        "kl": kl,
        "entropy": entropy,
        "ratio": ratio,
        "ppo_kl": old - new,
        "clipped": (clipped_ratio * advantage < ratio * advantage).double(),
        "tis_weight": weight,
        "loss": pg + ALGORITHM.kl_loss_coef * kl - ALGORITHM.entropy_coef * entropy,
    }
    sums = {name: float(values.sum().detach()) for name, values in tokens.items()}
    scales = {name: float(values.abs().sum().detach()) for name, values in tokens.items()}
    # a difference of log-probs is as exact as they are
    for name in ("ppo_kl", "kl"):
        scales[name] = max(scales[name], float((old.abs() + new.abs()).sum().detach()))
    return tokens["loss"].sum(), sums, scales


def run_batch(
    weights: Weights, variant: ModelVariant, batch: RolloutBatch
) -> tuple[Tensor, Tensor, list[SampleTrace]]:
    """Log-probs and entropies float64[F] (row-aligned), and the trace of every sample."""
    log_probs, entropies, traces = [], [], []
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist()):
        rows = slice(start, start + length)
        logits, trace = forward(weights, variant, batch.tokens[rows], batch.routes[rows])
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        labels = torch.from_numpy(batch.labels[rows])
        log_probs.append(log_p.gather(1, labels[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        traces.append(trace)
    return torch.cat(log_probs), torch.cat(entropies), traces
