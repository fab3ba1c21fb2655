"""The learning rule in float64: what a job of recorded rollouts must make of its weights and metrics.

No code of the trainer, of its losses or of its optimizer: the transformer is verify's plain one, and
everything after its logits is written out here.  A setting has the name of its flag.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r3train.verify.model_zoo import ModelVariant
from r3train.verify.oracle import BIAS, Weights, forward

# advantages whose rows have no finite gradient under ``nan_gradient.loss``: one step holds such
NO_GRADIENT = (-1.2, -1.0)


@dataclass(frozen=True)
class Rule:
    """The settings of a job; those named as flags are given to it as flags."""

    rollout_temperature: float
    grpo_std_normalization: bool
    eps_clip: float
    eps_clip_high: float
    kl_loss_coef: float
    entropy_coef: float
    use_tis: bool
    tis_clip: float
    tis_clip_low: float
    global_batch_size: int
    lr: float
    min_lr: float
    lr_decay_style: str
    lr_warmup_iters: int
    weight_decay: float
    clip_grad: float
    optimizer: str = "adam"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    advantage_estimator: str = "grpo"
    gamma: float = 1.0
    normalize_advantages: bool = False
    rollout_max_response_len: int = 26
    overlong_buffer_len: int | None = None
    overlong_penalty_factor: float = 1.0
    length_penalty_coef: float = 0.0
    mask_truncated: bool = False
    policy_loss: str = "ppo"

    def flags(self) -> list[str]:
        out = []
        for name, value in vars(self).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                out.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                out += [f"--{flag}", str(value)]
        return out


@dataclass(frozen=True)
class Sample:
    """One recorded answer of T tokens.

    tokens: int32[T]; mask: bool[T], the tokens that are trained; routes: int[T-1, L, K], -1 where nothing
    was recorded; rollout_log_probs: float32[T]; weight_versions: int32[T].
    """

    tokens: np.ndarray
    prompt_len: int
    mask: np.ndarray
    routes: np.ndarray
    rollout_log_probs: np.ndarray
    weight_versions: np.ndarray
    reward: float
    finish_reason: str = "stop"

    @property
    def all_routes(self) -> np.ndarray:
        """int[T, L, K]: the last token was never an input, so it has none."""
        last = np.full((1, *self.routes.shape[1:]), -1)
        return np.concatenate([self.routes, last])


Rollout = Sequence[Sequence[Sample]]  # [groups][samples]


@dataclass
class Expected:
    """The weights after the job, and a rollout's metrics with the size of what each is a sum of."""

    weights: Weights = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    scales: list[dict[str, float]] = field(default_factory=list)
    # the smallest distance of a token's ratio or importance weight from a bound that clips it
    margin: float = math.inf


