"""The actor on Megatron's Transformer Engine specification, over plain torch, against its local one.

``stand_ins/transformer_engine.py`` takes the place of the package in verify's workers; all else is what
runs on CUDA: grouped experts, norms fused into the linears after them, packed attention.  Sequences that are cut
over ranks are in bfloat16: Transformer Engine has no attention to them in float32.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from r3train.families.read_facts import read_hf_facts
from r3train.audit.audit_run import audit_run
from r3train.verify import runner
from r3train.verify.compare_outcomes import GATES, GRADIENTS, compare
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from r3train.verify.mutations import MUTATIONS
from r3train.verify.oracle import BIAS, run_batch
from r3train.verify.training_outcome import Outcome, read_outcome
from r3train.verify.rollouts import (
    RolloutBatch,
    make_rollouts,
    with_holes_filled,
    with_log_probs,
)
from r3train.verify.topologies import TOPOLOGIES, Topology

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

STAND_INS = Path(__file__).parent / "stand_ins"
LOG_PROBS = 1e-6  # in nats
# phases of verify up to the gradients, which one optimizer step after them would only repeat
EXACT = {phase: bound for phase, bound in GATES.items() if phase <= GRADIENTS}
# in bfloat16 the backward pass of a fused norm rounds elsewhere
ROUNDED = EXACT | {GRADIENTS: 0.05}
# besides those that are cut
IN_BF16 = ("tp2ep2", "pp2_uneven")
# changes of the stand-in
PLANTED = {
    "a fused norm's epsilon": (
        "norm = self.layer_norm_weight, self.eps",
        "norm = self.layer_norm_weight, 2 * self.eps",
    ),
    "the order of the experts": (
        'weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]',
        'weights = [getattr(self, f"weight{i}") for i in reversed(range(self.num_gemms))]',
    ),
}


@dataclass(frozen=True)
class Row:
    """A topology and its dtype."""

    topology: Topology
    bf16: bool

    def __str__(self) -> str:
        return f"{self.topology.name} {'bfloat16' if self.bf16 else 'float32'}"


class Rehearsal:
    """Runs of topologies with both kinds of layers, and what differs between the two."""

    def __init__(self, directory: Path, stand_ins: Path):
        self.directory, self.stand_ins = directory, stand_ins
        self.cases: dict[str, runner.Case] = {}
        self.refusal = ""  # the error of a case that must not run
        self.batches: dict[tuple[str, str, bool], RolloutBatch] = {}

    def plan(self, row: Row, mutation: str | None = None) -> None:
        for backend in ("local", "te"):
            name = f"{row} {backend}"
            self.cases[name] = self._case(row.topology, name, backend, row.bf16)
        if mutation:
            case = self.cases[f"{row} te"]
            name = f"{case.case_id} {mutation}"
            output = str(self.directory / name)
            address = MUTATIONS[mutation].address
            self.cases[name] = replace(case, case_id=name, output=output, mutation=address)

    def _case(self, topology: Topology, name: str, backend: str, bf16: bool) -> runner.Case:
        variant, key = VARIANTS[topology.variant], (topology.variant, topology.batch, bf16)
        checkpoint = self.directory / "models" / topology.variant
        rollouts = self.directory / f"{'-'.join(map(str, key))}.npz"
        if key not in self.batches:
            if not checkpoint.exists():
                write_checkpoint(variant, checkpoint)
            weights = load_file(checkpoint / "model.safetensors")
            batch = make_rollouts(variant, topology.batch)
            if bf16:  # a row without a route takes its own, and a near-tie may fall either way
                batch = with_holes_filled(batch, variant)
            log_probs, _, _ = run_batch({n: t.double() for n, t in weights.items()}, variant, batch)
            batch = with_log_probs(
                batch, log_probs.detach().numpy(), old_spread=0.01 if bf16 else 0.2
            )
            batch.save(rollouts)
            self.batches[key] = batch
        return runner.Case(
            case_id=name,
            topology=topology.name,
            checkpoint=str(checkpoint),
            rollouts=str(rollouts),
            output=str(self.directory / name),
            last_phase=GRADIENTS,
            bf16=bf16,
            attention_backend=backend,
        )

    def run(self, refused: str = "") -> str:
        """Run all cases; returns the error of the one that is to be refused."""
        path = [str(self.stand_ins), *filter(None, [os.environ.get("PYTHONPATH")])]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(path))
            statuses = runner.run(list(self.cases.values()), self.directory, print)
        failed = {name: status.error for name, status in statuses.items() if status.error}
        error = failed.pop(refused, "")
        assert not failed, failed
        return error

    def outcome(self, name: str) -> Outcome:
        case = self.cases[name]
        topology = TOPOLOGIES[case.topology]
        return read_outcome(
            Path(case.output),
            VARIANTS[topology.variant],
            self.batches[topology.variant, topology.batch, case.bf16],
            topology.recomputed_layers(read_hf_facts(case.checkpoint)),
        )

    def evidence(self, name: str) -> list[dict]:
        """The records of all ranks, of a run that passes its audit."""
        directory = Path(self.cases[name].output) / runner.EVIDENCE_RUN
        verdict = audit_run(directory).verdict
        files = sorted((directory / "evidence").glob("rank_*.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [*lines, {"verdict": verdict}]

    def differences(self, row: Row, of: str = "te") -> dict[str, float | str]:
        """Differences that Transformer Engine's layers make, by quantity; none where it agrees."""
        names = f"{row} {of}", f"{row} local"
        variant = VARIANTS[row.topology.variant]
        found, local = map(self.outcome, names)
        wrong: dict[str, float | str] = {}
        gap = float((found.log_probs - local.log_probs).abs().max())
        print(f"{names[0]}: log-probs {gap:.1e}", end="")
        if not gap <= LOG_PROBS:
            wrong["log_probs"] = gap
        mine, theirs = map(self.evidence, names)
        if mine != theirs or mine[-1] != {"verdict": "passed"} or len(mine) < 2:
            wrong["evidence"] = f"{len(mine)} records, {len(theirs)} of the local layers"
        scales = dict.fromkeys(found.terms, found.num_tokens)
        source = load_file(Path(self.cases[names[0]].checkpoint) / "model.safetensors")
        if row.bf16:
            source = {n: t if n.endswith(BIAS) else t.bfloat16() for n, t in source.items()}
        errors = compare(found, local, variant, scales, source, last_phase=GRADIENTS)
        for phase, error in errors.items():
            print(f", {error.where} {error.error:.1e}", end="")
            if not error.error <= (ROUNDED if row.bf16 else EXACT).get(phase, 0.0):
                wrong[f"phase {phase}"] = f"{error.where}: {error.error:.1e}"
        print()
        return wrong


