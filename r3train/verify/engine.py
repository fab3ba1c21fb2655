"""Plan a verification, run it, judge it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file

from r3train.proof.audit import audit_run
from r3train.verify import runner
from r3train.verify.compare import PhaseError, compare
from r3train.verify.jobs import Job
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from r3train.verify.oracle import BIAS, LossNumbers, run_batch
from r3train.verify.outcome import Outcome, Scales, oracle_outcome, read_outcome
from r3train.verify.phases import (
    BF16_THRESHOLDS,
    EXPORT,
    GATES,
    NOISE_FACTOR,
    REQUIRED_FACTOR,
)
from r3train.verify.rollouts import make_rollouts, with_holes_filled, with_log_probs
from r3train.verify.topologies import Topology, baseline

from r3train.verify.job_evidence import EVIDENCE_RUN

if TYPE_CHECKING:  # importing it needs megatron
    from r3train.verify.mutations import Mutation

NOISE_SEEDS = (1, 2)


@dataclass
class TopologyResult:
    """Errors of one topology by phase, the worse of the two oracles; ``reason`` where not run."""

    name: str
    world_size: int
    status: str  # passed | failed | not run
    reason: str = ""
    seconds: float = 0.0
    errors: dict[str, dict[int, PhaseError]] = field(default_factory=dict)  # oracle -> phase
    # bytes of routes sent to a rank (the largest share), against sending it all of them
    route_bytes: int = 0
    all_route_bytes: int = 0
    evidence: str = ""  # what check-evidence says of the run

    def worst(self, phase: int) -> PhaseError | None:
        found = [errors[phase] for errors in self.errors.values() if phase in errors]
        return max(found, key=lambda e: e.error, default=None)


@dataclass
class MutationResult:
    """Whether a planted bug was caught, by which phases, and by what factor in the one it names."""

    name: str
    claim: str
    topology: str
    phase: int | None
    status: str  # caught | survived | passed | failed | not run
    caught_by: list[int] = field(default_factory=list)
    factor: float = 0.0
    detail: str = ""
    evidence: str = ""  # what check-evidence says of it; empty where the bug ended in an error


@dataclass
class Verification:
    """All that one run of ``r3train verify`` found out."""

    dtype: str
    device: str
    thresholds: dict[int, float] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)
    topologies: list[TopologyResult] = field(default_factory=list)
    mutations: list[MutationResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing failed, nothing survived; what could not run here is reported, not failed."""
        fine = {"passed", "caught", "not run"}
        return all(r.status in fine for r in [*self.topologies, *self.mutations])