def predictions(
    weights: Weights, variant: ModelVariant, sample: Sample, temperature: float
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Log-probs float64[T-1] of tokens 1..T-1, the entropies that they were drawn with, and the
    experts int64[T, K] of each layer."""
    logits, trace = forward(weights, variant, sample.tokens, sample.all_routes)
    log_p = (logits[:-1] / temperature).log_softmax(-1)
    drawn = torch.from_numpy(sample.tokens[1:]).long()
    return log_p.gather(1, drawn[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), trace.experts


def shaped(groups: Rollout, rule: Rule) -> list[list[Sample]]:
    """The rollout as it is trained: rewards pay for length, cut answers are masked.

    DAPO's soft limit (arXiv 2503.14476, equation 13); a penalty in proportion to the length.
    """
    longest, out = rule.rollout_max_response_len, []
    for group in groups:
        own = []
        for s in group:
            length = int(s.mask.sum())
            reward = s.reward - rule.length_penalty_coef * length / longest
            if rule.overlong_buffer_len is not None:
                over = length - (longest - rule.overlong_buffer_len)
                share = max(0.0, over / rule.overlong_buffer_len)
                reward -= rule.overlong_penalty_factor * share
            cut = rule.mask_truncated and s.finish_reason == "length"
            own.append(replace(s, reward=reward, mask=s.mask & (not cut)))
        out.append(own)
    return out


def advantages(groups: Rollout, rule: Rule) -> list[np.ndarray]:
    """A number for each token of each sample, float64[T].

    grpo (arXiv 2402.03300, 4.1.2; without std 2503.20783), rloo (2402.14740), max_rl (over the mean),
    reinforce_plus_plus and its baseline (2501.03262).
    """
    name, out = rule.advantage_estimator, []
    for group in groups:
        rewards = [s.reward for s in group]
        n, mean = len(rewards), sum(rewards) / len(rewards)
        spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
        for s in group:
            centred = s.reward - mean
            if max(rewards) - min(rewards) < 1e-12:  # the mean's rounding is no advantage
                centred = 0.0
            value = {
                "grpo": centred / (spread + 1e-6) if rule.grpo_std_normalization else centred,
                "rloo": centred * n / (n - 1),
                "max_rl": centred / mean if mean > 0 else 0.0,
                "reinforce_plus_plus": s.reward,
                "reinforce_plus_plus_baseline": centred,
            }[name]
            tokens = np.full(len(s.tokens), value)
            if name == "reinforce_plus_plus":
                trained = np.flatnonzero(s.mask)
                for place, t in enumerate(trained):
                    tokens[t] *= rule.gamma ** (len(trained) - 1 - place)
            out.append(tokens)
    if rule.normalize_advantages or name.startswith("reinforce"):
        masks = [s.mask for group in groups for s in group]
        counted = np.concatenate([own[mask] for own, mask in zip(out, masks)])
        deviation = np.sqrt(((counted - counted.mean()) ** 2).sum() / (len(counted) - 1) + 1e-8)
        out = [(own - counted.mean()) / deviation for own in out]
    return out


def learning_rate(rule: Rule, step: int, total_steps: int) -> float:
    """The rate of the step, counted from 0: up from 0 in a line, then down to min_lr."""
    if step <= rule.lr_warmup_iters and rule.lr_warmup_iters:
        return rule.lr * step / rule.lr_warmup_iters
    done = (step - rule.lr_warmup_iters) / (total_steps - rule.lr_warmup_iters)
    left = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }[rule.lr_decay_style]
    return rule.min_lr + left * (rule.lr - rule.min_lr)


class Descent:
    """AdamW (arXiv 1711.05101, algorithm 2) or plain descent; vectors do not decay."""

    def __init__(self, rule: Rule):
        self._rule = rule
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._steps = 0

    def step(self, weights: Weights, gradients: Weights, rate: float) -> None:
        """Move the weights in place; the gradients are clipped to the norm ``clip_grad`` first."""
        rule = self._rule
        norm = total_norm(gradients)
        shrink = min(1.0, rule.clip_grad / (norm + 1e-6)) if rule.clip_grad else 1.0
        self._steps += 1
        for name, gradient in gradients.items():
            w, g = weights[name].data, gradient * shrink
            decay = rule.weight_decay if w.dim() > 1 else 0.0
            if rule.optimizer == "sgd":
                w -= rate * (g + decay * w)
                continue
            first, second = self._moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
            first = rule.adam_beta1 * first + (1 - rule.adam_beta1) * g
            second = rule.adam_beta2 * second + (1 - rule.adam_beta2) * g * g
            self._moments[name] = first, second
            mean = first / (1 - rule.adam_beta1**self._steps)
            size = (second / (1 - rule.adam_beta2**self._steps)).sqrt()
            w -= rate * decay * w
            w -= rate * mean / (size + rule.adam_eps)


def total_norm(gradients: Weights) -> float:
    return math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))


@dataclass
class Rows:
    """The trained tokens of a step, float64[N] each; ``new`` and ``entropy`` carry the gradient."""

    new: Tensor
    entropy: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    advantage: Tensor


def loss_of(rows: Rows, rule: Rule) -> tuple[Tensor, dict[str, Tensor], float]:
    """The mean loss; every metric's terms, float64[N]; the smallest distance from a clipping bound.

    PPO with two bounds (arXiv 1707.06347 equation 7, 2503.14476), k3 (2402.03300 equation 4),
    importance weights of trainer over engine held within their bounds.
    """
    r, a = (rows.new - rows.old).exp(), rows.advantage
    low, high = 1 - rule.eps_clip, 1 + rule.eps_clip_high
    inner = torch.where(r > high, high, torch.where(r < low, low, r))
    surrogate = torch.where(inner * a < r * a, inner * a, r * a)
    weight = (rows.old - rows.rollout).exp()
    held = weight.clamp(rule.tis_clip_low, rule.tis_clip)
    policy = -surrogate * held if rule.use_tis else -surrogate
    kl = (rows.ref - rows.new).exp() - (rows.ref - rows.new) - 1
    gap = (rows.old - rows.rollout).abs()
    terms = {
        "loss": policy + rule.kl_loss_coef * kl - rule.entropy_coef * rows.entropy,
        "pg_loss": policy,
        "kl": kl,
        "entropy": rows.entropy,
        "ratio": r,
        "ppo_kl": rows.old - rows.new,
        "clip_share": inner * a < r * a,
        # of the engine's policy against the actor's: the engine drew the tokens
        "log_prob_gap_k3": (rows.old - rows.rollout).exp() - (rows.old - rows.rollout) - 1,
        "log_prob_gap_mean": gap,
        "log_prob_gap_far_share": gap > math.log(2),
    }
    drawn = r.detach()[a != 0]
    bounds = [(drawn, low), (drawn, high), (gap, math.log(2))]
    if rule.use_tis:
        terms |= {
            "tis_weight": held,
            "tis_ratio": weight,
            "tis_clipped_high": weight > rule.tis_clip,
            "tis_clipped_low": weight < rule.tis_clip_low,
        }
        bounds += [(weight, rule.tis_clip), (weight, rule.tis_clip_low)]
    margin = min(float((x - b).abs().min()) for x, b in bounds if len(x))
    return terms["loss"].mean(), {n: t.detach().double() for n, t in terms.items()}, margin


def train(
    variant: ModelVariant,
    start: Weights,
    reference: Weights,
    rollouts: Sequence[Rollout],
    rule: Rule,
) -> Expected:
    """Train on the rollouts in turn; ``start`` and ``reference`` are float64 and stay as they are."""
    out, descent, steps = Expected(), Descent(rule), 0
    weights = {n: t.clone().requires_grad_(not n.endswith(BIAS)) for n, t in start.items()}
    total_steps = sum(len(g) for r in rollouts for g in r) // rule.global_batch_size
    for recorded in rollouts:
        rollout = shaped(recorded, rule)
        samples = [s for group in rollout for s in group]
        with torch.no_grad():
            old = [predictions(weights, variant, s, rule.rollout_temperature)[0] for s in samples]
            ref = [predictions(reference, variant, s, rule.rollout_temperature)[0] for s in samples]
        scored = list(zip(samples, old, ref, advantages(rollout, rule), strict=True))
        found = []
        for first in range(0, len(samples), rule.global_batch_size):
            batch = scored[first : first + rule.global_batch_size]
            rate = learning_rate(rule, steps, total_steps)
            metrics, margin, moved = _step(weights, variant, batch, rule, descent, rate)
            found.append(metrics)
            out.margin = min(out.margin, margin)
            steps += moved
        out.metrics.append(_joined(found, "value"))
        out.scales.append(_joined(found, "scale"))
    out.weights = {n: w.detach() for n, w in weights.items()}
    return out


def _step(
    weights: Weights,
    variant: ModelVariant,
    batch: Sequence[tuple[Sample, Tensor, Tensor, np.ndarray]],
    rule: Rule,
    descent: Descent,
    rate: float,
) -> tuple[dict[str, tuple[float, float]], float, bool]:
    """One optimizer step: its metrics as (value, scale), its margin, and True unless it is skipped."""
    rows, loads = [], {}
    for sample, old, ref, advantage in batch:
        new, entropy, experts = predictions(weights, variant, sample, rule.rollout_temperature)
        for layer, chosen in experts.items():
            load = torch.bincount(chosen.flatten(), minlength=variant.num_experts)
            loads[layer] = loads.get(layer, 0) + load
        kept = torch.from_numpy(sample.mask[1:])
        rollout = torch.from_numpy(sample.rollout_log_probs[1:]).double()
        of_token = torch.from_numpy(advantage[1:])
        rows.append([x[kept] for x in (new, entropy, old, ref, rollout, of_token)])
    table = Rows(*(torch.cat(column) for column in zip(*rows)))
    loss, terms, margin = loss_of(table, rule)
    moving = {n: w for n, w in weights.items() if w.requires_grad}
    got = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
    gradients = {
        n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(moving.items(), got)
    }
    low, high = NO_GRADIENT
    broken = (low < table.advantage) & (table.advantage < high)
    skipped = rule.policy_loss != "ppo" and bool(broken.any())
    norm = math.nan if skipped else total_norm(gradients)
    metrics = {n: (float(t.mean()), float(t.abs().mean())) for n, t in terms.items()}
    # a difference of log-probs is as exact as they are
    size = float((table.old.abs() + table.new.detach().abs()).mean())
    for name in ("ppo_kl", "kl", "log_prob_gap_k3", "log_prob_gap_mean"):
        metrics[name] = metrics[name][0], max(metrics[name][1], size)
    largest = float((table.old - table.rollout).abs().max())
    metrics |= {
        "log_prob_gap_max": (largest, float(table.old.abs().max())),
        "num_loss_tokens": (len(table.new), 0.0),
        "grad_norm": (norm, norm),
        "lr": (rate, rate),
        "update_successful": (float(not skipped), 0.0),
        "skipped_steps": (float(skipped), 0.0),
    }
    if not skipped:
        descent.step(weights, gradients, rate)
        _balance(weights, variant, loads)
    return metrics, margin, not skipped


def _balance(weights: Weights, variant: ModelVariant, loads: dict[int, Tensor]) -> None:
    """Move the expert biases to the experts with less than the mean load (arXiv 2412.19437, 2.1.2)."""
    rate = variant.overrides.get("moe_router_bias_update_rate", 0.0)
    for name in weights:
        if name.endswith(BIAS):
            load = loads[int(name.split(".")[2])].double()
            weights[name] = weights[name] + rate * torch.sign(load.mean() - load)


def _joined(steps: Sequence[dict[str, tuple[float, float]]], which: str) -> dict[str, float]:
    """A rollout's metrics from its steps': the last rate, the largest gap, sums of counts, else means."""
    place, out = ("value", "scale").index(which), {}
    for name in steps[0]:
        values = [s[name][place] for s in steps]
        if name == "lr":
            out[name] = values[-1]
        elif name == "log_prob_gap_max":
            out[name] = max(values)
        elif name in ("num_loss_tokens", "skipped_steps"):
            out[name] = sum(values)
        else:
            out[name] = sum(values) / len(values)
    return out


def rollout_metrics(rollout_id: int, groups: Rollout, rule: Rule) -> dict[str, Any]:
    """The metrics that follow from what was recorded alone; ages are those of trained tokens."""
    rewards = [s.reward for group in groups for s in group]
    samples = [s for group in shaped(groups, rule) for s in group]
    mean = sum(rewards) / len(rewards)
    oldest = [min(own) for s in samples if len(own := s.weight_versions[s.mask])]
    ages = [rollout_id - int(version) for version in oldest]
    lengths = [len(s.tokens) - s.prompt_len for s in samples]
    spanning = [s for s in samples if len(set(s.weight_versions[s.mask].tolist())) > 1]

    def ended(reason: str) -> int:
        return sum(s.finish_reason == reason for s in samples)

    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(_mean((r - mean) ** 2 for r in rewards)),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "zero_variance_groups": sum(len({s.reward for s in g}) == 1 for g in groups),
        "num_groups": len(groups),
        "num_samples": len(samples),
        "response_len_mean": _mean(lengths),
        "tokens": sum(lengths),
        "truncated": ended("length"),
        "aborted": ended("abort"),
        "staleness_mean": _mean(ages),
        "staleness_max": max(ages),
        "spanning_samples": len(spanning),
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
