"""The comparison itself: what it must notice, on outcomes made by the plain oracle only."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3train.verify.compare_outcomes import (
    DELTAS,
    EXPORT,
    FORWARD,
    GRADIENTS,
    LOSS,
    ROUTES,
    compare,
)
from r3train.verify.model_zoo import ModelVariant, write_checkpoint
from r3train.verify.training_outcome import OLD, RECOMPUTE, TRAIN, Outcome, oracle_outcome
from r3train.verify.rollouts import make_rollouts, train_samples, with_log_probs
from r3train.verify.verifier import MutationResult, TopologyResult, Verification

VARIANT = ModelVariant("small", num_layers=2, num_experts=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    torch.set_num_threads(1)
    checkpoint = write_checkpoint(VARIANT, tmp_path_factory.mktemp("model"))
    batch = make_rollouts(VARIANT, "level")
    batch = with_log_probs(batch, np.full(len(batch.tokens), -6.0))
    weights = load_file(Path(checkpoint) / "model.safetensors")
    oracle, scales = oracle_outcome(VARIANT, batch, {n: t.double() for n, t in weights.items()})
    return oracle, scales, weights


@pytest.fixture
def found(made: tuple) -> Outcome:
    """An outcome that agrees: the oracle's own tables, as a run would report them."""
    out = copy.deepcopy(made[0])
    out.seen = {n: torch.ones(out.chosen[n].shape[:2], dtype=torch.int64) for n in (OLD, TRAIN)}
    out.seen[RECOMPUTE] = torch.zeros_like(out.seen[TRAIN])
    out.chosen = {n: t.clone() for n, t in out.chosen.items()}
    out.exported = {n: t.clone() for n, t in made[2].items()}
    return out


def errors(found: Outcome, made: tuple) -> dict[int, float]:
    result = compare(found, made[0], VARIANT, made[1], made[2], last_phase=5)
    return {phase: e.error for phase, e in result.items()}


def test_an_outcome_agrees_with_itself_in_every_phase(found, made):
    assert set(errors(found, made).values()) == {0.0}


def test_one_wrong_expert_fails_the_routes(found, made):
    found.chosen[OLD][3, 1] = found.chosen[OLD][3, 1].roll(1)
    assert errors(found, made)[ROUTES] == 1


@pytest.mark.parametrize("times", [0, 2])
def test_a_row_routed_other_than_once_fails_the_routes(found, made, times):
    found.seen[TRAIN][5, 0] = times
    assert errors(found, made)[ROUTES] == 1


def test_a_recomputation_that_never_came_fails_the_routes(found, made):
    found.recomputed = {1}
    assert errors(found, made)[ROUTES] == len(found.log_probs)


def test_what_was_not_computed_is_infinitely_wrong(found, made):
    found.probs[TRAIN][7, 1] = float("nan")
    assert errors(found, made)[FORWARD] == float("inf")


def test_one_layer_off_by_a_little_is_not_averaged_away(found, made):
    found.blocks[TRAIN][:, 1] *= 1 + 1e-4
    assert errors(found, made)[FORWARD] == pytest.approx(1e-4, rel=1e-3)


def test_a_lost_token_fails_the_loss(found, made):
    found.num_tokens -= 1
    assert errors(found, made)[LOSS] >= 1


def test_one_parameter_off_is_not_averaged_away(found, made):
    found.gradients["model.layers.1.self_attn.k_norm.weight"] *= 1.5
    assert errors(found, made)[GRADIENTS] == pytest.approx(0.5, rel=1e-3)


def test_a_missing_gradient_is_infinitely_wrong(found, made):
    del found.gradients["lm_head.weight"]
    assert errors(found, made)[GRADIENTS] == float("inf")


def test_a_step_that_did_not_happen_fails_the_deltas(found, made):
    found.deltas["sgd2"]["lm_head.weight"] = torch.zeros_like(
        found.deltas["sgd2"]["lm_head.weight"]
    )
    assert errors(found, made)[DELTAS] > 0.05


def test_one_flipped_bit_fails_the_export(found, made):
    found.exported["model.norm.weight"].view(torch.int32)[0] ^= 1
    assert errors(found, made)[EXPORT] == 1


def test_survivors_and_failures_make_the_verification_fail():
    def verification(topology: str, mutation: str) -> Verification:
        return Verification(
            "float32",
            "cpu",
            topologies=[TopologyResult("t", 1, topology)],
            mutations=[MutationResult("m", "", "t", 0, mutation)],
        )

    assert verification("passed", "caught").ok and verification("not run", "caught").ok
    assert not verification("failed", "caught").ok
    assert not verification("passed", "survived").ok


def test_every_token_of_the_batch_is_unique_and_routes_survive_the_wire():
    batch = make_rollouts(VARIANT, "ragged")
    assert len(set(batch.tokens.tolist())) == len(batch.tokens) and 0 not in batch.tokens
    for i, sample in enumerate(train_samples(batch, VARIANT)):
        start, length = int(batch.starts[i]), int(batch.lengths[i])
        routed = sample.sample.routed_experts.astype(np.int32)
        routed[routed == 255] = -1
        np.testing.assert_array_equal(routed, batch.routes[start : start + length - 1])
