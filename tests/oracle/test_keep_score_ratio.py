"""--r3-keep-score-ratio in a real actor: the proof stays exact, and a rule that is broken fails it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec import structs

from r3train.config.hf_facts import read_hf_facts
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.oracle.actors import actor_of, configuration, in_ranks, samples

PASSES = ("old_log_prob", "train")


def all_go(replayed: torch.Tensor, own: torch.Tensor, ratio: float) -> torch.Tensor:
    return torch.ones_like(replayed, dtype=torch.bool)


def none_goes(replayed: torch.Tensor, own: torch.Tensor, ratio: float) -> torch.Tensor:
    return torch.zeros_like(replayed, dtype=torch.bool)


BUGS = {"": None, "all_go": all_go, "none_goes": none_goes}


def verdicts(checkpoint: Path) -> dict[str, Any]:
    """(failed quantities, counts) of a step with recomputation, sound and with each bug."""
    from r3train.launch.build_routes import build_routes
    from r3train.loop.prepare import prepare
    from r3train.proof.judge import judge, StepTotals
    from r3train.trainer.megatron import replay

    config = configuration(
        checkpoint,
        use_rollout_routing_replay=True,
        enable_r3_correctness_check=True,
        r3_keep_score_ratio=0.7,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    hf, out = read_hf_facts(checkpoint), {}
    with actor_of(config) as actor:
        routes = build_routes(config, hf)
        routes.open(actor.topology)
        batch = samples(hf, [(9, 20), (5, 30)])
        prepared = prepare(0, batch, config, hf, routes.row_shape, [actor.topology], passes=PASSES)
        slices = routes.slices(prepared, prepared.counts[0])
        expectation = prepared.expectation(routes.recorded(prepared))
        for bug, rule in BUGS.items():
            planted = (
                nullcontext() if rule is None else mock.patch.object(replay, "dropped_slots", rule)
            )
            with planted:
                old = actor.compute_log_probs(slices, "old_log_prob", weight_version=0)
                metrics = actor.train_step(slices, old, None, weight_version=0)
            assert metrics["update_successful"]
            totals = StepTotals(hf.route_shape)
            for record in actor.collect_evidence(0):
                totals.add(record)
            for name, expected in (
                (bug, expectation),
                (f"{bug} unexpected", structs.replace(expectation, keep_score_ratio=0.0)),
            ):
                verdict = judge(totals, expected, hf.route_shape, mismatch_threshold=1.0)
                out[name] = sorted({f.what for f in verdict.failures}), verdict.counts
    return out


@pytest.mark.ranks
def test_slots_are_let_go_by_the_rule_alone_and_every_other_is_the_rollouts(tmp_path):
    checkpoint = write_checkpoint(VARIANTS["moe4"], tmp_path / "model")
    (got,) = in_ranks(1, tmp_path / "ranks", verdicts, checkpoint)
    failed, counts = got[""]
    assert not failed
    assert counts["num_calls"] == counts["num_calls_expected"]
    # routes that no router would choose: many slots go, some stay
    assert 0.1 < counts["rows_replayed"] / counts["rows_dropped"] < 10
    assert counts["slots_dropped"] > counts["rows_dropped"] and counts["dropped_off"] == 0
    assert "fingerprint" in got["all_go"][0] and "dropped_off" in got["all_go"][0]
    assert got["none_goes"][0] == ["dropped_off"]
    # a run that lets nothing go, by its settings, and does
    assert got[" unexpected"][0] == ["rows_dropped", "slots_dropped"]
