"""--use-routing-replay (R2): train passes take the routes of the old-log-prob pass, and a wrong replay shows."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from r3train.families.read_facts import read_hf_facts
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of

RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tp2": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "ep2_recompute": dict(expert_model_parallel_size=2) | RECOMPUTE,
    "cp2": dict(context_parallel_size=2),
    "pp2": dict(pipeline_model_parallel_size=2),
    "pp2_vpp2": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
}
# so large that the second step of a rollout would choose other experts
LR = 3e-2


@contextmanager
def dispatched(actor: Any) -> Any:
    """Yield a list that fills with (layer, routing map) of every router call."""
    from r3train.trainer.megatron.replay import decoder_routers

    calls: list[tuple[int, torch.Tensor]] = []
    hooks = [
        router.register_forward_hook(
            lambda router, args, output: calls.append((router.layer_number, output[1].clone()))
        )
        for chunk in actor.model.unwrapped
        for router in decoder_routers(chunk)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def by_layer(calls: list[tuple[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """{layer: the maps of its calls, in the order of the rows}."""
    return {
        layer: torch.cat([m for number, m in calls if number == layer])
        for layer in sorted({number for number, _ in calls})
    }


def two_steps(checkpoint: Path, replays: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """Two optimizer steps on one rollout: shares of rows whose experts are those of the old pass."""
    config = configuration(checkpoint, use_routing_replay=replays, lr=LR, **fields)
    hf, out = read_hf_facts(checkpoint), {}
    with actor_of(config) as actor:
        slices, _ = slices_of(actor, config, hf, samples(hf, [(9, 20), (5, 30)]))
        with dispatched(actor) as calls:
            old = actor.compute_log_probs(slices, "old_log_prob")
        own = by_layer(calls)
        for step in range(2):
            with dispatched(actor) as calls:
                out[f"metrics {step}"] = actor.train_step(slices, old, None)
            out[f"calls {step}"] = len(calls) / len(own) / len(slices)
            # forwards come before their recomputations
            first = by_layer(calls[: len(own) * len(slices)])
            recomputed = by_layer(calls[len(own) * len(slices) :])
            for name, maps in (("forward", first), ("recomputed", recomputed)):
                out[f"{name} {step}"] = [
                    float((maps[layer] == own[layer]).all(1).float().mean()) for layer in maps
                ]
    return out


@pytest.mark.ranks
@pytest.mark.parametrize("recompute", (False, True))
def test_both_steps_of_a_rollout_take_the_routes_of_the_old_pass(tmp_path, recompute):
    checkpoint = write_checkpoint(VARIANTS["moe4"], tmp_path / "model")
    fields = RECOMPUTE if recompute else {}
    (live,) = in_ranks(1, tmp_path / "live", two_steps, checkpoint, False, fields)
    (r2,) = in_ranks(1, tmp_path / "r2", two_steps, checkpoint, True, fields)
    assert set(r2["forward 0"] + r2["forward 1"]) == {1.0}
    assert r2["calls 0"] == r2["calls 1"] == (2 if recompute else 1)
    assert set(r2["recomputed 0"] + r2["recomputed 1"]) == ({1.0} if recompute else set())
    # the first step is the same without it; in the second the live router has moved
    assert live["metrics 0"]["loss"] == r2["metrics 0"]["loss"]
    assert min(live["forward 1"]) < 0.9
    assert live["metrics 1"]["loss"] != r2["metrics 1"]["loss"]


def in_topologies(checkpoint: Path) -> dict[str, dict[str, Any]]:
    return {name: two_steps(checkpoint, True, fields) for name, fields in TOPOLOGIES.items()}


@pytest.mark.ranks
def test_every_rank_of_a_topology_replays_its_own_part_of_the_old_pass(tmp_path):
    checkpoint = write_checkpoint(VARIANTS["moe4"], tmp_path / "model")
    for rank_result in in_ranks(2, tmp_path / "ranks", in_topologies, checkpoint):
        for name, found in rank_result.items():
            recompute = "recompute_method" in TOPOLOGIES[name]
            assert set(found["forward 0"] + found["forward 1"]) == {1.0}, name
            assert set(found["recomputed 1"]) == ({1.0} if recompute else set()), name
            # half of the model's four layers on each pipeline stage
            assert len(found["forward 0"]) == (2 if "pp" in name else 4), name


def wrong_replays(checkpoint: Path) -> dict[str, str]:
    """Each planted fault, and the error of a train pass with it."""
    from r3train.trainer.megatron import actor_routes

    config = configuration(checkpoint, use_routing_replay=True)
    hf, errors = read_hf_facts(checkpoint), {}
    router_replay = actor_routes._RouterReplay
    found = router_replay.get_replay_topk

    def one_expert(self, scores, *arguments):
        experts = found(self, scores, *arguments)[1].clone()
        unused = (experts[0, 0] + 1 + torch.arange(scores.shape[1])) % scores.shape[1]
        experts[0, 0] = next(e for e in unused if e not in experts[0])
        return scores.gather(1, experts), experts

    def token_shift(self, scores, *arguments):
        experts = found(self, scores, *arguments)[1].roll(1, 0)
        return scores.gather(1, experts), experts

    faults = {"one expert": one_expert, "token shift": token_shift}
    with actor_of(config) as actor:
        slices, _ = slices_of(actor, config, hf, samples(hf, [(9, 20), (5, 30)]))
        old = actor.compute_log_probs(slices, "old_log_prob")
        for name, fault in faults.items():
            with mock.patch.object(router_replay, "get_replay_topk", fault):
                errors[name] = refused(actor, slices, old)
        with mock.patch.object(actor.replay, "note_dispatch", lambda *call: None):
            errors["not served"] = refused(actor, slices, old)
        errors["sound"] = refused(actor, slices, old)
        actor.replay.chosen.popitem()
        errors["no record"] = refused(actor, slices, old)
    return errors


def refused(actor: Any, slices: Any, old: Any) -> str:
    """The error of a train pass, "" without one."""
    try:
        actor.backward(slices, old, None)
    except (AssertionError, KeyError) as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.ranks
def test_a_wrong_replay_of_own_routes_ends_the_pass(tmp_path):
    checkpoint = write_checkpoint(VARIANTS["moe4"], tmp_path / "model")
    (errors,) = in_ranks(1, tmp_path / "ranks", wrong_replays, checkpoint)
    assert errors["sound"] == ""
    for name in ("one expert", "token shift"):
        assert "dispatched other experts than those replayed" in errors[name], errors
    assert "times replayed" in errors["not served"], errors
    assert errors["no record"].startswith("KeyError"), errors
