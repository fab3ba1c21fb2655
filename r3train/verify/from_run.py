"""A user's own dumped rollout as a test: one training step of it in every topology against world size 1.

Each topology is a whole job of the training command, which replays the rollout.  It trains one step of
SGD, so that what a parameter moved is its gradient.  The model is the one that the run began with.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from r3train.config import RunConfig
from r3train.config.checkpoint_settings import CheckpointSection, rollout_path
from r3train.config.cross_checks import check_model, check_static
from r3train.config.evaluation_settings import EvalSection
from r3train.config.fault_settings import FaultsSection
from r3train.config.hf_facts import HfModelFacts, read_hf_facts
from r3train.config.model_settings import ModelSection
from r3train.config.run import RunSection
from r3train.config.tracker_settings import TrackersSection
from r3train.hf_checkpoint import weight_files
from r3train.launch.run_dir import CONFIG_FILE
from r3train.loop.replay_source import dump_rollout, load_rollout
from r3train.observe.metrics import read_metrics
from r3train.audit.audit_run import audit_run
from r3train.verify.compare_outcomes import (
    BF16_THRESHOLDS,
    DELTAS,
    GATES,
    GRADIENTS,
    LOSS,
    PhaseError,
    relative_by_name,
    worst,
)
from r3train.verify.runner import torchrun
from r3train.verify.topologies import TOPOLOGIES, Topology
from r3train.verify.verifier import TopologyResult, Verification

PROGRAM = ("-m", "r3train.launch.train")
BASELINE = "one"
_TIMEOUT_S = 1800
# a step of SGD that moves weights by their gradients, large enough to be seen in float32
_SGD = {
    **{"optimizer": "sgd", "lr": 0.3, "min_lr": 0.3, "lr_decay_style": "constant"},
    **{"lr_warmup_iters": 0, "weight_decay": 0.0, "clip_grad": 0.0, "global_batch_size": None},
    **{"check_weight_update_equal": False, "ci_test": False},
    **{"optimizer_overrides": {}},  # those are of Adam
}
_NO_RECOMPUTE = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    "recompute_modules",
)
# means over the batch; each is held against a scale of at least 1, for a loss may be next to nothing
_MEANS = ("train/loss", "train/pg_loss", "train/kl", "train/entropy", "train/ratio")
_COUNTS = ("train/num_loss_tokens",)


@dataclass(frozen=True)
class Step:
    """The end of one job: its metrics, the weights that it exported, and the verdict on its evidence."""

    metrics: Mapping[str, float]
    weights: Mapping[str, Tensor]
    evidence: str  # "" where the run has no routes


class FromRun:
    """The test of one rollout of one run.

    Raises ValueError naming what is missing: the configuration, the rollout, the checkpoint.
    """

    def __init__(self, run_dir: Path, rollout_id: int | None, scratch: Path) -> None:
        file, directory = run_dir / CONFIG_FILE, run_dir / "rollouts"
        if not file.is_file():
            raise ValueError(f"{file}: no such file: is {run_dir} a run directory?")
        self.config = RunConfig.from_toml(file)
        if rollout_id is None:
            dumps = sorted(directory.glob("rollout_*.safetensors"))
            if not dumps:
                raise ValueError(
                    f"{directory}: holds no dumped rollout: start the run with --dump-rollouts"
                )
            rollout_id = int(dumps[0].stem.removeprefix("rollout_"))
        if not rollout_path(directory, rollout_id).is_file():
            raise ValueError(f"{rollout_path(directory, rollout_id)}: no such file (--rollout)")
        if self.config.lora.enabled:
            raise ValueError(
                f"{run_dir}: trains adapters (--lora-rank), which are not compared here"
            )
        self.hf: HfModelFacts = read_hf_facts(self.config.model.hf_checkpoint)
        self._scratch = scratch
        # the first rollout of a job of one
        temperature = self.config.rollout.rollout_temperature
        groups = load_rollout(directory, rollout_id)
        dump_rollout(scratch / "rollouts", 0, groups, temperature)

    def job(self, topology: Topology) -> RunConfig:
        """The job that trains the rollout in a topology."""
        config, output = self.config, self._scratch / topology.name
        layout = topology.parallel_section()
        kept = ("distributed_backend", "distributed_timeout_minutes")
        fields = ModelSection.model_fields
        recompute = {
            name: fields[name].get_default(call_default_factory=True) for name in _NO_RECOMPUTE
        }
        model = config.model.model_dump() | recompute | topology.model
        replay = config.replay.use_rollout_routing_replay
        sections = {
            "model": ModelSection(**model),
            "parallel": layout.model_copy(update={k: getattr(config.parallel, k) for k in kept}),
            "checkpoint": CheckpointSection(
                replay_rollouts=self._scratch / "rollouts", save_hf=output / "hf"
            ),
            "rollout": config.rollout.model_copy(
                update={
                    **{"num_rollout": 1, "rollout_external_engine_addrs": ()},
                    **{"rollout_server_env": (), "rollout_num_engines": 1},
                }
            ),
            "trainer": config.trainer.model_copy(update=_SGD),
            "algorithm": config.algorithm.model_copy(update={"min_ess": 0.0}),
            "replay": config.replay.model_copy(
                update={
                    **{"enable_r3_correctness_check": replay, "route_stores": False},
                    # older weights than the rollout's may route it
                    **{"r3_mismatch_threshold": 1.0, "plant_bug": None, "route_store_host": None},
                }
            ),
            "eval": EvalSection(),
            "faults": FaultsSection(),
            "trackers": TrackersSection(),
            "run": RunSection(
                run_dir=output / "run", plot=False, tensorboard=False, progress=False
            ),
        }
        return config.model_copy(update=sections)

    def misfit(self, topology: Topology) -> str:
        """The reason why a topology does not fit the model or the batch; "" if it does."""
        job = self.job(topology)
        try:
            check_static(job, topology.world_size)
            check_model(job, self.hf, topology.world_size)
        except ValueError as error:
            return str(error).splitlines()[0]
        return ""

    def run(self, topology: Topology) -> Step:
        """Run the job of a topology; raises RuntimeError with its last error."""
        config, output = self.job(topology), self._scratch / topology.name
        output.mkdir(parents=True)
        (output / CONFIG_FILE).write_text(config.to_toml(), encoding="utf-8")
        launch(output / CONFIG_FILE, topology.world_size, output / "job.log")
        run_dir = config.run.run_dir
        assert run_dir is not None and config.checkpoint.save_hf is not None
        [metrics] = read_metrics(run_dir)
        weights = load_weights(config.checkpoint.save_hf)
        evidence = audit_run(run_dir).verdict if config.r3_check_enabled else ""
        return Step(metrics, weights, evidence)


def launch(config: Path, world_size: int, log: Path) -> None:
    """Run the training command; raises RuntimeError with the last error of its output."""
    with torchrun(world_size, [*PROGRAM, "--config", str(config)], log) as process:
        try:
            process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the job took longer than {_TIMEOUT_S} s") from None
    if process.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        last = [line for line in lines if "rror" in line and line.strip()][:1] or lines[-1:]
        raise RuntimeError(f"the job ended with {process.returncode}: {' '.join(last)}")


def load_weights(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a Hugging Face checkpoint, by name."""
    return {n: t for file in weight_files(directory) for n, t in load_file(file).items()}


