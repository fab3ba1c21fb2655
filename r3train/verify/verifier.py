"""Plan a verification, run it, judge it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from r3train.families.read_facts import read_hf_facts
from r3train.audit.audit_run import audit_run
from r3train.verify import runner
from r3train.verify.compare_outcomes import (
    BF16_THRESHOLDS,
    EXPORT,
    GATES,
    GRADIENTS,
    NOISE_FACTOR,
    REQUIRED_FACTOR,
    ROUTES,
    PhaseError,
    compare,
)
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from r3train.verify.oracle import BIAS, Weights, run_batch
from r3train.verify.training_outcome import Outcome, oracle_outcome, read_outcome
from r3train.verify.rollouts import RolloutBatch, make_rollouts, with_holes_filled, with_log_probs
from r3train.verify.topologies import TOPOLOGIES, Topology, baseline

if TYPE_CHECKING:  # importing it needs megatron
    from r3train.verify.mutations import Mutation

NOISE_SEEDS = (1, 2)


@dataclass
class TopologyResult:
    """Errors of one topology against both oracles, by phase; ``reason`` says why it was not run."""

    name: str
    world_size: int
    status: str = "not run"  # or passed, failed
    reason: str = ""
    seconds: float = 0.0
    errors: dict[str, dict[int, PhaseError]] = field(default_factory=dict)  # oracle -> phase
    # bytes of routes sent to a rank (the largest share), against sending it all of them
    route_bytes: int = 0
    all_route_bytes: int = 0
    evidence: str = ""  # check-evidence's verdict on the run; "" of one without routes

    @property
    def ok(self) -> bool:
        """Nothing failed; a topology that could not run here is reported, not failed."""
        return self.status != "failed"

    def judge(self, thresholds: Mapping[int, float]) -> None:
        """Set status and reason by the errors and the evidence."""
        wrong = [
            f"{e.where}: {e.error:.1e}"
            for errors in self.errors.values()
            for phase, e in errors.items()
            if not e.error <= thresholds[phase]
        ]
        if self.evidence not in ("", "passed"):
            wrong.append(f"check-evidence: {self.evidence}")
        self.status, self.reason = "failed" if wrong else "passed", "; ".join(wrong)

    def worst(self, phase: int) -> PhaseError | None:
        found = [errors[phase] for errors in self.errors.values() if phase in errors]
        return max(found, key=lambda e: e.error, default=None)


@dataclass
class MutationResult:
    """The verdict on a planted bug: the phases that caught it, and the factor in the one it names."""

    name: str
    claim: str
    topology: str
    phase: int | None
    status: str = "not run"  # or caught, survived; passed, failed
    caught_by: list[int] = field(default_factory=list)
    factor: float = 0.0
    detail: str = ""
    evidence: str = ""  # check-evidence's verdict on it; empty where the bug ended in an error

    @property
    def ok(self) -> bool:
        return self.status not in ("survived", "failed")


@dataclass
class Verification:
    """The result of one run of ``r3train verify``."""

    dtype: str
    device: str
    thresholds: dict[int, float] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)
    topologies: list[TopologyResult] = field(default_factory=list)
    mutations: list[MutationResult] = field(default_factory=list)

    @classmethod
    def begun(cls, *, bf16: bool) -> Verification:
        """A verification on this machine's device, without results yet."""
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, gloo"
        return cls("bfloat16" if bf16 else "float32", device)

    @property
    def ok(self) -> bool:
        """Something was judged, nothing failed and nothing survived."""
        results = [*self.topologies, *self.mutations]
        return all(r.ok for r in results) and any(r.status != "not run" for r in results)


@dataclass(frozen=True)
class Given:
    """A model variant and a batch: the files that their cases read, and oracle (b)."""

    batch: RolloutBatch
    checkpoint: Path
    rollouts: Path
    weights: Weights  # of the checkpoint, in the dtype that the actor holds them in
    oracle: Outcome
    scales: dict[str, float]  # of the loss's terms


