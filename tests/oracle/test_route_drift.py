"""The router's drift as a real actor logs it, against sums over routes and scores taken by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from r3train.families.read_facts import read_hf_facts
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of

RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
NAMES = ("left", "gate_mass", "load_entropy", "dead_experts")


def logged_and_counted(
    checkpoint: Path, overrides: dict[str, Any], reuse: bool
) -> list[dict[str, float]]:
    """The drift's metrics of a rollout's first forwards, and the same numbers of the rows by hand.

    reuse: the first forward is that of the train step, and its backward computes it again.
    """
    from r3train.trainer.megatron.replay import decoder_routers

    config = configuration(
        checkpoint,
        transformer_overrides=overrides,
        use_rollout_routing_replay=True,
        log_route_drift=True,
        **(RECOMPUTED if reuse else {}),
    )
    hf = read_hf_facts(checkpoint)
    with actor_of(config) as actor:
        (chunk,) = actor.model.unwrapped
        slices, _ = slices_of(actor, config, hf, samples(hf, [(9, 20), (5, 30)]))
        logits = {}
        for router in decoder_routers(chunk):
            gating, number = router.gating, router.layer_number

            def watched(x, gating=gating, number=number):
                out = gating(x)
                logits.setdefault(number, []).append(out.detach().flatten(0, -2).double())
                return out

            router.gating = watched
        # routers that choose the replayed experts have not drifted, in half of the rows
        actor.compute_log_probs(slices, None)
        biases = {r.layer_number: copy.deepcopy(r.expert_bias) for r in decoder_routers(chunk)}
        native = {n: live(x[0], biases[n], hf.num_experts_per_tok) for n, x in logits.items()}
        for i, number in enumerate(slices[0].layer_numbers.tolist()):
            slices[0].routes[:20, i] = native[number][0][:20].numpy().astype("uint8")
        logits.clear()
        old = None if reuse else actor.compute_log_probs(slices, "old_log_prob")
        actor.train_step(slices, old, None)  # other passes are not counted
        passes = {n: x[0] for n, x in logits.items()}
        assert {len(x) for x in logits.values()} == {2}
        logged = actor.collect_drift()
        assert actor.collect_drift() == {}
    by_hand = {}
    (only,) = slices
    rows = torch.from_numpy(only.route_uids >= 0)
    for i, number in enumerate(only.layer_numbers.tolist()):
        live_experts, gates = live(passes[number], biases[number], hf.num_experts_per_tok)
        routes = torch.from_numpy(only.routes[:, i].astype("int64"))
        left, mass, load = 0, 0.0, [0] * hf.num_experts
        counted = [t for t in range(len(rows)) if rows[t] and (routes[t] < 255).all()]
        for t in counted:
            left += set(live_experts[t].tolist()) != set(routes[t].tolist())
            mass += float(gates[t, routes[t]].sum() / gates[t, live_experts[t]].sum())
            for expert in live_experts[t].tolist():
                load[expert] += 1
        share = torch.tensor(load, dtype=torch.float64) / sum(load)
        entropy = -sum(float(p * p.log()) for p in share if p > 0)
        values = (
            left / len(counted),
            mass / len(counted),
            entropy / float(torch.tensor(len(load), dtype=torch.float64).log()),
            load.count(0),
        )
        by_hand |= {f"r3/drift_{n}_layer_{number}": v for n, v in zip(NAMES, values)}
    return [logged, by_hand]


def live(logits: torch.Tensor, bias: torch.Tensor | None, topk: int) -> tuple:
    """The live top-k and all gate values of rows, int64[m, K] and float64[m, E]."""
    gates = logits.softmax(1) if bias is None else logits.sigmoid()
    scores = gates if bias is None else gates + bias.double()
    return scores.topk(topk, dim=1).indices, gates


@pytest.mark.ranks
@pytest.mark.parametrize(
    "variant, reuse",
    [
        pytest.param("moe4", False, marks=pytest.mark.slow),
        pytest.param("pre_softmax", False, marks=pytest.mark.slow),
        ("glm", False),
        ("moe4", True),
    ],
)
def test_the_drift_of_each_layer_is_that_of_its_rows(variant, reuse, tmp_path):
    """With softmax over logits, and with sigmoids whose expert bias is no part of the gate."""
    checkpoint = write_checkpoint(VARIANTS[variant], tmp_path / "model")
    overrides = VARIANTS[variant].overrides
    ((logged, by_hand),) = in_ranks(
        1, tmp_path / "ranks", logged_and_counted, checkpoint, overrides, reuse
    )
    means = {f"r3/drift_{name}" for name in NAMES}
    assert logged.keys() == by_hand.keys() | means
    for name, value in by_hand.items():
        assert logged[name] == pytest.approx(value, rel=1e-5), name
    lefts = [v for k, v in by_hand.items() if "left" in k]
    assert all(0.2 < left < 0.8 for left in lefts)
    assert logged["r3/drift_left"] == pytest.approx(sum(lefts) / len(lefts))