def layouts(names: Sequence[str], ci: bool) -> list[Topology]:
    """The topologies to try, each layout once: which of verify's own models it was for is no matter."""
    found: dict[str, Topology] = {}
    for topology in TOPOLOGIES.values():
        if topology.name in names or not names and (topology.ci or not ci):
            key = repr((topology.world_size, topology.parallel, topology.model))
            if topology.name != BASELINE and (topology.world_size > 1 or topology.model):
                found.setdefault(key, topology)
    return list(found.values())


def compare_steps(
    found: Step, reference: Step, start: Mapping[str, Tensor], *, bf16: bool
) -> dict[int, PhaseError]:
    """Errors of a job against world size 1, by phase; start: the weights that both began with.

    In bfloat16 weights are not compared: a step is below their resolution.
    """
    errors = {
        LOSS: worst(LOSS, _means(found.metrics, reference.metrics)),
        GRADIENTS: worst(GRADIENTS, _norms(found.metrics, reference.metrics)),
    }
    if not bf16:
        moved, expected = (
            {name: tensor.double() - start[name].double() for name, tensor in step.weights.items()}
            for step in (found, reference)
        )
        steps = relative_by_name(moved, expected, "step of ", dict(start))
        errors[DELTAS] = worst(DELTAS, steps)
    return errors


def _means(a: Mapping[str, float], b: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    for name in _MEANS:
        if name in a or name in b:
            one, other = a.get(name, math.nan), b.get(name, math.nan)
            yield abs(one - other) / max(1.0, abs(other)), name
    for name in _COUNTS:
        yield abs(a[name] - b[name]), name


def _norms(a: Mapping[str, float], b: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    one, other = a["train/grad_norm"], b["train/grad_norm"]
    yield (abs(one - other) / other if other else one), "grad norm"


def verify_run(
    test: FromRun,
    topologies: Sequence[Topology],
    max_world_size: int,
    report: Callable[[str], None],
) -> Verification:
    """Run the rollout at world size 1 and in each topology that fits; returns the verdicts.

    World size 1 is among them where its job or its evidence failed.  Raises ValueError where there is
    nothing to hold against it.
    """
    if not topologies:
        raise ValueError(f"--topology {BASELINE} alone compares nothing: all are held against it")
    bf16 = test.config.model.bf16
    result = Verification.begun(bf16=bf16)
    thresholds = {LOSS: GATES[LOSS], GRADIENTS: GATES[GRADIENTS], DELTAS: GATES[DELTAS]}
    if bf16:
        thresholds = {phase: BF16_THRESHOLDS[phase] for phase in (LOSS, GRADIENTS)}
    result.thresholds = thresholds
    start = load_weights(test.config.model.hf_checkpoint)
    if misfit := test.misfit(TOPOLOGIES[BASELINE]):
        raise ValueError(f"world size 1, which all are held against, does not fit: {misfit}")
    try:
        reference = test.run(TOPOLOGIES[BASELINE])
    except RuntimeError as error:
        result.topologies.append(TopologyResult(BASELINE, 1, "failed", str(error)))
        return result
    report(f"world size 1: evidence {reference.evidence or 'none'}")
    if reference.evidence not in ("", "passed"):
        reason, evidence = f"check-evidence: {reference.evidence}", reference.evidence
        result.topologies.append(TopologyResult(BASELINE, 1, "failed", reason, evidence=evidence))
    for topology in topologies:
        judged = TopologyResult(topology.name, topology.world_size)
        result.topologies.append(judged)
        judged.reason = test.misfit(topology)
        if topology.world_size > max_world_size:
            judged.reason = f"needs {topology.world_size} ranks, {max_world_size} can run here"
        if judged.reason:
            continue
        began = time.monotonic()
        try:
            found = test.run(topology)
        except RuntimeError as error:
            judged.status, judged.reason = "failed", str(error)
            continue
        judged.seconds = time.monotonic() - began
        judged.evidence = found.evidence
        judged.errors = {"a": compare_steps(found, reference, start, bf16=bf16)}
        judged.judge(thresholds)
        report(f"{topology.name}: {judged.status} in {judged.seconds:.0f} s")
    return result
