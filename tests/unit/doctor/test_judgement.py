"""Verdicts on log-probs and routes: planted defects are found, honest noise is not.

The model is random logits: 207 rows, 4 layers, 8 experts, top 2, as the demo's; and a larger one.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from r3train.doctor.engine_probe import Sampled
from r3train.doctor.finding import OK, PROBLEM, Finding
from r3train.doctor.judgement import (
    BFLOAT16,
    FLOAT32,
    Tolerance,
    judge_log_probs,
    judge_routes,
    parts_of,
    shortfall,
)

PROMPT, ANSWER = 200, 8
ROWS = PROMPT + ANSWER - 1
SHAPES = {"8 experts, top 2": (4, 8, 2), "64 experts, top 6": (24, 64, 6)}


def sampled(edges: tuple[int, ...] = (64, 128, 192, PROMPT)) -> Sampled:
    ids = np.zeros(PROMPT + ANSWER, dtype=np.int32)
    return Sampled(ids, PROMPT, np.zeros(ANSWER, dtype=np.float32), None, edges)


def model(shape: str, seed: int = 0) -> np.ndarray:
    """Router logits float32[ROWS, L, E]."""
    layers, experts, _ = SHAPES[shape]
    rng = np.random.default_rng(seed)
    return rng.normal(size=(ROWS, layers, experts)).astype(np.float32)


def choice(logits: np.ndarray, shape: str) -> np.ndarray:
    """The top-k, uint8[ROWS, L, K]."""
    return np.argsort(-logits, axis=-1)[..., : SHAPES[shape][2]].astype(np.uint8)


def judged(got: np.ndarray, logits: np.ndarray, tolerance: Tolerance) -> Finding:
    return judge_routes(got, logits, tolerance, "x", parts_of(sampled()))


each_shape = pytest.mark.parametrize("shape", SHAPES)
each_format = pytest.mark.parametrize("tolerance", [FLOAT32, BFLOAT16], ids=["fp32", "bf16"])


@each_format
@each_shape
def test_the_references_routes_are_right_in_any_order(shape, tolerance):
    logits = model(shape)
    assert judged(choice(logits, shape)[..., ::-1], logits, tolerance).level == OK


@each_shape
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("first", [0, 63, 100, 199, 200, 205])
def test_one_or_two_rows_wrong_in_every_layer_are_found_in_float32(first, count, shape):
    logits = model(shape)
    got = choice(logits, shape)
    got[first : first + count] = choice(model(shape, seed=1), shape)[first : first + count]
    found = judged(got, logits, FLOAT32)
    assert found.level == PROBLEM and "differ by more than a near tie" in found.text
    assert "MoE layer 1 of" in found.text and found.remedy


@each_format
@each_shape
@pytest.mark.parametrize("first", [63, 64, 199, 200, 206])
def test_a_row_wrong_at_a_boundary_is_found_in_either_format(first, shape, tolerance):
    logits = model(shape)
    got = choice(logits, shape)
    got[first] = choice(model(shape, seed=1), shape)[first]
    found = judged(got, logits, tolerance)
    assert found.level == PROBLEM and "rows at boundaries differ" in found.text


def shifted(got: np.ndarray, shift: int, last: int) -> None:
    got[-last:] = np.roll(got, shift, axis=0)[-last:]


def swapped(got: np.ndarray) -> None:
    got[:, [1, 2]] = got[:, [2, 1]]


@each_format
@each_shape
@pytest.mark.parametrize(
    "spoil",
    [swapped, *(partial(shifted, shift=s, last=n) for s in (1, -1) for n in (57, 7, 2))],
)
def test_rows_shifted_by_a_token_and_layers_swapped_are_found(spoil, shape, tolerance):
    logits = model(shape)
    got = choice(logits, shape)
    spoil(got)
    assert judged(got, logits, tolerance).level == PROBLEM


@each_format
def test_a_late_layer_that_is_shifted_behind_near_ties_is_found(tolerance):
    """Every row flips at a near tie: the later layers still show the shift when taken together."""
    shape = "64 experts, top 6"
    logits = model(shape)
    order = np.argsort(-logits[:, 0], axis=-1)
    last_in, first_out = order[:, 5:6], order[:, 6:7]
    tie = np.take_along_axis(logits[:, 0], last_in, axis=-1) - 1e-4
    np.put_along_axis(logits[:, 0], first_out, tie, axis=-1)
    got = choice(logits, shape)
    got[:, 0, 5] = first_out[:, 0]
    assert (shortfall(got, logits)[:, 0] > 0).all()
    assert judged(got, logits, tolerance).level == OK
    got[:, 20] = np.roll(got[:, 20], 1, axis=0)
    found = judged(got, logits, tolerance)
    assert (
        found.level == PROBLEM and "MoE layer 21 of 24 fits the neighbouring tokens" in found.text
    )


def noisy_choice(logits: np.ndarray, shape: str, noise: float) -> np.ndarray:
    rng = np.random.default_rng(7)
    return choice(logits + rng.normal(scale=noise, size=logits.shape), shape)


@each_shape
@pytest.mark.parametrize("tolerance, noise", [(FLOAT32, 1e-5), (BFLOAT16, 0.03)])
def test_near_ties_may_flip(tolerance, noise, shape):
    logits = model(shape)
    got = noisy_choice(logits, shape, noise)
    if tolerance is BFLOAT16:
        assert (shortfall(got, logits) > 0).any()
    found = judged(got, logits, tolerance)
    assert found.level == OK, found.text
    assert judged(got, logits, FLOAT32).level == (OK if tolerance is FLOAT32 else PROBLEM)


def test_what_follows_from_a_flip_at_a_near_tie_is_no_second_fault():
    shape = "8 experts, top 2"
    logits = model(shape)
    order = np.argsort(-logits[100, 1])
    logits[100, 1, order[2]] = logits[100, 1, order[1]] - 1e-4  # the second and third of 8 tie
    got = choice(logits, shape)
    got[100, 1] = order[[0, 2]]
    assert judged(got, logits, FLOAT32).level == OK
    got[100, 2:] = choice(model(shape, seed=1), shape)[100, 2:]
    assert judged(got, logits, FLOAT32).level == OK
    got[100, 0] = choice(model(shape, seed=1), shape)[100, 0]
    assert judged(got, logits, FLOAT32).level == PROBLEM


@each_format
@pytest.mark.parametrize("bad", [255, "twice"])
def test_a_row_that_is_no_choice_of_experts_is_found(bad, tolerance):
    shape = "8 experts, top 2"
    logits = model(shape)
    got = choice(logits, shape)
    got[-1, 3, 1] = got[-1, 3, 0] if bad == "twice" else bad
    found = judged(got, logits, tolerance)
    assert found.level == PROBLEM and "MoE layer 4" in found.text


def test_routes_of_another_shape_and_logits_that_are_nan_are_found():
    shape = "8 experts, top 2"
    logits = model(shape)
    got = choice(logits, shape)
    assert judged(got[:-1], logits, FLOAT32).level == PROBLEM
    logits[100, 2] = np.nan
    assert judged(got, logits, FLOAT32).level == PROBLEM


@each_format
def test_a_text_of_one_token_again_and_again_is_its_own_control(tolerance):
    logits = np.repeat(model("8 experts, top 2")[:1], ROWS, axis=0)
    assert judged(choice(logits, "8 experts, top 2"), logits, tolerance).level == OK


def test_log_probs_of_float32_agree_at_every_token():
    ours = np.zeros(300, dtype=np.float32)
    assert judge_log_probs("p", ours, ours + 5e-5, FLOAT32, "x").level == OK
    theirs = ours.copy()
    theirs[5] = 0.002
    found = judge_log_probs("p", ours, theirs, FLOAT32, "x")
    assert found.level == PROBLEM and "the worst is token 5" in found.text and found.remedy
    assert judge_log_probs("p", ours, ours + 5e-4, FLOAT32, "x").level == PROBLEM
    assert judge_log_probs("p", ours * np.nan, ours, FLOAT32, "x").level == PROBLEM


@pytest.mark.parametrize("draw, scale", [("normal", 0.075), ("laplace", 0.05)])
def test_answers_of_bfloat16_noise_of_the_mean_that_was_measured_pass(draw, scale):
    """Gaps of 0.06 and 0.05 nats on average: of 500 probes of ten answers one in fifty may fail."""
    rng = np.random.default_rng(0)
    failed = 0
    for _ in range(500):
        noise = getattr(rng, draw)(scale=scale, size=(10, 8)).astype(np.float32)
        found = [judge_log_probs("p", np.zeros(8), answer, BFLOAT16, "x") for answer in noise]
        failed += any(f.level == PROBLEM for f in found)
    assert failed <= 10


def test_log_probs_of_bfloat16_agree_on_average_and_nearly_everywhere():
    ours = np.zeros(300, dtype=np.float32)
    noise = np.random.default_rng(0).normal(scale=0.05, size=300).astype(np.float32)
    assert judge_log_probs("p", ours, noise, BFLOAT16, "x").level == OK
    assert judge_log_probs("p", ours, ours + 0.12, BFLOAT16, "x").level == PROBLEM
    few, many = noise.copy(), noise.copy()
    few[:3], many[:20] = 0.45, 0.45
    assert judge_log_probs("p", ours, few, BFLOAT16, "x").level == OK
    assert judge_log_probs("p", ours, many, BFLOAT16, "x").level == PROBLEM
    # of a short answer one token may be off, but not two, nor by much
    assert judge_log_probs("p", ours[:8], few[2:10], BFLOAT16, "x").level == OK
    assert judge_log_probs("p", ours[:8], few[1:9], BFLOAT16, "x").level == PROBLEM
    assert judge_log_probs("p", ours[:8], few[2:10] * 2.5, BFLOAT16, "x").level == PROBLEM
    assert judge_log_probs("p", ours[:8], ours[:8] * np.nan, BFLOAT16, "x").level == PROBLEM
