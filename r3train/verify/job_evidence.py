"""The R3 evidence of a verification job, as a run of the same step would leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from r3train.config.hf_facts import HfModelFacts
from r3train.proof.check import judge, totals
from r3train.proof.writer import EvidenceWriter
from r3train.loop.batch import record_samples, step_expectation
from r3train.loop.scatter import gather_topologies
from r3train.types import RankTopology, ReplayEvidence, TrainSample

PASSES = ("old_log_prob", "train")
EVIDENCE_RUN = "run"  # a job's run directory, beside its tables
# the batch's routes are no router's choice, so agreement says nothing here
_THRESHOLD = 1.0


def write_evidence(
    output: Path,
    records: Sequence[ReplayEvidence],
    samples: Sequence[TrainSample],
    data_rank_of: dict[int, int],
    *,
    num_microbatches: int,
    place: RankTopology,
    hf: HfModelFacts,
    recomputed: Sequence[int],
) -> None:
    """Write ``output``/run/evidence; a collective.

    records: of this rank, one step of the passes ``PASSES``.  samples: as the rollout left them.
    """
    topologies = gather_topologies(place)
    moe_layers = hf.moe_layer_numbers
    table = torch.from_numpy(totals(records, PASSES, hf.num_hidden_layers))
    dist.all_reduce(table)
    writer = EvidenceWriter(output / EVIDENCE_RUN, place.rank)
    writer.write(records)
    if place.rank == 0:
        expectation = step_expectation(
            0,
            record_samples([s.sample for s in samples], data_rank_of, place.dp_size, moe_layers),
            num_rows=sum(s.sample.num_tokens for s in samples),
            passes=PASSES,
            moe_layers=moe_layers,
            recomputed=recomputed,
            num_microbatches=num_microbatches,
            topologies=topologies,
        )
        verdict = judge(
            table.numpy(),
            PASSES,
            expectation,
            mismatch_threshold=_THRESHOLD,
            num_experts=hf.num_experts,
            topk=hf.num_experts_per_tok,
        )
        writer.write_step(
            {
                "step": 0,
                "passed": verdict.passed,
                "passes": PASSES,
                "world_size": len(topologies),
                "num_experts": hf.num_experts,
                "topk": hf.num_experts_per_tok,
                "mismatch_threshold": _THRESHOLD,
                **expectation.to_json(),
                **({} if verdict.passed else {"places": expectation.places_to_json()}),
                "counts": verdict.counts,
                "agreement": verdict.agreement,
                "failures": [asdict(f) for f in verdict.failures],
                "threshold_error": verdict.threshold_error,
            }
        )
    writer.close()
