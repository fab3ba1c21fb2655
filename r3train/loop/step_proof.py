"""Prove a step's replay: which steps are checked, their verdict, and its metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from r3train.algo.gap_budget import CanaryLogProbs, gap_budget
from r3train.chat.token_ledger import session_ledgers
from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.loop.canaries import Canaries
from r3train.loop.server_checksums import ServerChecksums
from r3train.loop.prepare import Prepared
from r3train.loop.rollout_source import RolloutSource
from r3train.loop.route_transport import Routes
from r3train.proof.verdicts import FAILED, NO_EVIDENCE, PASSED, SUSPECT
from r3train.proof.step_verdict import StepVerdict
from r3train.proof.live import LiveProof, StepClaims
from r3train.proof.custody_verdict import CustodyRecord
from r3train.proof.recheck_verdict import compare_rollout, log_probs_twice, RecheckRecord
from r3train.proof.served_verdict import ServerScores
from r3train.proof.suspicion import CALIBRATING, Statistic, Suspicions
from r3train.proof.writer import EvidenceWriter
from r3train.types import is_checked

if TYPE_CHECKING:
    from r3train.trainer.megatron.actor import MegatronActor

logger = logging.getLogger(__name__)

_SAID_WITHOUT_RECHECK = 3


@dataclass(eq=False)
class StepProof:
    """Judges the replay of each step; all ranks call its methods together.

    evidence: None with the R3 check off; source: rank 0's, which rechecks samples; canaries, checksums: None where they are off.
    """

    config: RunConfig
    hf: HfModelFacts
    actor: MegatronActor
    evidence: EvidenceWriter | None
    routes: Routes
    canaries: Canaries | None
    checksums: ServerChecksums | None = None

    def __post_init__(self) -> None:
        self._start: int | None = None  # the first rollout that was asked about
        calibrating = 0 if self.config.trainer.ci_test else CALIBRATING
        self._proof = self.evidence and LiveProof(
            self.evidence,
            self.hf.route_shape,
            self.config.replay_passes,
            self.config.mismatch_threshold,
            Suspicions(self.config.suspect_limit, calibrating),
            self.config.replay.r3_check_interval,
        )
        self._without_recheck = 0  # rollouts in a row, of which no comparison was judged
        # rank 0: log-probs of the last judged step's rechecked tokens, as delivered and computed again
        self._twice: tuple[np.ndarray, np.ndarray] | None = None

    def is_due(self, rollout_id: int) -> bool:
        """Tell whether the rollout's replay is proved; the first of a start always is.

        So a start's first verdict tells an audit where the interval of the start before it ends.
        """
        if self._start is None:
            self._start = rollout_id
        interval = self.config.replay.r3_check_interval
        starts = rollout_id == self._start
        return self.evidence is not None and (starts or is_checked(rollout_id, interval))

    def judge(
        self, rollout_id: int, prepared: Prepared | None, source: RolloutSource | None
    ) -> StepVerdict | None:
        """Prove the step's replay on all ranks; the verdict is on rank 0 only."""
        assert self._proof is not None
        records = self.actor.collect_evidence(rollout_id)
        recorded = self.routes.recorded(prepared)
        rechecked, missed = self._rechecked(rollout_id, prepared, source)
        claims = StepClaims(
            rechecked,
            missed,
            self._custody(rollout_id, prepared),
            served=self.canaries and self.canaries.served(rollout_id),
            held=self.checksums and self.checksums.count(rollout_id),
        )
        expectation = prepared.expectation(recorded) if prepared is not None else None
        verdict = self._proof.prove_step(records, expectation, claims)
        if verdict is not None:
            self._say(verdict)
        return verdict

    def _say(self, verdict: StepVerdict) -> None:
        """Rank 0: log what is suspect, or lacks evidence."""
        for text in verdict.suspects:
            logger.warning("suspect: %s", text)
        if verdict.stale_warning:  # a policy that learns fast; check-evidence counts it
            logger.info(verdict.stale_warning)
        if verdict.recheck is not None:
            lacks = verdict.recheck.verdict == NO_EVIDENCE
            self._without_recheck = self._without_recheck + 1 if lacks else 0
            if self._without_recheck == _SAID_WITHOUT_RECHECK:  # once, until one comes in time
                logger.warning(
                    "recheck: no evidence in %d rollouts in a row: busy servers did not read a sample again in"
                    " time (--r3-recheck-share); other claims were judged",
                    self._without_recheck,
                )

    def gap_metrics(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Rank 0: split the gap of a step, which has ``metrics``, after ``judge`` if that is due."""
        rechecked, self._twice = self._twice, None
        replayed, server_scores = self.config.replay.use_rollout_routing_replay, []
        if self.canaries is not None and replayed:
            server_scores = self.canaries.last_scores
        return gap_budget(
            metrics,
            rechecked=rechecked,
            canaries=canary_log_probs(server_scores) if server_scores else None,
            replayed=replayed,
            flushed=self.config.rollout.flush_cache_on_update,
        )

    def _custody(self, rollout_id: int, prepared: Prepared | None) -> list[CustodyRecord]:
        """Rank 0: what the custody of the step's sessions is judged by."""
        if prepared is None:
            return []
        masks = self.config.algorithm.mask_truncated
        found = session_ledgers([s.sample for s in prepared.samples], masks)
        return [CustodyRecord(c.session, c.calls, c.samples, rollout_id) for c in found]

    def _rechecked(
        self, rollout_id: int, prepared: Prepared | None, source: RolloutSource | None
    ) -> tuple[list[RecheckRecord] | None, int]:
        """Rank 0: compare samples with what their servers rechecked; (records, missed)."""
        rechecked = source.rechecked() if source is not None else None
        if prepared is None or rechecked is None:
            return None, 0
        samples = [s.sample for s in prepared.samples]
        # a prefill has the log-probs of the whole vocabulary, at temperature 1
        log_probs = (
            self.config.rollout.rollout_temperature == 1
            and not self.config.rollout.replays_sampling_mask
        )
        if log_probs:
            self._twice = log_probs_twice(rechecked, samples)
        records = compare_rollout(
            rollout_id,
            rechecked,
            samples,
            self.routes.read,
            self.hf.moe_layer_numbers,
            log_probs=log_probs,
            dtype=self.config.server_dtype,
        )
        # a prompt that was computed under other weights than its answer is not compared
        return records, rechecked.missed + len(rechecked.parts) - len(records)


def canary_log_probs(
    server_scores: Sequence[tuple[ServerScores, list[np.ndarray] | None]]
) -> CanaryLogProbs:
    """Gather the log-probs of canaries as all servers and the actor computed them; a text's first token has none.

    server_scores: each with the actor's log-probs without replay, None where that pass was not made.  These count if all
    have them.
    """
    scores = [score for server, _ in server_scores for score in server.scores]
    halved = [score for server, _ in server_scores for score in server.halved]
    live = [
        log_probs[1:]
        for _, live_log_probs in server_scores
        if live_log_probs is not None
        for log_probs in live_log_probs
    ]
    return CanaryLogProbs(
        server=np.concatenate([score.whole.log_probs[1:] for score in scores]),
        actor=np.concatenate(
            [log_probs[1:] for server, _ in server_scores for log_probs in server.actor]
        ),
        live=np.concatenate(live) if len(live) == len(scores) else None,
        early=np.concatenate([score.early.log_probs[1:] for score in halved]),
        warm=np.concatenate([score.warm.log_probs[1:] for score in halved]),
    )


def replay_metrics(verdict: StepVerdict) -> dict[str, Any]:
    """Return a verdict's numbers under ``r3/`` and ``recheck/``."""
    metrics: dict[str, Any] = {f"r3/{name}": value for name, value in verdict.counts.items()}
    metrics["r3/passed"] = verdict.passed
    metrics["agreement/suspect"] = _largest_sum(verdict.statistics)
    if verdict.recheck is not None:
        judged = {PASSED: True, SUSPECT: True, FAILED: False}
        metrics["recheck/passed"] = judged.get(verdict.recheck.verdict)
        metrics["recheck/suspect"] = _largest_sum(verdict.recheck.statistics)
        metrics["recheck/parts"] = verdict.recheck.parts
        metrics["recheck/missed"] = verdict.recheck.missed
    if verdict.custody is not None:
        metrics["agent/custody_passed"] = verdict.custody.verdict == PASSED
    for name, value in verdict.agreement.items():
        metrics["r3/agreement" if name == "equal" else f"r3/agreement_{name}"] = value
    return metrics


def _largest_sum(statistics: Sequence[Statistic]) -> float:
    return max((s.sum for s in statistics), default=0.0)