class Verifier:
    """One run: prepares checkpoints and batches, runs the cases, compares.

    report: takes a line on the progress.
    """

    def __init__(
        self, scratch: Path, *, bf16: bool, max_world_size: int, report: Callable[[str], None]
    ):
        self._scratch = scratch
        self._bf16 = bf16
        self._max_world_size = max_world_size
        self._report = report
        self._cases: dict[str, runner.Case] = {}
        self._statuses: dict[str, runner.Status] = {}
        self._given: dict[tuple[str, str], Given] = {}
        self._outcomes: dict[str, Outcome] = {}

    def verify(self, topologies: Sequence[Topology], mutations: Sequence[Mutation]) -> Verification:
        """Run the topologies and the mutations with their baselines and the noise runs."""
        result = Verification.begun(bf16=self._bf16)
        for t in topologies:
            self._plan(t.name, t)
        for m in mutations:
            topology = TOPOLOGIES[m.topology]
            self._plan(f"mutation-{m.name}", topology, mutation=m.address, last_phase=m.last_phase)
        for seed in NOISE_SEEDS:
            self._plan(f"noise-{seed}", TOPOLOGIES["one"], order_seed=seed)
        self._report(f"{len(self._cases)} cases; the plain-PyTorch oracle is ready")
        self._statuses = runner.run(list(self._cases.values()), self._scratch, self._report)
        result.noise = self._measure_noise()
        result.thresholds = BF16_THRESHOLDS if self._bf16 else _thresholds(result.noise)
        result.topologies = [self._judge_topology(t, result.thresholds) for t in topologies]
        result.mutations = [self._judge_mutation(m, result.thresholds) for m in mutations]
        return result

    # -- plan --------------------------------------------------------------------------------

    def _plan(self, case_id: str, topology: Topology, **options: object) -> None:
        """Add a case and, before it, its baseline; nothing where it cannot run here."""
        if case_id in self._cases or self._obstacle(topology):
            return
        first = baseline(topology)
        if case_id != first.name:
            self._plan(first.name, first)
        if self._bf16:
            options = {"last_phase": GRADIENTS, **options}
        given = self._prepare(topology)
        output = self._scratch / "cases" / case_id
        output.mkdir(parents=True)
        self._cases[case_id] = runner.Case(
            case_id=case_id,
            topology=topology.name,
            checkpoint=str(given.checkpoint),
            rollouts=str(given.rollouts),
            output=str(output),
            bf16=self._bf16,
            **options,
        )

    def _obstacle(self, topology: Topology) -> str:
        """The reason why a topology cannot run here; "" if it can."""
        if topology.world_size > self._max_world_size:
            return f"needs {topology.world_size} ranks, {self._max_world_size} can run here"
        is_cut = topology.parallel_section().context_parallel_size > 1
        if is_cut and not self._bf16 and torch.cuda.is_available():
            return "Transformer Engine has no attention of cut sequences in float32: --bf16 runs it"
        return ""

    def _prepare(self, topology: Topology) -> Given:
        key = (topology.variant, topology.batch)
        if key not in self._given:
            variant = VARIANTS[topology.variant]
            checkpoint = write_checkpoint(variant, self._scratch / "models" / variant.name)
            weights = load_file(checkpoint / "model.safetensors")
            if self._bf16:
                weights = {n: t if n.endswith(BIAS) else t.bfloat16() for n, t in weights.items()}
            batch = make_rollouts(variant, topology.batch)
            if self._bf16:
                batch = with_holes_filled(batch, variant)
            exact = {name: t.double() for name, t in weights.items()}
            log_probs, _, _ = run_batch(exact, variant, batch)
            spread = 0.01 if self._bf16 else 0.2
            batch = with_log_probs(batch, log_probs.detach().numpy(), old_spread=spread)
            rollouts = self._scratch / f"{variant.name}-{topology.batch}.npz"
            batch.save(rollouts)
            oracle, scales = oracle_outcome(variant, batch, exact)
            self._given[key] = Given(batch, checkpoint, rollouts, weights, oracle, scales)
        return self._given[key]

    # -- judge -------------------------------------------------------------------------------

    def _outcome(self, case_id: str) -> Outcome:
        case = self._cases[case_id]
        if case_id not in self._outcomes:
            topology = TOPOLOGIES[case.topology]
            self._outcomes[case_id] = read_outcome(
                Path(case.output),
                VARIANTS[topology.variant],
                self._prepare(topology).batch,
                topology.recomputed_layers(read_hf_facts(case.checkpoint)),
            )
        return self._outcomes[case_id]

    def _errors(self, case_id: str) -> dict[str, dict[int, PhaseError]]:
        """Errors against oracle (a) and oracle (b), by phase."""
        case = self._cases[case_id]
        topology = TOPOLOGIES[case.topology]
        given, first = self._prepare(topology), baseline(topology)
        references = {"b": given.oracle}
        if case_id != first.name:
            references = {"a": self._outcome(first.name), **references}
        # last rows route natively: in bfloat16 a near-tie may fall either way
        rows = torch.from_numpy(given.batch.inner_rows) if self._bf16 else None
        return {
            name: compare(
                self._outcome(case_id),
                reference,
                VARIANTS[topology.variant],
                given.scales,
                given.weights,
                last_phase=case.last_phase,
                rows=rows,
            )
            for name, reference in references.items()
        }

    def _evidence(self, case_id: str) -> str:
        return audit_run(Path(self._cases[case_id].output) / runner.EVIDENCE_RUN).verdict

    def _measure_noise(self) -> dict[int, float]:
        """Return the largest error, by phase, of runs that must agree.

        The actor with its microbatches permuted is compared with itself, and every baseline with
        the float64 oracle.
        """
        noise: dict[int, float] = {}
        for case_id, case in self._cases.items():
            is_baseline = case_id == baseline(TOPOLOGIES[case.topology]).name
            if self._statuses[case_id].error or not (is_baseline or case.order_seed is not None):
                continue
            for errors in self._errors(case_id).values():
                for phase in GATES.keys() & errors.keys():
                    noise[phase] = max(noise.get(phase, 0.0), errors[phase].error)
        return noise

    def _judge_topology(self, t: Topology, thresholds: dict[int, float]) -> TopologyResult:
        result = TopologyResult(t.name, t.world_size)
        if t.name not in self._cases:
            result.reason = self._obstacle(t)
            return result
        status, first = self._statuses[t.name], self._statuses[baseline(t).name]
        result.seconds = status.seconds
        if status.error or first.error:
            result.status, result.reason = "failed", status.error or f"oracle (a): {first.error}"
            return result
        result.evidence = self._evidence(t.name)
        result.errors = self._errors(t.name)
        result.route_bytes = max(self._outcome(t.name).route_bytes)
        itemsize = VARIANTS[t.variant].route_shape.dtype.itemsize
        result.all_route_bytes = self._prepare(t).batch.routes.size * itemsize
        result.judge(thresholds)
        return result

    def _judge_mutation(self, m: Mutation, thresholds: dict[int, float]) -> MutationResult:
        case_id = f"mutation-{m.name}"
        result = MutationResult(m.name, m.claim, m.topology, m.phase)
        if case_id not in self._cases:
            result.detail = self._obstacle(TOPOLOGIES[m.topology])
            return result
        error = self._statuses[case_id].error
        if error:
            refused = bool(m.expect_error) and m.expect_error in error
            result.status = "caught" if refused else "failed"
            result.factor = math.inf if refused else 0.0
            result.detail = f"refused: {error}" if refused else error
            return result
        result.evidence = self._evidence(case_id)
        errors = self._errors(case_id)
        factors: dict[int, float] = {}
        for phase, threshold in thresholds.items():
            if phase not in errors["b"]:
                continue
            # the oracle that is nearer counts: a bug must be plain to both
            e = min((found[phase] for found in errors.values()), key=lambda e: e.error)
            factors[phase] = _factor(e.error, threshold)
            if factors[phase] > 1:
                result.caught_by.append(phase)
                if phase == m.phase:
                    result.detail = e.where
        if m.phase is None:
            result.status = "failed" if result.caught_by else "passed"
            return result
        result.factor = factors[m.phase]
        result.status = "caught" if result.factor >= REQUIRED_FACTOR else "survived"
        return result


def _thresholds(noise: dict[int, float]) -> dict[int, float]:
    """The thresholds of float32 runs, by phase."""
    found = {p: min(gate, NOISE_FACTOR * noise.get(p, math.inf)) for p, gate in GATES.items()}
    return {ROUTES: 0.0, **found, EXPORT: 0.0}


def _factor(error: float, threshold: float) -> float:
    """The factor by which an error misses its threshold; any error misses an exact one wholly."""
    if threshold:
        return error / threshold
    return math.inf if error else 0.0