class Verifier:
    """One run: prepares checkpoints and batches, runs the jobs, compares."""

    def __init__(
        self,
        scratch: Path,
        *,
        bf16: bool,
        max_world_size: int,
        report: Callable[[str], None],
    ):
        self._scratch = scratch
        self._bf16 = bf16
        self._max_world_size = max_world_size
        self._report = report
        self._jobs: dict[str, Job] = {}
        self._statuses: dict[str, runner.JobStatus] = {}
        self._prepared: dict[tuple[str, str], tuple] = {}
        self._outcomes: dict[str, Outcome] = {}

    def verify(
        self, topologies: Sequence[Topology], mutations: Sequence[Mutation], by_name: dict
    ) -> Verification:
        """Run the topologies and the mutations with their baselines and the noise runs."""
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, gloo"
        result = Verification(dtype="bfloat16" if self._bf16 else "float32", device=device)
        able = [t for t in topologies if t.world_size <= self._max_world_size]
        for t in able:
            self._plan(baseline(t).name, baseline(t))
            self._plan(t.name, t)
        planted = [m for m in mutations if by_name[m.topology].world_size <= self._max_world_size]
        for m in planted:
            t = by_name[m.topology]
            self._plan(baseline(t).name, baseline(t))
            self._plan(f"mutation-{m.name}", t, mutation=m.name, last_phase=m.last_phase)
        for seed in NOISE_SEEDS:
            self._plan(f"noise-{seed}", by_name["one"], order_seed=seed)
        self._plan("one", by_name["one"])
        self._report(f"{len(self._jobs)} jobs; the plain-PyTorch oracle is ready")
        jobs = list(self._jobs.values())
        self._statuses = runner.run(jobs, self._scratch, by_name, self._report)
        result.noise = self._measure_noise(by_name)
        result.thresholds = self._thresholds(result.noise)
        for t in topologies:
            result.topologies.append(self._judge_topology(t, result.thresholds))
        for m in mutations:
            result.mutations.append(self._judge_mutation(m, by_name, result.thresholds))
        return result

    # -- plan --------------------------------------------------------------------------------

    def _plan(self, job_id: str, topology: Topology, **options: object) -> None:
        if job_id in self._jobs:
            return
        if self._bf16:
            options = {"last_phase": 3, **options}
        _, checkpoint, rollouts, *_ = self._prepare(topology)
        output = self._scratch / "jobs" / job_id
        output.mkdir(parents=True)
        self._jobs[job_id] = Job(
            job_id=job_id,
            topology=topology.name,
            checkpoint=str(checkpoint),
            rollouts=str(rollouts),
            output=str(output),
            bf16=self._bf16,
            **options,
        )

    def _prepare(self, topology: Topology) -> tuple:
        """(batch, checkpoint, rollouts file, oracle (b), scales) of a variant and batch."""
        key = (topology.variant, topology.batch)
        if key not in self._prepared:
            variant = VARIANTS[topology.variant]
            checkpoint = write_checkpoint(variant, self._scratch / "models" / variant.name)
            batch = make_rollouts(variant, topology.batch)
            if self._bf16:
                batch = with_holes_filled(batch, variant)
            weights = load_file(checkpoint / "model.safetensors")
            weights = {n: self._as_trained(n, t).double() for n, t in weights.items()}
            log_probs, _, _ = run_batch(weights, variant, batch, LossNumbers().temperature)
            spread = 0.01 if self._bf16 else 0.2
            batch = with_log_probs(batch, log_probs.detach().numpy(), old_spread=spread)
            rollouts = self._scratch / f"{variant.name}-{topology.batch}.npz"
            batch.save(rollouts)
            oracle, scales = oracle_outcome(variant, batch, checkpoint, bf16=self._bf16)
            self._prepared[key] = (batch, checkpoint, rollouts, oracle, scales)
        return self._prepared[key]

    def _as_trained(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A checkpoint's tensor in the dtype that the actor holds it in."""
        return weight if name.endswith(BIAS) or not self._bf16 else weight.bfloat16()

    # -- judge -------------------------------------------------------------------------------

    def _outcome(self, job_id: str, topology: Topology) -> Outcome:
        if job_id not in self._outcomes:
            batch = self._prepare(topology)[0]
            self._outcomes[job_id] = read_outcome(
                Path(self._jobs[job_id].output),
                VARIANTS[topology.variant],
                batch,
                topology.recompute,
            )
        return self._outcomes[job_id]

    def _errors(
        self, job_id: str, topology: Topology, last_phase: int
    ) -> dict[str, dict[int, PhaseError]]:
        """Errors against oracle (a) and oracle (b)."""
        batch, checkpoint, _, oracle, scales = self._prepare(topology)
        weights = load_file(checkpoint / "model.safetensors")
        found = self._outcome(job_id, topology)
        references: dict[str, Outcome] = {"b": oracle}
        first = baseline(topology)
        if job_id != first.name:
            references = {"a": self._outcome(first.name, first), **references}
        return {
            name: self._compare(found, reference, topology, scales, weights, last_phase, batch)
            for name, reference in references.items()
        }

    def _compare(
        self,
        found: Outcome,
        reference: Outcome,
        topology: Topology,
        scales: Scales,
        weights: dict,
        last_phase: int,
        batch: object,
    ) -> dict[int, PhaseError]:
        rows = None
        if self._bf16:
            # last rows route natively: in bfloat16 a near-tie may fall either way
            rows = torch.from_numpy(batch.inner_rows)
            weights = {n: self._as_trained(n, t) for n, t in weights.items()}
        return compare(
            found,
            reference,
            VARIANTS[topology.variant],
            scales,
            weights,
            last_phase=last_phase,
            rows=rows,
        )

    def _evidence(self, job_id: str) -> str:
        return audit_run(Path(self._jobs[job_id].output) / EVIDENCE_RUN).verdict

    def _measure_noise(self, by_name: dict) -> dict[int, float]:
        """Largest error of runs that must agree: the actor with its microbatches permuted against
        itself, and at world size 1 against the float64 oracle."""
        noise: dict[int, float] = {}
        runs = [(f"noise-{seed}", by_name["one"]) for seed in NOISE_SEEDS]
        runs += [(j.job_id, by_name[j.job_id]) for j in self._jobs.values() if j.job_id in by_name]
        for job_id, topology in runs:
            is_baseline = baseline(topology).name == topology.name
            if self._statuses[job_id].error or not (is_baseline or job_id.startswith("noise")):
                continue
            for errors in self._errors(job_id, topology, self._last_phase(job_id)).values():
                for phase, e in errors.items():
                    if phase in GATES:
                        noise[phase] = max(noise.get(phase, 0.0), e.error)
        return noise

    def _last_phase(self, job_id: str) -> int:
        return self._jobs[job_id].last_phase

    def _thresholds(self, noise: dict[int, float]) -> dict[int, float]:
        if self._bf16:
            return dict(BF16_THRESHOLDS)
        exact = {0: 0.0, EXPORT: 0.0}
        return exact | {
            phase: min(gate, NOISE_FACTOR * noise.get(phase, math.inf))
            for phase, gate in GATES.items()
        }

    def _judge_topology(self, t: Topology, thresholds: dict[int, float]) -> TopologyResult:
        result = TopologyResult(t.name, t.world_size, "not run")
        if t.name not in self._jobs:
            result.reason = f"needs {t.world_size} ranks, {self._max_world_size} can run here"
            return result
        status = self._statuses[t.name]
        result.seconds = status.seconds
        first = self._statuses[baseline(t).name]
        if status.error or first.error:
            result.status, result.reason = "failed", status.error or f"oracle (a): {first.error}"
            return result
        result.evidence = self._evidence(t.name)
        result.errors = self._errors(t.name, t, self._last_phase(t.name))
        batch, variant = self._prepare(t)[0], VARIANTS[t.variant]
        result.route_bytes = max(self._outcome(t.name, t).route_bytes)
        result.all_route_bytes = batch.routes.size * variant.route_shape.dtype.itemsize
        wrong = [
            e
            for errors in result.errors.values()
            for phase, e in errors.items()
            if not e.error <= thresholds[phase]
        ]
        result.status = "failed" if wrong else "passed"
        result.reason = "; ".join(f"{e.where}: {e.error:.1e}" for e in wrong)
        return result

    def _judge_mutation(
        self, m: Mutation, by_name: dict, thresholds: dict[int, float]
    ) -> MutationResult:
        job_id = f"mutation-{m.name}"
        result = MutationResult(m.name, m.claim, m.topology, m.phase, "not run")
        if job_id not in self._jobs:
            result.detail = "needs more ranks than can run here"
            return result
        status = self._statuses[job_id]
        if status.error:
            refused = bool(m.expect_error) and m.expect_error in status.error
            result.status = "caught" if refused else "failed"
            result.factor = math.inf if refused else 0.0
            result.detail = f"refused: {status.error}" if refused else status.error
            return result
        result.evidence = self._evidence(job_id)
        errors = self._errors(job_id, by_name[m.topology], m.last_phase)
        factors: dict[int, float] = {}
        for phase in errors["b"]:
            # the oracle that is nearer counts: a bug must be plain to both
            e = min((found[phase] for found in errors.values()), key=lambda e: e.error)
            threshold = thresholds[phase]
            if threshold > 0:
                factors[phase] = e.error / threshold
            else:
                factors[phase] = math.inf if e.error > 0 else 0.0
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