def rows(*world_sizes: int) -> list[Row]:
    """Verify's topologies of CI, each in a dtype that Transformer Engine takes, and some in both."""
    gate_topologies = [t for t in TOPOLOGIES.values() if t.ci and t.world_size in world_sizes]
    found = [Row(t, t.parallel_section().context_parallel_size > 1) for t in gate_topologies]
    return found + [Row(TOPOLOGIES[t], True) for t in IN_BF16 if 2 in world_sizes]


BUGGED = [Row(TOPOLOGIES["ep2"], False), Row(TOPOLOGIES["tp2ep2"], True)]
REFUSED = "cut in float32"


@pytest.fixture(scope="module")
def ci(tmp_path_factory) -> Rehearsal:
    rehearsal = Rehearsal(tmp_path_factory.mktemp("shape"), STAND_INS)
    for row in rows(1, 2, 4):
        rehearsal.plan(row, "one_expert" if row in BUGGED else None)
    rehearsal.cases[REFUSED] = rehearsal._case(TOPOLOGIES["cp2"], REFUSED, "te", bf16=False)
    rehearsal.refusal = rehearsal.run(refused=REFUSED)
    return rehearsal


@pytest.mark.parametrize("row", rows(1, 2, 4), ids=str)
def test_evidence_is_identical_and_log_probs_agree(row, ci):
    assert not ci.differences(row)


@pytest.mark.parametrize("row", BUGGED, ids=str)
def test_a_wrong_expert_in_one_row_is_seen_in_evidence_and_log_probs(row, ci):
    assert ci.differences(row, "te one_expert").keys() >= {"evidence", "log_probs"}


def test_cut_sequences_in_float32_are_refused(ci):
    assert "no attention backend is available" in ci.refusal


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(8), ids=str)
def test_eight_ranks_agree_too(row, tmp_path):
    rehearsal = Rehearsal(tmp_path, STAND_INS)
    rehearsal.plan(row)
    rehearsal.run()
    assert not rehearsal.differences(row)


@pytest.mark.parametrize("planted", PLANTED)
def test_another_layer_of_transformer_engine_is_seen(planted, tmp_path):
    right, wrong = PLANTED[planted]
    source = (STAND_INS / "transformer_engine.py").read_text()
    assert source.count(right) == 1
    (tmp_path / "transformer_engine.py").write_text(source.replace(right, wrong))
    rehearsal, row = Rehearsal(tmp_path, tmp_path), Row(TOPOLOGIES["recompute_uniform"], False)
    rehearsal.plan(row)
    rehearsal.run()
    assert "log_probs" in rehearsal.differences(row)
