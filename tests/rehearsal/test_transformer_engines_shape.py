"""The actor on Megatron's Transformer Engine specification, over plain torch, against its local one.

``stand_ins/transformer_engine.py`` takes the place of the package in verify's workers; all else is what
runs on CUDA: grouped experts, norms fused into the linears behind them, packed attention.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from r3train.config.hf_facts import read_hf_facts
from r3train.proof.audit import audit_run
from r3train.verify import runner
from r3train.verify.compare import GATES, GRADIENTS, compare
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from r3train.verify.oracle import run_batch
from r3train.verify.outcome import Outcome, read_outcome
from r3train.verify.rollouts import RolloutBatch, make_rollouts, with_log_probs
from r3train.verify.topologies import TOPOLOGIES, Topology

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

STAND_INS = Path(__file__).parent / "stand_ins"
LOG_PROBS = 1e-6  # in nats
# phases of verify up to the gradients, which one optimizer step after them would only repeat
EXACT = {phase: bound for phase, bound in GATES.items() if phase <= GRADIENTS}
# changes of the stand-in
PLANTED = {
    "a fused norm's epsilon": (
        "self.layer_norm_weight, self.eps",
        "self.layer_norm_weight, 2 * self.eps",
    ),
    "the order of the experts": (
        'weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]',
        'weights = [getattr(self, f"weight{i}") for i in reversed(range(self.num_gemms))]',
    ),
}


class Rehearsal:
    """Runs of topologies with both kinds of layers, and what differs between the two."""

    def __init__(self, directory: Path, stand_ins: Path):
        self.directory, self.stand_ins = directory, stand_ins
        self.cases: dict[str, runner.Case] = {}
        self.batches: dict[tuple[str, str], RolloutBatch] = {}

    def plan(self, topology: Topology, mutation: str | None = None) -> None:
        for backend in ("local", "te"):
            name = f"{topology.name} {backend}"
            self.cases[name] = self._case(topology, name, backend)
        if mutation:
            case = self.cases[f"{topology.name} te"]
            name = f"{case.case_id} {mutation}"
            output = str(self.directory / name)
            self.cases[name] = replace(case, case_id=name, output=output, mutation=mutation)

    def _case(self, topology: Topology, name: str, backend: str) -> runner.Case:
        variant, key = VARIANTS[topology.variant], (topology.variant, topology.batch)
        checkpoint = self.directory / "models" / topology.variant
        rollouts = self.directory / f"{'-'.join(key)}.npz"
        if key not in self.batches:
            if not checkpoint.exists():
                write_checkpoint(variant, checkpoint)
            weights = load_file(checkpoint / "model.safetensors")
            batch = make_rollouts(variant, topology.batch)
            log_probs, _, _ = run_batch({n: t.double() for n, t in weights.items()}, variant, batch)
            batch = with_log_probs(batch, log_probs.detach().numpy(), old_spread=0.2)
            batch.save(rollouts)
            self.batches[key] = batch
        return runner.Case(
            case_id=name,
            topology=topology.name,
            checkpoint=str(checkpoint),
            rollouts=str(rollouts),
            output=str(self.directory / name),
            last_phase=GRADIENTS,
            attention_backend=backend,
        )

    def run(self) -> None:
        path = [str(self.stand_ins), *filter(None, [os.environ.get("PYTHONPATH")])]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(path))
            statuses = runner.run(list(self.cases.values()), self.directory, print)
        failed = {name: status.error for name, status in statuses.items() if status.error}
        assert not failed, failed

    def outcome(self, name: str) -> Outcome:
        case = self.cases[name]
        topology = TOPOLOGIES[case.topology]
        return read_outcome(
            Path(case.output),
            VARIANTS[topology.variant],
            self.batches[topology.variant, topology.batch],
            topology.recomputed_layers(read_hf_facts(case.checkpoint)),
        )

    def evidence(self, name: str) -> list[dict]:
        """The records of all ranks, of a run that passes its audit."""
        directory = Path(self.cases[name].output) / runner.EVIDENCE_RUN
        verdict = audit_run(directory).verdict
        files = sorted((directory / "evidence").glob("rank_*.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [*lines, {"verdict": verdict}]

    def differences(self, topology: Topology, of: str = "te") -> dict[str, float | str]:
        """Differences that Transformer Engine's layers make, by quantity; none where it agrees."""
        names = f"{topology.name} {of}", f"{topology.name} local"
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
        errors = compare(
            *(found, local, VARIANTS[topology.variant], scales, source), last_phase=GRADIENTS
        )
        for phase, error in errors.items():
            print(f", {error.where} {error.error:.1e}", end="")
            if not error.error <= EXACT.get(phase, 0.0):
                wrong[f"phase {phase}"] = f"{error.where}: {error.error:.1e}"
        print()
        return wrong


def rehearsed(directory: Path, topologies: Iterable[Topology], bug: str | None = None) -> Rehearsal:
    rehearsal = Rehearsal(directory, STAND_INS)
    for topology in topologies:
        rehearsal.plan(topology, bug if topology.name == "ep2" else None)
    rehearsal.run()
    return rehearsal


def of_ci(*world_sizes: int) -> list[Topology]:
    return [t for t in TOPOLOGIES.values() if t.ci and t.world_size in world_sizes]


@pytest.fixture(scope="module")
def ci(tmp_path_factory) -> Rehearsal:
    return rehearsed(tmp_path_factory.mktemp("shape"), of_ci(1, 2, 4), "one_expert")


@pytest.mark.parametrize("topology", of_ci(1, 2, 4), ids=lambda t: t.name)
def test_evidence_is_identical_and_log_probs_agree(topology, ci):
    assert not ci.differences(topology)


def test_a_wrong_expert_in_one_row_is_seen_in_evidence_and_log_probs(ci):
    assert ci.differences(TOPOLOGIES["ep2"], "te one_expert").keys() >= {"evidence", "log_probs"}


@pytest.mark.slow
@pytest.mark.parametrize("topology", of_ci(8), ids=lambda t: t.name)
def test_eight_ranks_agree_too(topology, tmp_path):
    assert not rehearsed(tmp_path, [topology]).differences(topology)


@pytest.mark.parametrize("planted", PLANTED)
def test_another_layer_of_transformer_engine_is_seen(planted, tmp_path):
    right, wrong = PLANTED[planted]
    source = (STAND_INS / "transformer_engine.py").read_text()
    assert source.count(right) == 1
    (tmp_path / "transformer_engine.py").write_text(source.replace(right, wrong))
    rehearsal = Rehearsal(tmp_path, tmp_path)
    rehearsal.plan(TOPOLOGIES["recompute_uniform"])
    rehearsal.run()
    assert "log_probs" in rehearsal.differences(TOPOLOGIES["recompute_uniform"])
