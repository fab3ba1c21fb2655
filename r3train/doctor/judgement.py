"""Comparison of a server's answers with Hugging Face's forward and with the actor.

Routes are compared with the scores by which the reference's routers choose, not with the choice only:
two right implementations may choose differently where two experts tie, and nowhere else.  Rows at which the
server began anew (after its cache, at a chunk, at the answer) are judged apart from the rest: errors
happen there, and there are few of these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Iterator
from dataclasses import dataclass

import numpy as np

from r3train.doctor.engine_probe import SUBJECT, Sampled, Situations
from r3train.doctor.finding import Finding, Findings, ok, problem

ACTOR = "Megatron probe"


@dataclass(frozen=True)
class Expected:
    """The reference's forward of a text of T tokens."""

    log_probs: np.ndarray  # float32[T], entry 0 is 0
    router_scores: np.ndarray | None  # float32[T-1, L_moe, E]; None for a dense model


Reference = Callable[[np.ndarray], Expected]  # of int32[T]


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference between two right implementations in one number format.

    Routes are measured by ``shortfall``, in standard deviations of a row's scores.
    """

    log_prob_mean: float  # nats, over many tokens
    log_prob_high: float  # nats, of all tokens but ``log_prob_far_share``
    log_prob_far_share: float
    log_prob_most: float  # nats, of any token
    near_tie: float  # largest shortfall that is noise
    wrong_share: float  # rows past it, of each part
    route_mean: float  # mean shortfall that needs no control


# float32 on one machine agrees far closer.  bfloat16: rounding gave means up to 0.06 nats and ties up to
# 0.2 in random models of 4 to 48 layers; a flipped expert then moves a few later rows by more
FLOAT32 = Tolerance(2e-4, 1e-3, 0.0, 1e-3, 1e-3, 0.0, 1e-4)
BFLOAT16 = Tolerance(0.08, 0.25, 0.05, 1.0, 0.25, 0.02, 0.02)


def judge_answers(
    texts: Mapping[str, np.ndarray],
    situations: Situations,
    reference: Reference,
    actor: Mapping[str, np.ndarray],
    *,
    moe_layers: Sequence[int],
    tolerance: Tolerance,
) -> Findings:
    """The actor's texts against the reference, and every answer against the reference and the actor.

    texts: int32[T] by name, of which the server knows nothing.
    actor: its log-probs float32[T] of texts and answers, by name; empty where there is none.
    moe_layers: 1-based numbers of the layers whose routes are judged.
    """
    for what, ids in texts.items():
        if what in actor:
            theirs, named = reference(ids).log_probs, f"{what}, against HF"
            yield judge_log_probs(ACTOR, actor[what], theirs, tolerance, named)
    yield from situations.findings
    columns = np.asarray(moe_layers, dtype=np.int64) - 1
    for what, sampled in situations.sampled.items():
        expected = reference(sampled.token_ids)
        others = {"against HF": expected.log_probs}
        if what in actor:
            others["against the actor"] = actor[what]
        for whom, theirs in others.items():
            answer, named = theirs[sampled.prompt_len :], f"{what}, {whom}"
            yield judge_log_probs(SUBJECT, sampled.log_probs, answer, tolerance, named)
        if len(columns):
            got, parts = sampled.routes[:, columns], parts_of(sampled)
            yield judge_routes(got, expected.router_scores, tolerance, what, parts)


def judge_log_probs(
    subject: str, ours: np.ndarray, theirs: np.ndarray, tolerance: Tolerance, what: str
) -> Finding:
    """Two float32[T] of log-probs of one text: their gap on average, and that of the worst tokens."""
    gap = np.abs(ours - theirs)
    worst, mean = int(gap.argmax()), gap.mean()
    # gaps spread about as wide as their mean is: three standard errors, for an answer is short
    limit = tolerance.log_prob_mean * (1 + 3 / np.sqrt(len(gap)))
    far, allowed = ~(gap <= tolerance.log_prob_high), tolerance.log_prob_far_share * len(gap)
    text = f"{what}: largest gap of log-probs {gap[worst]:.2g}, {mean:.2g} on average"
    if (
        mean <= limit  # NaN is not
        and far.sum() <= np.ceil(allowed)
        and gap[worst] <= tolerance.log_prob_most
    ):
        return ok(subject, text)
    remedy = "compare versions with r3train doctor; look for quantisation or another attention"
    limits = (
        f"the worst is token {worst}; expected at most {limit:.2g} on average, "
        f"{tolerance.log_prob_high:g} at all but {np.ceil(allowed):.0f} of {len(gap)} tokens, and "
        f"{tolerance.log_prob_most:g} anywhere"
    )
    return problem(subject, f"{text}; {limits}", remedy)


def judge_routes(
    got: np.ndarray,
    scores: np.ndarray,
    tolerance: Tolerance,
    what: str,
    parts: Mapping[str, np.ndarray],
) -> Finding:
    """Experts int[N, L, K] against router scores float32[N, L, E] of the same tokens.

    parts: rows that are judged together, int64[n] by name; all layers are judged next to them.
    """
    if got.shape[:2] != scores.shape[:2]:
        text = f"{what}: routed experts are {got.shape}, the reference's scores {scores.shape}"
        return problem(SUBJECT, text, "this SGLang does not return what r3train reads: 0.5.23 does")
    gap = shortfall(got, scores)
    text = f"{what}: {(gap == 0).mean():.1%} of rows are the reference's"
    fault = next(_faults(got, scores, gap, parts, tolerance), None)
    if fault is None:
        return ok(SUBJECT, text)
    remedy = "do not train with R3 on this server: its routes are of another forward"
    return problem(SUBJECT, f"{text}; {fault}", remedy)


def shortfall(experts: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Distance of rows from the top-k of their scores: float[N, L], 0 where they are the top-k.

    The best logit left out less the worst one taken, in standard deviations of the row's scores;
    inf for a row that is no choice of K experts.  experts: int[N, L, K], scores: float[N, L, E].
    """
    ids, num_experts = experts.astype(np.int64), scores.shape[-1]
    taken = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(taken, ids.clip(0, num_experts - 1), True, axis=-1)
    best_out = np.where(taken, -np.inf, scores).max(-1)
    worst_in = np.where(taken, scores, np.inf).min(-1)
    gap = np.maximum(best_out - worst_in, 0) / np.maximum(scores.std(-1), 1e-30)
    is_choice = ((ids >= 0) & (ids < num_experts)).all(-1) & (taken.sum(-1) == ids.shape[-1])
    return np.where(is_choice, gap, np.inf)


