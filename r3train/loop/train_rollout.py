"""Train one rollout: log-prob passes over all of it, then its optimizer steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from r3train.config import RunConfig
from r3train.loop.distribute import gather_json
from r3train.loop.intake import Taken
from r3train.loop.kl_reward import add_kl_to_rewards
from r3train.loop.step_metrics import gap_warning, train_metrics
from r3train.types import RankTopology
from r3train.user_code import UserCodeFailed

if TYPE_CHECKING:
    from r3train.trainer.megatron.actor import MegatronActor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """The result of a rollout's training; the same on all ranks, but for ``metrics``.

    skipped_steps: optimizer steps whose loss or gradient was not finite; low_ess_steps: those that
    --min-ess skipped; loss_error: of the user's loss or estimator, "" without one; first_step_done: False if it
    failed in the first optimizer step or before.
    """

    metrics: dict[str, Any]
    skipped_steps: int = 0
    low_ess_steps: int = 0
    loss_error: str = ""
    first_step_done: bool = True


def train_rollout(
    rollout_id: int,
    taken: Taken,
    config: RunConfig,
    actor: MegatronActor,
    topologies: Sequence[RankTopology],
) -> Trained:
    """Make the passes and optimizer steps of a rollout; a collective.

    After a failure of the user's loss the rollout's other steps are skipped.
    """
    began, algorithm = time.monotonic(), config.algorithm
    steps: Sequence[Any] = taken.steps
    everything = [s for step in steps for s in step]
    log_probs_of = partial(actor.compute_log_probs, everything, loss_rows_only=True)
    old = ref = teacher = None
    if not config.reuses_log_probs:
        old = log_probs_of("old_log_prob", weight_version=rollout_id)
    if algorithm.needs_reference:
        ref = log_probs_of("ref_log_prob", routing=algorithm.ref_routing)
    if algorithm.holds_teacher:
        # another model than the one that generated: its own routers choose
        teacher = log_probs_of(None, with_teacher=True)
    metrics: dict[str, Any] = {"perf/log_prob_s": time.monotonic() - began}
    if algorithm.kl_coef:
        rank = actor.topology.rank
        try:
            steps, paid = add_kl_to_rewards(
                steps, taken.prepared, old, ref, algorithm, topologies, rank
            )
        except UserCodeFailed as failed:  # of the user's estimator, on all ranks
            return Trained(metrics, loss_error=str(failed), first_step_done=False)
        metrics.update(paid)
    reports, error = [], ""
    for i, step in enumerate(steps):
        version = rollout_id if i == 0 else None
        reports.append(actor.train_step(step, old, ref, version, teacher_log_probs=teacher))
        if reports[-1]["skipped_steps"] and not error:
            error = next(chain.from_iterable(gather_json(actor.loss_errors)), "")
            if error and i == 0:
                return Trained(metrics, loss_error=error, first_step_done=False)
    if config.trainer.ci_test and rollout_id == 0:
        is_actor = not config.lora.lora_adapter_path
        replayed = algorithm.ref_routing == "replay"
        _check_first_step(reports[0], reference_is_actor=is_actor and replayed)
    metrics.update(actor.collect_drift())
    metrics.update(train_metrics(reports, actor.maxima))
    if actor.topology.rank == 0 and (text := gap_warning(rollout_id, metrics)):
        logger.warning("%s", text)
    return Trained(
        metrics,
        skipped_steps=int(sum(r["skipped_steps"] for r in reports)),
        low_ess_steps=int(sum(r["low_ess_steps"] for r in reports)),
        loss_error=error,
    )


def _check_first_step(report: dict[str, float], *, reference_is_actor: bool) -> None:
    """--ci-test: at the first step the actor is the policy that its log-probs came from.

    reference_is_actor: it is the KL reference too.
    """
    references = {"ppo_kl": "old log_probs"} | (
        {"kl": "ref_log_probs"} if reference_is_actor else {}
    )
    for name, other in references.items():
        if abs(report.get(name, 0.0)) > 1e-8:
            raise AssertionError(
                f"ci-test: first-step log_probs must equal {other}, but {name} is {report[name]:g}"
            )
