"""The training loop: rollouts of step n+1 are generated while step n trains.

Consumes complete groups from the rollout source (rank 0), waits for nothing else, and produces
weights: every step ends with the servers holding the version that the next groups are drawn from.
All ranks run the loop together; rank 0 holds the source, the publisher, the display and the files,
and cuts every other rank its slices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from r3train.evidence.check import StepExpectation, StepVerdict, judge, totals
from r3train.evidence.writer import EvidenceWriter
from r3train.loop import planted_bugs, weight_probe
from r3train.loop.batch import Packing, Scored, slices_for_ranks, step_expectation, train_samples
from r3train.loop.report import RolloutReport, rollout_metrics, train_metrics
from r3train.loop.scatter import broadcast_json, gather_topologies, scatter_slices
from r3train.trainer.backend import TrainerBackend
from r3train.types import RankSlice

logger = logging.getLogger(__name__)


class RolloutSource(Protocol):
    """Where complete groups come from; ``rollout.producer.Producer`` is the one implementation."""

    def next_batch(self, step: int, on_wait: Callable | None = None) -> list[list[Scored]]: ...

    def quiesced(self) -> AbstractContextManager[None]: ...

    def set_version(self, version: int) -> None: ...

    def stats(self) -> dict[str, Any]: ...


class Display(Protocol):
    """What a person watches on rank 0."""

    def rollout_begin(self, rollout_id: int, num_groups: int) -> None: ...

    def rollout_update(self, groups_done: int, tokens: int) -> None: ...

    def train_update(self, activity: str) -> None: ...

    def step_line(self, metrics: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class ReplayPlan:
    """R3 as the loop needs it; None in its place trains without replay."""

    num_layers: int
    num_experts: int
    topk: int
    route_dtype: type
    moe_layers: tuple[int, ...]
    recomputed: tuple[int, ...]
    mismatch_threshold: float
    check: bool
    plant_bug: str | None


@dataclass(frozen=True)
class LoopSettings:
    """The numbers of the loop."""

    num_rollout: int
    start_rollout: int
    rollout_batch_size: int
    steps_per_rollout: int
    max_tokens_per_gpu: int
    grpo_std_normalization: bool
    needs_reference: bool
    ci_test: bool
    probe_tokens: np.ndarray | None  # int32[T], under --check-weight-update-equal
    probe_tolerance: float
    save_interval: int | None
    publish_at_start: bool  # the servers do not hold the actor's first weights, or may not


@dataclass
class RankZero:
    """What rank 0 holds and other ranks do not."""

    start_source: Callable[[], RolloutSource]  # begins to generate
    publisher: Any  # weights.publish.WeightPublisher
    probe: Callable[[np.ndarray], list[np.ndarray]]  # log-probs of one text on each server
    display: Display
    metrics: Any  # evidence.metrics.MetricsWriter


class AsyncLoop:
    """Runs rollouts ``start_rollout .. num_rollout`` to their end; ``zero`` is None but on rank 0."""

    def __init__(
        self,
        actor: TrainerBackend,
        settings: LoopSettings,
        replay: ReplayPlan | None,
        *,
        zero: RankZero | None,
        evidence: EvidenceWriter | None,
        save: Callable[[int], None] | None = None,
    ):
        self._actor = actor
        self._settings = settings
        self._replay = replay
        self._zero = zero
        self._evidence = evidence
        self._save = save
        self._source: RolloutSource | None = None
        self._topologies = gather_topologies(actor.topology)
        self._passes = (
            ("old_log_prob",) + (("ref_log_prob",) if settings.needs_reference else ()) + ("train",)
        )

    def run(self) -> None:
        """Train to the end; raises what went wrong, on the rank where it did."""
        s = self._settings
        if s.publish_at_start:
            self._publish(s.start_rollout)
        if self._zero is not None:
            self._source = self._zero.start_source()
        for rollout_id in range(s.start_rollout, s.num_rollout):
            began = time.monotonic()
            slices, expectation, metrics = self._take_rollout(rollout_id)
            waited = time.monotonic()
            metrics.update(self._train(rollout_id, slices))
            verdict = self._judge(rollout_id, expectation)
            if verdict is not None:
                metrics.update(_replay_metrics(verdict))
                if not verdict.passed:  # what was seen is written before the run ends over it
                    self._report(rollout_id, metrics)
                    verdict.raise_if_failed()
            trained = time.monotonic()
            if s.save_interval and self._save and (rollout_id + 1) % s.save_interval == 0:
                self._save(rollout_id + 1)
            published = time.monotonic()
            if rollout_id + 1 < s.num_rollout or s.probe_tokens is not None:
                metrics.update(self._publish(rollout_id + 1))
            done = time.monotonic()
            metrics.update(
                {
                    "perf/rollout_wait_s": waited - began,
                    "perf/train_s": trained - waited,
                    "perf/publish_s": done - published,
                    "perf/step_s": done - began,
                    "perf/tokens_per_s": metrics.get("rollout/tokens", 0) / (done - began),
                }
            )
            self._report(rollout_id, metrics)
        if self._save and s.num_rollout > s.start_rollout:
            self._save(s.num_rollout)

    def _report(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        if self._zero is not None:
            self._zero.metrics.write(rollout_id, metrics)
            self._zero.display.step_line({**metrics, "step": rollout_id})

    # -- rollout -----------------------------------------------------------------------------

    def _take_rollout(
        self, rollout_id: int
    ) -> tuple[list[list[RankSlice]], StepExpectation | None, dict[str, Any]]:
        """This rank's slices of each optimizer step, the expectation and metrics (rank 0)."""
        plan: dict[str, Any] | None = None
        packed: list[list[RankSlice]] | None = None
        expectation, metrics = None, {}
        if self._zero is not None:
            packed, plan, expectation, metrics = self._prepare(rollout_id)
        counts = broadcast_json(plan)["microbatches"]
        mine = scatter_slices(packed)
        steps, start = [], 0
        for count in counts:
            steps.append(mine[start : start + count])
            start += count
        return steps, expectation, metrics

    def _prepare(self, rollout_id: int) -> tuple:
        """Rank 0: wait for the rollout, score it, cut it."""
        zero, s, replay = self._zero, self._settings, self._replay
        zero.display.rollout_begin(rollout_id, s.rollout_batch_size)
        zero.display.train_update("waiting for rollout")
        first = self._source.stats()

        def on_wait(stats: dict[str, Any]) -> None:
            tokens = stats["generated_tokens"] - first["generated_tokens"]
            done = min(stats["buffered_groups"], s.rollout_batch_size)
            zero.display.rollout_update(done, tokens)

        groups = self._source.next_batch(rollout_id, on_wait)
        zero.display.rollout_update(len(groups), sum(x.response_len for g in groups for x, _ in g))
        samples, stats = train_samples(groups, std_normalization=s.grpo_std_normalization)
        report = RolloutReport(rollout_id, stats)
        metrics = rollout_metrics(report, samples)

        trained = samples
        if replay is not None and replay.plant_bug in planted_bugs.ROUTE_BUGS:
            trained = planted_bugs.plant(replay.plant_bug, samples, replay.moe_layers)
        packing = Packing(
            topologies=self._topologies,
            max_tokens_per_gpu=s.max_tokens_per_gpu,
            route_shape=(replay.num_layers, replay.topk) if replay else None,
            route_dtype=replay.route_dtype if replay else np.uint8,
        )
        of_rank: list[list[RankSlice]] = [[] for _ in self._topologies]
        counts = []
        share = len(trained) // s.steps_per_rollout
        for step in range(s.steps_per_rollout):
            part = trained[step * share : (step + 1) * share]
            sliced = slices_for_ranks(part, packing, first_microbatch_id=sum(counts))
            counts.append(len(sliced[0]))
            for rank, slices in enumerate(sliced):
                of_rank[rank] += slices
        expectation = None
        if replay is not None and replay.check:
            expectation = step_expectation(
                rollout_id,
                [t.sample for t in samples],
                passes=self._passes,
                moe_layers=replay.moe_layers,
                recomputed=replay.recomputed,
                num_microbatches=sum(counts),
                ranks_per_stage=len(self._topologies) // self._topologies[0].pp_size,
            )
        return of_rank, {"microbatches": counts}, expectation, metrics

    # -- train -------------------------------------------------------------------------------

    def _train(self, rollout_id: int, steps: Sequence[list[RankSlice]]) -> dict[str, Any]:
        """Log-prob passes over the whole rollout, then its optimizer steps."""
        if self._zero is not None:
            self._zero.display.train_update("training")
        everything = [s for step in steps for s in step]
        old = self._actor.compute_log_probs(everything, "old_log_prob")
        ref = None
        if self._settings.needs_reference:
            ref = self._actor.compute_log_probs(everything, "ref_log_prob")
        reports = [self._actor.train_step(step, old, ref) for step in steps]
        if self._settings.ci_test and rollout_id == 0:
            _check_first_step(reports[0])
        return train_metrics(reports)

    def _judge(self, rollout_id: int, expectation: StepExpectation | None) -> StepVerdict | None:
        """Write this rank's evidence, add all ranks' up, and judge them on rank 0."""
        if self._evidence is None:
            return None
        assert self._replay is not None
        records = self._actor.collect_evidence(rollout_id)
        self._evidence.write(records)
        table = torch.from_numpy(totals(records, self._passes, self._replay.num_layers))
        dist.all_reduce(table)
        verdict = None
        if expectation is not None:  # rank 0
            verdict = judge(
                table.numpy(),
                self._passes,
                expectation,
                mismatch_threshold=self._replay.mismatch_threshold,
                num_experts=self._replay.num_experts,
                topk=self._replay.topk,
            )
            self._evidence.write_step(
                {
                    "step": rollout_id,
                    "passed": verdict.passed,
                    "passes": self._passes,
                    "expected_fingerprints": {
                        str(n): f"{f:#018x}" for n, f in expectation.fingerprints.items()
                    },
                    "counts": verdict.counts,
                    "agreement": verdict.agreement,
                    "failures": [asdict(f) for f in verdict.failures],
                    "threshold_error": verdict.threshold_error,
                }
            )
        return verdict

    # -- publish -----------------------------------------------------------------------------

    def _publish(self, version: int) -> dict[str, Any]:
        """Send the weights to all servers while nothing is in flight; drain elsewhere."""
        weights = self._actor.hf_weights()
        if self._zero is None:
            for _ in weights:
                raise AssertionError("only rank 0 holds whole tensors")
            self._check_servers(version)
            return {}
        self._zero.display.train_update("publishing weights")
        with self._source.quiesced() if self._source is not None else nullcontext():
            published = self._zero.publisher.publish(weights, version=version)
            gap = self._check_servers(version)
            if self._source is not None:
                self._source.set_version(version)
        metrics = {"perf/published_bytes": published.num_bytes, "rollout/weight_version": version}
        if gap is not None:
            metrics["train/weight_probe_gap"] = gap
        return metrics

    def _check_servers(self, version: int) -> float | None:
        """--check-weight-update-equal: probe every server with one text."""
        tokens = self._settings.probe_tokens
        if tokens is None:
            return None
        ours = weight_probe.actor_log_probs(self._actor, self._topologies, tokens)
        if self._zero is None:
            return None
        theirs = self._zero.probe(tokens)  # [servers, T]
        return max(
            weight_probe.compare(ours, t, version, tolerance=self._settings.probe_tolerance)
            for t in theirs
        )


def _check_first_step(report: dict[str, float]) -> None:
    """--ci-test: at the first step the actor is the policy that its log-probs came from."""
    for name in ("ppo_kl", "kl"):
        if abs(report.get(name, 0.0)) > 1e-8:
            other = "ref_log_probs" if name == "kl" else "old log_probs"
            raise AssertionError(
                f"ci-test: first-step log_probs must equal {other}, but {name} is {report[name]:g}"
            )


def _replay_metrics(verdict: StepVerdict) -> dict[str, Any]:
    metrics: dict[str, Any] = {f"r3/{name}": value for name, value in verdict.counts.items()}
    metrics["r3/passed"] = verdict.passed
    for name, value in verdict.agreement.items():
        metrics["r3/agreement" if name == "equal" else f"r3/agreement_{name}"] = value
    return metrics
