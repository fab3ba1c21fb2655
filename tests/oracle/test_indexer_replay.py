"""The tokens that an indexer chose: proved in ranks, and with bugs that must be caught.

That they are attended to is compared with transformers in ``test_families.py``.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from r3train.audit.audit_run import audit_run
from r3train.config.hf_facts import read_hf_facts
from r3train.proof.judge import INDEXERS
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


def cases(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """Of each topology and bug, the stages and quantities that failed; in a rank."""
    from r3train.launch.build_routes import build_routes
    from r3train.loop.distribute import broadcast_json, gather_topologies
    from r3train.loop.prepare import prepare
    from r3train.proof.live import prove_step
    from r3train.proof.writer import EvidenceWriter
    from tests.oracle.planted import planted_by

    hf, out = read_hf_facts(checkpoint), {}
    bugs = {bug.name: bug for bug in planted_by("tests/oracle/test_indexer_replay.py")}
    for name, parallel in TOPOLOGIES.items():
        config = configuration(
            checkpoint,
            use_rollout_routing_replay=True,
            enable_r3_correctness_check=True,
            r3_mismatch_threshold=1.0,
            n_samples_per_prompt=len(LENGTHS),
            max_tokens_per_gpu=29,
            kl_loss_coef=0.1,
            **parallel,
        )
        with actor_of(config) as actor:
            topologies = gather_topologies(actor.topology)
            routes = build_routes(config, hf)
            routes.open(actor.topology)
            for step, bug in enumerate(["", *bugs]):
                planted = bugs[bug].planted(config, hf) if bug else nullcontext()
                with planted:
                    prepared = None
                    if actor.topology.rank == 0:
                        prepared = prepare(
                            step,
                            samples(hf, LENGTHS),
                            config,
                            hf,
                            routes.row_shape,
                            topologies,
                            passes=PASSES,
                        )
                    count = broadcast_json(prepared and prepared.counts[0])
                    slices = routes.slices(prepared, count)
                    old = actor.compute_log_probs(slices, "old_log_prob", weight_version=step)
                    ref = actor.compute_log_probs(slices, "ref_log_prob")
                    actor.train_step(slices, old, ref, weight_version=step)
                recorded = routes.recorded(prepared)
                evidence = EvidenceWriter(scratch / f"{name}{bug}", actor.topology.rank)
                verdict = prove_step(
                    evidence,
                    actor.collect_evidence(step),
                    prepared and prepared.expectation(recorded),
                    hf.route_shape,
                    passes=PASSES,
                    mismatch_threshold=1.0,
                )
                evidence.close()
                if verdict is not None:
                    out[name, bug] = sorted({(f.stage, f.what) for f in verdict.failures})
                    out[name, bug, "agreement"] = verdict.agreement
    return out


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="module")
def found(scratch, tmp_path_factory) -> dict[str, Any]:
    checkpoint = tmp_path_factory.mktemp("model") / "model"
    make(checkpoint, NAME)
    return in_ranks(2, tmp_path_factory.mktemp("ranks"), cases, checkpoint, scratch)[0]


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_sound_step_is_proved_and_judged_alike_from_its_files(name, found, scratch):
    assert found[name, ""] == []
    audit = audit_run(scratch / name)
    assert audit.verdict == "passed", audit.findings
    rows = sum(max(0, sum(lengths) - 1 - 5) for lengths in LENGTHS)
    passes = len(PASSES) + (name in ("pp2", "core_attn"))
    assert audit.numbers["rows_of_indexer"] == passes * rows * 3
    # random tokens: about as far from the trainer's own choice as chance is
    assert found[name, "", "agreement"]["indexer_equal"] < 0.1
    assert 0.3 < found[name, "", "agreement"]["indexer_mismatch"] < 0.9


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_fails_the_stages_of_indexers_alone(name, bug, found, scratch):
    failed = found[name, bug]
    assert BUGS[bug] <= {what for _, what in failed}
    assert {stage for stage, _ in failed} <= {*INDEXERS}
    audit = audit_run(scratch / f"{name}{bug}")
    assert audit.verdict == "failed"
    assert audit.claims["covered" if bug == "indexer_not_asked" else "applied"] == "failed"


def test_a_recomputation_with_the_tokens_of_another_microbatch_is_found(found):
    failed = found["pp2", OF_RECOMPUTATION]
    assert {("indexer_backward", "rows_recompute_differ")} <= set(failed)
    assert {stage for stage, _ in failed} == {"indexer_backward"}
