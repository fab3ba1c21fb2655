"""The tokens that an indexer chose: proved in ranks, and with bugs that must be caught.

That they are attended to is compared with transformers in ``test_families.py``.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3train.audit.audit_run import audit_run
from r3train.families.read_facts import read_hf_facts
from r3train.routing.indexer_topk import num_words, to_bits
from r3train.types import TrainSample
from tests.hf_reference import HfReference
from tests.oracle.actors import actor_of, configuration, in_ranks, samples
from tests.oracle.test_families import make

PASSES = ("old_log_prob", "ref_log_prob", "train")
NAME = "deepseek_v32 of long sequences"
TOPOLOGIES = {
    "tp2": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "cp2": dict(context_parallel_size=2),
    "pp2": dict(
        pipeline_model_parallel_size=2,
        decoder_first_pipeline_num_layers=1,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    ),
    "core_attn": dict(
        expert_model_parallel_size=2,
        recompute_granularity="selective",
        recompute_modules=("core_attn",),
    ),
}
# three microbatches of 29 tokens: two samples longer than the choice of 5, and short ones only
LENGTHS = [(9, 20), (4, 25), *[(2, 3)] * 5, (1, 3)]
BUGS = {
    "one_chosen_token": {"fingerprint"},
    "choices_of_the_row_before": {"fingerprint"},
    "choices_of_the_layer_before": {"fingerprint"},
    "choices_not_applied": {"fingerprint"},
    "token_chosen_twice": {"fingerprint", "duplicate_rows", "map_deviation"},
    "indexer_not_asked": {"num_calls", "fingerprint", "rows_replayed"},
}
OF_RECOMPUTATION = "choices_of_the_forward_in_progress"


# as a server would send them: the indexer's own, and moved by a row or a layer
MOVED = {
    "own": lambda bits: bits,
    "row": lambda bits: np.concatenate([bits[:1], bits[:-1]]),
    "layer": lambda bits: np.roll(bits, 1, axis=1),
}
LONG = [(5, 150), (9, 120)]


def sent(checkpoint: Path) -> list[np.ndarray]:
    """Return the choices of transformers' indexers, as ``RolloutSample.indexer_topk`` of the long samples."""
    hf, model, out = read_hf_facts(checkpoint), HfReference(checkpoint), []
    for s in samples(hf, LONG):
        with torch.no_grad():
            model.log_probs(s.sample.token_ids, s.sample.routed_experts)
        ids = torch.stack([model.own_tokens[i] for i in range(hf.num_hidden_layers)], 1)
        rows = ids[hf.index_topk : -1].numpy().astype(int)
        out.append(to_bits(rows, num_words(s.sample.num_tokens)))
    return out


