"""The adapters that an actor begins with, without --lora-adapter-path: those of its --seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from r3train.verify.tiny import random_model, save
from r3train.families.tiny_options import TinyOptions
from tests.oracle.actors import actor_of, configuration, in_ranks


def first_factors(checkpoint: Path) -> list[dict[str, torch.Tensor]]:
    """The factors of actors of seed 1, 2 and again 1, by parameter name."""
    found = []
    for seed in (1, 2, 1):
        with actor_of(configuration(checkpoint, lora_rank=4, lora_alpha=8.0, seed=seed)) as actor:
            (chunk,) = actor.model.unwrapped
            every = {n: p.detach().clone() for n, p in chunk.named_parameters() if p.requires_grad}
        found.append(every)
    return found


@pytest.mark.ranks
def test_the_seed_says_which_adapters_a_run_begins_with(tmp_path):
    options = TinyOptions(num_layers=1)
    save(random_model(options), tmp_path / "model", options)
    ((one, other, again),) = in_ranks(1, tmp_path / "ranks", first_factors, tmp_path / "model")
    assert one.keys() == other.keys() == again.keys()
    assert all(torch.equal(one[name], again[name]) for name in one)
    differ = [name for name in one if not torch.equal(one[name], other[name])]
    assert differ and differ == [name for name in one if name.endswith(".lora.a")]
    assert not any(one[name].any() for name in one.keys() - set(differ))  # B's