def parts_of(sampled: Sampled) -> dict[str, np.ndarray]:
    """Rows of an answer by the server's work for them; those at boundaries are in others too."""
    rows = np.arange(len(sampled.token_ids) - 1)
    edges = {row for edge in sampled.edges for row in (edge - 1, edge)} | {len(rows) - 1}
    return {
        "rows at boundaries": np.array(sorted(edges & set(rows.tolist()))),
        "rows of the answer": rows[sampled.prompt_len :],
        "rows of the prompt": rows[: sampled.prompt_len],
    }


def _faults(
    got: np.ndarray,
    scores: np.ndarray,
    gap: np.ndarray,
    parts: Mapping[str, np.ndarray],
    tolerance: Tolerance,
) -> Iterator[str]:
    """Descriptions of what is wrong, the plainest first.

    A row is right as far as it first differs at a near tie: an expert that flips there moves the
    row's later layers, which say nothing then.  So parts and layers must also fit their own tokens
    twice as well as those next to them.
    """
    differs = ~(gap <= 0)
    layer = differs.argmax(1)
    wrong = ~(gap[np.arange(len(gap)), layer] <= tolerance.near_tie)
    for name, rows in parts.items():
        bad = rows[wrong[rows]]
        if len(bad) > tolerance.wrong_share * len(rows):
            place = f"first at token {bad[0]}, MoE layer {layer[bad[0]] + 1} of {gap.shape[1]}"
            yield f"{len(bad)} of {len(rows)} {name} differ by more than a near tie, {place}"
    beside = [shortfall(got, np.roll(scores, shift, axis=0)) for shift in (1, -1)]

    places = [(f"{name} fit", rows, slice(None)) for name, rows in parts.items() if len(rows)]
    num_layers = gap.shape[1]
    for layer_id in range(num_layers):
        places.append((f"MoE layer {layer_id + 1} of {num_layers} fits", slice(None), layer_id))
    for name, *place in places:
        control = min(shifted[*place].mean() for shifted in beside)
        if not gap[*place].mean() <= max(tolerance.route_mean, control / 2):
            yield f"{name} the neighbouring tokens nearly as well: shifted?"
