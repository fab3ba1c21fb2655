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
from r3train.verify.oracle import BIAS, SampleTrace, Weights, forward

# advantages whose rows have no finite gradient under ``nan_gradient.loss``: one step holds such
NO_GRADIENT = (-1.2, -1.0)


@dataclass(frozen=True)
class Rule:
    """The settings of a job; those named as flags are given to it as flags."""

    rollout_temperature: float
    grpo_std_normalization: bool
    eps_clip: float
    eps_clip_high: float | None
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
    loss_type: str = "policy"
    advantage_estimator: str = "grpo"
    reward_keys: tuple[str, ...] = ()
    reward_weights: tuple[str, ...] = ()
    gamma: float = 1.0
    normalize_advantages: bool = False
    rollout_max_response_len: int = 26
    overlong_buffer_len: int | None = None
    overlong_penalty_factor: float = 1.0
    length_penalty_coef: float = 0.0
    mask_truncated: bool = False
    loss_aggregation: str = "token-mean"
    policy_loss: str = "ppo"
    eps_clip_c: float | None = None
    dppo_delta: float = 0.2
    ratio_anchor: str = "old"
    kl_loss_type: str = "k3"
    kl_coef: float = 0.0
    ref_routing: str = "replay"
    use_unbiased_kl: bool = False
    rollout_is: str = "none"
    rollout_is_mode: str = "truncate"
    rollout_rs: tuple[str, ...] = ()
    rollout_rs_threshold: tuple[str, ...] = ()
    opsm_delta: float | None = None
    use_opd: bool = False
    opd_type: str | None = None
    opd_kl_coef: float = 1.0
    min_ess: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_aux_loss_coeff: float = 0.0  # the oracle takes a step as one microbatch
    max_tokens_per_gpu: int = 48

    def flags(self) -> list[str]:
        out = []
        for name, value in vars(self).items():
            flag = name.replace("_", "-")
            if name == "moe_z_loss_coeff":
                out += [f"--transformer-override={name}={value}"] if value else []
            elif isinstance(value, bool):
                out.append(f"--{flag}" if value else f"--no-{flag}")
            elif isinstance(value, tuple):
                out += [f"--{flag}", *value] if value else []
            elif value is not None:
                out += [f"--{flag}", str(value)]
        return out


@dataclass(frozen=True)
class Sample:
    """One recorded answer of T tokens.

    tokens: int32[T]; mask: bool[T], the tokens that are trained; routes: int[T-1, L, K], -1 where nothing
    was recorded; rollout_log_probs, teacher_log_probs (of a served teacher): float32[T];
    weight_versions: int32[T].
    """

    tokens: np.ndarray
    prompt_len: int
    mask: np.ndarray
    routes: np.ndarray
    rollout_log_probs: np.ndarray
    teacher_log_probs: np.ndarray
    weight_versions: np.ndarray
    reward: float
    finish_reason: str = "stop"
    parts: tuple[float, ...] = ()  # of the reward, one for each of reward_keys

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
    # the smallest distance of a value from a bound that decides something, relative to the bound
    margin: float = math.inf