def cases(checkpoint: Path, scratch: Path, own: list[np.ndarray]) -> dict[str, Any]:
    """Of each topology and bug, the stages and quantities that failed; in a rank."""
    from r3train.launch.start.build_actor import build_routes
    from r3train.loop.distribute import broadcast_json, gather_topologies
    from r3train.loop.prepare import Preparation
    from r3train.proof.live import LiveProof
    from r3train.proof.writer import EvidenceWriter
    from tests.oracle.planted import planted_by

    hf, out = read_hf_facts(checkpoint), {}
    bugs = {bug.name: bug for bug in planted_by("tests/oracle/test_indexer_replay.py")}

    def prove(config: Any, batches: dict[str, list[TrainSample]]) -> dict[str, Any]:
        """Train a step of each batch, with the bug of its name, and judge it."""
        found = {}
        with actor_of(config) as actor:
            topologies = gather_topologies(actor.topology)
            routes = build_routes(config, hf)
            routes.open(actor.topology)
            for step, (case, batch) in enumerate(batches.items()):
                bug = bugs.get(case.split()[-1])
                with bug.planted(config, hf) if bug else nullcontext():
                    prepared = None
                    if actor.topology.rank == 0:
                        given = (config, hf, routes.row_shape, topologies, PASSES)
                        prepared = Preparation(*given).prepare(step, batch)
                    count = broadcast_json(prepared and prepared.counts[0])
                    slices = routes.slices(prepared, count)
                    old = actor.compute_log_probs(slices, "old_log_prob", weight_version=step)
                    ref = actor.compute_log_probs(slices, "ref_log_prob")
                    actor.train_step(slices, old, ref, weight_version=step)
                recorded = routes.recorded(prepared)
                evidence = EvidenceWriter(scratch / case, actor.topology.rank)
                verdict = LiveProof(evidence, hf.route_shape, PASSES, 1.0).prove_step(
                    actor.collect_evidence(step), prepared and prepared.expectation(recorded)
                )
                evidence.close()
                if verdict is not None:
                    failed = sorted({(f.stream, f.stage, f.what) for f in verdict.failures})
                    found[case] = failed, verdict.agreement
        return found

    def in_topology(parallel: dict[str, Any], lengths: list[tuple[int, int]]) -> Any:
        return configuration(
            checkpoint,
            use_rollout_routing_replay=True,
            enable_r3_correctness_check=True,
            r3_mismatch_threshold=1.0,
            n_samples_per_prompt=len(lengths),
            max_tokens_per_gpu=max(sum(pair) for pair in lengths),
            kl_loss_coef=0.1,
            **parallel,
        )

    for name, parallel in TOPOLOGIES.items():
        batch = samples(hf, LENGTHS)
        batches = {f"{name} {bug}".strip(): batch for bug in ["", *bugs]}
        out |= prove(in_topology(parallel, LENGTHS), batches)
    moved = {
        f"sent {case}": [
            replace(s, sample=replace(s.sample, indexer_topk=move(bits)))
            for s, bits in zip(samples(hf, LONG), own, strict=True)
        ]
        for case, move in MOVED.items()
    }
    return out | prove(in_topology(TOPOLOGIES["cp2"], LONG), moved)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="module")
def found(scratch, tmp_path_factory) -> dict[str, Any]:
    checkpoint = tmp_path_factory.mktemp("model") / "model"
    make(checkpoint, NAME)
    given = checkpoint, scratch, sent(checkpoint)
    return in_ranks(2, tmp_path_factory.mktemp("ranks"), cases, *given)[0]


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_sound_step_is_proved_and_judged_alike_from_its_files(name, found, scratch):
    failed, agreement = found[name]
    assert failed == []
    audit = audit_run(scratch / name)
    assert audit.verdict == "passed", audit.findings
    rows = sum(max(0, sum(lengths) - 1 - 5) for lengths in LENGTHS)
    passes = len(PASSES) + (name in ("pp2", "core_attn"))
    assert audit.numbers["rows_of_indexer"] == passes * rows * 3
    # random tokens: about as far from the trainer's own choice as chance is
    assert agreement["indexer_equal"] < 0.1 and 0.3 < agreement["indexer_mismatch"] < 0.9


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_fails_the_stages_of_indexers_alone(name, bug, found, scratch):
    failed, _ = found[f"{name} {bug}"]
    assert BUGS[bug] <= {what for _, _, what in failed}
    assert {stream for stream, _, _ in failed} == {"indexer"}
    audit = audit_run(scratch / f"{name} {bug}")
    assert audit.verdict == "failed"
    assert audit.claims["covered" if bug == "indexer_not_asked" else "applied"] == "failed"


def test_a_recomputation_with_the_tokens_of_another_microbatch_is_found(found):
    failed, _ = found[f"pp2 {OF_RECOMPUTATION}"]
    assert ("indexer", "replay_backward", "rows_recompute_differ") in failed
    assert {failure[:2] for failure in failed} == {("indexer", "replay_backward")}


def test_the_choices_of_transformers_indexers_are_the_trainers_own(found, scratch):
    failed, agreement = found["sent own"]
    assert failed == [] and audit_run(scratch / "sent own").verdict == "passed"
    assert agreement["indexer_equal"] == 1 and agreement["indexer_mismatch"] == 0


@pytest.mark.parametrize("moved", ["row", "layer"])
def test_choices_that_a_server_moved_are_applied_and_fail_agreement(moved, found, scratch):
    failed, agreement = found[f"sent {moved}"]
    assert failed == [] and agreement["indexer_equal"] < 0.9
    audit = audit_run(scratch / f"sent {moved}")
    assert audit.claims["applied"] == audit.claims["covered"] == "passed"
    assert audit.claims["agreement"] == "failed"
    assert {(f.stream, f.stage) for f in audit.findings} == {("indexer", "replay_forward")}
