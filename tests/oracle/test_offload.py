"""An actor whose memory leaves its device between passes (--colocate): the same bits, and the memory is gone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from r3train.families.read_facts import read_hf_facts
from r3train.verify.model_zoo import ModelVariant, write_checkpoint
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of

pytestmark = pytest.mark.ranks

MODEL = ModelVariant("small", num_layers=2, num_experts=4, dense_layers=(0,))
SHARDED = dict(use_distributed_optimizer=True)
SETTINGS = {
    1: {"float32": {}, "bf16": dict(bf16=True), "bf16_sharded": SHARDED | dict(bf16=True)},
    2: {
        "sharded": SHARDED,
        "ep2_bf16_sharded": SHARDED | dict(expert_model_parallel_size=2, bf16=True),
    },
}


def state(actor: Any) -> list[Any]:
    """Weights and all that the optimizers hold; copies."""
    weights = [p.detach().clone() for m in actor.model.unwrapped for p in m.parameters()]
    inner = [part.optimizer for part in actor.optimizer.chained_optimizers]
    return copy.deepcopy([weights, [one.state_dict() for one in inner]])


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for k in value for x in flat(value[k])]
    return [x for v in value for x in flat(v)] if isinstance(value, (list, tuple)) else [value]


def unlike(one: Any, other: Any) -> int:
    pairs = zip(flat(one), flat(other), strict=True)
    return sum(not (torch.equal(a, b) if torch.is_tensor(a) else a == b) for a, b in pairs)


def steps(checkpoint: Path, fields: dict[str, Any], *, offloaded: bool) -> dict[str, Any]:
    """Three steps; with ``offloaded`` the memory goes away before each, and comes back in two parts."""
    config = configuration(checkpoint, use_rollout_routing_replay=True, **fields)
    hf, out = read_hf_facts(checkpoint), {"held": [], "states": [], "exports": []}
    with actor_of(config) as actor:
        memory = actor.memory
        slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12), (6, 7)]))
        for _ in range(3):
            if offloaded:
                held = [memory.num_bytes()]
                for parts in (("weights",), (), ("weights", "gradients", "optimizer")):
                    memory.hold(*parts)
                    held.append(memory.num_bytes())
                    if parts == ("weights",):  # as they go to the servers
                        out["exports"].append([(n, t.clone()) for n, t in actor.hf_weights()])
                out["held"].append(held)
            else:
                out["exports"].append([(n, t.clone()) for n, t in actor.hf_weights()])
            old = actor.compute_log_probs(slices, None)
            metrics = actor.train_step(slices, old, None)
            assert metrics["update_successful"] == 1.0
            out["states"].append([state(actor), metrics])
    return out


def both(checkpoint: Path, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, fields in settings.items():
        here = steps(checkpoint, fields, offloaded=False)
        there = steps(checkpoint, fields, offloaded=True)
        found[name] = {
            "unlike": unlike(
                [here["states"], here["exports"]], [there["states"], there["exports"]]
            ),
            "moved": unlike(here["states"][0][0], here["states"][1][0]),
            "held": there["held"],
        }
    return found


@pytest.mark.parametrize("ranks", SETTINGS)
def test_an_actor_that_was_away_takes_the_same_steps_to_the_bit_and_its_memory_was_free(
    tmp_path, ranks
):
    checkpoint = write_checkpoint(MODEL, tmp_path / "model")
    for found in in_ranks(ranks, tmp_path / "ranks", both, checkpoint, SETTINGS[ranks]):
        for name, facts in found.items():
            assert facts["unlike"] == 0, name
            assert facts["moved"] > 10, name
            for before, weights, nothing, after in facts["held"][1:]:
                assert nothing == 0 < weights < before == after, name
