"""The formulas of the learning rule on rows without a model, compared with the float64 oracle.

Rewards, advantages, the loss, its gradient and its metrics, for every rule of ``rule_pairs`` and of ``test_algorithm``; then
with each line of ``changed_formulas``, which must show.  No ranks: what topologies do is in whole jobs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3train.algo.trajectories import loss_weights
from r3train.algo.corrections import mismatch_metrics
from r3train.algo.losses.policy_losses import configured_loss
from r3train.algo.policy_loss import microbatch_loss
from r3train.algo.loss_rows import LossRows
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.loop import prepare
from r3train.loop.kl_reward import held_ratios
from r3train.loop.step_metrics import train_metrics
from r3train.verify.model_zoo import VARIANTS
from tests.oracle.algorithm import Bounds, Rows, Rule, Sample, advantages, kl_pay, loss_of, shaped
from tests.oracle.changed_formulas import Change, CHANGES, planted
from tests.oracle.test_algorithm import as_recorded, metric_errors, RULES

# advantages are float32; a changed line misses this by two hundred times at least
CLOSE = 2e-6
GROUPS, GROUP_SIZE = 4, 3
ROUTE_SHAPE = VARIANTS["moe4"].num_layers, VARIANTS["moe4"].topk
# a loss by import path is no formula of ours
NAMES = [name for name, rule in RULES.items() if ":" not in rule.policy_loss]


def groups() -> list[list[Sample]]:
    """Answers of 0 to 24 tokens; one is empty, some are cut, one group has equal rewards."""
    draw, out = np.random.default_rng(5), []
    for group in range(GROUPS):
        out.append([])
        for member in range(GROUP_SIZE):
            answer = 0 if (group, member) == (1, 2) else int(draw.integers(2, 25))
            length = 3 + group + answer
            mask = np.arange(length) >= 3 + group
            near = np.where(mask, -0.05 - 3 * draw.random(length), 0).astype(np.float32)
            sample = Sample(
                tokens=draw.integers(2, 60, length).astype(np.int32),
                prompt_len=3 + group,
                mask=mask,
                routes=np.zeros((length - 1, *ROUTE_SHAPE), int),
                rollout_log_probs=near,
                teacher_log_probs=np.where(mask, -3 * draw.random(length), 0).astype(np.float32),
                weight_versions=np.where(mask, 0, -1).astype(np.int32),
                reward=0.1 if group == GROUPS - 1 else float(draw.normal()),
                finish_reason="length" if answer > 20 else "stop",
                parts=(float(draw.normal()), 5 * float(draw.random())),
            )
            out[-1].append(sample)
    return out


def streams(samples: list[Sample]) -> dict[str, list[torch.Tensor]]:
    """Log-probs float64[T-1] of each sample around the engine's, and entropies."""
    draw = torch.Generator().manual_seed(6)
    out: dict[str, list[torch.Tensor]] = {n: [] for n in ("old", "new", "ref", "entropy")}
    for s in samples:
        engine = torch.from_numpy(s.rollout_log_probs[1:]).double()

        def around(of: torch.Tensor, far: float) -> torch.Tensor:
            noise = torch.randn(len(of), generator=draw, dtype=torch.float64)
            return (of + far * noise).clamp(max=-1e-3)

        old = around(engine, 0.4)
        log_prob_streams = {"old": old, "new": around(old, 0.1), "ref": around(old, 0.5)}
        log_prob_streams["entropy"] = torch.rand(len(old), generator=draw, dtype=torch.float64)
        for name, values in log_prob_streams.items():
            out[name].append(values)
    return out


def by_the_oracle(rule: Rule) -> tuple[np.ndarray, float, dict[str, tuple[float, float]]]:
    """[loss, ess, gradient of each trained row], the margin of the bounds, and each metric with its scale."""
    given = groups()
    trained = shaped(given, rule)
    samples = [s for group in trained for s in group]
    log_prob_streams = streams(samples)
    pay = kl_pay(trained, log_prob_streams["old"], log_prob_streams["ref"], rule)
    tables, new, bounds = [], [], Bounds()
    for i, (s, advantage) in enumerate(zip(samples, advantages(trained, rule, pay))):
        kept = torch.from_numpy(s.mask[1:])
        if not kept.any():
            continue
        new.append(log_prob_streams["new"][i][kept].requires_grad_())
        old, ref, entropy = (log_prob_streams[n][i][kept] for n in ("old", "ref", "entropy"))
        engine, teacher = (
            torch.from_numpy(x[1:]).double()[kept]
            for x in (s.rollout_log_probs, s.teacher_log_probs)
        )
        if rule.loss_type == "sft":
            advantage = np.ones_like(advantage)
        ages = torch.zeros(int(kept.sum()), dtype=torch.int64)
        per_token = torch.from_numpy(advantage[1:])[kept]
        tables.append(Rows(new[-1], entropy, old, ref, teacher, engine, per_token, ages))
    loss, metrics, _ = loss_of(tables, rule, bounds)
    gradient = torch.cat(torch.autograd.grad(loss, new))
    found = [float(loss.detach()), metrics["ess"][0], *gradient.tolist()]
    return np.array(found), bounds.margin, metrics