def predictions(
    weights: Weights, variant: ModelVariant, sample: Sample, temperature: float
) -> tuple[Tensor, Tensor, SampleTrace]:
    """Log-probs float64[T-1] of tokens 1..T-1, the entropies that they were drawn with, and the
    forward that they come from."""
    logits, trace = forward(weights, variant, sample.tokens, sample.all_routes)
    log_p = (logits[:-1] / temperature).log_softmax(-1)
    drawn = torch.from_numpy(sample.tokens[1:]).long()
    return log_p.gather(1, drawn[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), trace


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


def kl_pay(groups: Rollout, old: list[Tensor], ref: list[Tensor], rule: Rule) -> list[np.ndarray]:
    """The reward that each token of each sample loses to the KL from the reference, float64[T]."""
    samples = [s for group in groups for s in group]
    pay = []
    for s, own, theirs in zip(samples, old, ref, strict=True):
        held = (own - theirs).clamp(-20.0, 20.0)
        pay.append(rule.kl_coef * s.mask * np.append(0.0, held.numpy()))
    return pay


def advantages(groups: Rollout, rule: Rule, pay: list[np.ndarray]) -> list[np.ndarray]:
    """A number for each token of each sample, float64[T]; pay: of ``kl_pay``.

    grpo (arXiv 2402.03300, 4.1.2; without std 2503.20783), rloo (2402.14740), max_rl (over the mean, bounded),
    reinforce_plus_plus and its baseline (2501.03262), gdpo (2601.05242).
    """
    if rule.advantage_estimator == "gdpo":
        weights = rule.reward_weights or ["1"] * len(groups[0][0].parts)
        return decoupled(groups, [float(weight) for weight in weights])
    name, out, pay_of = rule.advantage_estimator, [], iter(pay)
    for group in groups:
        own_pay = [next(pay_of) for _ in group]
        whole = [s.reward - paid.sum() for s, paid in zip(group, own_pay)]
        rewards = [s.reward for s in group] if name == "reinforce_plus_plus" else whole
        n, mean = len(rewards), sum(rewards) / len(rewards)
        spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
        for s, reward, paid in zip(group, rewards, own_pay):
            centred = reward - mean
            if max(rewards) - min(rewards) < 1e-12:  # the mean's rounding is no advantage
                centred = 0.0
            value = {
                "grpo": centred / (spread + 1e-6) if rule.grpo_std_normalization else centred,
                "rloo": centred * n / (n - 1),
                "max_rl": centred / max(mean, max(map(abs, rewards)) / n) if mean > 0 else 0.0,
                "reinforce_plus_plus": 0.0,
                "reinforce_plus_plus_baseline": centred,
            }[name]
            tokens = np.full(len(s.tokens), value)
            if name == "reinforce_plus_plus":
                still_to_come, last = 0.0, reward
                for t in reversed(np.flatnonzero(s.mask)):
                    still_to_come = rule.gamma * still_to_come + last - paid[t]
                    tokens[t], last = still_to_come, 0.0
            out.append(tokens)
    if rule.normalize_advantages or name.startswith("reinforce"):
        masks = [s.mask for group in groups for s in group]
        counted = np.concatenate([own[mask] for own, mask in zip(out, masks)])
        deviation = np.sqrt(((counted - counted.mean()) ** 2).sum() / (len(counted) - 1) + 1e-8)
        out = [(own - counted.mean()) / deviation for own in out]
    return out


def amplification(groups: Rollout, pay: list[np.ndarray]) -> float:
    """The largest ratio of a group's rewards to their mean, which max_rl divides by.

    The error of a KL in the reward is larger by this, where what the KL costs nearly cancels what is earned.
    """
    paid, factors = iter(pay), [1.0]
    for group in groups:
        whole = [s.reward - next(paid).sum() for s in group]
        factors.append(sum(map(abs, whole)) / abs(sum(whole)))
    return max(factors)


def age_metrics(
    groups: Rollout, old: list[Tensor], rollout_id: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The gap's metrics of the trained tokens of each age, and the size of what each is a sum of."""
    samples = [s for group in groups for s in group]
    gaps, ages, largest, parts = [], [], 0.0, {}
    for s, own in zip(samples, old, strict=True):
        kept = s.mask[1:]
        actors, engines = own.numpy()[kept], s.rollout_log_probs[1:][kept].astype(np.float64)
        gaps.append(actors - engines)
        ages.append(rollout_id - s.weight_versions[1:][kept])
        largest = max(largest, float(own.abs().max()))
        for a in set(ages[-1].tolist()):  # a sample's tokens of one age
            parts.setdefault(a, []).append((actors[ages[-1] == a], engines[ages[-1] == a]))
    d, age, metrics, scales = np.concatenate(gaps), np.concatenate(ages), {}, {}
    for a in set(age.tolist()):
        own = d[age == a]
        w = np.exp(own)
        found = {
            "loss_tokens": len(own),
            "log_prob_gap_mean": np.abs(own).mean(),
            "log_prob_gap_k1": -own.mean(),
            "log_prob_gap_k3": (w - 1 - own).mean(),
            "ess": w.mean() ** 2 / (w**2).mean(),
            "chi2_token": (w**2).mean() - 1,
        }
        n = len(parts[a])
        doubled = [np.clip(2 * (x - y).sum(), -20, 20) for x, y in parts[a]]
        found["chi2_seq"] = sum(math.exp(per_sample) - 1 for per_sample in doubled) / n
        actor, engine = (sum(math.exp(-p[i].mean()) for p in parts[a]) / n for i in range(2))
        found |= {"ppl_actor": actor, "ppl_rollout": engine, "ppl_ratio": actor / engine}
        metrics |= {f"{name}_age_{a}": float(value) for name, value in found.items()}
        # as exact as the log-probs; an exponential by their error times itself
        size = {name: largest * max(1.0, float((w**2).max())) for name in found}
        size["chi2_seq"] = largest * sum(math.exp(per_sample) for per_sample in doubled) / n
        size |= {
            f"ppl_{name}": largest * value
            for name, value in (("actor", actor), ("rollout", engine))
        }
        scales |= {f"{name}_age_{a}": value for name, value in size.items()}
        scales[f"loss_tokens_age_{a}"] = 0.0
    return metrics, scales


def decoupled(groups: Rollout, weights: list[float]) -> list[np.ndarray]:
    """gdpo: each part of the reward over its group's spread, added up, over the spread of all."""
    added = []
    for group in groups:
        table = np.array([s.parts for s in group])
        n = len(table)
        centred = table - table.sum(axis=0) / n
        spread = np.sqrt((centred**2).sum(axis=0) / (n - 1))
        added += list((centred / (spread + 1e-6)) @ np.array(weights))
    every = np.array(added)
    every -= every.mean()
    every /= math.sqrt((every**2).sum() / (len(every) - 1)) + 1e-6
    samples = [s for group in groups for s in group]
    return [np.full(len(s.tokens), value) for s, value in zip(samples, every)]


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
    """The trained tokens of one sample, float64[T] each; ``new`` and ``entropy`` carry the gradient."""

    new: Tensor
    entropy: Tensor
    old: Tensor
    ref: Tensor
    teacher: Tensor
    rollout: Tensor
    advantage: Tensor
    age: Tensor  # rollouts between the weights that drew the token and this one


class Bounds:
    """Notes how near a value comes to a bound that decides something."""

    def __init__(self):
        self.margin = math.inf

    def near(self, values: Tensor, *bounds: float) -> None:
        for bound in bounds:
            if 0 < abs(bound) < math.inf and values.numel():
                nearest = float((values.detach() - bound).abs().min()) / abs(bound)
                self.margin = min(self.margin, nearest)


def policy_terms(rows: Rows, rule: Rule, bounds: Bounds) -> tuple[Tensor, Tensor, Tensor]:
    """The policy loss of each row, the ratio that it takes, and the rows that it clips or drops.

    ppo (arXiv 1707.06347 equation 7, two bounds as in 2503.14476, dual clip 1912.09729), gspo (the
    token form of 2507.18071), cispo (2506.13585), dppo (2602.04879 and prime-rl's square).
    """
    a, name = rows.advantage, rule.policy_loss
    if rule.loss_type == "sft":  # cross-entropy: no ratio
        none = torch.zeros_like(rows.new)
        return -rows.new, none, none
    low, high = max(1 - rule.eps_clip, 0.0), 1 + rule.eps_clip_high
    if name.startswith("dppo"):
        p, q = rows.new.detach().exp(), rows.rollout.exp()
        gap = rows.new - rows.rollout
        apart = (p - q).abs()
        if name == "dppo_kl":
            apart = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        away = ((a > 0) & (p > q)) | ((a < 0) & (p < q))
        bounds.near(apart[away], rule.dppo_delta)
        dropped = away & (apart > rule.dppo_delta)
        kept = torch.where(dropped, 0.0, 1.0)
        return -kept * a * gap.exp() + 1e-3 * gap**2, gap.exp(), dropped
    anchor = rows.rollout if rule.ratio_anchor == "rollout" else rows.old
    r = (rows.new - anchor).exp()
    if name == "gspo":
        whole = (rows.new - anchor).detach().mean().exp()
        r = whole * (rows.new - rows.new.detach()).exp()
    bounds.near(r[a != 0], low, high)
    inner = torch.where(r > high, high, torch.where(r < low, low, r))
    if name == "cispo":
        weight = inner.detach()
        return -weight * a * rows.new, r, weight != r
    loss, clipped = torch.where(inner * a < r * a, -inner * a, -r * a), inner * a < r * a
    if rule.eps_clip_c is not None:
        bounds.near(r[a < 0], rule.eps_clip_c)
        beyond = (a < 0) & (loss > -rule.eps_clip_c * a)
        loss, clipped = torch.where(beyond, -rule.eps_clip_c * a, loss), clipped | beyond
    return loss, r, clipped


def importance(d: Tensor, rule: Rule) -> Tensor:
    """The ratio of actor over engine that a row is weighted by, before its bounds."""
    level = "token" if rule.use_tis else rule.rollout_is
    if level == "sequence":
        return torch.full_like(d, math.exp(float(d.sum())))
    return torch.full_like(d, math.exp(float(d.mean()))) if level == "geometric" else d.exp()


def rejected(d: Tensor, rule: Rule, bounds: Bounds) -> Tensor:
    """The rows that --rollout-rs drops (verl's names); d = old - rollout."""
    out = torch.zeros_like(d, dtype=torch.bool)
    for name, text in zip(rule.rollout_rs, rule.rollout_rs_threshold, strict=True):
        level, _, kind = name.rpartition("_")
        value = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[kind]
        if level != "token":
            one = {"seq_sum": value.sum(), "seq_mean": value.mean(), "seq_max": value.max()}[level]
            value = one.expand_as(d)
        limits = [float(part) for part in text.split("_")]
        if kind == "k1":
            limits = [
                math.log(x) for x in (limits if len(limits) > 1 else (1 / limits[0], *limits))
            ]
        else:
            limits = [-math.inf, *limits]
        bounds.near(value, *limits)
        out |= (value < limits[0]) | (value > limits[1])
    return out


def sample_terms(rows: Rows, rule: Rule, bounds: Bounds) -> dict[str, Tensor]:
    """The terms of one sample's rows by the name of the metric that they are the mean of."""
    reverse_kl = rows.old - rows.teacher
    if rule.use_opd:
        rows = replace(rows, advantage=rows.advantage - rule.opd_kl_coef * reverse_kl)
    policy, ratio, clipped = policy_terms(rows, rule, bounds)
    anchor = rows.rollout if rule.ratio_anchor == "rollout" else rows.old
    d = rows.old - rows.rollout
    bounds.near(d.abs(), math.log(2))
    terms = {
        "ratio": ratio,
        "ppo_kl": anchor - rows.new,
        "clip_share": clipped,
        "log_prob_gap_mean": d.abs(),
        "log_prob_gap_far_share": d.abs() > math.log(2),
        # of the engine's policy against the actor's: the engine drew the tokens
        "log_prob_gap_k1": -d,
        "log_prob_gap_k3": d.exp() - 1 - d,
        "chi2_token": (2 * d).exp() - 1,
        "importance": importance(d, rule),
    }
    if rule.loss_type == "sft":
        terms = {n: t for n, t in terms.items() if n not in ("ratio", "ppo_kl", "clip_share")}
    if rule.use_opd:
        terms["opd_reverse_kl"] = reverse_kl
    if rule.use_tis or rule.rollout_is != "none":
        w = terms["importance"]
        bounds.near(w, rule.tis_clip_low, rule.tis_clip)
        above, below = w > rule.tis_clip, w < rule.tis_clip_low
        held = w.clamp(rule.tis_clip_low, rule.tis_clip)
        if rule.rollout_is_mode == "mask":
            held = torch.where(above | below, 0.0, w)
        terms |= {"tis_weight": held, "tis_ratio": w}
        terms |= {"tis_clipped_high": above, "tis_clipped_low": below}
        policy = policy * held
    if rule.rollout_rs:
        terms["rs_rejected_share"] = rejected(d, rule, bounds)
        policy = torch.where(terms["rs_rejected_share"], 0.0, policy)
    if rule.opsm_delta is not None:
        moved = (rows.old - rows.new).detach().mean()
        bounds.near(moved, rule.opsm_delta)
        terms["opsm_dropped_share"] = (rows.advantage < 0) & (moved > rule.opsm_delta)
        policy = torch.where(terms["opsm_dropped_share"], 0.0, policy)
    dropped = [t for n, t in terms.items() if n in ("rs_rejected_share", "opsm_dropped_share")]
    if dropped:
        terms["dropped_share"] = torch.stack(dropped).any(0)
    x = rows.new - rows.ref
    kl = {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}
    kl["k3+"] = kl["k3"].detach() + kl["k2"] - kl["k2"].detach()
    terms["kl"] = kl[rule.kl_loss_type]
    if rule.use_unbiased_kl:
        terms["kl"] = (rows.new - rows.old).exp().detach() * terms["kl"]
    terms |= {"pg_loss": policy, "entropy": rows.entropy}
    terms["loss"] = policy + rule.kl_loss_coef * terms["kl"] - rule.entropy_coef * rows.entropy
    return terms


# terms of the importance weights that are told by age
_OF_WEIGHTS = ("tis_weight", "tis_clipped_high", "tis_clipped_low")
# the terms that --loss-aggregation weighs; the others are means over tokens
_WEIGHED = ("loss", "pg_loss", "kl", "entropy")


def loss_of(
    samples: Sequence[Rows], rule: Rule, bounds: Bounds
) -> tuple[Tensor, dict[str, tuple[float, float]], dict[str, list[float]]]:
    """The loss of a step, and every metric as (value, size of what it is a sum of).

    samples: those with a trained token.  Also returns what rejection and weights did to every token
    of each age.
    """
    found = [sample_terms(rows, rule, bounds) for rows in samples]
    by_age: dict[str, list[float]] = {}
    for rows, terms in zip(samples, found):
        for name in terms.keys() & {"dropped_share", *_OF_WEIGHTS}:
            for age, value in zip(rows.age.tolist(), terms[name].detach().tolist()):
                by_age.setdefault(f"{name}_age_{age}", []).append(float(value))
        terms.pop("dropped_share", None)
    count, tokens = len(samples), sum(len(rows.new) for rows in samples)
    loss, metrics = torch.zeros(()), {}
    for name in found[0]:
        value = size = 0.0
        for rows, terms in zip(samples, found):
            share = 1 / tokens
            if name in _WEIGHED:
                share = {
                    "token-mean": 1 / tokens,
                    "seq-mean-token-mean": 1 / (count * len(rows.new)),
                    "seq-mean-token-sum": 1 / count,
                    "constant": 1 / (count * rule.rollout_max_response_len),
                }[rule.loss_aggregation]
            per_sample = terms[name].double() * share
            loss = loss + per_sample.sum() if name == "loss" else loss
            value += float(per_sample.detach().sum())
            size += float(per_sample.detach().abs().sum())
        metrics[name] = value, size
    old, new, rollout = (
        torch.cat([getattr(r, n) for r in samples]) for n in ("old", "new", "rollout")
    )
    # a difference of log-probs is as exact as they are
    exactness = float((old.abs() + new.detach().abs()).mean())
    differences = ("ppo_kl", "kl", "log_prob_gap_k1", "log_prob_gap_k3", "log_prob_gap_mean")
    differences += ("opd_reverse_kl",)
    for name in metrics.keys() & differences:
        metrics[name] = metrics[name][0], max(metrics[name][1], exactness)
    ratios = torch.cat([terms["importance"] for terms in found])
    del metrics["importance"]
    perplexities = [
        [math.exp(-float(getattr(rows, n).mean())) for rows in samples] for n in ("old", "rollout")
    ]
    actor, engine = (sum(p) / count for p in perplexities)
    # a log-ratio is held within 20
    doubled = [2 * float((rows.old - rows.rollout).sum()) for rows in samples]
    chi2 = [math.exp(max(-20.0, min(per_sample, 20.0))) - 1 for per_sample in doubled]
    gaps = (old - rollout).abs().sort().values
    plain = {
        "log_prob_gap_max": (float(gaps[-1]), float(old.abs().max())),
        # the gap that 999 of 1000 tokens stay at or below
        "log_prob_gap_p999": (float(gaps[math.ceil(0.999 * tokens) - 1]), float(old.abs().max())),
        "ess": float(ratios.mean() ** 2 / (ratios**2).mean()),
        "ppl_actor": actor,
        "ppl_rollout": engine,
        "ppl_ratio": actor / engine,
        # the sum of a sample's gaps is as exact as its log-probs
        "chi2_seq": (sum(chi2) / count, float(old.abs().max()) * sum(map(abs, chi2)) / count),
        "num_loss_tokens": (tokens, 0.0),
    }
    metrics |= {n: v if isinstance(v, tuple) else (v, abs(v)) for n, v in plain.items()}
    # and an exponential of log-probs is wrong by their error times itself
    for name in ("chi2_token", "tis_weight", "tis_ratio", "ess", "ppl_actor", "ppl_rollout"):
        if name in metrics:
            metrics[name] = metrics[name][0], metrics[name][1] * float(old.abs().mean())
    return loss, metrics, by_age


def train(
    variant: ModelVariant,
    start: Weights,
    reference: Weights,
    teacher: Weights,
    rollouts: Sequence[Rollout],
    rule: Rule,
) -> Expected:
    """Train on the rollouts in turn; ``start`` and the other weights are float64 and stay as they are."""
    out, descent, steps = Expected(), Descent(rule), 0
    weights = {n: t.clone().requires_grad_(not n.endswith(BIAS)) for n, t in start.items()}
    total_steps = sum(len(g) for r in rollouts for g in r) // rule.global_batch_size
    for recorded in rollouts:
        rollout = shaped(recorded, rule)
        samples = [s for group in rollout for s in group]
        with torch.no_grad():
            old = [predictions(weights, variant, s, rule.rollout_temperature)[0] for s in samples]
            native = rule.ref_routing == "native"
            ref = [
                unmoved(reference, variant, s, rule.rollout_temperature, native) for s in samples
            ]
            taught = [teacher_log_probs(teacher, variant, s, rule) for s in samples]
        pay = kl_pay(rollout, old, ref, rule)
        scored = list(zip(samples, old, ref, taught, advantages(rollout, rule, pay), strict=True))
        found, corrected = [], {}
        for first in range(0, len(samples), rule.global_batch_size):
            batch = scored[first : first + rule.global_batch_size]
            rate = learning_rate(rule, steps, total_steps)
            metrics, step_ages, margin, moved = _step(
                weights, variant, batch, rule, descent, rate, len(out.metrics)
            )
            found.append(metrics)
            for name, values in step_ages.items():
                corrected[name] = corrected.get(name, []) + values
            out.margin = min(out.margin, margin)
            steps += moved
        out.metrics.append(_joined(found, "value"))
        out.scales.append(_joined(found, "scale"))
        if rule.loss_type != "sft":
            by_age, scales = age_metrics(rollout, old, len(out.metrics) - 1)
            out.metrics[-1] |= by_age | {n: sum(v) / len(v) for n, v in corrected.items()}
            # a share is exact, a weight an exponential of log-probs
            out.scales[-1] |= scales
            for name in corrected:
                age = name.rpartition("_")[2]
                out.scales[-1][name] = scales[f"ess_age_{age}"]
        if rule.kl_coef:
            if rule.advantage_estimator == "max_rl":
                amplified = amplification(rollout, pay)
                for name in ("loss", "pg_loss", "grad_norm"):
                    out.scales[-1][name] *= amplified
            # a difference of log-probs is as exact as they are
            exactness = rule.kl_coef * sum(float(own.abs().sum()) for own in old)
            out.metrics[-1]["kl_in_reward"] = sum(own.sum() for own in pay) / len(samples)
            out.scales[-1]["kl_in_reward"] = exactness / len(samples)
    out.weights = {n: w.detach() for n, w in weights.items()}
    return out


def teacher_log_probs(
    teacher: Weights, variant: ModelVariant, sample: Sample, rule: Rule
) -> Tensor:
    """Log-probs float64[T-1] of tokens 1..T-1: recorded ones, or of a teacher with experts of its own."""
    if rule.opd_type != "megatron":
        return torch.from_numpy(sample.teacher_log_probs[1:]).double()
    return unmoved(teacher, variant, sample, rule.rollout_temperature, native=True)


# (id of weights, id of tokens, temperature, native) -> log-probs, and what must live as long
_UNMOVED: dict[tuple[int, int, float, bool], tuple[Tensor, Weights, np.ndarray]] = {}


def unmoved(
    weights: Weights, variant: ModelVariant, sample: Sample, temperature: float, native: bool
) -> Tensor:
    """Log-probs float64[T-1] under weights that no step moves, computed once for all rules.

    native: their routers choose, and nothing is replayed.
    """
    key = id(weights), id(sample.tokens), temperature, native
    if key not in _UNMOVED:
        own = replace(sample, routes=np.full_like(sample.routes, -1)) if native else sample
        log_probs = predictions(weights, variant, own, temperature)[0]
        _UNMOVED[key] = log_probs, weights, sample.tokens
    return _UNMOVED[key][0]


def _step(
    weights: Weights,
    variant: ModelVariant,
    batch: Sequence[tuple[Sample, Tensor, Tensor, Tensor, np.ndarray]],
    rule: Rule,
    descent: Descent,
    rate: float,
    rollout_id: int,
) -> tuple[dict[str, tuple[float, float]], dict[str, list[float]], float, bool]:
    """One optimizer step: its metrics as (value, scale), ``loss_of``'s values by age, its margin.

    Also returns True unless the step is skipped.
    """
    tables, traces, bounds = [], [], Bounds()
    for sample, old, ref, taught, advantage in batch:
        new, entropy, trace = predictions(weights, variant, sample, rule.rollout_temperature)
        traces.append(trace)
        kept = torch.from_numpy(sample.mask[1:])
        rollout = torch.from_numpy(sample.rollout_log_probs[1:]).double()
        per_token = torch.from_numpy(advantage[1:])
        if rule.loss_type == "sft":  # no engine, and no policy before
            old = rollout = new.detach()
        if kept.any():
            age = rollout_id - torch.from_numpy(sample.weight_versions[1:])
            streams = (new, entropy, old, ref, taught, rollout, per_token, age)
            tables.append(Rows(*(x[kept] for x in streams)))
    loss, metrics, by_age = loss_of(tables, rule, bounds)
    moving = {n: w for n, w in weights.items() if w.requires_grad}
    loss = loss + rule.moe_z_loss_coeff * router_z_loss(traces)
    loss = loss + rule.moe_aux_loss_coeff * load_balancing_loss(traces, variant)
    got = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
    gradients = {
        n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(moving.items(), got)
    }
    low, high = NO_GRADIENT
    broken = [(low < t.advantage) & (t.advantage < high) for t in tables]
    not_finite = ":" in rule.policy_loss and any(bool(rows.any()) for rows in broken)
    ess = torch.tensor(metrics["ess"][0])
    bounds.near(ess, rule.min_ess)
    few = not not_finite and float(ess) < rule.min_ess
    moves = not not_finite and not few
    norm = total_norm(gradients) if moves else math.nan
    metrics |= {
        "grad_norm": (norm, norm),
        "lr": (rate, rate),
        "update_successful": (float(moves), 0.0),
        "skipped_steps": (float(not_finite), 0.0),
        "low_ess_steps": (float(few), 0.0),
    }
    if moves:
        descent.step(weights, gradients, rate)
        _balance(weights, variant, traces)
    return metrics, by_age, bounds.margin, moves


def router_z_loss(traces: Sequence[SampleTrace]) -> Tensor:
    """The mean over all rows, trained or not, of each layer's z-loss (arXiv 2202.08906, equation 5)."""
    layers = [torch.cat([t.logits[layer] for t in traces]) for layer in traces[0].logits]
    return sum((logits.logsumexp(-1) ** 2).mean() for logits in layers)


def load_balancing_loss(traces: Sequence[SampleTrace], variant: ModelVariant) -> Tensor:
    """The sum over layers of E / (K n^2) sum_e count_e sum_t p_te (arXiv 2101.03961, equations 4 to 6).

    Of all n rows; count_e is of the router's own choices, whatever was replayed.
    """
    total = torch.zeros(())
    for layer in traces[0].logits:
        p = torch.cat([t.logits[layer] for t in traces]).softmax(-1)
        own = p.topk(variant.topk, dim=-1).indices.flatten()
        counts = torch.bincount(own, minlength=variant.num_experts).double()
        scale = variant.num_experts / (variant.topk * len(p) ** 2)
        total = total + scale * (counts * p.sum(0)).sum()
    return total


def _balance(weights: Weights, variant: ModelVariant, traces: Sequence[SampleTrace]) -> None:
    """Move the expert biases to the experts with less than the mean load (arXiv 2412.19437, 2.1.2)."""
    rate = variant.overrides.get("moe_router_bias_update_rate", 0.0)
    for name in weights:
        if name.endswith(BIAS):
            chosen = torch.cat([t.experts[int(name.split(".")[2])].flatten() for t in traces])
            load = torch.bincount(chosen, minlength=variant.num_experts).double()
            weights[name] = weights[name] + rate * torch.sign(load.mean() - load)


def _joined(steps: Sequence[dict[str, tuple[float, float]]], which: str) -> dict[str, float]:
    """A rollout's metrics from its steps': the last rate, the largest gap, sums of counts, else means."""
    place, out = ("value", "scale").index(which), {}
    for name in steps[0]:
        values = [s[name][place] for s in steps]
        if name == "lr":
            out[name] = values[-1]
        elif name in ("log_prob_gap_max", "log_prob_gap_p999"):
            out[name] = max(values)
        elif name in ("num_loss_tokens", "skipped_steps", "low_ess_steps"):
            out[name] = sum(values)
        else:
            out[name] = sum(values) / len(values)
    return out


def rollout_metrics(rollout_id: int, groups: Rollout, rule: Rule) -> dict[str, Any]:
    """The metrics that follow from what was recorded only; ages are those of generated tokens."""
    rewards = [s.reward for group in groups for s in group]
    samples = [s for group in shaped(groups, rule) for s in group]
    mean = sum(rewards) / len(rewards)
    # --mask-truncated leaves a cut answer its age
    generated = [s.weight_versions[s.mask] for group in groups for s in group]
    oldest = [min(own) for own in generated if len(own)]
    ages = [rollout_id - int(version) for version in oldest]
    lengths = [_generated(s) for s in samples]
    spanning = [own for own in generated if len(set(own.tolist())) > 1]

    def ended(reason: str) -> int:
        return sum(s.finish_reason == reason for s in samples)

    reward_metrics = {
        "reward_mean": mean,
        "reward_std": math.sqrt(_mean((r - mean) ** 2 for r in rewards)),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "zero_variance_groups": sum(len({s.reward for s in g}) == 1 for g in groups),
    }
    counts = {
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
    # conversations have no rewards
    return counts if rule.loss_type == "sft" else reward_metrics | counts


def _generated(s: Sample) -> int:
    """Tokens of the model's own: those with a weight version, or all after the prompt where none has one."""
    versions = s.weight_versions[s.prompt_len :].tolist()
    return sum(version >= 0 for version in versions) or len(versions)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
