"""The factors that LoRA begins with: PEFT's scale, and a seed that tells one run from another."""

from __future__ import annotations

import math

import pytest
import torch

from r3train.cpu.device import prepare_device

prepare_device()
from r3train.trainer.megatron.lora import random_factors  # noqa: E402

# [rank, in features]: PEFT's bound is that of the inputs
SHAPE = (8, 400)
NAME = "model.layers.0.self_attn.q_proj.lora_A"


def test_a_begins_within_the_bound_of_its_inputs_and_fills_it():
    a = random_factors(3)(NAME, SHAPE)
    bound = 1 / math.sqrt(SHAPE[1])
    assert a.shape == SHAPE and a.abs().max() <= bound
    assert a.max() > 0.98 * bound and a.min() < -0.98 * bound
    # uniform: of variance bound^2 / 3
    assert a.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert a.mean().abs() < 0.05 * bound


def test_b_begins_with_zeros_so_the_first_policy_is_the_base():
    b = random_factors(3)(NAME.replace("_A", "_B"), (400, 8))
    assert b.shape == (400, 8) and not b.any()


def test_seed_and_name_alone_say_what_is_drawn():
    a, different = random_factors(3)(NAME, SHAPE), []
    torch.manual_seed(99)
    assert torch.equal(a, random_factors(3)(NAME, SHAPE))
    different.append(random_factors(4)(NAME, SHAPE))
    different.append(random_factors(3)(NAME.replace("layers.0", "layers.1"), SHAPE))
    assert not any(torch.equal(a, other) for other in different)