def by_production(rule: Rule) -> tuple[np.ndarray, dict[str, float]]:
    """The same, by the functions that a job calls; without margin and scales."""
    settings = {n: getattr(rule, n) for n in AlgorithmSection.model_fields}
    settings["reward_weights"] = tuple(float(weight) for weight in rule.reward_weights)
    algorithm = AlgorithmSection(**settings)
    recorded = as_recorded(0, groups(), VARIANTS["moe4"])
    scored, _ = prepare.train_samples(recorded, algorithm, rule.rollout_max_response_len)
    log_prob_streams = streams([s for group in groups() for s in group])
    if algorithm.kl_coef:
        ratios = {
            s.sample.sample_id: np.append(0.0, held_ratios(old, ref).numpy())
            for s, old, ref in zip(scored, log_prob_streams["old"], log_prob_streams["ref"])
        }
        scored = prepare.advantages_with_kl(scored, algorithm, ratios)
    counts = np.array([int(s.sample.loss_mask.sum()) for s in scored])
    weights = loss_weights(counts, algorithm, rule.rollout_max_response_len)

    def joined(arrays: list) -> torch.Tensor:
        return torch.cat([torch.as_tensor(np.asarray(a)).double() for a in arrays])

    samples = [s.sample for s in scored]
    new, places = joined(log_prob_streams["new"]).requires_grad_(), torch.arange(len(samples))
    rows = LossRows(
        log_probs=new,
        old_log_probs=joined(log_prob_streams["old"]),
        rollout_log_probs=joined([s.rollout_log_probs[1:] for s in samples]),
        advantages=joined([s.advantages[1:] for s in scored]),
        mask=joined([s.loss_mask[1:] for s in samples]).bool(),
        entropy=joined(log_prob_streams["entropy"]),
        samples=places.repeat_interleave(torch.tensor([s.num_tokens - 1 for s in samples])),
        loss_weights=torch.tensor(weights.copy()),
        ref_log_probs=joined(log_prob_streams["ref"]),
        teacher_log_probs=(
            joined([s.teacher_log_probs[1:] for s in samples]) if algorithm.use_opd else None
        ),
    )
    got = microbatch_loss(configured_loss(algorithm), rows, algorithm)
    tokens = int(got.sums.pop("num_tokens"))
    (gradient,) = torch.autograd.grad(got.loss / tokens, new)
    sums = {name: float(value) / tokens for name, value in got.sums.items()}
    sums |= mismatch_metrics(sums) | {name: float(x) for name, x in got.maxima.items()}
    metrics = {n.removeprefix("train/"): x for n, x in train_metrics([sums]).items()}
    found = [float(got.loss.detach()) / tokens, metrics["ess"]]
    return np.array([*found, *gradient[rows.mask].tolist()]), metrics


def far(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, over the largest value of its kind; of other rows it is infinite."""
    if got.shape != wanted.shape:
        return np.inf
    parts = (slice(0, 1), slice(1, 2), slice(2, None))
    return max(np.abs(got[p] - wanted[p]).max() / np.abs(wanted[p]).max() for p in parts)


def rule_with(settings: dict) -> str:
    """The first rule that has these settings, a name among the several of a setting included."""

    def fits(rule: Rule) -> bool:
        log_prob_streams = {name: getattr(rule, name) for name in settings}
        return all(
            log_prob_streams[n] == x
            or isinstance(log_prob_streams[n], tuple)
            and x in log_prob_streams[n]
            for n, x in settings.items()
        )

    return next(name for name, rule in reversed(RULES.items()) if fits(rule))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_and_its_gradient_are_those_of_the_oracle(name: str):
    wanted, margin, _ = by_the_oracle(RULES[name])
    assert margin > 1e-6  # float32 may put no row on the other side of a bound
    assert far(by_production(RULES[name])[0], wanted) < CLOSE


# what the trainer adds up over microbatches
OF_A_STEP = {"num_loss_tokens", "log_prob_gap_p999"}
_SUMS = "algo.corrections:mismatch_sums"
OF_METRICS = {
    "k1_of_the_actor": Change(_SUMS, "-d.sum()", "d.sum()"),
    "chi2_of_the_ratio": Change(_SUMS, "expm1(2 * d)", "expm1(d)"),
    "perplexity_of_the_sum": Change(
        "algo.corrections:_sample_sums", "-sums[2] / count", "-sums[2]"
    ),
    "far_from_a_nat": Change("algo.corrections:log_prob_gap_sums", "TWICE_AS_LIKELY", "1.0"),
}


def metric_error(rule: Rule) -> float:
    """The largest error of a metric, over what it may be."""
    _, _, metrics = by_the_oracle(rule)
    _, got = by_production(rule)
    values, scales = ({n: pair[i] for n, pair in metrics.items()} for i in (0, 1))
    assert got.keys() == values.keys() - OF_A_STEP
    found = metric_errors(got, values, scales)
    return max(error for n, error in found.items() if n.removeprefix("train/") in got)


@pytest.mark.parametrize("name", NAMES)
def test_the_metrics_of_the_loss_are_those_of_the_oracle(name: str):
    assert metric_error(RULES[name]) < 1


@pytest.mark.parametrize("name", OF_METRICS)
def test_a_changed_line_of_a_metric_shows(name: str):
    with planted(OF_METRICS[name]):
        assert metric_error(RULES["everything"]) > 200


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_line_of_a_formula_shows(name: str):
    rule = RULES[rule_with(CHANGES[name].under)]
    wanted, _, _ = by_the_oracle(rule)
    with planted(CHANGES[name]):
        assert far(by_production(rule)[0], wanted) > 200 * CLOSE
    assert far(by_production(rule)[0], wanted) < CLOSE
